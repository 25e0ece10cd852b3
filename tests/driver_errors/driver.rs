//! Starts tests again in child processes, each with a driver of its own.

use std::{
    any, mem,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use tandem_attn::{
    Error,
    exec::gpu::{Gpu, Workspace, WorkspaceOptions},
    plan::{Bound, Plan, PlanOptions, Planner},
    problem::{Batch, Spec},
};

/// Runs `test` again in a child with a driver of these settings; `true` in the child itself.
pub fn with_driver(test: impl Fn(), settings: &str) -> bool {
    with_library(test, settings, || fake_driver().to_owned())
}

pub fn with_library(test: impl Fn(), settings: &str, library: impl Fn() -> PathBuf) -> bool {
    matches!(said_by(test, settings, library, &[]), Process::Child)
}

/// Which process this is, for a scenario of a test.
pub enum Process {
    /// The child, which runs the test.
    Child,
    /// The parent of a child that passed, with the child's standard error.
    Parent(String),
    /// The child of another scenario of the same test.
    Other,
}

/// The same with more variables of the environment.
pub fn said_by(
    test: impl Fn(),
    settings: &str,
    library: impl Fn() -> PathBuf,
    variables: &[(&str, &str)],
) -> Process {
    const CHILD: &str = "TANDEM_TEST_CHILD";
    if std::env::var(CHILD).is_ok_and(|child| child == settings) {
        return Process::Child;
    }
    if std::env::var_os(CHILD).is_some() {
        return Process::Other;
    }
    let name = any::type_name_of_val(&test).split_once("::");
    let (_, name) = name.expect("a function in a crate");
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture"])
        .env("TANDEM_LIBCUDA", library())
        .env("TANDEM_LIBNCCL", library())
        .env("FAKE_DRIVER", settings)
        .env(CHILD, settings)
        .envs(variables.iter().copied())
        .output()
        .unwrap();
    let said = [&child.stdout, &child.stderr].map(|said| String::from_utf8_lossy(said));
    // A name of no test is a success of 0 tests.
    let passed = child.status.success() && said[0].contains("test result: ok. 1 passed");
    assert!(passed, "{name} with {settings:?}: {}{}", said[0], said[1]);
    Process::Parent(said[1].clone().into_owned())
}

/// With a driver that knows tensor maps, and blocks of up to 1,024 threads.
pub fn with_young_driver(test: impl Fn()) -> bool {
    with_library(test, "threads=1024", young_driver)
}

/// With one that also launches graphs.
pub fn with_graph_driver(test: impl Fn()) -> bool {
    with_library(test, "threads=1024", graph_driver)
}

fn fake_driver() -> &'static Path {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    DRIVER.get_or_init(|| compiled_driver("fake-driver", &[]))
}

/// One of 12.0 or newer, which knows tensor maps.
pub fn young_driver() -> PathBuf {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    let compiled = || compiled_driver("fake-young-driver", &["--cfg", "young"]);
    DRIVER.get_or_init(compiled).clone()
}

/// One that also launches graphs.
fn graph_driver() -> PathBuf {
    static DRIVER: OnceLock<PathBuf> = OnceLock::new();
    let flags = ["--cfg", "young", "--cfg", "graphs"];
    let compiled = || compiled_driver("fake-graph-driver", &flags);
    DRIVER.get_or_init(compiled).clone()
}

fn compiled_driver(folder: &str, flags: &[&str]) -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
    let out = out.join("libcuda.so.1");
    std::fs::create_dir_all(out.parent().unwrap()).unwrap();
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(rustc)
        .args([
            "--edition=2024",
            "--crate-type=cdylib",
            "--crate-name=fake_driver",
        ])
        .args(["-O", "-Cpanic=abort", "-o"])
        .arg(&out)
        .args(flags)
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fake_driver/lib.rs"
        ))
        .output()
        .expect("rustc runs");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    out
}

pub fn launches() -> i32 {
    let function = libcuda::symbol(c"fake_launches").unwrap();
    // SAFETY: the type is that of the function in the fake driver.
    let function: extern "C" fn() -> i32 = unsafe { mem::transmute(function) };
    function()
}

pub fn planned(gpu: &Gpu, spec: &Spec, batch: &Batch) -> Plan {
    let options = PlanOptions::default();
    let plan = Planner::new().plan(spec, batch, &gpu.device(), &options);
    plan.unwrap()
}

/// A workspace that has the size of a plan.
pub fn workspace(gpu: &Gpu, plan: &Plan) -> Workspace {
    let workspace = gpu.workspace(&plan.spec, &Bound::of(plan), WorkspaceOptions::default());
    workspace.unwrap()
}

/// An error of the driver names the call and contains its code.
#[track_caller]
pub fn assert_fails_in(expected: (&str, u32), error: &Error) {
    let Error::Driver { call, code, .. } = error else {
        panic!("{error:?}")
    };
    assert_eq!((*call, *code), expected, "{error}");
}

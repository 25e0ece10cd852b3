//! Checks that a program outside of the workspace needs only a Rust compiler to build. It builds such a program from
//! packed packages, in an environment with only `PATH` and `HOME`, finds it in git, and tries the READMEs' commands.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

use crate::{
    Error,
    process::{cargo, output, run as run_command, target_dir},
    workspace,
};

/// Limits of the outside program.
const MAX_BYTES: u64 = 12_000_000;
const MAX_START: Duration = Duration::from_millis(5);
const MAX_LOCKED: usize = 30;

/// Packs the workspace, builds the outside program from the packages and runs it, and finds it in git.
pub fn run() -> Result<(), Error> {
    let root = workspace().join("target/adopt");
    let _ = fs::remove_dir_all(root.join("packages"));
    fs::create_dir_all(root.join("packages"))?;
    let packed = pack(&root)?;
    let patches: String = packed
        .iter()
        .map(|(name, folder)| format!("{name} = {{ path = {folder:?} }}\n"))
        .collect();
    let registry = format!(
        "tandem-attn = {{ version = \"0.1.0\", features = [\"cuda\"] }}\n\n[patch.crates-io]\n{patches}"
    );
    let git = format!(
        "tandem-attn = {{ git = \"file://{}\", features = [\"cuda\"] }}\n",
        last_commit(&root)?.display()
    );
    let outsiders = || {
        build_and_try(&outside(&root, "registry", &registry)?, &root)?;
        find_in_git(&outside(&root, "git", &git)?)
    };
    // A variant's kernels are a module, which takes one processor a minute. The others have work, too.
    let (variant, outsiders) = thread::scope(|scope| {
        let variant = scope.spawn(build_own_variant);
        let outsiders = outsiders();
        (variant.join().expect("no panic"), outsiders)
    });
    outsiders?;
    // Build the driver with all packages. Alone, its dependencies would be compiled with other features, and again for
    // the tests.
    let driver = crate::test::emulated_driver()?;
    try_own_variant(variant?, &driver)?;
    try_examples(&driver)?;
    // After the tests are compiled, whose dependencies these commands share.
    try_commands(&root)?;
    check_minimum_rust(&root)
}

/// A repository with the last commit alone. Cargo would copy the history, which takes a minute.
fn last_commit(root: &Path) -> Result<PathBuf, Error> {
    let folder = root.join("repository");
    let _ = fs::remove_dir_all(&folder);
    let of = format!("file://{}", workspace().display());
    run_command(
        crate::process::command("git")
            .args(["clone", "--quiet", "--depth=1", &of])
            .arg(&folder),
    )?;
    Ok(folder)
}

/// Checks the published packages with the Rust version that `Cargo.toml` states. Skipped if that is not installed and
/// cannot be.
fn check_minimum_rust(root: &Path) -> Result<(), Error> {
    let manifest = fs::read_to_string(workspace().join("Cargo.toml"))?;
    let stated = manifest
        .lines()
        .find_map(|line| line.strip_prefix("rust-version = "));
    let stated = stated.ok_or("Cargo.toml states no rust-version")?;
    let toolchain = format!("{}.0", stated.trim_matches('"'));
    if output(Command::new("rustc").arg("--version"))?.starts_with(&format!("rustc {toolchain} ")) {
        println!("adopt: Rust {toolchain} is the one that compiles all of it here");
        return Ok(());
    }
    let installed = Command::new("rustup")
        .args(["toolchain", "install", "--profile=minimal", &toolchain])
        .output();
    let there = Command::new("rustc")
        .args([&format!("+{toolchain}"), "--version"])
        .output()?;
    if !there.status.success() {
        let why = installed.map_or_else(
            |error| error.to_string(),
            |run| String::from_utf8_lossy(&run.stderr).trim().to_owned(),
        );
        println!("adopt: skipped Rust {toolchain}: {why}");
        return Ok(());
    }
    let begin = Instant::now();
    run_command(
        bare("cargo")?
            .arg(format!("+{toolchain}"))
            .args(["check", "--locked", "--quiet"])
            .args([
                "-p",
                "tandem-attn",
                "-p",
                "tandem-schedule",
                "-p",
                "tandem-papers",
            ])
            .args(["-p", "tandem-cli"])
            .arg("--features=tandem-attn/cuda,tandem-attn/cudarc,tandem-cli/cuda")
            .current_dir(workspace())
            .env("CARGO_TARGET_DIR", root.join("minimum")),
    )?;
    println!(
        "adopt: Rust {toolchain} checks all of it: {:.0} s",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Builds the example with its own kernels. Returns the time.
fn build_own_variant() -> Result<Duration, Error> {
    let begin = Instant::now();
    // In the workspace's target directory: `core` for the GPU takes a minute to compile and is needed there anyway.
    run_command(
        bare("cargo")?
            .args(NOT_OPTIMISED)
            .args(["build", "--quiet", "--manifest-path"])
            .arg(workspace().join("examples/own_variant/Cargo.toml"))
            .env("CARGO_TARGET_DIR", target_dir()?),
    )?;
    Ok(begin.elapsed())
}

/// Runs the example without a GPU and on the emulated GPU.
fn try_own_variant(built: Duration, driver: &Path) -> Result<(), Error> {
    let (cpu, gpu) = (
        "CPU: the largest difference",
        "Emulated GPU: the largest difference",
    );
    // On GPUs other than Hopper it ended with an error.
    for (libcuda, settings, expected) in [
        (Path::new("/none"), "", cpu),
        (driver, "", gpu),
        (driver, "compute=80", gpu),
    ] {
        try_program("own-variant", (libcuda, settings), expected)?;
    }
    // On a GPU host (`cargo xtask bundle`) a missing GPU is an error.
    let program = target_dir()?.join("debug/own-variant");
    let mut required = Command::new(program);
    let required = required.env_clear().env("TANDEM_LIBCUDA", "/none");
    if output(required.env("TANDEM_REQUIRE_GPU", "1")).is_ok() {
        return Err("own-variant ends well where a GPU is required and there is none".into());
    }
    println!(
        "adopt: a program with kernels of its own: built in {:.0} s beside the programs above, right on the CPU and the emulated GPU",
        built.as_secs_f64()
    );
    Ok(())
}

/// Runs examples for GPUs on the emulated one. They compare their results with f64.
fn try_examples(driver: &Path) -> Result<(), Error> {
    for name in ["examples/gpu_fp8", "examples/gpu_mla"] {
        try_program(name, (driver, ""), "the largest difference from f64")?;
        println!("adopt: {name}: right on the emulated GPU");
    }
    Ok(())
}

/// Runs a program that was compiled with the tests, with this driver and settings of the emulated GPU.
fn try_program(
    name: &str,
    (libcuda, settings): (&Path, &str),
    expected: &str,
) -> Result<(), Error> {
    let program = target_dir()?.join("debug").join(name);
    let said = output(
        Command::new(program)
            .env_clear()
            .env("TANDEM_LIBCUDA", libcuda)
            .env("PTX_DRIVER", settings),
    )?;
    match said.contains(expected) {
        true => Ok(()),
        false => Err(format!("{name} does not say {expected:?}: {said}").into()),
    }
}

/// A command for a program in a minimal environment.
fn bare(program: impl AsRef<OsStr>) -> Result<Command, Error> {
    let mut command = Command::new(program);
    command.env_clear();
    for kept in ["PATH", "HOME"] {
        command.env(kept, env::var_os(kept).ok_or(format!("{kept} is not set"))?);
    }
    Ok(command)
}

/// Optimisation does not affect whether a command builds and runs. With these settings, and in the workspace's target
/// directory, most dependencies are those that the tests have compiled.
const NOT_OPTIMISED: [&str; 3] = [
    "--config=profile.dev.opt-level=0",
    "--config=profile.dev.debug=false",
    "--config=profile.dev.incremental=false",
];

/// Tries the commands in the READMEs of the library and of the command.
fn try_commands(root: &Path) -> Result<(), Error> {
    let readme = fs::read_to_string(workspace().join("README.md"))?
        + &fs::read_to_string(workspace().join("cli/README.md"))?;
    let (installed, empty) = (root.join("installed"), root.join("empty"));
    let target = workspace().join("target");
    let _ = fs::remove_dir_all(&empty);
    fs::create_dir_all(&empty)?;
    for shown in shell_lines(&readme) {
        let begin = Instant::now();
        match shown {
            // It runs this check.
            "cargo xtask test" => continue,
            // The outside program above is built; here cargo only has to find the package.
            "cargo add tandem-attn --path ../tandem-attn --features cuda" => run_command(
                bare("cargo")?
                    .args(["add", "tandem-attn", "--features=cuda", "--path"])
                    .arg(workspace())
                    .current_dir(outside(root, "path", "")?),
            )?,
            "cargo run --release" => run_command(
                bare("cargo")?
                    .args(NOT_OPTIMISED)
                    .args(["run", "--quiet", "--", "demo", "--svg"])
                    .arg(empty.join("demo.svg"))
                    .current_dir(workspace())
                    .env("CARGO_TARGET_DIR", &target),
            )?,
            "cargo install --path cli --features cuda" => run_command(
                bare("cargo")?
                    .args(NOT_OPTIMISED)
                    .args(["install", "--debug", "--features=cuda"])
                    .args(["--locked", "--quiet", "--force"])
                    .args([OsStr::new("--path"), workspace().join("cli").as_os_str()])
                    .args([OsStr::new("--root"), installed.as_os_str()])
                    .env("CARGO_TARGET_DIR", &target),
            )?,
            _ if shown.starts_with("tandem ") => run_command(
                bare(installed.join("bin/tandem"))?
                    .args(shown.split_whitespace().skip(1))
                    .current_dir(&empty),
            )?,
            _ => return Err(format!("README shows {shown:?}, which nothing here tries").into()),
        }
        println!("adopt: {shown}: {:.0} s", begin.elapsed().as_secs_f64());
    }
    Ok(())
}

/// The commands in Markdown's shell blocks, without their comments.
fn shell_lines(markdown: &str) -> impl Iterator<Item = &str> {
    let mut inside = false;
    let commands = markdown.lines().filter(move |line| {
        let fence = line.starts_with("```");
        inside = if fence { *line == "```sh" } else { inside };
        inside && !fence
    });
    commands.map(|line| line.split('#').next().unwrap_or(line).trim())
}

/// Runs `cargo package` on all published packages and unpacks the results.
fn pack(root: &Path) -> Result<Vec<(String, PathBuf)>, Error> {
    let metadata: Value = serde_json::from_str(&output(cargo().args([
        "metadata",
        "--no-deps",
        "--format-version=1",
    ]))?)?;
    let (unpublished, published): (Vec<&Value>, Vec<&Value>) = metadata["packages"]
        .as_array()
        .into_iter()
        .flatten()
        .partition(|package| package["publish"].as_array().is_some_and(Vec::is_empty));
    let mut packed = Vec::new();
    // What an earlier run left must not be taken for what this one packs.
    let packages = target_dir()?.join("package");
    let _ = fs::remove_dir_all(&packages);
    // The registry does not know these packages yet, so packing verifies nothing; the outside program does.
    let excluded = unpublished
        .iter()
        .filter_map(|package| package["name"].as_str());
    run_command(
        cargo()
            .args([
                "package",
                "--workspace",
                "--no-verify",
                "--allow-dirty",
                "--quiet",
            ])
            .args(excluded.map(|name| format!("--exclude={name}"))),
    )?;
    for package in published {
        let name = package["name"].as_str().ok_or("a package without a name")?;
        let version = package["version"]
            .as_str()
            .ok_or("a package without a version")?;
        let file = packages.join(format!("{name}-{version}.crate"));
        let there = fs::metadata(&file);
        let there =
            there.map_err(|error| format!("cargo package left no {}: {error}", file.display()))?;
        let bytes = there.len();
        run_command(
            Command::new("tar")
                .args(["-xzf"])
                .arg(&file)
                .arg("-C")
                .arg(root.join("packages")),
        )?;
        let folder = root.join(format!("packages/{name}-{version}"));
        for wanted in ["README.md", "LICENSE-MIT", "LICENSE-APACHE"] {
            if !folder.join(wanted).is_file() {
                return Err(format!("{name} is packed without {wanted}").into());
            }
        }
        println!(
            "adopt: {name} {version} is {:.2} MiB",
            bytes as f64 / 1048576.0
        );
        packed.push((name.into(), folder));
    }
    Ok(packed)
}

/// Creates the outside program with this dependency.
fn outside(root: &Path, way: &str, dependency: &str) -> Result<PathBuf, Error> {
    let folder = root.join(way);
    fs::create_dir_all(folder.join("src"))?;
    fs::copy(
        workspace().join("tests/outside/src/main.rs"),
        folder.join("src/main.rs"),
    )?;
    fs::write(
        folder.join("Cargo.toml"),
        format!(
            "[package]\nname = \"outside\"\nversion = \"0.1.0\"\nedition = \"2024\"\n\n[workspace]\n\n[dependencies]\n{dependency}"
        ),
    )?;
    Ok(folder)
}

/// Checks that cargo finds the library in the repository, with all its packages. Nothing is built, because the packages
/// were, which have the same sources.
fn find_in_git(folder: &Path) -> Result<(), Error> {
    let begin = Instant::now();
    // An earlier run's would name the commit of then.
    let _ = fs::remove_file(folder.join("Cargo.lock"));
    run_command(
        bare("cargo")?
            .args(["fetch", "--quiet"])
            .current_dir(folder),
    )?;
    let locked = check_locked(folder)?;
    println!(
        "adopt: git: found in {:.0} s with {locked} packages",
        begin.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Checks that the outside program has few packages. Returns their number.
fn check_locked(folder: &Path) -> Result<usize, Error> {
    let lock = fs::read_to_string(folder.join("Cargo.lock"))?;
    let locked = lock.matches("[[package]]").count() - 1;
    match locked <= MAX_LOCKED {
        true => Ok(locked),
        false => Err("there are too many dependencies".into()),
    }
}

/// Builds the outside program from the packages, and runs it.
fn build_and_try(folder: &Path, root: &Path) -> Result<(), Error> {
    let begin = Instant::now();
    run_command(
        bare("cargo")?
            .args(["build", "--release", "--quiet"])
            .current_dir(folder)
            .env("CARGO_TARGET_DIR", root.join("target")),
    )?;
    let built = begin.elapsed();

    let locked = check_locked(folder)?;
    let program = root.join("target/release/outside");
    let bytes = fs::metadata(&program)?.len();
    let mut start = Duration::MAX;
    let mut said = String::new();
    for _ in 0..20 {
        let begin = Instant::now();
        let run = Command::new(&program).env_clear().output()?;
        start = start.min(begin.elapsed());
        if !run.status.success() {
            return Err(format!(
                "the outside program failed: {}",
                String::from_utf8_lossy(&run.stderr)
            )
            .into());
        }
        said = String::from_utf8_lossy(&run.stdout).into();
    }
    println!(
        "adopt: registry: built in {:.0} s with {locked} packages, {:.1} MB, ends {:.1} ms after its start, says: {}",
        built.as_secs_f64(),
        bytes as f64 / 1e6,
        start.as_secs_f64() * 1e3,
        said.trim()
    );
    let without_driver = said.contains("libcuda");
    for (holds, what) in [
        (bytes <= MAX_BYTES, "the program is too large"),
        (
            !without_driver || start <= MAX_START,
            "the program starts too slowly",
        ),
        (
            without_driver || said.contains("Gpu::new took"),
            "the program neither found a GPU nor named the missing driver",
        ),
    ] {
        if !holds {
            return Err(what.into());
        }
    }
    Ok(())
}

//! Runs external checkers: Miri, ThreadSanitizer, libFuzzer, cargo-deny.

use std::{
    fs,
    process::{Command, Stdio},
};

use crate::{
    Error,
    process::{cargo, command, host, output, run as run_command},
    setup::NIGHTLY,
    workspace,
};

/// Tests of a package: the target, and the arguments of its test runner.
struct Tests {
    package: &'static str,
    target: &'static [&'static str],
    runner: &'static [&'static str],
}

/// Tests that call no driver, as many as Miri runs in minutes: it is a thousand times slower. Skipped are comparisons
/// with attention in f64 and tests of all numbers. Of the planner, one random batch and small ones are planned;
/// comparisons of plans would take as long again for each. Of the emulator, the parts are tested but no kernels: the
/// first of its 66 pieces of PTX takes minutes.
const INTERPRETED: [Tests; 5] = [
    Tests {
        package: "tandem-attn",
        target: &["--lib"],
        runner: &[
            "--skip=kv::tests::formats",
            "--skip=every_16_bit_pattern",
            "--skip=deep_chains",
            "--skip=reference::",
            "--skip=more_work_than_costs_can_count",
        ],
    },
    Tests {
        package: "tandem-attn",
        target: &["--test=cpu"],
        runner: &[
            "one_key_gives",
            "a_batch_of_nothing",
            "nan_keys_stay",
            "portable_code",
        ],
    },
    Tests {
        package: "tandem-attn",
        target: &["--test=plan"],
        runner: &["a_plan_computes_its_batch", "a_plan_does_not", "as_data::"],
    },
    Tests {
        package: "tandem-ptx-run",
        target: &["--lib"],
        runner: &[],
    },
    Tests {
        package: "tandem-schedule",
        target: &["--lib"],
        runner: &["hardware::", "metrics::", "model::", "policy::"],
    },
];

/// Tests of multi-threaded code.
const THREADED: [Tests; 2] = [
    Tests {
        package: "tandem-attn",
        target: &["--lib"],
        runner: &["exec::cpu"],
    },
    Tests {
        package: "tandem-attn",
        target: &["--test=cpu"],
        runner: &["--skip=adversarial"],
    },
];

/// Runs tests under Miri: undefined behaviour, uninitialised reads, data races.
pub fn miri(only: &str) -> Result<(), Error> {
    for_each(&INTERPRETED, only, |tests| {
        let mut miri = nightly();
        miri.args(["cargo", "miri", "test", "--package", tests.package]);
        // Tests read files and the environment. Rayon's threads live as long as the program, which is not a leak. Its
        // queues keep bits in pointers, which stricter memory models forbid. Floats are deterministic, because
        // logarithms that differ by a bit elsewhere are not a defect.
        miri.env(
            "MIRIFLAGS",
            "-Zmiri-disable-isolation -Zmiri-ignore-leaks -Zmiri-tree-borrows -Zmiri-permissive-provenance -Zmiri-deterministic-floats",
        );
        miri.env("RAYON_NUM_THREADS", "2");
        miri.env("TANDEM_CASES", "1").env("PROPTEST_CASES", "1");
        miri
    })
}

/// Runs tests with ThreadSanitizer, with an instrumented standard library, too: data races.
pub fn tsan(only: &str) -> Result<(), Error> {
    // The target is given explicitly, so that build scripts and macros are compiled without the sanitizer.
    let target = host()?;
    for_each(&THREADED, only, |tests| {
        let mut tsan = nightly();
        tsan.args(["cargo", "test", "-Zbuild-std", "--package", tests.package]);
        tsan.args(["--target", &target, "--target-dir"]);
        tsan.arg(workspace().join("target/tsan"));
        tsan.env("RUSTFLAGS", "-Zsanitizer=thread");
        tsan.env("TSAN_OPTIONS", "halt_on_error=1");
        tsan.env("CARGO_PROFILE_TEST_DEBUG", "line-tables-only");
        tsan.env("RAYON_NUM_THREADS", "4");
        tsan.env("TANDEM_CASES", "20").env("PROPTEST_CASES", "20");
        tsan
    })
}

/// Kinds of external input, each with a libFuzzer target in `tests/libfuzzer`.
const READ: [&str; 4] = ["workloads", "traces", "tensors", "plans"];

/// Flags of rustc with which libFuzzer observes coverage and comparisons.
const COVERAGE: &str = "-Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
                        -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
                        -Cllvm-args=-sanitizer-coverage-pc-table \
                        -Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 --cfg fuzzing";

/// Fuzzes each target whose name contains `only` for `seconds` seconds, starting from seeds. New inputs are kept in
/// `target/libfuzzer`, where the next run continues.
pub fn libfuzzer(only: &str, seconds: u32) -> Result<(), Error> {
    let chosen: Vec<_> = READ.iter().filter(|name| name.contains(only)).collect();
    if chosen.is_empty() {
        return Err(format!(
            "no target has {only:?} in its name: there are {}",
            READ.join(", ")
        )
        .into());
    }
    // The target is given explicitly, so that build scripts and macros are compiled without the instrumentation.
    let host = host()?;
    let folder = workspace().join("target/libfuzzer");
    let mut build = cargo();
    build.args(["build", "--bins", "--target", &host, "--manifest-path"]);
    build.arg(workspace().join("tests/libfuzzer/Cargo.toml"));
    build.arg("--target-dir").arg(&folder);
    run_command(build.env("RUSTFLAGS", COVERAGE))?;
    let programs = folder.join(&host).join("debug");
    for name in chosen {
        let [seeds, corpus] = ["seeds", "corpus"].map(|what| folder.join(what).join(name));
        run_command(Command::new(programs.join(name)).env("TANDEM_SEEDS", &seeds))?;
        fs::create_dir_all(&corpus)?;
        println!("libfuzzer: {name}, {seconds} s");
        let mut fuzzer = Command::new(programs.join(name));
        fuzzer.arg(format!("-max_total_time={seconds}"));
        fuzzer.arg(format!("-artifact_prefix={}/{name}-", folder.display()));
        fuzzer.args(["-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]);
        // The programs' output for each input is of no interest.
        run_command(fuzzer.arg(&corpus).arg(&seeds).stdout(Stdio::null()))?;
    }
    Ok(())
}

/// Checks licences, versions and sources of our dependencies against `deny.toml`; with `advisories`, also the RustSec
/// database, which is fetched.
pub fn deny(advisories: bool) -> Result<(), Error> {
    const INSTALL: &str = "cargo-deny is not installed: cargo install --locked cargo-deny";
    output(command("cargo-deny").arg("--version")).map_err(|_| INSTALL)?;
    let mut deny = command("cargo-deny");
    deny.args(["--locked", "--workspace", "check"]);
    if advisories {
        deny.arg("advisories");
    }
    run_command(deny.args(["bans", "licenses", "sources"]))
}

/// Runs the tests whose package or target contains `only`.
fn for_each(all: &[Tests], only: &str, command: impl Fn(&Tests) -> Command) -> Result<(), Error> {
    let has = |tests: &&Tests| {
        tests.package.contains(only) || tests.target.iter().any(|target| target.contains(only))
    };
    let chosen: Vec<&Tests> = all.iter().filter(has).collect();
    if chosen.is_empty() {
        return Err(format!("no package and no target has {only:?} in its name").into());
    }
    install()?;
    for tests in chosen {
        let mut command = command(tests);
        command.args(tests.target).arg("--").args(tests.runner);
        run_command(&mut command)?;
    }
    Ok(())
}

/// Installs the toolchain in its own folder. Among rustup's toolchains, a nightly with library sources would be chosen
/// to compile kernels.
fn install() -> Result<(), Error> {
    let list = output(rustup().args(["toolchain", "list"]))?;
    if list.lines().any(|line| line.starts_with(NIGHTLY)) {
        return Ok(());
    }
    let mut install = rustup();
    install.args(["toolchain", "install", NIGHTLY, "--no-self-update"]);
    install.args([
        "--profile=minimal",
        "--component=miri",
        "--component=rust-src",
    ]);
    run_command(&mut install)
}

/// The start of a command that runs a program of the toolchain.
fn nightly() -> Command {
    let mut run = rustup();
    run.args(["run", NIGHTLY]);
    run
}

/// Rustup on our own folder, without the environment variables of another toolchain's cargo.
fn rustup() -> Command {
    let mut rustup = command("rustup");
    rustup.env("RUSTUP_HOME", workspace().join(".tools/rustup"));
    for name in [
        "CARGO",
        "RUSTC",
        "RUSTDOC",
        "RUSTUP_TOOLCHAIN",
        "CARGO_TARGET_DIR",
    ] {
        rustup.env_remove(name);
    }
    rustup
}

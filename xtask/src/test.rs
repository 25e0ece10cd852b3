//! Runs all checks that a change must pass.

use std::{path::PathBuf, thread};

use crate::{
    Error, kernels, package,
    process::{cargo, run as run_command, target_dir},
    programs, setup, unchanged,
};

/// `cargo test` of everything, with one set of features for all packages, so that nothing is compiled twice.
const EVERYTHING: [&str; 3] = [
    "test",
    "--workspace",
    "--features=tandem-attn/cuda,tandem-attn/cust,tandem-attn/cudarc,tandem-cli/cuda,tandem-cli/engine,tandem-cli/emulator",
];

/// Installs what is missing, checks the kernels and runs all tests.
pub fn run() -> Result<(), Error> {
    setup::run()?;
    // The compiler for the GPU keeps one processor busy, which tests need not wait for.
    let (kernels, tests) = thread::scope(|scope| {
        let kernels =
            scope.spawn(|| check_kernels().inspect_err(|error| eprintln!("error: {error}")));
        let tests = programs::run(&EVERYTHING);
        (kernels.join().expect("no panic"), tests)
    });
    match (kernels, tests) {
        (Err(kernels), Err(tests)) => Err(format!("{kernels}\n{tests}").into()),
        (kernels, tests) => kernels.and(tests),
    }
}

fn check_kernels() -> Result<(), Error> {
    let known = kernels::committed()?;
    // Built once for both checks: reading and hashing 100 MB of PTX takes seconds.
    let modules = unchanged::build(&known)?;
    kernels::check(&known, &modules)?;
    package::check(&modules)
}

/// Compiles everything that [`run`] runs, including the emulated driver. Returns the driver's path.
pub fn emulated_driver() -> Result<PathBuf, Error> {
    run_command(cargo().args(EVERYTHING).args(["--no-run", "--quiet"]))?;
    // Cargo leaves libraries built for tests in the folder of dependencies.
    Ok(target_dir()?.join("debug/deps/libptx_driver.so"))
}

/// Builds `tests/fuzz` and runs it.
pub fn fuzz(arguments: &[String]) -> Result<(), Error> {
    let mut command = cargo();
    command.args(["run", "--release", "--package", "tandem-fuzz", "--"]);
    run_command(command.args(arguments))
}

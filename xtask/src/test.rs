//! Runs all checks that a change must pass.

use std::path::PathBuf;

use crate::{
    Error, kernels, package,
    process::{cargo, run as run_command, target_dir},
    programs, unchanged,
};

/// `cargo test` of everything, with one set of features for all packages, so that nothing is compiled twice.
const EVERYTHING: [&str; 3] = [
    "test",
    "--workspace",
    "--features=tandem-attn/cuda,tandem-attn/cust,tandem-attn/cudarc,tandem-cli/cuda,tandem-cli/engine,tandem-cli/emulator",
];

/// Checks the kernels, which installs what is missing, and runs all tests.
pub fn run() -> Result<(), Error> {
    let known = kernels::committed()?;
    // Built once for both checks: reading and hashing 100 MB of PTX takes seconds.
    let modules = unchanged::build(&known)?;
    kernels::check(&known, &modules)?;
    package::check(&modules)?;
    programs::run(&EVERYTHING)
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

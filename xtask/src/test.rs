//! Everything that a change must pass.

use crate::{
    Error, kernels, package,
    process::{cargo, run as run_command},
};

/// Checks the kernels, which sets up what is missing, and runs all tests. One set of features for all packages, so
/// that nothing is compiled twice.
pub fn run() -> Result<(), Error> {
    kernels::run(kernels::Mode::Check)?;
    package::run(true)?;
    run_command(cargo().args([
        "test",
        "--workspace",
        "--features=tandem-attn/cuda,tandem-attn/cust,tandem-attn/cudarc,tandem-cli/cuda,tandem-cli/engine,tandem-cli/emulator",
    ]))
}

/// Builds `tests/fuzz` and runs it.
pub fn fuzz(arguments: &[String]) -> Result<(), Error> {
    let mut command = cargo();
    command.args(["run", "--release", "--package", "tandem-fuzz", "--"]);
    run_command(command.args(arguments))
}

//! Everything that a change must pass.

use crate::{
    Error, kernels, package,
    process::{cargo, run as run_command},
};

/// Checks the kernels, which sets up what is missing, and runs all tests, with and without the feature `cuda`.
pub fn run() -> Result<(), Error> {
    kernels::run(kernels::Mode::Check)?;
    package::run(true)?;
    run_command(cargo().args(["test", "--workspace"]))?;
    // The other packages do not know the feature.
    run_command(cargo().args([
        "test",
        "--package=tandem-attn",
        "--package=tandem-cli",
        "--features=cuda,cust",
    ]))
}

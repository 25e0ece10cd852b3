//! The command `tandem`. Its code is in the library, which benchmarks share.

use std::process::ExitCode;

fn main() -> ExitCode {
    tandem_cli::main()
}

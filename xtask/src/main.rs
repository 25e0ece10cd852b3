//! The development tasks of tandem-attn. `cargo xtask help` lists them.

mod adopt;
mod bundle;
mod checkers;
mod kernels;
mod machine_code;
#[path = "../../build/modules.rs"]
mod modules;
mod mutate;
mod package;
mod process;
mod programs;
mod ptx_code;
#[path = "../../kernels-bin/src/registers.rs"]
mod registers;
mod report;
mod setup;
mod sources;
#[path = "../../kernels-bin/src/target.rs"]
mod target;
mod test;
mod unchanged;

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use clap::{Parser, Subcommand};

/// Any error, ready to be shown.
type Error = Box<dyn std::error::Error + Send + Sync>;

/// The development tasks of tandem-attn.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    chore: Chore,
}

#[derive(Subcommand)]
enum Chore {
    /// Install what is missing to build for the GPU.
    Setup,
    /// Build all kernels and show the resources of each, from ptxas and from the machine code.
    Kernels {
        /// Fail if the table differs from kernels-gpu/static-report.txt. Only what has changed is compiled and assembled.
        #[arg(long, conflicts_with = "bless")]
        check: bool,
        /// Compile and assemble all modules for the check.
        #[arg(long, requires = "check")]
        assemble: bool,
        /// Write the table to kernels-gpu/static-report.txt.
        #[arg(long)]
        bless: bool,
        /// Build only kernels whose name contains a match of this regular expression
        #[arg(long, value_name = "REGEX", conflicts_with_all = ["check", "bless"])]
        only: Option<String>,
        /// Show the PTX of those kernels
        #[arg(long, requires = "only", conflicts_with = "sass")]
        ptx: bool,
        /// Show the machine code of those kernels
        #[arg(long, requires = "only")]
        sass: bool,
    },
    /// Build all kernels and write kernels-bin/, the package from which programs take them.
    Package {
        /// Fail if kernels-bin/ was not made from these sources.
        #[arg(long)]
        check: bool,
    },
    /// Set up, check the kernels, run every test. GPU tests report that they are skipped if there is no GPU.
    Test,
    /// Random sequences of calls, right and wrong: `cargo xtask fuzz cpu --seeds 1000`, `cargo xtask fuzz --help`
    #[command(disable_help_flag = true)]
    Fuzz {
        /// Arguments of `tandem-fuzz`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Inject small faults into a copy of the last commit, one at a time, and check that tests find them.
    Mutate {
        /// Only faults with this text in their name or their file
        #[arg(default_value = "")]
        only: String,
    },
    /// Run tests that call no driver under Miri: undefined behaviour. Installs a nightly compiler in our own folder.
    Miri {
        /// Only packages and targets with this text in their name
        #[arg(default_value = "")]
        only: String,
    },
    /// Run tests of the CPU executor with ThreadSanitizer, with the same compiler.
    Tsan {
        /// Only packages and targets with this text in their name
        #[arg(default_value = "")]
        only: String,
    },
    /// Fuzz the readers of workloads, traces, tensors and plans with libFuzzer. Needs a C++ compiler.
    Libfuzzer {
        /// Only targets with this text in their name
        #[arg(default_value = "")]
        only: String,
        /// Seconds for each target
        #[arg(long, default_value_t = 60)]
        seconds: u32,
    },
    /// Check our dependencies against deny.toml: licences, duplicate versions, sources.
    Deny {
        /// Also fetch and check the RustSec advisories.
        #[arg(long)]
        advisories: bool,
    },
    /// Pack the workspace and build a program outside of it, with the feature cuda, in a minimal environment.
    Adopt,
    /// Put the GPU tests and benchmarks into dist/, to run on a GPU host without Rust.
    Bundle,
}

fn main() -> ExitCode {
    let done = match Arguments::parse().chore {
        Chore::Setup => setup::run(),
        Chore::Kernels {
            only: Some(only),
            ptx,
            sass,
            ..
        } => kernels::some(&only, kernels::Code::from_flags(ptx, sass)),
        Chore::Kernels {
            check,
            assemble,
            bless,
            ..
        } => kernels::run(kernels::Mode::from_flags(check, assemble, bless)),
        Chore::Package { check } => package::run(check),
        Chore::Test => test::run(),
        Chore::Fuzz { arguments } => test::fuzz(&arguments),
        Chore::Mutate { only } => mutate::run(&only),
        Chore::Miri { only } => checkers::miri(&only),
        Chore::Tsan { only } => checkers::tsan(&only),
        Chore::Libfuzzer { only, seconds } => checkers::libfuzzer(&only, seconds),
        Chore::Deny { advisories } => checkers::deny(advisories),
        Chore::Adopt => adopt::run(),
        Chore::Bundle => bundle::run(),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// The root of the workspace.
fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("xtask lies in the workspace").into()
}

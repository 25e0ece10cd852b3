//! Random sequences of calls, right and wrong: every call is refused by a typed error, or right as attention in f64 is.
//!
//! ```text
//! tandem-fuzz cpu --seeds 1000          # on the CPU
//! tandem-fuzz gpu --seconds 60          # on a GPU, or on what TANDEM_LIBCUDA names
//! tandem-fuzz emulated --seeds 20       # on an emulated GPU, with --compute 80 on one of Ampere
//! tandem-fuzz plans --seeds 1000000     # planned and verified, and not run
//! tandem-fuzz cpu --replay fuzz-7.json  # one that failed
//! tandem-fuzz delays --seed 7 --out F   # kernels whose barriers wait at random, for:
//! tandem-fuzz gpu --modules F
//! ```

mod case;
mod cpu;
mod delays;
mod draw;
mod gpu;
#[path = "../../common/hooks.rs"]
mod hooks;
#[path = "../../common/in_8_bits.rs"]
mod in_8_bits;
#[path = "../../common/modules.rs"]
mod modules;
mod numbers;
#[path = "../../common/numeric.rs"]
mod numeric;
mod oracle;
mod planned;
mod plans;
mod refused;
mod row_656;
mod runner;
mod shrink;
mod tally;
mod world;
mod wrong;

#[cfg(test)]
mod tests;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use clap::{Parser, ValueEnum};

use numeric::Rng;
use runner::Run;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Target {
    Cpu,
    Gpu,
    Emulated,
    Plans,
    /// Writes kernels whose barriers, copies and claims wait a random time
    Delays,
}

/// Random sequences of calls, right and wrong.
#[derive(Debug, Parser)]
#[command(name = "tandem-fuzz")]
struct Arguments {
    target: Target,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// How many; without a number of seconds, a hundred
    #[arg(long)]
    seeds: Option<u64>,
    /// Stop after so many seconds
    #[arg(long)]
    seconds: Option<u64>,
    /// Cases that run at the same time; one on an emulated GPU
    #[arg(long)]
    threads: Option<usize>,
    /// Small cases
    #[arg(long)]
    tiny: bool,
    /// Cases on an emulated GPU as large as those on a GPU: up to minutes each
    #[arg(long)]
    large: bool,
    /// The compute capability of the emulated GPU: 80 or 90
    #[arg(long, value_parser = ["80", "90"])]
    compute: Option<String>,
    /// Only cases with this among what is special about their results, or with these calls: "rotary", "ByHead"
    #[arg(long)]
    with: Option<String>,
    /// Run the case of a file
    #[arg(long, conflicts_with_all = ["seeds", "seconds"])]
    replay: Option<PathBuf>,
    /// Kernels of a folder in the place of those in the program
    #[arg(long)]
    modules: Option<PathBuf>,
    /// Kernels with this in the name of their module
    #[arg(long)]
    only: Option<String>,
    /// Where cases that fail are written
    #[arg(long, default_value = ".")]
    out: PathBuf,
}

impl Arguments {
    /// The first option that the target does not read.
    fn ignored(&self) -> Option<&'static str> {
        use Target::{Cpu, Delays, Emulated, Gpu, Plans};
        let options = [
            (
                self.seeds.is_some(),
                "--seeds",
                &[Cpu, Gpu, Emulated, Plans][..],
            ),
            (
                self.seconds.is_some(),
                "--seconds",
                &[Cpu, Gpu, Emulated, Plans],
            ),
            (self.threads.is_some(), "--threads", &[Cpu, Gpu]),
            (self.with.is_some(), "--with", &[Cpu, Gpu, Emulated]),
            (self.compute.is_some(), "--compute", &[Emulated]),
            (self.tiny, "--tiny", &[Cpu, Gpu, Plans]),
            (self.large, "--large", &[Emulated]),
            (self.replay.is_some(), "--replay", &[Cpu, Gpu, Emulated]),
            (
                self.modules.is_some(),
                "--modules",
                &[Gpu, Emulated, Delays],
            ),
            (self.only.is_some(), "--only", &[Delays]),
        ];
        let mut options = options.into_iter();
        let ignored = |&(given, _, of): &(bool, _, &[Target])| given && !of.contains(&self.target);
        options.find(ignored).map(|(_, option, _)| option)
    }
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if let Some(option) = arguments.ignored() {
        eprintln!("{option} changes nothing for this target: leave it out");
        return ExitCode::from(2);
    }
    let seeds = match (arguments.seeds, arguments.seconds) {
        (None, None) => 100,
        (None, Some(_)) => u64::MAX,
        (Some(seeds), _) => seeds,
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let run = Run {
        seeds: arguments.seed..arguments.seed.saturating_add(seeds),
        time: arguments.seconds.map(Duration::from_secs),
        threads: arguments.threads.unwrap_or(cores),
        tiny: arguments.tiny || arguments.target == Target::Emulated && !arguments.large,
        compute: match arguments.compute.as_deref() {
            Some("80") => 80,
            _ => 90,
        },
        with: arguments.with,
        modules: arguments.modules,
        out: arguments.out,
    };
    let done = match (arguments.target, arguments.replay) {
        (Target::Plans, _) => plans::run(&run),
        (Target::Delays, _) => {
            let (only, from) = (arguments.only.as_deref(), run.modules.as_deref());
            delays::write(&run.out, arguments.seed as u32, only, from)
        }
        (target, Some(file)) => runner::replay(target, &run, &file),
        (target, None) => runner::run(target, &run),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(what) => {
            eprintln!("{what}");
            ExitCode::FAILURE
        }
    }
}

//! The command `tandem`: plans, runs, measures and visualises attention.
//!
//! Each subcommand is a module with its arguments (`Args`) and its work (`run`). A subcommand collects its text, and
//! [`output`] prints it. Errors are [`Failure`]s, which have an exit code.

use std::{ffi::OsStr, process::ExitCode};

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand, builder::styling};

pub mod attend;
pub mod backend;
pub mod bench;
pub mod cache_type;
pub mod check;
pub mod chunk_size;
pub mod compare;
pub mod deal;
pub mod demo;
pub mod doctor;
#[cfg(feature = "engine")]
pub mod engine;
mod failure;
pub mod hooks;
pub mod input;
pub mod memory;
pub mod output;
pub mod pages;
pub mod picture;
pub mod plan;
pub mod roofline;
pub mod serve_sim;
mod shards;
pub mod table;
pub mod tensors;
#[cfg(feature = "emulator")]
pub mod trace;
pub mod workload;

pub use failure::Failure;

/// The examples of the README are tested, if their features are there.
#[cfg(all(doctest, feature = "cuda"))]
#[doc = include_str!("../../README.md")]
struct Readme;

const EXIT_CODES: &str = "\
Exit codes:
  0    everything worked
  1    a result was not right, or a file could not be written
  2    wrong input: a flag, a file or a tensor; nothing was written
  3    the backend that was asked for is not available, or has too little memory
  130  interrupted; no partial output is left behind";

const STYLES: styling::Styles = styling::Styles::styled()
    .header(styling::AnsiColor::Green.on_default().bold())
    .usage(styling::AnsiColor::Green.on_default().bold())
    .literal(styling::AnsiColor::Cyan.on_default())
    .placeholder(styling::AnsiColor::Cyan.on_default());

/// Attention for LLM serving: plan, run, measure and look.
///
/// Without a subcommand this is `tandem demo`.
#[derive(Debug, Parser)]
#[command(name = "tandem", version, styles = STYLES, max_term_width = 98, after_help = EXIT_CODES)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    Demo(demo::Args),
    Plan(plan::Args),
    Attend(attend::Args),
    Bench(Box<bench::Args>),
    Roofline(roofline::Args),
    Compare(compare::Args),
    ServeSim(serve_sim::Args),
    ChunkSize(chunk_size::Args),
    #[cfg(feature = "emulator")]
    Trace(trace::Args),
    #[cfg(feature = "engine")]
    Generate(engine::generate::Args),
    #[cfg(feature = "engine")]
    Serve(engine::serve::Args),
    Doctor(doctor::Args),
    Completions(pages::Completions),
    Man(pages::Man),
}

/// With `-3` as a value of every option, for the option to refuse. clap takes it for an unknown flag, and its advice does
/// not help.
fn with_negative_values(command: clap::Command) -> clap::Command {
    let option = |arg: clap::Arg| match arg.get_long() {
        Some(_) if arg.get_action().takes_values() => arg.allow_negative_numbers(true),
        _ => arg,
    };
    command
        .mut_args(option)
        .mut_subcommands(with_negative_values)
}

/// The error for a subcommand that this build lacks, with the way to get it.
fn left_out(subcommand: Option<&OsStr>) -> Option<Failure> {
    let features = match subcommand?.to_str()? {
        "trace" if cfg!(not(feature = "emulator")) => "emulator",
        "generate" | "serve" if cfg!(not(feature = "engine")) => failure::OF_MODELS,
        _ => return None,
    };
    let what = format!("`tandem {}`", subcommand?.display());
    Some(failure::built_without(&what, features, ""))
}

/// Parses the arguments of the process, runs the subcommand, and reports errors.
#[must_use]
pub fn main() -> ExitCode {
    output::finish_writing_when_interrupted();
    let matches = with_negative_values(Cli::command()).try_get_matches();
    let cli = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        // If help cannot be printed, that is an error like any other.
        Err(help) if !help.use_stderr() => {
            output::print_styled(&help.render().ansi().to_string());
            return ExitCode::SUCCESS;
        }
        Err(wrong) => match left_out(std::env::args_os().nth(1).as_deref()) {
            None => wrong.exit(),
            Some(failure) => {
                output::error(&failure);
                return failure.exit_code();
            }
        },
    };
    let result = match cli.command {
        None => demo::run(&demo::Args::default()),
        Some(Command::Demo(args)) => demo::run(&args),
        Some(Command::Plan(args)) => plan::run(&args),
        Some(Command::Attend(args)) => attend::run(&args),
        Some(Command::Roofline(args)) => roofline::run(&args),
        Some(Command::Compare(args)) => compare::run(&args),
        Some(Command::ServeSim(args)) => serve_sim::run(&args),
        Some(Command::ChunkSize(args)) => chunk_size::run(&args),
        #[cfg(feature = "emulator")]
        Some(Command::Trace(args)) => trace::run(&args),
        #[cfg(feature = "engine")]
        Some(Command::Generate(args)) => engine::generate::run(&args),
        #[cfg(feature = "engine")]
        Some(Command::Serve(args)) => engine::serve::run(&args),
        Some(Command::Bench(args)) => bench::run(&args),
        Some(Command::Doctor(args)) => doctor::run(&args),
        Some(Command::Completions(args)) => pages::completions(&args),
        Some(Command::Man(args)) => pages::man(&args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            output::error(&failure);
            failure.exit_code()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_interface_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_subcommand_has_an_example_in_its_help() {
        for subcommand in Cli::command().get_subcommands_mut() {
            let (name, help) = (
                subcommand.get_name().to_owned(),
                subcommand.render_long_help().to_string(),
            );
            let example = help
                .split_once("Example")
                .map_or("", |(_, example)| example);
            assert!(
                example.contains(&format!("tandem {name}")),
                "tandem {name} --help shows no example:\n{help}"
            );
        }
    }
}

//! `tandem chunk-size`: recommends a chunk size and explains why.

use std::{fmt::Write, path::PathBuf};

use serde::Serialize;
use tandem_schedule::chunk::{Advice, Expected, recommend, together};

use crate::{
    Failure,
    output::{self, Files, Force},
    serve_sim::{Machine, at_least_1, positive, read_trace},
    table::{Table, WIDTH, counted, digits, wrap},
};

const EXAMPLES: &str = "\
Examples:
  tandem chunk-size --model llama-3-8b --device h200 --prompt 4000 --generated 300
  tandem chunk-size --device a100 --tensor 2 --trace arxiv.csv --target-ms 60";

/// Recommend a chunk size for a workload, with reasons.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    machine: Machine,
    /// Mean number of prompt tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 2000, value_parser = at_least_1)]
    prompt: u32,
    /// Mean number of generated tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = at_least_1)]
    generated: u32,
    /// Take both means from a trace
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "generated"])]
    trace: Option<PathBuf>,
    /// Number of concurrent requests; with --pipeline, of each of the batches under way, one for each stage [default: as many as
    /// fit the memory, up to 256]
    #[arg(long, value_name = "REQUESTS", value_parser = at_least_1)]
    batch: Option<u32>,
    /// Maximum time between tokens
    #[arg(long, value_name = "MS", value_parser = positive)]
    target_ms: Option<f64>,
    /// Write the table as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

/// The file that `--json` writes.
#[derive(Debug, Serialize)]
struct File<'a> {
    format: &'static str,
    program: String,
    chunk: u32,
    reasons: &'a [String],
    /// Of each of the batches under way, one for each stage.
    requests: u32,
    batches: u32,
    separate_tokens_per_s: f64,
    candidates: Vec<Line>,
}

/// A chunk size: times in seconds, fractions from 0 to 1.
#[derive(Debug, Serialize)]
struct Line {
    chunk: u32,
    tokens_per_s: f64,
    step_s: f64,
    piggybacked: f64,
    keeps_target: bool,
}

fn file(advice: &Advice, [requests, batches]: [u32; 2]) -> File<'_> {
    let candidates = advice.candidates.iter().map(|candidate| Line {
        chunk: candidate.chunk,
        tokens_per_s: candidate.tokens_per_s,
        step_s: candidate.step_ns / 1e9,
        piggybacked: candidate.piggybacked,
        keeps_target: candidate.keeps_target,
    });
    File {
        format: "tandem-chunk-size-1",
        program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
        chunk: advice.chunk,
        reasons: &advice.reasons,
        requests,
        batches,
        separate_tokens_per_s: advice.separate_tokens_per_s,
        candidates: candidates.collect(),
    }
}

/// Runs the subcommand.
///
/// # Errors
/// Wrong input.
pub fn run(args: &Args) -> Result<(), Failure> {
    let inputs = args.machine.files();
    let files = Files::new().reads(args.trace.iter().chain(&inputs));
    files.writes(&args.json).check(args.force)?;
    let (advice, requests) = args.advice()?;
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&file(&advice, requests)).expect("plain data");
        output::write_file(path, (json + "\n").as_bytes())?;
    }
    output::print(&report(&advice, requests));
    Ok(())
}

impl Args {
    /// The advice, the requests of a batch, and the batches under way: one for each stage.
    fn advice(&self) -> Result<(Advice, [u32; 2]), Failure> {
        let cost = self.machine.cost()?;
        let (prompt, generated) = match &self.trace {
            None => (self.prompt, self.generated),
            Some(path) => {
                let (prompt, generated) = read_trace(path)?.mean_lengths();
                (prompt.round() as u32, generated.round() as u32)
            }
        };
        if prompt == 0 || generated == 0 {
            return Err(Failure::Input(
                "requests of the trace have no prompt or generate nothing, in the mean".to_owned(),
            ));
        }
        let stages = cost.parallel().pipeline;
        let fitting = cost.max_requests(prompt + generated) / stages;
        let requests = self.batch.unwrap_or_else(|| fitting.clamp(1, 256));
        let expected = Expected {
            prompt,
            generated,
            requests,
            target_ns: self.target_ms.map(|ms| ms * 1e6),
        };
        let mut advice = recommend(&cost, &expected);
        if requests > fitting {
            advice.reasons.push(format!(
                "The memory has room for the keys and values of {}{}, not of {requests}: others would wait or be \
                 preempted.",
                counted(fitting as usize, "such request"),
                if stages > 1 { " in each batch" } else { "" },
            ));
        }
        Ok((advice, [requests, stages]))
    }
}

fn report(advice: &Advice, [requests, stages]: [u32; 2]) -> String {
    let mut text = format!(
        "chunk size {} (chunk and decodes together)\n\n",
        advice.chunk
    );
    for reason in &advice.reasons {
        let _ = writeln!(text, "{}", wrap(&format!("- {reason}"), WIDTH, "  "));
    }
    let _ = writeln!(text, "\nwith {}:", together(requests, stages));
    let mut table = Table::new(["chunk", "tokens/s", "gain", "step ms", "piggybacked %", ""]);
    // The eight smallest sizes, the recommended one, and every fourth of the others.
    let shown = advice
        .candidates
        .iter()
        .enumerate()
        .filter(|(index, candidate)| {
            *index < 8 || candidate.chunk == advice.chunk || index % 4 == 3
        });
    for (_, candidate) in shown {
        let mark = match (candidate.chunk == advice.chunk, candidate.keeps_target) {
            (true, _) => "← recommended",
            (false, false) => "too slow a step",
            (false, true) => "",
        };
        table.push([
            candidate.chunk.to_string(),
            digits(candidate.tokens_per_s),
            format!(
                "{:.2}",
                candidate.tokens_per_s / advice.separate_tokens_per_s
            ),
            digits(candidate.step_ns / 1e6),
            format!("{:.0}", 100.0 * candidate.piggybacked),
            mark.to_owned(),
        ]);
    }
    text + &table.render()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn parse(line: &str) -> Args {
        Cli::parse_from(format!("tandem {line}").split_whitespace()).args
    }

    #[test]
    fn advice_is_given_with_reasons() {
        let args = parse("--device a100 --tensor 2 --prompt 9000 --generated 450 --target-ms 100");
        let (advice, requests) = args.advice().unwrap();
        let text = report(&advice, requests);
        assert!(
            text.starts_with(&format!("chunk size {}", advice.chunk)),
            "{text}"
        );
        assert!(
            text.contains("← recommended") && text.contains("are piggybacked"),
            "{text}"
        );
        run(&args).unwrap();
    }

    /// In a pipeline a batch is under way in each stage, and the memory holds all of them.
    #[test]
    fn a_pipeline_has_several_batches() {
        let args = parse("--device a100 --pipeline 2 --batch 100000");
        let (advice, requests) = args.advice().unwrap();
        let text = report(&advice, requests);
        for said in [
            "in each of 2 batches under way",
            "such requests in each batch",
        ] {
            let words = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(words.contains(said), "{said}: {text}");
        }
        let fitting = |line: &str| parse(line).advice().unwrap().1[0];
        let [one, both] = ["", " --pipeline 2"].map(|more| {
            fitting(&format!(
                "--device a100 --prompt 30000 --generated 2000{more}"
            ))
        });
        // Half of the weights, and half of the requests in each batch.
        assert!((one..=2 * one).contains(&both), "{one} and {both}");
    }

    #[test]
    fn more_requests_than_fit_the_memory_are_noted() {
        let noted = |line: &str| {
            let (advice, requests) = parse(line).advice().unwrap();
            report(&advice, requests).contains("not of 100000:")
        };
        assert!(noted("--batch 100000") && !noted("--batch 100"));
    }

    #[test]
    fn a_request_without_tokens_is_refused() {
        for wrong in ["--generated 0", "--prompt 4000000000", "--batch 0"] {
            let words = format!("tandem {wrong}");
            assert!(
                Cli::try_parse_from(words.split_whitespace()).is_err(),
                "{wrong}"
            );
        }
    }

    #[test]
    fn reports_are_narrow() {
        for line in [
            "",
            "--batch 1",
            "--prompt 9000 --target-ms 0.001",
            "--prompt 16777216 --generated 16777216",
            "--pipeline 4",
        ] {
            let (advice, requests) = parse(line).advice().unwrap();
            let text = report(&advice, requests);
            assert!(
                text.lines().all(|line| line.chars().count() < 100),
                "{text}"
            );
        }
    }
}

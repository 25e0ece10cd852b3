//! `tandem chunk-size`: which chunk size, and why.

use std::{fmt::Write, path::PathBuf};

use tandem_attn::schedule::{
    chunk::{Advice, Expected, recommend},
    trace::Trace,
};

use crate::{Failure, output, serve_sim::Machine};

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
    /// Mean tokens of a prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 2000)]
    prompt: u32,
    /// Mean tokens generated
    #[arg(long, value_name = "TOKENS", default_value_t = 200)]
    generated: u32,
    /// Take both means from a trace
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "generated"])]
    trace: Option<PathBuf>,
    /// Requests that run at once; as many as fit the memory, up to 256, where none is given
    #[arg(long, value_name = "REQUESTS")]
    batch: Option<u32>,
    /// The longest time between tokens that is wanted
    #[arg(long, value_name = "MS")]
    target_ms: Option<f64>,
}

/// Runs it.
///
/// # Errors
/// Wrong input.
pub fn run(args: &Args) -> Result<(), Failure> {
    let (advice, requests) = args.advice()?;
    output::print(&report(&advice, requests));
    Ok(())
}

impl Args {
    fn advice(&self) -> Result<(Advice, u32), Failure> {
        let cost = self.machine.cost()?;
        let (prompt, generated) = match &self.trace {
            None => (self.prompt, self.generated),
            Some(path) => {
                let (prompt, generated) = Trace::read(path)?.mean_lengths();
                (prompt.round() as u32, generated.round() as u32)
            }
        };
        if prompt == 0 || generated == 0 {
            return Err(Failure::Input(
                "a request has at least one prompt token and one generated token".to_owned(),
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
        Ok((recommend(&cost, &expected), requests))
    }
}

fn report(advice: &Advice, requests: u32) -> String {
    let mut text = format!(
        "chunk size {} (chunk and decodes together)\n\n",
        advice.chunk
    );
    for reason in &advice.reasons {
        let _ = writeln!(text, "- {reason}");
    }
    let _ = writeln!(
        text,
        "\nwith {requests} requests at once:\n{:>8}{:>12}{:>10}{:>14}{:>10}",
        "chunk", "tokens/s", "gain", "step ms", "riding %"
    );
    // Every size near the best, and fewer beyond.
    let shown = advice
        .candidates
        .iter()
        .enumerate()
        .filter(|(index, candidate)| {
            *index < 8 || candidate.chunk == advice.chunk || index % 4 == 3
        });
    for (_, candidate) in shown {
        let _ = writeln!(
            text,
            "{:>8}{:>12.0}{:>10.2}{:>14.1}{:>10.0}{}",
            candidate.chunk,
            candidate.tokens_per_s,
            candidate.tokens_per_s / advice.separate_tokens_per_s,
            candidate.step_ns / 1e6,
            100.0 * candidate.piggybacked,
            match (candidate.chunk == advice.chunk, candidate.keeps_target) {
                (true, _) => "  ← recommended",
                (false, false) => "  too slow a step",
                (false, true) => "",
            }
        );
    }
    text
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
            text.contains("← recommended") && text.contains("ride along"),
            "{text}"
        );
        run(&args).unwrap();
    }

    #[test]
    fn a_request_without_tokens_is_refused() {
        let error = run(&parse("--generated 0")).unwrap_err().to_string();
        assert!(error.contains("at least one"), "{error}");
    }
}

//! `tandem serve-sim`: latency and throughput of scheduling policies, without the machine.

use std::{path::PathBuf, time::Duration};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_attn::plan::BatchLimits;
use tandem_schedule::{
    Limits,
    attention::Overlap,
    cost::CostModel,
    metrics::Report,
    policy,
    sim::{AttentionSource, Simulation, simulate_with},
    trace::Trace,
};

use crate::{
    Failure,
    output::{self, Files, Force},
};

pub(crate) mod chart;
mod limits;
mod machine;
mod policies;
pub(crate) mod table;
mod window;

use limits::requests;
pub use machine::Machine;
use machine::not_negative;
pub(crate) use machine::{
    at_least_1, at_most, hardware, models, page_tokens, positive, read_trace,
};
#[cfg(feature = "engine")]
pub(crate) use machine::{correction, described, is_file};
pub(crate) use policies::Name;
#[cfg(feature = "engine")]
pub(crate) use policies::{Policies, shares_blocks};
use table::{file, heading, table};

const EXAMPLES: &str = "\
A policy may end in +pod: prefill and decode attention then share the GPU instead of taking turns. With --plan it may
end in +unpacked: each request then reads its shared prefix separately.

Examples:
  tandem serve-sim --model llama-3-8b --device h200 --trace mooncake_conversation.jsonl
  tandem serve-sim --device a100 --tensor 2 --trace arxiv.csv --rate 0.85 --budget 1024 \\
    --policy prefill-first,sarathi-serve,sarathi-serve+pod --svg serving.svg
  tandem serve-sim --model gpt-3 --device a100 --tensor 8 --pipeline 8 --requests 400 \\
    --prompt 2000 --generated 200 --policy orca,sarathi --svg bubbles.svg";

/// Simulate serving a trace, and compare scheduling policies.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(flatten)]
    machine: Machine,
    /// Requests: Mooncake's JSON lines, Azure's CSV, or a CSV of prompt and generated lengths
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// Number of requests: the first of the trace, or equal ones without a trace
    #[arg(long, value_name = "N", value_parser = requests)]
    requests: Option<usize>,
    /// Prompt tokens of a request, without a trace
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 2000,
        value_parser = at_least_1,
        conflicts_with = "trace"
    )]
    prompt: u32,
    /// Tokens generated for a request, without a trace
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 200,
        value_parser = at_least_1,
        conflicts_with = "trace"
    )]
    generated: u32,
    /// Poisson arrivals at this rate instead of the trace's own
    #[arg(long, value_name = "PER SECOND", value_parser = positive)]
    rate: Option<f64>,
    /// Divide all arrival times, of the trace or of --rate, by this factor [default: 1]
    #[arg(long, value_name = "TIMES", value_parser = positive)]
    speed: Option<f64>,
    /// Seed of the Poisson arrivals [default: 1]
    #[arg(long, requires = "rate")]
    seed: Option<u64>,
    /// Policies to compare [default: all, and sarathi-serve+pod]
    #[arg(
        long,
        hide_default_value = true,
        value_delimiter = ',',
        default_value = "prefill-first,orca,sarathi,sarathi-serve,sarathi-serve+pod,decode-priority"
    )]
    policy: Vec<String>,
    /// Maximum tokens in a step; policies that compute whole prompts get room for the longest
    #[arg(long, value_name = "TOKENS", default_value_t = 2048, value_parser = at_least_1)]
    budget: u32,
    /// Chunk of the policy sarathi, including its decodes; 0: adapt to the finished requests [default: 512]
    #[arg(long, value_name = "TOKENS", value_parser = at_most)]
    chunk: Option<u32>,
    /// Target time between tokens of the policy decode-priority [default: 50]
    #[arg(long, value_name = "MS", value_parser = positive)]
    target_ms: Option<f64>,
    /// Maximum number of requests that hold pages
    #[arg(long, value_name = "REQUESTS", default_value_t = 256, value_parser = at_least_1)]
    batch: u32,
    /// Tokens in a page
    #[arg(long, value_name = "TOKENS", default_value_t = 64, value_parser = page_tokens)]
    page_size: u32,
    /// Compute every prompt from its first token, without a prefix cache
    #[arg(long)]
    no_prefix_cache: bool,
    /// Swap preempted requests to this amount of host memory instead of computing them again
    #[arg(long, value_name = "GB", default_value_t = 0.0, value_parser = not_negative)]
    swap_gb: f64,
    /// Predict attention times from a plan of every batch: slower, but includes shared prefixes
    #[arg(long)]
    plan: bool,
    /// Compose each step before the tokens of the last one are known, as `tandem bench --serve` does on a GPU
    #[arg(long)]
    ahead: bool,
    /// Draw TTFT and TBT, and the steps with their bubbles and stalls
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the table as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, or a picture that cannot be written.
pub fn run(args: &Args) -> Result<(), Failure> {
    let inputs = args.machine.files();
    let files = Files::new().reads(args.trace.iter().chain(&inputs));
    files
        .writes(args.svg.iter().chain(&args.json))
        .check(args.force)?;
    args.check_effects()?;
    let cost = args.machine.cost()?;
    let trace = args.trace()?;
    let instead = "a --trace with hash_ids";
    args.policies().check_shared(&trace, instead)?;
    args.check_size(&cost, &trace)?;
    let mut reports = Vec::new();
    for name in &args.policy {
        reports.push(args.simulate(name, &cost, &trace)?);
    }
    let mut text = table(&cost, &trace, None, &reports);
    if reports.iter().all(|report| report.finished == 0) {
        output::print(&text);
        let (report, requests) = (&reports[0], trace.arrivals.len());
        return Err(Failure::Wrong(nothing_finished(
            report,
            requests,
            None,
            [
                "the memory for keys and values",
                "more GPUs (--tensor, --pipeline)",
            ],
        )));
    }
    if let Some(path) = &args.json {
        let file = file(&cost, &trace, &reports);
        let json = serde_json::to_string_pretty(&file).expect("plain data") + "\n";
        output::write_file(path, json.as_bytes())?;
    }
    if let Some(path) = &args.svg {
        let [machine, requests] = heading(&cost, &trace, None);
        let from = args.trace.as_ref().and_then(|path| path.file_name());
        let from = from.map_or("requests alike".to_owned(), |name| {
            name.to_string_lossy().into_owned()
        });
        let title = format!("{machine}: {from}");
        output::write_file(path, chart::draw(&title, &requests, &reports).as_bytes())?;
        text += &format!("\ndrawn in {}\n", path.display());
    }
    output::print(&text);
    Ok(())
}

/// Why no request finished under a policy: requests are larger than what holds their keys, of which `more` helps; or the
/// window ended; or some are left that no step can compute.
pub(crate) fn nothing_finished(
    report: &Report,
    requests: usize,
    window_s: Option<f64>,
    [holds, more]: [&str; 2],
) -> String {
    let Report {
        policy, refused, ..
    } = report;
    let reason = match window_s {
        _ if *refused == requests => format!(
            "all {requests} were refused, as larger than {holds} or than a step; give shorter ones, or {more}"
        ),
        Some(window_s) => {
            format!("the {window_s} s of --window are too short; give a longer --window")
        }
        None => format!(
            "{refused} of {requests} were refused, as larger than {holds} or than a step, and {} are left that fit no step; \
             give shorter ones, or {more}",
            requests - refused
        ),
    };
    format!("no request finished under {policy}: {reason}")
}

impl Args {
    fn trace(&self) -> Result<Trace, Failure> {
        let mut trace = match &self.trace {
            Some(path) => read_trace(path)?,
            None => Trace::uniform(self.requests.unwrap_or(500), self.prompt, self.generated),
        };
        let at_once = trace.arrivals.iter().all(|arrival| arrival.at_s == 0.0);
        if self.speed.is_some() && self.rate.is_none() && at_once {
            return Err(Failure::Input(
                "--speed divides arrival times, but all requests arrive at once: leave it out, or give --rate, or a --trace \
                 with times"
                    .to_owned(),
            ));
        }
        if let Some(requests) = self.requests {
            trace = trace.first(requests);
        }
        if trace.arrivals.is_empty() {
            return Err(Failure::Input(match &self.trace {
                Some(path) if self.requests != Some(0) => {
                    format!("{} has no requests", path.display())
                }
                _ => "--requests is 0: give the number of requests to serve".to_owned(),
            }));
        }
        if let Some(rate) = self.rate {
            trace = trace.with_poisson_arrivals(rate, self.seed.unwrap_or(1));
        }
        Ok(trace.sped_up(self.speed.unwrap_or(1.0)))
    }

    fn simulate(&self, name: &str, cost: &CostModel, trace: &Trace) -> Result<Report, Failure> {
        let parts = Name::of(name)?;
        let cost = cost.clone().with_overlap(match parts.pod {
            true => Overlap::pod(cost.cache_type()),
            false => Overlap::Serial,
        });
        let options = self.policies().options(&cost, trace);
        let policy = policy::by_name(parts.policy, &options)?;
        let stages = cost.parallel().pipeline;
        let limits = self.limits(&parts, &cost, trace);
        let mut simulation = Simulation::with_policy(&cost, limits, policy);
        simulation.page_size = self.page_size;
        simulation.ahead = self.ahead;
        if self.plan {
            simulation.attention = match parts.unpacked {
                true => AttentionSource::Unpacked,
                false => AttentionSource::Planner,
            };
        }
        if self.svg.is_some() {
            simulation.timeline = 0..chart::MOST_SPANS / u64::from(stages);
        }
        let bar = ProgressBar::new(trace.arrivals.len() as u64).with_style(
            ProgressStyle::with_template("{msg:20} {wide_bar} {pos}/{len} requests, {eta} left")
                .expect("the template is sound"),
        );
        bar.set_message(name.to_owned());
        bar.enable_steady_tick(Duration::from_millis(200));
        let report = simulate_with(trace, simulation, |left| bar.set_position(left as u64));
        bar.finish_and_clear();
        let mut report = report?;
        name.clone_into(&mut report.policy);
        Ok(report)
    }

    /// The limits of a policy's steps.
    fn limits(&self, policy: &Name<'_>, cost: &CostModel, trace: &Trace) -> Limits {
        let lengths = trace.arrivals.iter().map(|arrival| {
            let request = &arrival.request;
            request.prompt.len().saturating_add(request.max_new_tokens)
        });
        let longest = lengths.max().unwrap_or(0);
        // In a pipeline, the batch is divided among the stages.
        let step_requests = self.batch.div_ceil(cost.parallel().pipeline);
        let workspace = BatchLimits::decodes(step_requests, longest, self.page_size);
        Limits {
            step_tokens: if policy.is_whole() {
                self.budget.max(longest)
            } else {
                self.budget
            },
            step_requests,
            chunk_keys: cost.cache_type().chunk_keys(&workspace),
            running: self.batch,
            spare_pages: self.batch,
            host_pages: self.host_pages(cost),
            prefix_cache: !self.no_prefix_cache,
            ..Limits::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::{CommandFactory, Parser};

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
    fn a_trace_is_simulated_tabulated_and_drawn() {
        let directory = tempfile::tempdir().unwrap();
        let (trace, svg) = (
            directory.path().join("t.csv"),
            directory.path().join("s.svg"),
        );
        let mut csv = "num_prefill_tokens,num_decode_tokens\n".to_owned();
        (0..30).for_each(|i| csv += &format!("{}.0,{}.0\n", 500 + 100 * i, 20 + i));
        std::fs::write(&trace, csv).unwrap();
        let args = parse(&format!(
            "--model yi-6b --device a100 --pipeline 2 --rate 4 --policy orca,sarathi,sarathi-serve+pod --chunk 0 \
             --trace {} --svg {}",
            trace.display(),
            svg.display()
        ));
        run(&args).unwrap();
        let svg = std::fs::read_to_string(&svg).unwrap();
        for text in ["<svg", "orca", "sarathi-serve+pod", "a bubble", "</svg>"] {
            assert!(svg.contains(text), "no {text}");
        }
        let cost = args.machine.cost().unwrap();
        let trace = args.trace().unwrap();
        let report = args.simulate("orca", &cost, &trace).unwrap();
        let table = table(&cost, &trace, None, &[report]);
        assert!(
            table.contains("yi-6b on 2 × a100") && table.contains("bubbles"),
            "{table}"
        );
    }

    /// Each allowed request once kept a page free, so that a large --batch let requests run one after the other.
    #[test]
    fn a_large_batch_does_not_keep_requests_waiting() {
        let tokens_per_s = |batch: u32| {
            let args = parse(&format!(
                "--device a6000 --model llama-2-7b --prompt 500 --generated 100 --requests 200 --batch {batch}"
            ));
            let (cost, trace) = (args.machine.cost().unwrap(), args.trace().unwrap());
            let report = args.simulate("sarathi-serve", &cost, &trace).unwrap();
            report.tokens_per_s()
        };
        let usual = tokens_per_s(64);
        for batch in [512, 4096] {
            let got = tokens_per_s(batch);
            assert!(got > 0.8 * usual, "--batch {batch}: {got} of {usual}");
        }
    }

    #[test]
    fn the_reason_why_nothing_finished_is_the_true_one() {
        let said = |refused, window_s| {
            let report = Report {
                policy: "orca".to_owned(),
                refused,
                ..Report::default()
            };
            nothing_finished(&report, 5, window_s, ["the caches", "a larger --cache"])
        };
        for window_s in [None, Some(2.0)] {
            let said = said(5, window_s);
            assert!(said.contains("under orca: all 5 were refused"), "{said}");
        }
        let short = said(1, Some(2.0));
        assert!(
            short.contains("the 2 s of --window are too short"),
            "{short}"
        );
        let left = said(1, None);
        assert!(
            left.contains("1 of 5 were refused") && left.contains("4 are left"),
            "{left}"
        );
    }

    #[test]
    fn a_speed_needs_times_of_arrival() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("t.csv");
        std::fs::write(&path, "num_prefill_tokens,num_decode_tokens\n5,2\n6,2\n").unwrap();
        let call = format!("--speed 3 --trace {}", path.display());
        let said = parse(&call).trace().unwrap_err().to_string();
        assert!(said.contains("all requests arrive at once"), "{said}");
        let trace = parse(&format!("{call} --rate 2")).trace().unwrap();
        assert!(trace.arrivals[1].at_s > 0.0);
    }

    #[test]
    fn prefixes_that_are_not_packed_take_longer() {
        let directory = tempfile::tempdir().unwrap();
        let trace = directory.path().join("t.jsonl");
        let mut lines = String::new();
        for request in 0..40 {
            lines += &format!(
                "{{\"timestamp\": 0, \"input_length\": 4100, \"output_length\": 60, \"hash_ids\": [0, 1, 2, 3, 4, 5, 6, 7, {}]}}\n",
                100 + request
            );
        }
        std::fs::write(&trace, lines).unwrap();
        let args = parse(&format!("--plan --trace {}", trace.display()));
        let (cost, trace) = (args.machine.cost().unwrap(), args.trace().unwrap());
        args.policies().check_shared(&trace, "").unwrap();
        let tbt = |name: &str| args.simulate(name, &cost, &trace).unwrap().tbt.mean();
        let (packed, unpacked) = (tbt("sarathi-serve"), tbt("sarathi-serve+unpacked"));
        assert!(unpacked > packed, "{unpacked} {packed}");
    }

    /// As in the engine: 1 GiB of converted keys and values with 8 heads of 128.
    #[test]
    fn chunks_over_caches_of_8_bits_have_a_limit_of_keys() {
        let most = |line: &str| {
            let args = parse(line);
            let (cost, trace) = (args.machine.cost().unwrap(), args.trace().unwrap());
            args.limits(&Name::of("sarathi-serve").unwrap(), &cost, &trace)
                .chunk_keys
        };
        assert_eq!(most("--prompt 30000"), u32::MAX);
        assert_eq!(most("--prompt 30000 --cache-type e4m3"), 262_144);
        assert_eq!(most("--prompt 500000 --cache-type e4m3"), 500_200);
    }

    #[test]
    fn wrong_input_is_named() {
        let reason = |line: &str| run(&parse(line)).unwrap_err().to_string();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("m.json");
        std::fs::write(&path, "{}").unwrap();
        let path = path.display();
        assert!(reason(&format!("--model {path}")).starts_with(&format!("{path}: ")));
        assert!(reason("--model gpt-5").contains("gpt-5"));
        assert!(reason("--device h800").contains("h800"));
        assert!(reason("--policy fifo").contains("fifo"));
        assert!(reason("--policy orca+fast").contains("no +fast"));
        assert!(reason("--policy orca+unpacked").contains("--plan"));
        let said = reason("--policy orca+unpacked --plan --no-prefix-cache");
        assert!(said.contains("no request shares a prefix"), "{said}");
        assert!(reason("--policy orca+unpacked --plan").contains("no blocks"));
        assert!(reason("--tensor 3").starts_with("32 query heads cannot be divided among 3 GPUs"));
        assert!(reason("--pipeline 99").starts_with("32 layers cannot be divided among 99 stages"));
        let model = r#"{"name": "m", "layers": 2, "hidden": 4096, "q_heads": 256, "kv_heads": 1, "head_dim": 80,
            "ffn": 4096, "ffn_matrices": 3, "vocab": 1000}"#;
        std::fs::write(directory.path().join("wide.json"), model).unwrap();
        let wide = directory.path().join("wide.json");
        let said = reason(&format!("--model {} --cache-type e4m3", wide.display()));
        assert!(said.contains("h200") && said.contains("auto"), "{said}");
        let measured = directory.path().join("c.json");
        std::fs::write(&measured, "{\"cache_type\": \"e4m3\"}").unwrap();
        let said = reason(&format!("--correction {}", measured.display()));
        assert!(
            said.contains("c.json: ")
                && said.contains("of type e4m3")
                && said.contains("--cache-type"),
            "{said}"
        );
        let flags = |line: &str| {
            let words = format!("tandem {line}");
            crate::with_negative_values(Cli::command())
                .try_get_matches_from(words.split_whitespace())
                .err()
                .map(|error| error.to_string())
        };
        for wrong in ["--rate 0", "--rate -1", "--speed nan", "--target-ms -3"] {
            assert!(
                flags(wrong).is_some_and(|said| said.contains("positive number")),
                "{wrong}"
            );
        }
        for wrong in [
            "--budget 0",
            "--batch 0",
            "--page-size 0",
            "--page-size 4097",
            "--prompt 0",
            "--tensor 0",
        ] {
            assert!(
                flags(wrong).is_some_and(|said| said.contains("from 1 to")),
                "{wrong}"
            );
        }
        assert!(reason("--trace /no/such").starts_with("cannot read /no/such: "));
        assert!(reason("--model gpt-3").contains("raise the tensor"));
        assert!(reason("--requests 0").contains("--requests is 0"));
    }
}

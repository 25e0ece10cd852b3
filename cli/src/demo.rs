//! `tandem demo`: plans, runs, checks and draws a hybrid batch.

use std::path::PathBuf;

use tandem_attn::{
    plan::{PlanOptions, Planner},
    problem::{KvLayout, Spec},
};

use crate::{
    Failure,
    backend::{Place, Results},
    check,
    output::{self, Files, Force},
    picture, plan,
    table::{scaled, time},
    tensors::Tensors,
    workload::{Case, Requests, Tree},
};

const EXAMPLES: &str = "\
Examples:
  tandem demo
  tandem demo --svg plan.svg --backend cpu";

/// Plan and run a hybrid batch on the best backend, check it against f64, and draw the plan.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// File for the drawing of the plan
    #[arg(long, value_name = "FILE", default_value = DRAWING)]
    svg: PathBuf,
    #[command(flatten)]
    place: Place,
}

const DRAWING: &str = "tandem-demo.svg";

impl Default for Args {
    fn default() -> Self {
        Self {
            svg: DRAWING.into(),
            place: Place::default(),
        }
    }
}

/// A prompt chunk, and decodes that share a system prompt and one of three documents.
fn case() -> Case {
    Case {
        name: "a chunk of a prompt beside 24 decodes with shared prefixes".to_owned(),
        spec: Spec::new(16, 4, 128),
        page_size: 16,
        layout: KvLayout::Nhd,
        requests: vec![Requests {
            branches: 0,
            all_pages: false,
            one_block_in: 0,
            q_len: 256,
            kv_len: 1024,
            count: 1,
        }],
        tree: Some(Tree {
            nodes_per_level: vec![1, 3, 24],
            tokens_per_level: vec![512, 256, 100],
        }),
        by_head: None,
        top_k: None,
        numbers: Default::default(),
    }
}

const SEED: u64 = 42;
const TIMES: usize = 3;
const CHECKED_TOKENS: u32 = 64;

/// Runs the subcommand.
///
/// # Errors
/// [`Failure::Wrong`] if a result is less exact than its type allows.
pub fn run(args: &Args) -> Result<(), Failure> {
    Files::new().writes([&args.svg]).check(Force::default())?;
    let case = case();
    let batch = case.batch()?;
    let mut backend = args.place.open()?;
    let (machine, device) = (backend.machine(), backend.device());
    let tensors = Tensors::random(&case.spec, &batch, case.layout, SEED)?;
    let made = Planner::new().plan(&case.spec, &batch, &device, &PlanOptions::default())?;

    let mut loaded = backend.load(&made, &tensors)?;
    let mut best = loaded.run(false)?;
    for _ in 1..TIMES {
        best = best.min(loaded.run(false)?);
    }
    let results: Results = loaded.results()?;
    drop(loaded);
    let errors = check::sample(&made, &batch, &tensors, &results, CHECKED_TOKENS)?;

    let title = format!("{}, {}", case.name, case.heads());
    output::write_file(&args.svg, picture::plan(&made, &device, &title).as_bytes())?;
    let traffic = made.traffic();
    // Bytes of keys and values if each request read its own.
    let apart: u64 = (0..batch.requests())
        .map(|request| batch.kv_len(request) * case.spec.kv_bytes_per_token())
        .sum();
    let seconds = best.as_secs_f64();
    output::print(&format!(
        "tandem {} on {} ({})\n\n{}\n\n\
         ran in {}: {} of keys and values where requests on their own would read {},\n\
         {} at {}\n\
         {} query tokens checked against attention in f64: outputs within {:.1e}, LSEs within {:.1e}\n\
         the plan as a picture: {}\n\n\
         Next: tandem bench, tandem plan --help, tandem attend --help\n",
        env!("CARGO_PKG_VERSION"),
        machine.name,
        machine.details,
        plan::describe(&case, batch.requests(), &made, &device),
        time(seconds * 1e9),
        scaled(traffic.kv_bytes as f64, "B"),
        scaled(apart as f64, "B"),
        scaled(traffic.flops as f64, "FLOP"),
        scaled(traffic.flops as f64 / seconds, "FLOP/s"),
        errors.tokens,
        errors.out,
        errors.lse.unwrap_or(0.0),
        args.svg.display(),
    ));
    if errors.are_small() {
        Ok(())
    } else {
        Err(Failure::Wrong(
            "these errors are larger than rounding allows: please report this".to_owned(),
        ))
    }
}

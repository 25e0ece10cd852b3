//! `tandem trace`: shows what the warps of a CTA do in each step, on an emulated GPU.

use std::{collections::BTreeMap, path::PathBuf};

use tandem_attn::{
    exec::emulated::{Emulated, Settings, State, Timeline},
    plan::Plan,
    tensor::Element,
};

use crate::{
    Failure,
    bench::{Planning, Work},
    memory,
    output::{self, Files, Force},
    picture,
    table::{counted, digits},
    tensors::{Tensor, Tensors, kv_view},
    workload::{self, Case},
};

const EXAMPLES: &str = "\
Examples:
  tandem trace small.json --svg trace.svg
  tandem trace hybrid.json --kernel prefill --cta 1 --svg trace.svg

The kernels run as they are, on a CPU: a case of a few hundred keys takes a second.
In a step all warps that can go on execute one instruction; copies take 400 steps, and products
half a step for each of their columns. It shows who waits for whom, and not how long that takes
on a GPU.";

/// Draw what the warps of a CTA do, on an emulated GPU; needs no GPU.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload file (docs/guide/workloads.md) with a small case
    #[arg(value_name = "WORKLOAD.json")]
    workload: PathBuf,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// The first launch of a kernel whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    kernel: String,
    /// Index of the CTA in the launch
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    cta: u32,
    /// Number of SMs of the emulated GPU
    #[arg(long, value_name = "NUMBER", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=256))]
    sms: u32,
    /// File for the drawing
    #[arg(long, value_name = "FILE")]
    svg: PathBuf,
    #[command(flatten)]
    planning: Planning,
    #[command(flatten)]
    force: Force,
}

/// Maximum of tile rows times keys, over all KV heads: about a minute of emulation.
const MOST_SCORES: u64 = 1 << 26;

/// Minimum number of rows of a tile, even for few queries.
const TILE_ROWS: u64 = 64;

/// Bytes of main memory per byte of the tensors: the emulator tracks the state of each.
const BOOKS: u64 = 20;

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, or a kernel fault that the emulator finds.
pub fn run(args: &Args) -> Result<(), Failure> {
    let files = Files::new().reads([&args.workload]).writes([&args.svg]);
    files.check(args.force)?;
    let cases = workload::matching(workload::load(&args.workload)?, args.case.as_deref())?;
    let [case] = &cases[..] else {
        return Err(Failure::Input(format!(
            "one case is traced and there are {}: choose one with --case, the first is {:?}",
            cases.len(),
            cases[0].name
        )));
    };
    let timelines = timelines(case, args.sms, args.cta, &args.planning)?;
    if timelines.is_empty() {
        return Err(Failure::Input(format!(
            "case {:?} launches no kernel: it has no queries",
            case.name
        )));
    }
    let chosen = timelines
        .iter()
        .find(|one| one.kernel.contains(&args.kernel))
        .ok_or_else(|| {
            let kernels: Vec<_> = timelines.iter().map(|one| one.kernel.as_str()).collect();
            Failure::Input(format!(
                "no kernel of the run has {:?} in its name: there are {}",
                args.kernel,
                kernels.join(", ")
            ))
        })?;
    if chosen.intervals.is_empty() {
        return Err(Failure::Input(format!(
            "the launch of {} has no CTA {}: give a smaller --cta",
            chosen.kernel, args.cta
        )));
    }
    let title = format!("{}: {}, CTA {}", case.name, chosen.kernel, args.cta);
    let svg = picture::timeline(chosen, &title);
    output::write_file(&args.svg, svg.as_bytes())?;
    output::print(&format!(
        "{}wrote {}\n",
        describe(chosen),
        args.svg.display()
    ));
    Ok(())
}

/// Timelines of the warps of a CTA in each launch of a case.
///
/// # Errors
/// As [`run`].
pub fn timelines(
    case: &Case,
    sms: u32,
    cta: u32,
    planning: &Planning,
) -> Result<Vec<Timeline>, Failure> {
    case.refuse_chosen("leave top_k out to trace it")?;
    let rows =
        |q_len: u32| (u64::from(q_len) * u64::from(case.spec.group())).next_multiple_of(TILE_ROWS);
    let scores: u64 = case
        .requests
        .iter()
        .map(|one| {
            let of_one = rows(one.q_len)
                .max(TILE_ROWS)
                .saturating_mul(one.kv_len.into());
            of_one.saturating_mul(one.count.into())
        })
        .fold(0, u64::saturating_add)
        .saturating_mul(case.spec.kv_heads.into());
    if scores > MOST_SCORES || case.tree.is_some() {
        return Err(Failure::Input(format!(
            "case {:?} is too large for an emulator: give one of some hundred keys and few heads, of requests alone",
            case.name
        )));
    }
    let batch = case.batch()?;
    let needed = Work::of(&case.spec, &batch).allocated.saturating_mul(BOOKS);
    memory::check(
        &format!("tracing case {:?}", case.name),
        needed,
        "give fewer keys or heads",
    )?;
    let emulated = Emulated::new(Settings {
        multiprocessors: sms,
        ..Settings::default()
    })?;
    let plan =
        planning
            .planner()
            .plan(&case.spec, &batch, &emulated.device(), &planning.options())?;
    let tensors = Tensors::random(&case.spec, &batch, case.layout, 1)?;
    let page_size = batch.parts[0].table.page_size;
    match (&tensors.q, &tensors.k, &tensors.v) {
        (Tensor::Bf16(q), Tensor::Bf16(k), Tensor::Bf16(v)) => {
            traced(&emulated, &plan, case, q, page_size, (k, v), cta)
        }
        (Tensor::F16(q), Tensor::F16(k), Tensor::F16(v)) => {
            traced(&emulated, &plan, case, q, page_size, (k, v), cta)
        }
        (Tensor::Bf16(q), Tensor::F8E4M3(k), Tensor::F8E4M3(v)) => {
            traced(&emulated, &plan, case, q, page_size, (k, v), cta)
        }
        (Tensor::F16(q), Tensor::F8E4M3(k), Tensor::F8E4M3(v)) => {
            traced(&emulated, &plan, case, q, page_size, (k, v), cta)
        }
        _ => Err(Failure::Input(format!(
            "tandem trace takes no queries of {:?} with keys of {:?}: give queries in bf16 or f16, and keys in that type or in f8e4m3",
            case.spec.q_dtype, case.spec.kv_dtype
        ))),
    }
}

fn traced<T: Element, K: Element>(
    emulated: &Emulated,
    plan: &Plan,
    case: &Case,
    q: &[T],
    page_size: u32,
    (k, v): (&[K], &[K]),
    cta: u32,
) -> Result<Vec<Timeline>, Failure> {
    let spec = &case.spec;
    let view = kv_view(spec, case.layout, page_size, k, v);
    let rows = plan.total_q as usize * spec.q_heads as usize;
    let mut out = vec![T::from_f32(0.0); rows * spec.head_dim_v as usize];
    Ok(emulated.trace(plan, q, &[view], &mut out, cta)?)
}

/// Describes how long each warp waits, and where it waits most.
#[must_use]
pub fn describe(timeline: &Timeline) -> String {
    let mut text = format!(
        "{}, CTA {}: {} in {}\n",
        timeline.kernel,
        timeline.block,
        counted(timeline.warps as usize, "warp"),
        counted(timeline.steps as usize, "step"),
    );
    let names = picture::barriers(timeline);
    for warp in 0..timeline.warps {
        let mut steps: BTreeMap<State, u64> = BTreeMap::new();
        let own = timeline.intervals.iter().filter(|one| one.warp == warp);
        own.for_each(|one| *steps.entry(one.state).or_default() += one.end - one.begin);
        let all: u64 = steps.values().sum();
        let share = |part: u64| digits(100.0 * part as f64 / all.max(1) as f64);
        let issues = steps.remove(&State::Issues).unwrap_or(0);
        text += &format!(
            "  warp {warp}: issues {} % of {}",
            share(issues),
            counted(all as usize, "step")
        );
        let longest = steps.into_iter().max_by_key(|&(_, steps)| steps);
        if let Some((state, steps)) = longest {
            let what = picture::state_name(state, &names);
            text += &format!("; {what} {} %", share(steps));
        }
        text.push('\n');
    }
    text
}

//! `tandem plan`: shows a plan for any device, as a table and as a picture.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use tandem_attn::{
    plan::{
        DeviceDescription, Plan, PlanError,
        pod::{PodConfig, PodMode, PodPlan},
    },
    problem::{Batch, Dtype},
};

use crate::{
    Failure,
    bench::Planning,
    deal::Dealing,
    input,
    output::{self, Files, Force},
    picture,
    shards::Sharded,
    table::{WIDTH, counted, digits, scaled, time, wrap},
    workload::{self, Case},
};

const EXAMPLES: &str = "\
Examples:
  tandem plan my-workload.json --svg plan.svg
  tandem plan my-workload.json --device a100 --packing off
  tandem plan my-workload.json --kv-dtype f8e4m3
  tandem plan pat_fig10.json --case 'pat 4 32/8' --json plan.json
  tandem plan my-workload.json --gpus 8 --deal heads:4+pages:16";

/// Plan a workload for a device and show the plan; needs no GPU.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload file (docs/guide/workloads.md), or a file with the cases of a paper
    #[arg(value_name = "WORKLOAD.json")]
    workload: PathBuf,
    /// Only cases whose name contains this text
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// Use this type for keys and values instead of the workload's: bf16, f16, f8e4m3, …
    #[arg(long, value_name = "DTYPE", value_parser = workload::dtype_of)]
    kv_dtype: Option<Dtype>,
    #[arg(long, default_value = "h200", value_name = "NAME|FILE", help = devices())]
    device: String,
    /// Write the description of the device as JSON, to edit and pass to --device
    #[arg(long, value_name = "FILE")]
    describe: Option<PathBuf>,
    /// Draw the plan: units over SMs in time
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the plan as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    planning: Planning,
    #[command(flatten)]
    dealing: Dealing,
    #[command(flatten)]
    force: Force,
}

/// What `--device` takes.
fn devices() -> String {
    let names: Vec<_> = DeviceDescription::names().collect();
    format!(
        "{}, or a JSON file with a description, as --describe writes it",
        names.join(", ")
    )
}

/// Runs the subcommand.
///
/// # Errors
/// Wrong input.
pub fn run(args: &Args) -> Result<(), Failure> {
    let description = PathBuf::from(&args.device);
    let files = Files::new().reads([&args.workload, &description]);
    files
        .writes(
            [&args.svg, &args.json, &args.describe]
                .into_iter()
                .flatten(),
        )
        .check(args.force)?;
    let mut cases = workload::matching(workload::load(&args.workload)?, args.case.as_deref())?;
    for case in &mut cases {
        case.use_kv_dtype(args.kv_dtype)?;
    }
    let device = device(&args.device)?;
    if cases.len() > 1 && (args.svg.is_some() || args.json.is_some()) {
        return Err(Failure::Input(format!(
            "--svg and --json take one case and there are {}: choose one with --case, the first is {:?}",
            cases.len(),
            cases[0].name
        )));
    }
    if args.dealing.gpus > 1 && args.json.is_some() {
        return Err(Failure::Input(
            "--json writes the plan of one GPU: leave it out, or --gpus; the shares are `Sharding::shares`".to_owned(),
        ));
    }
    if args.dealing.gpus > 1 && device.is_cpu() {
        return Err(Failure::Input(
            "--gpus is for GPUs: leave it out, or give another --device than cpu".to_owned(),
        ));
    }
    if args.dealing.deal.len() > 1 && args.svg.is_some() {
        return Err(Failure::Input(
            "--svg draws one way to distribute a batch: give one --deal".to_owned(),
        ));
    }
    if args.dealing.gpus == 1 && !args.dealing.deal.is_empty() {
        return Err(Failure::Input(
            "--deal is for several GPUs: give --gpus too".to_owned(),
        ));
    }
    let mut planner = args.planning.planner();
    let mut report = String::new();
    for case in &cases {
        if args.dealing.gpus > 1 {
            case.refuse_chosen("leave --gpus out")?;
        }
        let batch = case.planned()?;
        if args.dealing.gpus > 1 {
            report += &on_several(args, case, &batch, &device)?;
            continue;
        }
        let begin = Instant::now();
        let plan = planner.plan(&case.spec, &batch, &device, &args.planning.options())?;
        let time = begin.elapsed();
        let title = format!("{}, {}", case.name, case.heads());
        if let Some(path) = &args.svg {
            output::write_file(path, picture::plan(&plan, &device, &title).as_bytes())?;
        }
        if let Some(path) = &args.json {
            let json = serde_json::to_string(&plan).expect("plain data");
            output::write_file(path, json.as_bytes())?;
        }
        report += &format!(
            "{}\nplanned in {} µs\n\n",
            describe(case, case.count() as usize, &plan, &device),
            digits(time.as_secs_f64() * 1e6)
        );
    }
    if let Some(path) = &args.describe {
        let json = serde_json::to_string_pretty(&device).expect("plain data");
        output::write_file(path, json.as_bytes())?;
    }
    output::print(&report);
    Ok(())
}

/// The shares of a case with all requested shardings; the first is drawn.
fn on_several(
    args: &Args,
    case: &Case,
    batch: &Batch,
    device: &DeviceDescription,
) -> Result<String, Failure> {
    let all = Sharded::of(case, batch, device, &args.dealing, &args.planning)?;
    let title = format!("{}, {}", case.name, case.heads());
    if let (Some(path), Some(first)) = (&args.svg, all.first()) {
        output::write_file(path, first.draw(&title).as_bytes())?;
    }
    let ways: Vec<_> = all.iter().map(Sharded::describe).collect();
    Ok(format!(
        "{title}, on {}\n\n{}\n",
        device.name,
        ways.join("\n")
    ))
}

/// A device by name, or from a file.
///
/// # Errors
/// [`Failure::Input`] if it is neither.
pub fn device(name: &str) -> Result<DeviceDescription, Failure> {
    let unknown = match DeviceDescription::named(name) {
        Ok(device) => return Ok(device),
        Err(error) => error,
    };
    let path = Path::new(name);
    let text = match input::text(path, input::MOST_JSON) {
        Ok(text) => text,
        Err(failure) if path.exists() || name.ends_with(".json") => return Err(failure),
        Err(_) => {
            let PlanError::UnknownDevice { known, .. } = &unknown else {
                return Err(unknown.into());
            };
            return Err(Failure::Input(format!(
                "no device is named {name:?}: give {known}, or a JSON file with a description"
            )));
        }
    };
    let device: DeviceDescription = workload::json::read(name, &text)?;
    let sound = device.check();
    sound.map_err(|error| Failure::Input(format!("{name}: {error}")))?;
    Ok(device)
}

/// Describes a plan: the batch, the launches, the bytes moved, and the time predicted by the cost model.
#[must_use]
pub fn describe(case: &Case, requests: usize, plan: &Plan, device: &DeviceDescription) -> String {
    let traffic = plan.traffic();
    let schedule = plan.schedule(device);
    let requests = counted(requests, "request");
    format!(
        "{}\n{requests}: {}\n{}, pages of {}, for {} ({})\n\n{plan}\n{}\
         moves {} of keys and values and {} of partial states, computes {}\n\
         takes {} by the cost model, with its CTAs busy {:.0} % of the time{}",
        wrap(&case.name, WIDTH, "  "),
        wrapped(&case.lengths()),
        case.heads(),
        case.page_size,
        device.name,
        picture::processors(device),
        launches(plan),
        scaled(traffic.kv_bytes as f64, "B"),
        scaled(traffic.partial_bytes as f64, "B"),
        scaled(traffic.flops as f64, "FLOP"),
        time(schedule.makespan_ns),
        100.0 * schedule.busy(),
        plan.pod
            .as_ref()
            .map_or(String::new(), |pod| hybrid(pod, device)),
    )
}

/// What a run launches, with a line that says what the plan does not know of. Nothing on a CPU.
fn launches(plan: &Plan) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for name in plan.launches() {
        match counts.iter_mut().find(|(known, _)| *known == name) {
            Some((_, count)) => *count += 1,
            None => counts.push((name, 1)),
        }
    }
    if counts.is_empty() {
        return String::new();
    }
    let words: Vec<_> = counts
        .into_iter()
        .map(|(name, count)| match count {
            1 => name,
            _ => format!("{name} ×{count}"),
        })
        .collect();
    format!(
        "launches {}\n\
         on a pool in NHD, its keys and values in one layout, without scales of tokens; another pool may take other kernels\n",
        words.join(", ")
    )
}

/// How prefills and decodes run together, if there are both.
pub(crate) fn form(plan: &Plan, device: &DeviceDescription) -> Option<&'static str> {
    let pod = plan.pod.as_ref()?;
    Some(in_words(pod.mode, config(pod, device)))
}

/// The configuration in which a plan's prefills and decodes run side by side.
fn config<'a>(pod: &PodPlan, device: &'a DeviceDescription) -> Option<&'a PodConfig> {
    device.pod.configs.get(pod.config? as usize)
}

/// A form that is not the plan's own has no configuration.
fn in_words(mode: PodMode, config: Option<&PodConfig>) -> &'static str {
    match (mode, config) {
        (PodMode::Streams, _) => "on two streams",
        (PodMode::Fused, None) => "side by side",
        (PodMode::Fused, Some(PodConfig { decode: None, .. })) => "side by side, on SMs apart",
        (PodMode::Fused, Some(_)) => "side by side on every SM",
        (PodMode::Tickets, _) => "in one kernel, by tickets",
        _ => "one after the other",
    }
}

/// The ways to run prefills and decodes, with their predicted times; the plan's own is marked.
fn hybrid(pod: &PodPlan, device: &DeviceDescription) -> String {
    let fused = match pod.mode {
        PodMode::Tickets => PodMode::Tickets,
        _ => PodMode::Fused,
    };
    let mut text = "\n\nprefills and decodes           predicted".to_owned();
    for mode in [PodMode::Serial, PodMode::Streams, fused] {
        let ns = pod.forecast.of(mode);
        // The predicted time is infinite if the device has no kernels for a mode; a CPU has no streams.
        if ns < f64::MAX && (mode == pod.mode || mode != PodMode::Streams || !device.is_cpu()) {
            let chosen = if mode == pod.mode {
                "  ← this plan"
            } else {
                ""
            };
            let config = config(pod, device).filter(|_| mode == pod.mode);
            let words = in_words(mode, config);
            text += &format!("\n  {words:<26} {:>10}{chosen}", time(ns));
        }
    }
    text
}

/// Wraps text that does not fit a line.
fn wrapped(words: &str) -> String {
    const MOST: usize = 80;
    if words.chars().count() <= MOST {
        return words.to_owned();
    }
    let kept: String = words.chars().take(MOST - 1).collect();
    let whole = kept
        .rsplit_once(", ")
        .map_or(kept.as_str(), |(whole, _)| whole);
    format!("{whole}, …")
}

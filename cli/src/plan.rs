//! `tandem plan`: what a plan does, as a table and as a picture, for any device.

use std::{path::PathBuf, time::Instant};

use tandem_attn::plan::{
    DeviceDescription, Plan, PlanError, Planner,
    pod::{PodForecast, PodMode, PodPlan},
};

use crate::{
    Failure,
    bench::Planning,
    output, picture,
    table::{counted, digits, scaled, time},
    workload::{self, Case},
};

const EXAMPLES: &str = "\
Examples:
  tandem plan my-workload.json --svg plan.svg
  tandem plan my-workload.json --device a100 --packing off
  tandem plan pat_fig10.json --case 'pat 4 32/8' --json plan.json";

/// Plan a workload for a device and show the plan; needs no GPU.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A workload file (docs/workloads.md), or a file with the cases of a paper
    #[arg(value_name = "WORKLOAD.json")]
    workload: PathBuf,
    /// Only cases whose name has this in it
    #[arg(long, value_name = "TEXT")]
    case: Option<String>,
    /// h200, h100, a100, a6000, rtx4090, cpu, or a JSON file with a description
    #[arg(long, default_value = "h200", value_name = "NAME|FILE")]
    device: String,
    /// Draw the plan: units over SMs in time
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Write the plan as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    planning: Planning,
}

/// Runs it.
///
/// # Errors
/// Wrong input.
pub fn run(args: &Args) -> Result<(), Failure> {
    let cases = workload::matching(workload::load(&args.workload)?, args.case.as_deref())?;
    let device = device(&args.device)?;
    if cases.len() > 1 && (args.svg.is_some() || args.json.is_some()) {
        return Err(Failure::Input(format!(
            "--svg and --json take one case and there are {}: choose one with --case, the first is {:?}",
            cases.len(),
            cases[0].name
        )));
    }
    for path in args.svg.iter().chain(&args.json) {
        output::check_writable(path)?;
    }
    let mut planner = Planner::new();
    let mut report = String::new();
    for case in &cases {
        let batch = case.batch()?;
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
            describe(case, batch.requests(), &plan, &device),
            digits(time.as_secs_f64() * 1e6)
        );
    }
    output::print(&report);
    Ok(())
}

/// A device by name, or from a file.
///
/// # Errors
/// [`Failure::Input`] where it is neither.
pub fn device(name: &str) -> Result<DeviceDescription, Failure> {
    let unknown = match DeviceDescription::named(name) {
        Ok(device) => return Ok(device),
        Err(error) => error,
    };
    let text = match std::fs::read_to_string(name) {
        Ok(text) => text,
        Err(error) if name.ends_with(".json") => {
            return Err(Failure::Read {
                path: name.into(),
                error,
            });
        }
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

/// A plan in words: what it is for, its launches, what it moves, and how long that takes by the cost model.
#[must_use]
pub fn describe(case: &Case, requests: usize, plan: &Plan, device: &DeviceDescription) -> String {
    let traffic = plan.traffic();
    let schedule = plan.schedule(device);
    let busy = schedule.busy_ns / (schedule.spans_end_ns() * f64::from(schedule.ctas)).max(1e-9);
    let requests = counted(requests, "request");
    format!(
        "{}\n{requests}: {}\n{}, pages of {}, for {} ({})\n\n{plan}\n\
         moves {} of keys and values and {} of partial states, computes {}\n\
         takes {}{} by the cost model, with its CTAs busy {:.0} % of the time{}",
        case.name,
        wrapped(&case.lengths()),
        case.heads(),
        case.page_size,
        device.name,
        picture::processors(device),
        scaled(traffic.kv_bytes as f64, "B"),
        scaled(traffic.partial_bytes as f64, "B"),
        scaled(traffic.flops as f64, "FLOP"),
        time(schedule.makespan_ns),
        picture::serially(plan),
        100.0 * busy,
        plan.pod.as_ref().map_or(String::new(), hybrid),
    )
}

/// How the prefills and the decodes run, and why.
fn hybrid(pod: &PodPlan) -> String {
    let how = match pod.mode {
        PodMode::Streams => "overlap on two streams",
        PodMode::Fused => "run side by side on every SM",
        PodMode::Tickets => "share one kernel, by tickets of their SM",
        _ => "run one after the other",
    };
    let PodForecast {
        serial_ns,
        streams_ns,
        fused_ns,
        ..
    } = pod.forecast;
    if pod.mode == PodMode::Serial && serial_ns <= streams_ns {
        return format!("\nprefills and decodes {how}");
    }
    let mut forecast = format!(
        "one after the other {}, streams {}",
        time(serial_ns),
        time(streams_ns)
    );
    if fused_ns < f64::MAX {
        forecast += &format!(", side by side {}", time(fused_ns));
    }
    format!("\nprefills and decodes {how}\nforecast: {forecast}")
}

/// No more than fits a line.
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

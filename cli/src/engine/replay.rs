//! `tandem bench --serve`: serves a trace with a model of random weights and compares the times with a simulation.

mod parts;
mod policies;
mod requests;
mod results;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_engine::{
    Architecture, Backend, Engine, Weights,
    calibrate::{Calibration, calibrate, warm_up},
    replay::{Replay, replay},
};
use tandem_schedule::{
    Hardware, ModelDescription,
    attention::Overlap,
    cost::{CostModel, Parallel},
    metrics::Report,
    sim::{simulate, standing_at},
    trace::Trace,
};

use self::{
    policies::planning,
    requests::{check_lengths, longest, trace},
};
use super::{Room, warn};
use crate::{
    Failure,
    backend::Place,
    bench::serving::Args,
    output::{self, Files, Force},
    serve_sim::{Name, chart, correction, described, is_file, nothing_finished, table},
};

/// Default capacity of the KV cache on the CPU, in tokens.
const CPU_CACHE: u32 = 65_536;
/// The policy that determines the capacity and the start state.
const BASE: &str = "sarathi-serve";

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, a missing backend, or a file that cannot be written.
pub fn run(args: &Args, place: Place, json: Option<&PathBuf>, force: Force) -> Result<(), Failure> {
    let named = [&args.model, &args.device].into_iter();
    let named: Vec<_> = named
        .filter(|name| is_file(name))
        .map(PathBuf::from)
        .collect();
    let outputs = [&args.svg, &args.parts, &args.calibration].into_iter();
    Files::new()
        .reads(named.iter().chain(&args.trace).chain(&args.correction))
        .writes(outputs.flatten().chain(json))
        .check(force)?;

    let whole = trace(args)?;
    let trace = match args.requests {
        Some(requests) => whole.clone().first(requests as usize),
        None => whole.clone(),
    };
    let (description, architecture) = model(&args.model, longest(&whole))?;
    let cost = CostModel::new(&description, &hardware(&args.device)?, Parallel::default())?;
    // The backend checks its caches itself. It need not be the device that is simulated.
    let cost = cost.with_served_cache_type(args.cache_type.into())?;
    args.policies().check()?;
    let instead = "--prefix, or a --trace with hash_ids";
    args.policies().check_shared(&whole, instead)?;
    let gpu = place.gpu()?;
    if args.wait && gpu.is_none() {
        return Err(Failure::Input(
            "--wait changes nothing on the CPU, where no step is composed before the last one has ended: leave it out, \
             or give --backend gpu"
                .to_owned(),
        ));
    }
    let room = Room {
        cache: args.cache.or(gpu.is_none().then_some(CPU_CACHE)),
        page_size: args.page_size,
        cache_type: cost.cache_type(),
        step_tokens: args.most_tokens(&trace)?,
        step_requests: args.batch,
    };
    check_lengths(&trace, architecture.positions, room.cache)?;
    let ceilings = match &gpu {
        Some(_) => Some(place.open()?.ceilings()?),
        None => None,
    };
    let positions = architecture.positions;
    let mut backend = room.backend(gpu, architecture, &Weights::random(1))?;
    let fitting = backend.pages().saturating_mul(backend.page_size());
    check_lengths(&trace, positions, Some(fitting))?;
    let device = backend.name();

    let bar = bar();
    let calibration = match &args.correction {
        Some(path) => Calibration {
            correction: correction(path, &cost)?,
            steps: Vec::new(),
        },
        None => {
            bar.set_message("calibrating");
            let measured = calibrate(&mut *backend, &cost, room.step_tokens, &mut |done, all| {
                bar.set_length(all as u64);
                bar.set_position(done as u64);
            });
            warn(&bar, backend.warnings());
            measured?
        }
    };
    let corrected = cost.clone().with_correction(&calibration.correction);
    let capacity = capacity(args, &corrected, &whole, &*backend)?;
    let rate = args.load.map(|load| load * capacity).or(args.rate);
    let trace = match rate {
        Some(rate) => trace.with_poisson_arrivals(rate, args.seed.unwrap_or(1)),
        None => trace,
    };
    let mut trace = match args.start {
        Some(start_s) => {
            let choices = Name::of(BASE)?;
            let simulation = args.simulation(&choices, &corrected, &trace, &*backend)?;
            standing_at(&trace, simulation, start_s)?
        }
        None => trace,
    };
    if let Some(window_s) = args.window {
        trace.arrivals.retain(|arrival| arrival.at_s < window_s);
    }
    trace.check_arrivals()?;
    if args.window.is_none() {
        warn(&bar, takes_long(&trace));
    }
    if trace.arrivals.is_empty() {
        return Err(Failure::Input(
            "no request is left: give an earlier --start".to_owned(),
        ));
    }
    if let Some(path) = &args.calibration {
        let json = serde_json::to_string_pretty(&calibration.correction).expect("plain data");
        output::write_file(path, (json + "\n").as_bytes())?;
    }
    bar.set_length(trace.arrivals.len() as u64);
    let mut served = Vec::new();
    for name in &args.policy {
        bar.set_message(name.clone());
        let replayed;
        (backend, replayed) = serve(args, name, &corrected, &trace, backend, &bar)?;
        let simulated = predict(args, name, &corrected, &trace, &*backend)?;
        served.push((replayed, simulated));
    }
    bar.finish_and_clear();

    let results = results::Results {
        device: &device,
        ceilings,
        cost: &cost,
        trace: &trace,
        capacity,
        rate,
        ahead: args.ahead(&*backend),
        calibration: &calibration,
        served: &served,
    };
    let mut text = results.text(args);
    // What was measured is shown even if a file cannot be written.
    let written = write_files(args, json, &results, &description.name, &mut text);
    output::print(&text);
    written?;
    let mut unfinished = served.iter();
    let unfinished = unfinished.find(|(replay, _)| replay.report.finished == 0);
    unfinished.map_or(Ok(()), |(replay, _)| {
        let (report, requests) = (&replay.report, trace.arrivals.len());
        Err(Failure::Wrong(nothing_finished(
            report,
            requests,
            args.window,
            ["the caches", "a larger --cache"],
        )))
    })
}

/// What to say of a trace whose requests arrive over a long time, in which each policy is measured.
fn takes_long(trace: &Trace) -> Vec<String> {
    const LONG_S: f64 = 600.0;
    let last_s = trace.arrivals.last().map_or(0.0, |arrival| arrival.at_s);
    let long = last_s > LONG_S;
    let say = || {
        let minutes = last_s / 60.0;
        format!(
            "the last request arrives after {minutes:.0} minutes, and each policy serves all of them: --window SECONDS ends \
             earlier, and a higher --rate or --load brings them together"
        )
    };
    long.then(say).into_iter().collect()
}

/// Writes the outputs, and adds to the text where pictures are.
fn write_files(
    args: &Args,
    json: Option<&PathBuf>,
    results: &results::Results<'_>,
    model: &str,
    text: &mut String,
) -> Result<(), Failure> {
    let device = results.device;
    if let Some(path) = json {
        output::write_file(path, results.json(args).as_bytes())?;
    }
    if let Some(path) = &args.svg {
        let [machine, requests] = table::heading(results.cost, results.trace, Some(device));
        let title = format!("{machine}: measured, and simulated after calibration");
        let svg = chart::draw(&title, &requests, &results.reports());
        output::write_file(path, svg.as_bytes())?;
        *text += &format!("\ndrawn in {}\n", path.display());
    }
    if let Some(path) = &args.parts {
        let title = format!("Where a step's time goes: {model} on {device}");
        let svg = parts::draw(&title, results.calibration);
        output::write_file(path, svg.as_bytes())?;
        *text += &format!("\ndrawn in {}\n", path.display());
    }
    Ok(())
}

fn bar() -> ProgressBar {
    let style = ProgressStyle::with_template("{msg:20} {wide_bar} {pos}/{len}, {elapsed}");
    let bar = ProgressBar::new(1).with_style(style.expect("the template is sound"));
    bar.enable_steady_tick(Duration::from_millis(200));
    bar
}

/// A model by name, from its description, or from its folder.
fn model(name: &str, longest: u32) -> Result<(ModelDescription, Architecture), Failure> {
    let folder = Path::new(name);
    if folder.is_dir() {
        let architecture = Architecture::read(folder)?;
        let name = folder.canonicalize().unwrap_or_else(|_| folder.to_owned());
        let name = name.file_name().map_or_else(
            || "model".to_owned(),
            |name| name.to_string_lossy().into_owned(),
        );
        return Ok((architecture.description(&name), architecture));
    }
    let description = match is_file(name) {
        true => described(folder, ModelDescription::from_json)?,
        false => ModelDescription::named(name)?,
    };
    // The time of a step does not depend on the number of positions.
    let positions = longest.next_power_of_two().max(8192);
    let architecture = Architecture::described(&description, positions)?;
    Ok((description, architecture))
}

fn hardware(name: &str) -> Result<Hardware, Failure> {
    match is_file(name) {
        true => described(name.as_ref(), Hardware::from_json),
        false => Ok(Hardware::named(name)?),
    }
}

/// Simulated requests per second of a trace if all requests arrive at 0, with chunked prefill and serial attention.
fn capacity(
    args: &Args,
    cost: &CostModel,
    trace: &Trace,
    backend: &dyn Backend,
) -> Result<f64, Failure> {
    let mut trace = trace.clone();
    for arrival in &mut trace.arrivals {
        arrival.at_s = 0.0;
    }
    let choices = Name::of(BASE)?;
    let simulation = args.simulation(&choices, cost, &trace, backend)?;
    Ok(simulate(&trace, simulation)?.requests_per_s())
}

/// The cost model of a policy's steps, by which it decides both when it is measured and when it is simulated.
fn priced(name: &Name<'_>, corrected: &CostModel) -> CostModel {
    corrected.clone().with_overlap(match name.pod {
        true => Overlap::pod(corrected.cache_type()),
        false => Overlap::Serial,
    })
}

/// Replays the trace on the backend and returns the backend.
fn serve(
    args: &Args,
    name: &str,
    cost: &CostModel,
    trace: &Trace,
    mut backend: Box<dyn Backend>,
    bar: &ProgressBar,
) -> Result<(Box<dyn Backend>, Replay), Failure> {
    let choices = Name::of(name)?;
    backend.plan_with(planning(&choices))?;
    // Only devices load kernels and capture graphs.
    if backend.is_asynchronous() {
        let warm = warm_up(&mut *backend);
        warn(bar, backend.warnings());
        warm?;
    }
    let policy = args.policy(&choices, &priced(&choices, cost), trace)?;
    let ahead = args.ahead(&*backend);
    let engine = Engine::with_policy(backend, args.limits(&choices, trace), policy)?;
    let mut engine = engine.running_ahead(ahead);
    let progress = &mut |left| bar.set_position(left as u64);
    let mut replayed = replay(&mut engine, trace, args.window, chart::MOST_SPANS, progress)?;
    name.clone_into(&mut replayed.report.policy);
    warn(bar, engine.warnings());
    Ok((engine.into_backend()?, replayed))
}

/// The simulation's prediction.
fn predict(
    args: &Args,
    name: &str,
    cost: &CostModel,
    trace: &Trace,
    backend: &dyn Backend,
) -> Result<Report, Failure> {
    let choices = Name::of(name)?;
    let cost = priced(&choices, cost);
    let mut simulation = args.simulation(&choices, &cost, trace, backend)?;
    simulation.timeline = 0..chart::MOST_SPANS;
    simulation.until_s = args.window;
    let mut report = simulate(trace, simulation)?;
    "  simulated".clone_into(&mut report.policy);
    Ok(report)
}

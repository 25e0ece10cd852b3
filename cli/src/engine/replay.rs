//! `tandem bench --serve`: serves a trace with a model of random weights and compares the times with a simulation.

mod parts;
mod results;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_attn::plan::{PackRule, PlanOptions, pod::PodMode};
use tandem_engine::{
    Architecture, Backend, Engine, Limits, Weights,
    calibrate::{Calibration, MeasuredStep, StepLengths, calibrate, warm_up},
    replay::{Replay, replay},
};
use tandem_schedule::{
    Hardware, ModelDescription, Prompt,
    attention::Overlap,
    chunk::{ChunkSize, Expected},
    cost::{CostModel, Parallel},
    metrics::Report,
    policy::{self, Policy, PolicyOptions},
    sim::{AttentionSource, Simulation, simulate, standing_at},
    trace::Trace,
};

use super::Room;
use crate::{
    Failure,
    backend::{self, Choice},
    bench::serving::Args,
    memory,
    output::{self, Files, Force},
    serve_sim::{chart, correction, described, is_file, read_trace, table},
    table::counted,
};

/// Default capacity of the KV cache on the CPU, in tokens.
const CPU_CACHE: u32 = 65_536;
/// The policy that determines the capacity and the start state.
const BASE: &str = "sarathi-serve";
/// Prompts with a common beginning are given as blocks of this number of tokens.
const BLOCK: u32 = 16;

/// Runs the subcommand.
///
/// # Errors
/// Wrong input, a missing backend, or a file that cannot be written.
pub fn run(
    args: &Args,
    choice: Choice,
    json: Option<&PathBuf>,
    force: Force,
) -> Result<(), Failure> {
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
    let cost = cost.with_cache_type(args.cache_type.into())?;
    for name in &args.policy {
        Choices::of(name)?.policy(args, &cost, &trace)?;
    }
    let gpu = backend::gpu(choice)?;
    if args.wait && gpu.is_none() {
        return Err(Failure::Input(
            "--wait changes nothing on the CPU, where no step is composed before the last one has ended: leave it out, \
             or give --backend gpu"
                .to_owned(),
        ));
    }
    let usual = match &gpu {
        Some(_) => cost.pages(args.page_size).saturating_mul(args.page_size),
        None => CPU_CACHE,
    };
    let room = Room {
        cache: Some(args.cache.unwrap_or(usual)),
        page_size: args.page_size,
        cache_type: cost.cache_type(),
        step_tokens: args.most_tokens(&trace)?,
        step_requests: args.batch,
    };
    check_lengths(&trace, architecture.positions, room.cache)?;
    let ceilings = match &gpu {
        Some(_) => Some(backend::open(Choice::Gpu)?.ceilings()?),
        None => None,
    };
    let mut backend = room.backend(gpu, architecture, &Weights::random(1))?;
    let device = backend.name();

    let bar = bar();
    let calibration = match &args.correction {
        Some(path) => Calibration {
            correction: correction(path, &cost)?,
            steps: Vec::new(),
        },
        None => {
            bar.set_message("calibrating");
            calibrate(&mut *backend, &cost, room.step_tokens, &mut |done, all| {
                bar.set_length(all as u64);
                bar.set_position(done as u64);
            })?
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
            let choices = Choices::of(BASE)?;
            let simulation = args.simulation(&choices, &corrected, &trace, &*backend)?;
            standing_at(&trace, simulation, start_s)?
        }
        None => trace,
    };
    if let Some(window_s) = args.window {
        trace.arrivals.retain(|arrival| arrival.at_s < window_s);
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
        (backend, replayed) = serve(args, name, &cost, &trace, backend, &bar)?;
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
        Err(Failure::Wrong(format!(
            "no request finished under {}: all were refused, as larger than the caches or than a step; give shorter ones, \
             or a larger --cache",
            replay.report.policy
        )))
    })
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

/// Checks that memory suffices for the requests and their tokens: accounts of requests, ids of blocks and of tokens,
/// times.
fn check_memory(args: &Args, requests: u64, [prompt, generated]: [u64; 2]) -> Result<(), Failure> {
    const REQUEST: u64 = 640;
    let blocks = match args.prefix {
        Some(_) => prompt.div_ceil(BLOCK.into()) + requests,
        None => 0,
    };
    let times = args.policy.len() as u64 + 2;
    // With a window, only the prompts inside of it are expanded to tokens.
    let ids = if args.window.is_some() { 0 } else { prompt };
    // The whole trace is kept in addition to the part that is served.
    let needed = REQUEST * requests + 4 * (ids + 2 * blocks + times * generated);
    memory::check(
        &format!(
            "serving {} of {prompt} prompt and {generated} generated tokens together",
            counted(requests as usize, "request")
        ),
        needed,
        "give fewer --requests, or shorter ones",
    )
}

fn trace(args: &Args) -> Result<Trace, Failure> {
    let mut trace = match &args.trace {
        Some(path) => {
            let trace = read_trace(path)?;
            let served = args.requests.map_or(usize::MAX, |most| most as usize);
            let served = &trace.arrivals[..served.min(trace.arrivals.len())];
            let tokens = served.iter().fold([0, 0], |[prompt, generated], arrival| {
                let request = &arrival.request;
                [
                    prompt + u64::from(request.prompt.len()),
                    generated + u64::from(request.max_new_tokens),
                ]
            });
            check_memory(args, served.len() as u64, tokens)?;
            trace
        }
        None => {
            let requests = args.requests.unwrap_or(64);
            let all = |tokens: u32| u64::from(requests) * u64::from(tokens);
            let tokens = [all(args.prompt), all(args.generated)];
            check_memory(args, requests.into(), tokens)?;
            Trace::uniform(requests as usize, args.prompt, args.generated)
        }
    };
    if trace.arrivals.is_empty() {
        return Err(Failure::Input("the trace has no requests".to_owned()));
    }
    if let Some(prefix) = args.prefix {
        if prefix > args.prompt {
            return Err(Failure::Input(format!(
                "--prefix {prefix} is more than the {} tokens of a prompt (--prompt)",
                args.prompt
            )));
        }
        if !prefix.is_multiple_of(BLOCK) {
            return Err(Failure::Input(format!(
                "--prefix {prefix}: prompts share blocks of {BLOCK} tokens: give a multiple of {BLOCK}"
            )));
        }
        let blocks = args.prompt.div_ceil(BLOCK);
        let shared = prefix / BLOCK;
        for (request, arrival) in trace.arrivals.iter_mut().enumerate() {
            let own = (request as u32 + 1).wrapping_mul(blocks);
            let id = |block| if block < shared { block } else { own + block };
            arrival.request.prompt = Prompt::Blocks {
                ids: (0..blocks).map(id).collect(),
                block: BLOCK,
                len: args.prompt,
            };
        }
    }
    Ok(trace)
}

/// Whether the trace says which blocks of its prompts are equal.
fn shares_blocks(trace: &Trace) -> bool {
    let mut arrivals = trace.arrivals.iter();
    arrivals.any(|arrival| matches!(arrival.request.prompt, Prompt::Blocks { .. }))
}

/// Numbers of tokens of the requests, prompt and answer.
fn lengths(trace: &Trace) -> impl Iterator<Item = u32> {
    trace.arrivals.iter().map(|arrival| {
        let request = &arrival.request;
        request.prompt.len().saturating_add(request.max_new_tokens)
    })
}

fn longest(trace: &Trace) -> u32 {
    lengths(trace).max().unwrap_or(0)
}

/// Checks that a request fits, before anything is measured; those that do not are refused while the trace is served.
fn check_lengths(trace: &Trace, positions: u32, cache: Option<u32>) -> Result<(), Failure> {
    let shortest = lengths(trace).min().unwrap_or(0);
    let cache = cache.unwrap_or(u32::MAX);
    let room = match shortest {
        _ if shortest > positions => {
            format!("the model has {positions} positions: give a model with more")
        }
        _ if shortest > cache => {
            format!("the KV cache holds {cache} tokens: give a larger --cache")
        }
        _ => return Ok(()),
    };
    Err(Failure::Input(format!(
        "no request fits: the shortest has {shortest} tokens of prompt and answer, and {room}, or shorter requests"
    )))
}

/// The parts of a policy's name.
struct Choices<'a> {
    policy: &'a str,
    pod: bool,
    unpacked: bool,
}

impl<'a> Choices<'a> {
    fn of(name: &'a str) -> Result<Self, Failure> {
        let mut parts = name.split('+');
        let mut choices = Self {
            policy: parts.next().unwrap_or_default(),
            pod: false,
            unpacked: false,
        };
        for part in parts {
            match part {
                "pod" => choices.pod = true,
                "unpacked" => choices.unpacked = true,
                _ => {
                    return Err(Failure::Input(format!(
                        "{name}: there is no +{part}; a policy may end in +pod or +unpacked"
                    )));
                }
            }
        }
        Ok(choices)
    }

    /// Whether the policy computes prompts whole.
    fn is_whole(&self) -> bool {
        matches!(self.policy, "prefill-first" | "orca")
    }

    fn planning(&self) -> PlanOptions {
        PlanOptions::default()
            .with_pod(if self.pod {
                PodMode::Auto
            } else {
                PodMode::Serial
            })
            .with_packing(if self.unpacked {
                PackRule::Off
            } else {
                PackRule::Fastest
            })
    }

    fn policy(
        &self,
        args: &Args,
        cost: &CostModel,
        trace: &Trace,
    ) -> Result<Box<dyn Policy>, Failure> {
        let (prompt, generated) = trace.mean_lengths();
        let expected = Expected {
            prompt: prompt as u32,
            generated: generated as u32,
            requests: args.batch,
            target_ns: None,
        };
        let options = PolicyOptions {
            chunk: ChunkSize::adaptive(cost.clone(), expected),
            target_ns: 50e6,
            cost: cost.clone(),
        };
        Ok(policy::by_name(self.policy, &options)?)
    }

    fn limits(&self, args: &Args, trace: &Trace) -> Limits {
        Limits {
            step_tokens: match self.is_whole() {
                true => args.budget.max(longest(trace)),
                false => args.budget,
            },
            step_requests: args.batch,
            running: args.batch,
            spare_pages: args.batch,
            ..Limits::default()
        }
    }
}

impl Args {
    /// Whether each step is composed before the tokens of the last one are known.
    fn ahead(&self, backend: &dyn Backend) -> bool {
        backend.is_asynchronous() && !self.wait
    }

    /// Number of tokens of the largest step of any policy.
    fn most_tokens(&self, trace: &Trace) -> Result<u32, Failure> {
        let mut most = self.budget.max(self.batch);
        for name in &self.policy {
            most = most.max(Choices::of(name)?.limits(self, trace).step_tokens);
        }
        Ok(most)
    }

    /// Whether a policy reads shared prefixes separately. Then the simulations must see shared prefixes, too.
    fn compares_packing(&self) -> bool {
        let unpacked = |name: &String| Choices::of(name).is_ok_and(|choices| choices.unpacked);
        self.policy.iter().any(unpacked)
    }

    fn simulation<'a>(
        &self,
        choices: &Choices<'_>,
        cost: &'a CostModel,
        trace: &Trace,
        backend: &dyn Backend,
    ) -> Result<Simulation<'a>, Failure> {
        let policy = choices.policy(self, cost, trace)?;
        let limits = Limits {
            chunk_keys: backend.chunk_keys(),
            ..choices.limits(self, trace)
        };
        let mut simulation = Simulation::with_policy(cost, limits, policy);
        simulation.page_size = backend.page_size();
        simulation.pages = Some(backend.pages());
        simulation.ahead = self.ahead(backend);
        if self.prefix.is_some() || self.compares_packing() && shares_blocks(trace) {
            simulation.attention = match choices.unpacked {
                true => AttentionSource::Unpacked,
                false => AttentionSource::Planner,
            };
        }
        Ok(simulation)
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
    let choices = Choices::of(BASE)?;
    let simulation = args.simulation(&choices, cost, &trace, backend)?;
    Ok(simulate(&trace, simulation)?.requests_per_s())
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
    let choices = Choices::of(name)?;
    backend.plan_with(choices.planning())?;
    warm_up(&mut *backend)?;
    let policy = choices.policy(args, cost, trace)?;
    let ahead = args.ahead(&*backend);
    let engine = Engine::with_policy(backend, choices.limits(args, trace), policy)?;
    let mut engine = engine.running_ahead(ahead);
    let progress = &mut |left| bar.set_position(left as u64);
    let mut replayed = replay(&mut engine, trace, args.window, chart::MOST_SPANS, progress)?;
    name.clone_into(&mut replayed.report.policy);
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
    let choices = Choices::of(name)?;
    let cost = cost.clone().with_overlap(match choices.pod {
        true => Overlap::pod(cost.cache_type()),
        false => Overlap::Serial,
    });
    let mut simulation = args.simulation(&choices, &cost, trace, backend)?;
    simulation.timeline = 0..chart::MOST_SPANS;
    simulation.until_s = args.window;
    let mut report = simulate(trace, simulation)?;
    "  simulated".clone_into(&mut report.policy);
    Ok(report)
}

/// A short name of a calibration step: decodes and their keys, and a chunk from its first token to the end of its keys.
fn short(step: &MeasuredStep) -> String {
    let StepLengths {
        decodes,
        keys,
        chunk,
        chunk_keys,
    } = step.lengths;
    let mut parts = Vec::new();
    if decodes > 0 {
        parts.push(format!("{decodes} × {keys}"));
    }
    if chunk > 0 {
        parts.push(format!("{chunk} to {chunk_keys}"));
    }
    parts.join(" + ") + if step.pod { ", POD" } else { "" }
}

impl results::Results<'_> {
    fn reports(&self) -> Vec<Report> {
        let both = self.served.iter();
        both.flat_map(|(replay, simulated)| [replay.report.clone(), simulated.clone()])
            .collect()
    }
}

/// Predicted time for the rows of a step's table.
fn predicted_ms(calibration: &Calibration, cost: &CostModel, index: usize) -> f64 {
    1e3 * calibration.predicted_s(cost, &calibration.steps[index])
}

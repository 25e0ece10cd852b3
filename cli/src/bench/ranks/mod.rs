//! `tandem bench --gpus N`: compares batches on several GPUs with the same batches on one.

mod device;
mod gate;
mod groups;
mod rounds;

use serde::{Deserialize, Serialize};
use tandem_attn::{
    plan::{Plan, Planner},
    problem::{Batch, Dtype, Spec},
    shard::{Forecast, Link, MERGED_WHOLE, Sharding, Share},
};

use super::{Args, Stats};
use crate::{
    Failure,
    deal::{Deal, mergeable},
    output,
    table::{Table, digits},
    workload::Case,
};
use device::Device;

/// The file that `--json` writes.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RanksFile {
    /// `tandem-ranks-1`.
    pub format: String,
    /// Version of the program.
    pub program: String,
    /// Time at which it began.
    pub date: String,
    /// The GPUs.
    pub gpus: Vec<String>,
    /// The measurements.
    pub results: Vec<RanksResult>,
}

/// A case with one sharding.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct RanksResult {
    /// Name of the case.
    pub case: String,
    /// The sharding.
    pub deal: String,
    /// Number of ranks.
    pub ranks: u32,
    /// Times of the whole batch on the first GPU.
    pub one: Stats,
    /// Times of the slowest rank in each run.
    pub all: Stats,
    /// Time that the exchange adds to a layer in a captured graph, in microseconds.
    pub exchange_us: Option<f64>,
    /// The same with NCCL, if it is available.
    pub nccl_us: Option<f64>,
    /// Time of the ranks predicted by the cost model.
    pub predicted_us: f64,
    /// Predicted time of one GPU.
    pub predicted_one_us: f64,
    /// Root mean square of the difference to the results of one GPU, relative to that of these results.
    pub error: f64,
}

/// Runs the subcommand.
pub(super) fn run(args: &Args, cases: &[Case]) -> Result<(), Failure> {
    let devices = (0..args.dealing.gpus).map(|ordinal| Device::new(args.place, ordinal));
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let date = humantime::format_rfc3339_seconds(std::time::SystemTime::now()).to_string();
    let mut results = Vec::new();
    let mut left_out = String::new();
    for case in cases {
        match measured(args, case, &devices) {
            Ok(measured) => results.extend(measured),
            // What was measured before is not lost if the GPUs have too little memory for a case.
            Err(Failure::Input(reason) | Failure::GpuMemory(reason)) => {
                left_out += &format!("left out: {}: {reason}\n", case.name)
            }
            Err(failure) => return Err(failure),
        }
    }
    let file = RanksFile {
        format: "tandem-ranks-1".to_owned(),
        program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
        date,
        gpus: devices
            .iter()
            .map(|device| device.gpu.name().to_owned())
            .collect(),
        results,
    };
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&file).expect("plain data");
        output::write_file(path, json.as_bytes())?;
    }
    output::print(&format!("{}{left_out}", render(&file)));
    // The comparison is false for NaN.
    let exact = |result: &&RanksResult| result.error < 0.02;
    match file.results.iter().find(|result| !exact(result)) {
        Some(wrong) => Err(Failure::Wrong(format!(
            "{}, {}: results differ from those of one GPU by {:.3}",
            wrong.case, wrong.deal, wrong.error
        ))),
        None if file.results.is_empty() => Err(Failure::Input("nothing was measured".to_owned())),
        None => Ok(()),
    }
}

fn render(file: &RanksFile) -> String {
    let mut table = Table::new([
        "case",
        "distributed",
        "1 GPU µs",
        "all µs",
        "×",
        "reads µs",
        "NCCL µs",
        "predicted µs",
        "error",
    ]);
    for result in &file.results {
        table.push([
            result.case.clone(),
            result.deal.clone(),
            digits(result.one.median_us),
            digits(result.all.median_us),
            format!("{:.2}", result.one.median_us / result.all.median_us),
            result.exchange_us.map_or(String::new(), digits),
            result.nccl_us.map_or(String::new(), digits),
            digits(result.predicted_us),
            format!("{:.4}", result.error),
        ]);
    }
    format!(
        "{}, {} × {}, {}\n\n{}\nµs: median of the slowest rank, with flushed caches. reads, NCCL: what the exchange adds to a \
         layer in a captured graph, by direct reads and by NCCL.\nerror: root mean square of the difference to one GPU's results, over that of these.\n",
        file.program,
        file.gpus.len(),
        file.gpus.first().map_or("", String::as_str),
        file.date,
        table.render()
    )
}

/// Measures a case with all shardings.
fn measured(args: &Args, case: &Case, devices: &[Device]) -> Result<Vec<RanksResult>, Failure> {
    case.refuse_chosen("leave --gpus out")?;
    let (spec, batch) = (&case.spec, case.batch()?);
    let halves = [spec.q_dtype, spec.kv_dtype, spec.out_dtype];
    let more = spec.latent || spec.variant.sinks || spec.variant.hooks.is_some();
    if more || halves.iter().any(|dtype| *dtype != Dtype::BF16) {
        return Err(Failure::Input(
            "several GPUs are measured with bf16, and without sinks, biases, sigmoid weights and latent heads".to_owned(),
        ));
    }
    let shardings = args
        .dealing
        .shardings(spec, &batch)
        .map_err(Failure::Input)?;
    // Requested ones were checked before.
    let mergeable = |(_, sharding): &(Deal, Sharding)| mergeable(sharding.keys);
    let shardings: Vec<_> = shardings.into_iter().filter(mergeable).collect();
    if shardings.is_empty() {
        return Err(Failure::Input(format!(
            "neither its heads nor its keys can be distributed over {} GPUs: give fewer, or a --deal",
            args.dealing.gpus
        )));
    }
    let plan = |spec: &Spec, batch: &Batch, device: &Device| -> Result<Plan, Failure> {
        let mut planner = Planner::with_rules(args.planning.rules());
        Ok(planner.plan(spec, batch, &device.gpu.device(), &args.planning.options())?)
    };
    let pools = devices.iter().map(|device| device.load(case, &batch));
    let pools = pools.collect::<Result<Vec<_>, _>>()?;
    let one = Sharding::one().shares(spec, &batch);
    let whole = one
        .map_err(|error| Failure::Input(error.to_string()))?
        .remove(0);
    let whole_plan = plan(spec, &batch, &devices[0])?;
    let settings = rounds::Settings {
        seconds: args.seconds,
        merge_all: batch.total_q() <= MERGED_WHOLE,
    };
    let one = rounds::measure(
        &devices[..1],
        &pools[..1],
        spec,
        &[(whole.clone(), whole_plan.clone())],
        &settings,
    )?;
    let description = devices[0].gpu.device();
    let forecast = |shares: &[Share], plans: &[Plan]| {
        Forecast::new(
            shares,
            plans,
            &description,
            &Link::NVLINK,
            settings.merge_all,
        )
        .total_ns
            / 1e3
    };
    let predicted_one_us = forecast(&[whole], &[whole_plan]);
    let mut results = Vec::new();
    for (deal, sharding) in shardings {
        let shares = sharding
            .shares(spec, &batch)
            .map_err(|error| Failure::Input(error.to_string()))?;
        let plans = shares.iter().zip(devices);
        let plans: Vec<Plan> = plans
            .map(|(share, device)| plan(&share.spec, &share.batch, device))
            .collect::<Result<_, _>>()?;
        let predicted_us = forecast(&shares, &plans);
        let work: Vec<_> = shares.into_iter().zip(plans).collect();
        let all = rounds::measure(devices, &pools, spec, &work, &settings)?;
        results.push(result(
            case,
            deal,
            &one,
            all,
            [predicted_us, predicted_one_us],
        ));
    }
    Ok(results)
}

fn result(
    case: &Case,
    deal: Deal,
    one: &rounds::Measured,
    all: rounds::Measured,
    [predicted_us, predicted_one_us]: [f64; 2],
) -> RanksResult {
    RanksResult {
        case: case.name.clone(),
        deal: deal.to_string(),
        ranks: all.ranks,
        one: one.times,
        all: all.times,
        exchange_us: all.exchange_us[0],
        nccl_us: all.exchange_us[1],
        predicted_us,
        predicted_one_us,
        error: all.error(one),
    }
}

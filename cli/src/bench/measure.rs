//! One case on one backend.

use std::time::{Duration, Instant};

use tandem_attn::{
    plan::{Plan, Planner},
    problem::{Batch, Spec},
};

use super::{CaseResult, Settings, Stats};
use crate::{
    Failure,
    backend::{Backend, Loaded},
    check,
    tensors::Tensors,
    workload::Case,
};

const SEED: u64 = 7;
const FEWEST_RUNS: usize = 3;
const MOST_RUNS: usize = 1000;
/// Plans are made so often.
const PLAN_RUNS: usize = 21;

pub(super) fn case(
    backend: &mut dyn Backend,
    case: &Case,
    settings: &Settings,
) -> Result<CaseResult, Failure> {
    let spec = &case.spec;
    let batch = case.batch()?;
    let work = Work::of(spec, &batch);
    let mut result = CaseResult {
        case: case.name.clone(),
        implementation: "tandem".to_owned(),
        heads: case.heads(),
        page_size: case.page_size,
        requests: batch.requests() as u32,
        query_tokens: batch.total_q(),
        bytes: work.bytes,
        flops: work.flops,
        plan: None,
        flushed: None,
        warm: None,
        errors: None,
        skipped: None,
    };
    if work.allocated > settings.memory_bytes {
        result.skipped = Some(format!(
            "needs {:.1} GB of {:.1}",
            work.allocated as f64 / 1e9,
            settings.memory_bytes as f64 / 1e9
        ));
        return Ok(result);
    }
    let device = backend.device();
    let mut planner = Planner::new();
    let mut plan = Plan::empty(*spec);
    let mut times = Vec::with_capacity(PLAN_RUNS);
    for _ in 0..PLAN_RUNS {
        let begin = Instant::now();
        planner.plan_into(spec, &batch, &device, &settings.options, &mut plan)?;
        times.push(microseconds(begin.elapsed()));
    }
    result.plan = Some(Stats::of(times));

    let tensors = Tensors::random(spec, &batch, case.layout, SEED)?;
    let mut loaded = backend.load(&plan, &tensors)?;
    loaded.run(false)?;
    result.flushed = Some(repeat(&mut *loaded, settings.time, true)?);
    result.warm = Some(repeat(&mut *loaded, settings.time, false)?);
    if settings.check > 0 {
        let results = loaded.results()?;
        let errors = check::sample(&plan, &batch, &tensors, &results, settings.check)?;
        result.errors = Some(errors);
    }
    Ok(result)
}

/// Runs until the time is over. Time spent flushing counts too, or short runs would take for ever.
fn repeat(loaded: &mut dyn Loaded, time: Duration, flush: bool) -> Result<Stats, Failure> {
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < FEWEST_RUNS || begin.elapsed() < time && times.len() < MOST_RUNS {
        times.push(microseconds(loaded.run(flush)?));
    }
    Ok(Stats::of(times))
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// What a batch moves and computes at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    /// Queries, outputs, and each key and value once.
    pub bytes: u64,
    /// On pairs of a query and a key that it sees.
    pub flops: u64,
    /// Bytes of all tensors.
    pub allocated: u64,
}

impl Work {
    pub(crate) fn of(spec: &Spec, batch: &Batch) -> Self {
        let part = &batch.parts[0];
        let table = &part.table;
        let page_tokens = u64::from(table.page_size);
        let mut pairs = 0;
        // Tokens of each page that some request reads.
        let mut read = vec![0; table.pool_pages as usize];
        for request in 0..batch.requests() {
            let (q_len, kv_len) = (batch.q_len(request), part.kv_len(request));
            if q_len == 0 {
                continue;
            }
            let first = part.first_position(request);
            pairs += (0..q_len as i32)
                .map(|token| spec.variant.visible(first + token, kv_len).len() as u64)
                .sum::<u64>();
            let left_out = spec.variant.visible(first, kv_len).start / table.page_size;
            let mut left = kv_len;
            for (index, &page) in table.pages(request).iter().enumerate() {
                let tokens = left.min(table.page_size);
                left -= tokens;
                if index as u32 >= left_out {
                    read[page as usize] = tokens.max(read[page as usize]);
                }
            }
        }
        let unique: u64 = read.iter().copied().map(u64::from).sum();
        let tokens = u64::from(batch.total_q()) * u64::from(spec.q_heads);
        let rows = tokens * u64::from(spec.head_dim_qk) * u64::from(spec.q_dtype.bytes())
            + tokens * u64::from(spec.head_dim_v) * u64::from(spec.out_dtype.bytes());
        let pool = u64::from(table.pool_pages) * page_tokens * spec.kv_bytes_per_token();
        Self {
            bytes: unique * spec.kv_bytes_per_token() + rows,
            flops: pairs * spec.flops_per_pair(),
            allocated: pool + rows,
        }
    }
}

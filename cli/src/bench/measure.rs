//! Measures one case on one backend.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use tandem_attn::{
    plan::{Plan, Planner},
    problem::{Batch, Spec},
};

use super::{CaseResult, Settings, Stats, energy};
use crate::{
    Failure,
    backend::{Backend, Loaded, meter::Meter},
    check,
    table::scaled,
    tensors::Tensors,
    workload::{Case, Chosen, Place},
};

const SEED: u64 = 7;
/// The number of runs from which `tandem compare` can tell noise from a difference.
const FEWEST_RUNS: usize = Stats::TELLING as usize;
const MOST_RUNS: usize = 1000;
/// Number of times that planning is measured.
const PLAN_RUNS: usize = 21;

pub(super) fn case(
    backend: &mut dyn Backend,
    case: &Case,
    settings: &Settings,
    meter: Option<&mut (dyn Meter + 'static)>,
) -> Result<CaseResult, Failure> {
    let spec = &case.spec;
    let (batch, chosen) = case.batches()?;
    let work = Work::of(spec, &batch);
    let mut result = CaseResult {
        case: case.name.clone(),
        implementation: "tandem".to_owned(),
        heads: case.heads(),
        page_size: case.page_size,
        // If each head is computed as requests of its own, these are the counts of the model.
        requests: case.count() as u32,
        query_tokens: case.tokens() as u32,
        bytes: work.bytes,
        flops: work.flops,
        hybrid: None,
        plan: None,
        flushed: None,
        warm: None,
        read: None,
        energy: None,
        errors: None,
        skipped: None,
    };
    if work.allocated > settings.memory_bytes {
        result.skipped = Some(format!(
            "its tensors need {}, and at most {} may be taken",
            scaled(work.allocated as f64, "B"),
            scaled(settings.memory_bytes as f64, "B")
        ));
        return Ok(result);
    }
    match measured(
        backend,
        case,
        settings,
        (&batch, chosen, meter),
        &mut result,
    ) {
        // If this backend does not support a case or the machine lacks memory for it, the other cases still run.
        Err(Failure::Input(reason) | Failure::GpuMemory(reason)) => result.skipped = Some(reason),
        other => other?,
    }
    Ok(result)
}

/// Plans, runs and checks a case.
fn measured(
    backend: &mut dyn Backend,
    case: &Case,
    settings: &Settings,
    (batch, chosen, meter): (&Batch, Option<Chosen>, Option<&mut (dyn Meter + 'static)>),
    result: &mut CaseResult,
) -> Result<(), Failure> {
    let spec = &case.spec;
    let device = backend.device();
    let planned = chosen.as_ref().map_or(batch, |chosen| &chosen.planned);
    let mut planner = Planner::with_rules(settings.rules);
    let mut plan = Plan::empty(*spec);
    let mut times = Vec::with_capacity(PLAN_RUNS);
    for _ in 0..PLAN_RUNS {
        let begin = Instant::now();
        planner.plan_into(spec, planned, &device, &settings.options, &mut plan)?;
        times.push(microseconds(begin.elapsed()));
    }
    result.plan = Some(Stats::of(times));
    result.hybrid = plan.pod.map(|pod| pod.mode);
    let mut tensors = Tensors::random(spec, batch, case.layout, SEED)?.with_numbers(case.numbers);
    if settings.token_scales {
        tensors = tensors.with_token_scales(spec, SEED)?;
    }
    tensors.indices = chosen.map(|chosen| chosen.indices);
    let mut loaded = backend.load(&plan, &tensors)?;
    loaded.run(false)?;
    result.flushed = Some(repeat(&mut *loaded, settings.time, true)?);
    result.warm = Some(repeat(&mut *loaded, settings.time, false)?);
    let bytes = result.bytes;
    if let Some(first) = loaded.read(bytes) {
        first?;
        let read = || loaded.read(bytes).expect("it was read before");
        result.read = Some(repeat_with(read, settings.time)?);
    }
    if let Some(meter) = meter {
        result.energy = Some(energy::measure(meter, settings.time, &mut *loaded)?);
    }
    if settings.check > 0 {
        let results = loaded.results()?;
        let errors = check::sample(&plan, batch, &tensors, &results, settings.check)?;
        result.errors = Some(errors);
    }
    Ok(())
}

/// Runs until the time is over. The time of flushing counts, because short runs would take forever otherwise.
fn repeat(loaded: &mut dyn Loaded, time: Duration, flush: bool) -> Result<Stats, Failure> {
    repeat_with(|| loaded.run(flush), time)
}

fn repeat_with(
    mut run: impl FnMut() -> Result<Duration, Failure>,
    time: Duration,
) -> Result<Stats, Failure> {
    let begin = Instant::now();
    let mut times = Vec::new();
    while times.len() < FEWEST_RUNS || begin.elapsed() < time && times.len() < MOST_RUNS {
        times.push(microseconds(run()?));
    }
    Ok(Stats::of(times))
}

fn microseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e6
}

/// The minimum of bytes and operations that a batch needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    /// Bytes of queries and outputs, and of each key and value once.
    pub bytes: u64,
    /// Operations on pairs of a query and a visible key.
    pub flops: u64,
    /// Bytes of all tensors.
    pub allocated: u64,
}

impl Work {
    pub(crate) fn of(spec: &Spec, batch: &Batch) -> Self {
        let table = &batch.parts[0].table;
        let page_tokens = u64::from(table.page_size);
        let mut pairs = 0;
        // For each page, the number of its tokens that some request reads.
        let mut read = vec![0; table.pool_pages as usize];
        for request in 0..batch.requests() {
            let q_len = batch.q_len(request);
            if q_len == 0 {
                continue;
            }
            let place = Place::of(batch, request);
            let Place { part, row_block } = place;
            let (q_len, kv_len) = (q_len / part.heads, part.kv_len(row_block));
            let first = part.first_position(row_block);
            let words = batch
                .ancestors
                .get(batch.qo_indptr[request] as usize..)
                .unwrap_or(&[]);
            pairs += (0..q_len as i32)
                .map(|token| {
                    let seen = spec.variant.visible(first + token, kv_len);
                    let word = words.get(token as usize).copied().unwrap_or(u64::MAX);
                    seen.len() as u64 - hidden(word, first + token, &seen)
                })
                .sum::<u64>()
                * u64::from(part.heads);
            let left_out = spec.variant.visible(first, kv_len).start / table.page_size;
            for head in 0..part.heads {
                let mut left = kv_len;
                for (index, page) in (0..).zip(place.pages(head)) {
                    let tokens = left.min(table.page_size);
                    left -= tokens;
                    if index >= left_out {
                        read[page as usize] = tokens.max(read[page as usize]);
                    }
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

/// Number of keys that a query's ancestor mask hides among those visible by mask and window.
fn hidden(word: u64, position: i32, seen: &Range<u32>) -> u64 {
    if word == u64::MAX {
        return 0;
    }
    let keys = (0..64).filter(|distance| word >> distance & 1 == 0);
    let keys = keys.filter_map(|distance| u32::try_from(position - distance).ok());
    keys.filter(|key| seen.contains(key)).count() as u64
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tandem_attn::plan::{DeviceDescription, PlanOptions};

    use super::*;
    use crate::{
        backend::{Ceilings, Machine},
        failure::{A_SMALLER_CASE, too_little_memory},
        workload,
    };

    /// A backend that refuses everything, for this reason.
    struct Picky(fn() -> Failure);

    impl Backend for Picky {
        fn machine(&self) -> Machine {
            unimplemented!("not asked")
        }

        fn device(&self) -> DeviceDescription {
            DeviceDescription::named("h200").unwrap()
        }

        fn memory_bytes(&self) -> u64 {
            u64::MAX
        }

        fn ceilings(&mut self) -> Result<Ceilings, Failure> {
            unimplemented!("not asked")
        }

        fn load<'a>(
            &'a mut self,
            _: &'a Plan,
            _: &'a Tensors,
        ) -> Result<Box<dyn Loaded + 'a>, Failure> {
            Err((self.0)())
        }
    }

    #[test]
    fn what_a_backend_does_not_take_is_left_out() {
        let settings = Settings {
            token_scales: false,
            energy: false,
            time: Duration::ZERO,
            check: 0,
            options: PlanOptions::default(),
            rules: Default::default(),
            memory_bytes: u64::MAX,
        };
        // The backend refuses the first two, and the planner the third. Too little memory once ended the run, and lost what was
        // measured before.
        let picky = || Failure::Input("this backend is picky".to_owned());
        let full = || too_little_memory([9, 5, 7], A_SMALLER_CASE);
        for (dim, refusal, reason) in [
            (128, picky as fn() -> _, "this backend is picky"),
            (128, full, "5 of 7 are free; give a smaller case"),
            (272, picky, "head dimension of 272"),
        ] {
            let text = format!(
                r#"{{"heads": 4, "kv_heads": 2, "head_dim": {dim}, "requests": [{{"q_len": 1, "kv_len": 9}}]}}"#
            );
            let cases = workload::parse("test", &text).unwrap();
            let result = case(&mut Picky(refusal), &cases[0], &settings, None).unwrap();
            let said = result.skipped.as_deref().unwrap_or_default();
            assert!(said.contains(reason), "{said}");
            assert!(result.times().is_none());
        }
    }

    fn work(text: &str) -> Work {
        let case = workload::parse("test", text).unwrap().remove(0);
        Work::of(&case.spec, &case.batch().unwrap())
    }

    #[test]
    fn shared_keys_count_once() {
        let tree = work(
            r#"{"heads": 4, "kv_heads": 2, "head_dim": 16, "page_size": 16,
                "tree": {"nodes_per_level": [1, 3], "tokens_per_level": [32, 5]}}"#,
        );
        // 3 queries and outputs of 4 heads; 32 + 3 · 5 keys and values of 2 heads; 2 bytes each.
        let rows = 2 * 3 * 4 * 16 * 2;
        assert_eq!(tree.bytes, rows + (32 + 15) * 2 * 2 * 16 * 2);
        assert_eq!(tree.allocated, rows + (32 + 48) * 2 * 2 * 16 * 2);
        assert_eq!(tree.flops, 3 * 37 * 4 * 4 * 16);
    }

    #[test]
    fn hidden_pairs_do_not_count() {
        let pairs = |variant: &str| {
            let text = format!(
                r#"{{"heads": 1, "kv_heads": 1, "head_dim": 16, "page_size": 4, "variant": {variant},
                    "requests": [{{"q_len": 3, "kv_len": 20}}]}}"#
            );
            let work = work(&text);
            (work.flops / 64, (work.bytes - 2 * 3 * 16 * 2) / 64)
        };
        assert_eq!(pairs(r#"{"causal": false}"#), (60, 20));
        assert_eq!(pairs(r#"{"causal": true}"#), (18 + 19 + 20, 20));
        // Each query sees itself and 4 keys. The first is at position 17, so keys 13 to 19 are read, on pages from 12
        // on.
        assert_eq!(pairs(r#"{"window_left": 4}"#), (15, 8));
        // The last two tokens are children of the first, and do not see each other.
        let tree = work(
            r#"{"heads": 1, "kv_heads": 1, "head_dim": 16, "page_size": 4,
                "requests": [{"q_len": 3, "kv_len": 20, "branches": 2}]}"#,
        );
        assert_eq!(tree.flops / 64, 18 + 19 + 19);
    }
}

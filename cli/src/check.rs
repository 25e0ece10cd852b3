//! Exactness of results: compares sampled query tokens with attention in f64.

use serde::{Deserialize, Serialize};
use tandem_attn::{
    plan::Plan,
    problem::{Batch, Compute, Dtype, PageTable, Spec},
};

use crate::{Failure, backend::Results, tensors::Tensors, workload::Place};

/// The largest errors found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Errors {
    /// Number of query tokens compared, with all heads of each.
    pub tokens: u32,
    /// Largest absolute error of the outputs.
    pub out: f64,
    /// Largest error of the outputs, relative to what rounding to the output type allows.
    pub out_of_bound: f64,
    /// Largest absolute error of the LSEs; none if the implementation returns none.
    pub lse: Option<f64>,
    /// Whether matrix products were in 8 bits, which allows a larger error.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub in_8_bits: bool,
    /// Whether rotary embedding was applied to queries and keys, which were then rounded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub rotary: bool,
}

/// Maximum error of an LSE.
const LSE_BOUND: f64 = 1e-3;

/// The same if queries are rounded to e4m3. Each number of a row then has an error of up to 1/16, so a logit has an
/// error of about 0.02 for random numbers up to 1, and the first rows see few keys. The worst of 1,024 rows was off by
/// 0.069.
const LSE_BOUND_IN_8_BITS: f64 = 1.0 / 8.0;

/// The same if queries and keys are rounded to bf16 once more after rotary embedding.
const LSE_BOUND_WITH_ROTARY: f64 = 5.0 / 256.0;

impl Errors {
    /// The largest error of outputs and LSEs, relative to what is allowed.
    #[must_use]
    pub fn of_bound(&self) -> f64 {
        let bound = if self.in_8_bits {
            LSE_BOUND_IN_8_BITS
        } else if self.rotary {
            LSE_BOUND_WITH_ROTARY
        } else {
            LSE_BOUND
        };
        self.out_of_bound.max(self.lse.unwrap_or(0.0) / bound)
    }

    /// Whether the results are as exact as their types allow.
    #[must_use]
    pub fn are_small(&self) -> bool {
        self.of_bound() <= 1.0
    }
}

/// Maximum error of an output: rounding of the result, and of the weights if these are 16-bit, too.
fn bound(spec: &Spec, right: f64) -> f64 {
    let unit = match spec.out_dtype {
        // A weight has a rounding error of up to 1/16 of its value.
        _ if spec.compute == Compute::F8 => 1.0 / 16.0,
        Dtype::BF16 => 1.0 / 256.0,
        Dtype::F16 => 1.0 / 2048.0,
        _ => 1e-5,
    };
    unit * (1.5 * right.abs() + 0.5)
}

/// Compares up to `tokens` query tokens, spread over all requests.
///
/// # Errors
/// If the reference cannot be computed.
pub fn sample(
    plan: &Plan,
    batch: &Batch,
    tensors: &Tensors,
    results: &Results,
    tokens: u32,
) -> Result<Errors, Failure> {
    let spec = &plan.spec;
    let picks = pick(spec, batch, tokens);
    let (heads, dim_qk, dim_v) = (
        spec.q_heads as usize,
        spec.head_dim_qk as usize,
        spec.head_dim_v as usize,
    );
    let mut errors = Errors {
        in_8_bits: spec.compute == Compute::F8,
        rotary: spec.rotary.is_some(),
        ..Errors::default()
    };
    let mut lse: f64 = 0.0;
    for Pick {
        token,
        request,
        keys,
    } in picks
    {
        let alone = alone(batch, token, request, keys);
        let queries = token as usize * heads * dim_qk..(token as usize + 1) * heads * dim_qk;
        let right = tensors.reference(spec, &alone, &tensors.q.slice(queries))?;
        for (head, &right) in right.lse.iter().enumerate() {
            let got = f64::from(results.lse[token as usize * heads + head]);
            let error = if got == right {
                0.0
            } else {
                (got - right).abs()
            };
            lse = lse.max(not_nan(error));
        }
        for (index, &right) in right.out.iter().enumerate() {
            let got = f64::from(results.out.get(token as usize * heads * dim_v + index));
            let error = not_nan((got - right).abs());
            errors.out = errors.out.max(error);
            errors.out_of_bound = errors.out_of_bound.max(not_nan(error / bound(spec, right)));
        }
        errors.tokens += 1;
    }
    errors.lse = Some(lse);
    Ok(errors)
}

/// `max` would ignore NaN, and JSON has no infinity.
fn not_nan(error: f64) -> f64 {
    if error.is_finite() { error } else { f64::MAX }
}

/// A query token, its request, and the number of keys up to the last that it can see.
#[derive(Clone, Copy, Debug)]
struct Pick {
    token: u32,
    request: usize,
    keys: u32,
}

/// Query tokens spread evenly over the batch, including the first and the last.
fn pick(spec: &Spec, batch: &Batch, tokens: u32) -> Vec<Pick> {
    let variant = &spec.variant;
    let total = batch.total_q();
    let count = tokens.min(total);
    let mut picks: Vec<Pick> = (0..count)
        .map(|index| {
            let token =
                (u64::from(index) * u64::from(total - 1) / u64::from(count.max(2) - 1)) as u32;
            let request = batch.qo_indptr.partition_point(|&start| start <= token) - 1;
            // Distances count from the query's position. In a batch of one token that is the position of the last key,
            // so without a causal mask only the last token of a request can be checked.
            let distances =
                variant.window_left.is_some() || variant.hooks.is_some() || spec.rotary.is_some();
            let last_only = distances && !variant.causal;
            let token = if last_only {
                batch.qo_indptr[request + 1] - 1
            } else {
                token
            };
            let from_end = batch.qo_indptr[request + 1] - 1 - token;
            let place = Place::of(batch, request);
            let keys = place.part.kv_len(place.row_block);
            let from_end = from_end / place.part.heads;
            Pick {
                token,
                request,
                keys: if variant.causal {
                    keys - from_end
                } else {
                    keys
                },
            }
        })
        .collect();
    picks.dedup_by_key(|pick| pick.token);
    picks
}

/// A batch of one query token on the first `keys` keys of a request.
fn alone(batch: &Batch, token: u32, request: usize, keys: u32) -> Batch {
    let table = &batch.parts[0].table;
    let place = Place::of(batch, request);
    let pages = keys.div_ceil(table.page_size) as usize;
    let mut one = PageTable::new(table.page_size, table.pool_pages);
    one.push(&place.pages(token)[..pages], keys);
    let ancestors = batch.ancestors.get(token as usize);
    Batch::new(vec![0, 1], one).with_ancestors(ancestors.copied().into_iter().collect())
}

#[cfg(test)]
mod tests {
    use tandem_attn::plan::{PlanOptions, Planner};

    use super::{Errors, sample};
    use crate::{
        backend::{Backend, CpuBackend},
        tensors::Tensors,
        workload,
    };

    /// Without a causal mask, queries also see later keys.
    #[test]
    fn prompts_without_a_causal_mask_are_exact() {
        for variant in [
            r#""alibi": true"#,
            // Fewer entries than distances, also to the right.
            r#""distance_bias": 12"#,
            r#""sigmoid": -3"#,
            r#""rotary": {"theta": 1e4}"#,
            r#""window_left": 5"#,
        ] {
            let text = format!(
                r#"{{"heads": 4, "kv_heads": 2, "head_dim": 64, "variant": {{"causal": false, {variant}}},
                    "requests": [{{"q_len": 30, "kv_len": 40}}]}}"#
            );
            let case = workload::parse("test", &text).unwrap().remove(0);
            let (spec, batch) = (&case.spec, case.batch().unwrap());
            let mut backend = CpuBackend::new();
            let device = backend.device();
            let plan = Planner::new().plan(spec, &batch, &device, &PlanOptions::default());
            let plan = plan.unwrap();
            let tensors = Tensors::random(spec, &batch, case.layout, 1).unwrap();
            let tensors = tensors.with_numbers(case.numbers);
            let mut loaded = backend.load(&plan, &tensors).unwrap();
            loaded.run(false).unwrap();
            let results = loaded.results().unwrap();
            let errors = sample(&plan, &batch, &tensors, &results, 9).unwrap();
            assert!(errors.are_small(), "{variant}: {errors:?}");
        }
    }

    /// A GPU's results for 8,192 keys: rounding keys to bf16 after rotary embedding changes the logits.
    #[test]
    fn log_sums_may_be_off_by_what_rounding_of_turned_keys_does() {
        let plain = Errors {
            out_of_bound: 0.35,
            lse: Some(1.7e-3),
            ..Errors::default()
        };
        assert!(!plain.are_small());
        let rotary = Errors {
            rotary: true,
            ..plain
        };
        assert!(rotary.are_small() && rotary.of_bound() < 0.5);
        let wrong = Errors {
            lse: Some(0.1),
            ..rotary
        };
        assert!(!wrong.are_small());
    }
}

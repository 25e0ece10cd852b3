//! What is right, in f64, and whether results are that.

mod in_f8;
mod of_slots;

use tandem_attn::{
    kv::KvView,
    problem::{Batch, Dtype, KvLayout},
    reference::{self, Output},
    tensor::HeadTensors,
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

pub use self::{in_f8::of_plan, of_slots::of_slots};
use crate::{
    case::{Appends, Case, Numbers, Scales},
    hooks,
    in_8_bits::near,
    numbers::{get, summands},
    numeric::{Tolerance, compare},
    world::{Image, REQUESTS, World},
};

/// What is right, and what results may be off besides what rounding makes of any.
#[derive(Debug)]
pub struct Right {
    pub output: Output,
    /// By element, of outputs and of log-sums: where products have 8 bits.
    pub off: Option<[Vec<f64>; 2]>,
    /// How often a result is rounded.
    pub roundings: f64,
}

impl From<Output> for Right {
    fn from(output: Output) -> Self {
        Self {
            output,
            off: None,
            roundings: 1.0,
        }
    }
}

/// The scale of a request, by a row of queries: of keys, or of values.
fn of_request(case: &Case, world: &World, side: usize, row: usize) -> f32 {
    if case.scales != Scales::Request {
        return 1.0;
    }
    let (q_heads, group) = (case.spec.q_heads as usize, case.spec.group() as usize);
    let request = row / q_heads * 7 % REQUESTS as usize;
    let at = request * case.spec.kv_heads as usize + row % q_heads / group;
    world.scale_values[side][at]
}

/// Scales of requests are of who asks: on the queries, and on what comes out.
fn with_scales(
    case: &Case,
    world: &World,
    q: &[f32],
    attention: impl FnOnce(&[f32]) -> Output,
) -> Output {
    let mut q = q.to_vec();
    for (row, numbers) in q.chunks_mut(case.spec.head_dim_qk as usize).enumerate() {
        let scale = of_request(case, world, 0, row);
        numbers.iter_mut().for_each(|x| *x *= scale);
    }
    let mut output = attention(&q);
    let rows = output.out.chunks_mut(case.spec.head_dim_v as usize);
    for (row, numbers) in rows.enumerate() {
        let scale = f64::from(of_request(case, world, 1, row));
        numbers.iter_mut().for_each(|x| *x *= scale);
    }
    output
}

/// Attention of a batch by its definition.
pub fn right(case: &Case, batch: &Batch, world: &World, q: &[f32]) -> Output {
    // Values of latent attention were copied out of the keys.
    let mut spec = case.spec;
    spec.latent = false;
    let parts = batch.parts.iter();
    let views = parts.map(|part| {
        let page_size = part.table.page_size;
        let (keys, values) = (&world.keys, &world.values);
        KvView::new(&spec, KvLayout::Nhd, page_size, keys, values)
    });
    let views: Vec<_> = views.collect();
    let mut heads = HeadTensors::default();
    if spec.variant.sinks {
        heads = heads.with_sinks(&world.sink_values);
    }
    let slopes = &world.slope_values;
    with_scales(case, world, q, |q| {
        let output = match spec.variant.hooks {
            Some(name) if name == SIGMOID.name => {
                let own = hooks::sigmoid(&spec);
                reference::attention_with(&own, &spec, batch, q, &views, &heads)
            }
            Some(name) if name == DISTANCE_BIAS.name => {
                let own = hooks::distance_bias(&spec, slopes);
                reference::attention_with(&own, &spec, batch, q, &views, &heads)
            }
            Some(name) => {
                assert!(name == ALIBI.name, "{name} is not drawn");
                let own = hooks::alibi(&spec, slopes);
                reference::attention_with(&own, &spec, batch, q, &views, &heads)
            }
            None => reference::attention_heads(&spec, batch, q, &views, &heads),
        };
        output.expect("the reference is given what it asks for")
    })
}

/// What results may be wrong by: outputs, and log-sums.
fn tolerances(case: &Case, world: &World, on_gpu: bool, right: &Output) -> [Tolerance; 2] {
    let dtype = case.spec.out_dtype;
    let (mut out, mut lse) = (
        Tolerance::of(dtype),
        Tolerance {
            absolute: if on_gpu { 2e-4 } else { 1e-5 },
            relative: 1e-5,
        },
    );
    let scale = if case.scales == Scales::One { 1.0 } else { 1.5 };
    let mut largest = scale;
    if case.spec.latent {
        // Values are keys, of any size.
        let values = world.values.iter().filter(|value| value.is_finite());
        largest = values.fold(1.0, |most: f64, value| most.max(f64::from(value.abs())));
    }
    let step = match (case.spec.kv_dtype, case.spec.q_dtype) {
        (Dtype::F16, _) | (Dtype::F8E4M3 | Dtype::F8E5M2, Dtype::F16) => 1.0 / 2048.0,
        _ => 1.0 / 256.0,
    };
    if on_gpu {
        // Weights are rounded to 16 bits before they meet the values, whose sum may cancel.
        out.absolute = step * largest;
        if case.spec.variant.adds_up {
            // They are not normalised, and as many as there are keys.
            out.absolute *= (case.most_keys() as f64).sqrt().max(4.0);
        }
    }
    // Numbers that are rounded to 16 bits again: queries and keys that were turned, keys times scales that are no powers of two.
    let rounded = match (case.spec.rotary, case.appends) {
        _ if !on_gpu => 0.0,
        (Some(_), _) => 1.0,
        (None, Appends::Computed) => 0.5,
        _ => 0.0,
    };
    if rounded > 0.0 {
        let of_logit = rounded * step * summands(case) * scale * scale / 2.0;
        out.absolute += ((2.0 * of_logit).exp_m1() + step) * largest;
        lse.absolute += of_logit;
    } else if case.spec.rotary.is_some() {
        (out.absolute, lse.absolute) = (out.absolute.max(2e-5), 2e-5);
    }
    // Large logits are rounded before their differences are taken.
    let logits = right.lse.iter().filter(|lse| lse.is_finite());
    let mut most = logits.fold(0.0_f64, |most, lse| most.max(lse.abs()));
    if case.spec.variant.soft_cap.is_some() {
        // Capped logits do not show how large the products were whose sum f32 rounded, by 2⁻²⁴ of them.
        most = most.max(summands(case) * scale / 32.0);
    }
    if case.numbers != Numbers::Usual {
        out.absolute += most * largest / f64::from(1 << 19);
        lse.absolute += most / f64::from(1 << 19);
    }
    [out, lse]
}

/// Whether results are right, and nothing else was written.
pub fn judge(
    case: &Case,
    world: &World,
    tokens: usize,
    on_gpu: bool,
    results: &[u8],
    right: &Right,
) -> Result<(), String> {
    let spec = &case.spec;
    let (heads, dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
    let element = spec.out_dtype.bytes() as usize;
    let mut out = Vec::with_capacity(tokens * heads * dim);
    let mut expected: Image = world.results.clone();
    for token in 0..tokens {
        let at = world.out.start + token * world.strides[1] * element;
        let place = at..at + heads * dim * element;
        out.extend(get(spec.out_dtype, &results[place.clone()], heads * dim));
        expected.bytes_mut()[place.clone()].copy_from_slice(&results[place]);
    }
    let place = world.lse.start..world.lse.start + tokens * heads * 4;
    let lse = get(Dtype::F32, &results[place.clone()], tokens * heads);
    expected.bytes_mut()[place.clone()].copy_from_slice(&results[place]);
    let output = &right.output;
    let [mut of_out, of_lse] = tolerances(case, world, on_gpu, output);
    of_out.absolute *= right.roundings;
    of_out.relative *= right.roundings;
    match &right.off {
        None => {
            compare("out", &[tokens, heads, dim], &out, &output.out, of_out)?;
            compare("lse", &[tokens, heads], &lse, &output.lse, of_lse)?;
        }
        Some([of_outs, of_lses]) => {
            let rounding = [1e-5, of_out.relative];
            near("out", &out, &output.out, of_outs, rounding)?;
            near("lse", &lse, &output.lse, of_lses, [2e-4, 1e-5])?;
        }
    }
    match expected.differs(results) {
        Some(at) => Err(format!(
            "byte {at} of the results was written, and is nobody's: outputs {:?}, log-sums {:?}",
            world.out, world.lse
        )),
        None => Ok(()),
    }
}

//! What is right, in f64, and whether results are that.

use tandem_attn::{
    kv::KvView,
    problem::{Batch, Dtype, KvLayout},
    reference::{self, Output},
    tensor::HeadTensors,
    variant::FromLaunch,
    variants::{Alibi, Slopes},
};

use crate::{
    case::{Case, Numbers, Scales},
    numbers::{get, summands},
    numeric::{Tolerance, compare},
    world::{Image, REQUESTS, World},
};

/// Attention of a batch by its definition.
pub fn right(case: &Case, batch: &Batch, world: &World, q: &[f32]) -> Output {
    // Values of latent attention were copied out of the keys.
    let mut spec = case.spec;
    spec.latent = false;
    let view = KvView::new(
        &spec,
        KvLayout::Nhd,
        case.page_size,
        &world.keys,
        &world.values,
    );
    let views = vec![view; batch.parts.len()];
    let mut heads = HeadTensors::default();
    if spec.variant.sinks {
        heads = heads.with_sinks(&world.sink_values);
    }
    // Scales of requests are of who asks: on the queries, and on what comes out.
    let (q_heads, group) = (spec.q_heads as usize, spec.group() as usize);
    let of_request = |side: usize, row: usize| {
        let request = row / q_heads * 7 % REQUESTS as usize;
        let at = request * spec.kv_heads as usize + row % q_heads / group;
        world.scale_values[side][at]
    };
    let mut q = q.to_vec();
    if case.scales == Scales::Request {
        for (row, numbers) in q.chunks_mut(spec.head_dim_qk as usize).enumerate() {
            numbers.iter_mut().for_each(|x| *x *= of_request(0, row));
        }
    }
    let output = match spec.variant.hooks {
        Some(_) => {
            let address = world.slope_values.as_ptr() as u64;
            // SAFETY: the slopes of these heads, which outlive it.
            let alibi = unsafe { Alibi::from_launch(spec.variant_params(), &Slopes { address }) };
            reference::attention_with(&alibi, &spec, batch, &q, &views, &heads)
        }
        None => reference::attention_heads(&spec, batch, &q, &views, &heads),
    };
    let mut output = output.expect("the reference is given what it asks for");
    if case.scales == Scales::Request {
        for (row, numbers) in output.out.chunks_mut(spec.head_dim_v as usize).enumerate() {
            let scale = f64::from(of_request(1, row));
            numbers.iter_mut().for_each(|x| *x *= scale);
        }
    }
    output
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
    if on_gpu {
        // Weights are rounded to 16 bits before they meet the values, whose sum may cancel.
        let step = match dtype {
            Dtype::BF16 => 1.0 / 256.0,
            _ => 1.0 / 2048.0,
        };
        out.absolute = step * largest;
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
    right: &Output,
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
    let [of_out, of_lse] = tolerances(case, world, on_gpu, right);
    compare("out", &[tokens, heads, dim], &out, &right.out, of_out)?;
    compare("lse", &[tokens, heads], &lse, &right.lse, of_lse)?;
    match expected.differs(results) {
        Some(at) => Err(format!(
            "byte {at} of the results was written, and is nobody's: outputs {:?}, log-sums {:?}",
            world.out, world.lse
        )),
        None => Ok(()),
    }
}

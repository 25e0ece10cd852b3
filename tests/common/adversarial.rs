//! Numbers that the softmax finds hard: how logits lie along the keys is said, and keys and queries are made to have them.
// Each program uses its own part of this.
#![allow(dead_code)]

use super::{
    numeric::{Rng, Tolerance},
    problems::Tensors,
};
use tandem_attn::{
    problem::{Batch, Dtype, Spec},
    reference::Output,
    tensor::Element,
};

/// The logit of a key at a position, of so many keys.
type Logit = fn(&mut Rng, u32, u32) -> f32;

/// How logits lie along the keys of a request.
pub const KINDS: &[(&str, Logit)] = &[
    ("up to ten thousand", |rng, _, _| rng.between(-1e4, 1e4)),
    ("in the hundreds", |rng, _, _| rng.between(-400.0, 400.0)),
    ("growing slowly", |_, at, _| 0.25 * at as f32),
    ("growing fast", |_, at, _| 20.0 * at as f32),
    ("falling slowly", |_, at, _| -0.25 * at as f32),
    ("falling fast", |_, at, _| -20.0 * at as f32),
    (
        "to and fro",
        |_, at, _| if at % 64 < 32 { 300.0 } else { -300.0 },
    ),
    ("the first outweighs all", |_, at, _| {
        if at == 0 { 1000.0 } else { 0.0 }
    }),
    ("one in the middle outweighs all", |_, at, keys| {
        if at == keys / 2 { 1000.0 } else { 0.0 }
    }),
    ("the last outweighs all", |_, at, keys| {
        if at + 1 == keys { 1000.0 } else { 0.0 }
    }),
    ("the same for all", |_, _, _| 7.0),
    ("denormal", |rng, _, _| rng.between(-1e-38, 1e-38)),
    ("minus infinity for every third key", |_, at, _| {
        if at % 3 == 1 {
            f32::NEG_INFINITY
        } else {
            0.1 * at as f32
        }
    }),
    ("minus infinity for all but the first", |_, at, _| {
        if at == 0 { 1.0 } else { f32::NEG_INFINITY }
    }),
    ("infinity for one key", |_, at, keys| {
        if at == keys / 2 { f32::INFINITY } else { 0.0 }
    }),
];

/// Of the first element of a query.
const QUERY: f32 = 16.0;

/// Gives keys the logits of a kind, and values the size that the element type just holds if they are `large`.
///
/// The other elements are small and random, or zero where all keys are to be the same to the bit.
pub fn make_hard<Q: Element, T: Element>(
    tensors: &mut Tensors<Q, T>,
    spec: &Spec,
    batch: &Batch,
    logit: Logit,
    large: bool,
) {
    let dim = spec.head_dim_qk as usize;
    let mut rng = Rng(17);
    for row in tensors.q.chunks_mut(dim) {
        row[0] = Q::from_f32(QUERY);
        for x in &mut row[1..] {
            *x = Q::from_f32(rng.between(-0.05, 0.05));
        }
    }
    let largest = match T::DTYPE {
        Dtype::F16 => 60_000.0,
        Dtype::BF16 => 1e38,
        _ => 400.0,
    };
    for (part, pools) in batch.parts.iter().zip(&mut tensors.parts) {
        let table = &part.table;
        for (row_block, at) in (0..table.row_blocks())
            .flat_map(|row_block| (0..table.kv_len(row_block)).map(move |at| (row_block, at)))
        {
            let keys = table.kv_len(row_block);
            let page = table.pages(row_block)[(at / table.page_size) as usize];
            for head in 0..spec.kv_heads {
                let place = |s: &tandem_attn::abi::KvStrides| {
                    (page * s.page + at % table.page_size * s.token + head * s.head) as usize
                };
                let first = logit(&mut rng, at, keys) / (spec.scale * QUERY);
                let limited = if first.is_finite() {
                    first.clamp(-largest, largest)
                } else {
                    first
                };
                pools.k[place(&pools.k_strides)] = T::from_f32(limited);
                if large {
                    let values = &mut pools.v[place(&pools.v_strides)..];
                    for value in &mut values[..spec.head_dim_v as usize] {
                        *value = T::from_f32(value.to_f32() * largest);
                    }
                }
            }
        }
    }
}

/// What results may be wrong by: usual tolerances, and the rounding of large logits before their differences are taken.
pub fn allowed(right: &Output, largest: f64, out: Tolerance, lse: Tolerance) -> [Tolerance; 2] {
    let finite = right.lse.iter().filter(|lse| lse.is_finite());
    let logits = finite.fold(0.0_f64, |most, lse| most.max(lse.abs()));
    let rounding = logits / f64::from(1 << 19);
    [
        Tolerance {
            absolute: (out.absolute + rounding) * largest,
            relative: out.relative,
        },
        Tolerance {
            absolute: lse.absolute + rounding,
            relative: lse.relative,
        },
    ]
}

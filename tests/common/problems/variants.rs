//! Masks, soft caps, sinks, hooks and rotary embeddings.

use proptest::prelude::*;
use tandem_attn::{
    problem::{Batch, Dtype, Masks, Spec, Variant},
    tensor::HeadTensors,
    variants::{ALIBI, DISTANCE_BIAS, SIGMOID},
};

pub use self::hooks::*;
use super::super::numeric::Rng;

#[path = "../hooks.rs"]
mod hooks;

/// Masks and soft caps.
pub fn variant() -> impl Strategy<Value = Variant> {
    let window = prop_oneof![3 => Just(None), 2 => (0..300_u32).prop_map(Some)];
    let cap = prop_oneof![3 => Just(None), 1 => (5.0..50.0_f32).prop_map(Some)];
    (prop::bool::weighted(0.9), window, cap).prop_map(|(causal, window_left, soft_cap)| {
        let mut variant = Variant::CAUSAL;
        variant.causal = causal;
        variant.window_left = window_left;
        variant.soft_cap = soft_cap;
        variant
    })
}

/// Sinks for a spec that has them, the same everywhere.
pub fn sinks(spec: &Spec) -> Option<Vec<f32>> {
    let random = || Rng(7).floats(spec.sinks(), -2.0, 6.0);
    spec.variant.sinks.then(random)
}

/// What the spec has for each head.
pub fn heads(sinks: &Option<Vec<f32>>) -> HeadTensors<'_> {
    let none = HeadTensors::default();
    sinks
        .as_deref()
        .map_or(none, |sinks| none.with_sinks(sinks))
}

/// Other hooks of the library in the place of linear biases, for some of the problems and where there are kernels.
pub fn vary_hooks(spec: &mut Spec, seed: u64) {
    if spec.variant.hooks.is_none() || seed % 4 < 2 {
        return;
    }
    if spec.head_dim_qk == 128 && !spec.variant.sinks && spec.q_dtype == Dtype::BF16 {
        *spec = spec.with_hooks(&SIGMOID);
    } else if spec.head_dim_qk <= 64 && spec.q_dtype == Dtype::BF16 {
        *spec = spec.with_hooks(&DISTANCE_BIAS);
    }
}

/// For each query token which of the last keys it sees: trees of drafted tokens, or any of them.
pub fn ancestors(batch: &Batch, seed: u64) -> Vec<u64> {
    let mut rng = Rng(seed);
    let mut words = Vec::new();
    for request in 0..batch.requests() {
        let tokens = batch.q_len(request);
        match rng.below(3) {
            0 if tokens <= 64 => {
                let parents: Vec<_> = (0..tokens)
                    .map(|token| {
                        rng.below(token as usize + 1)
                            .checked_sub(1)
                            .map(|at| at as u32)
                    })
                    .collect();
                words.extend(Batch::ancestors_of(&parents));
            }
            1 => words.extend((0..tokens).map(|_| rng.bits())),
            _ => words.extend((0..tokens).map(|_| u64::MAX)),
        }
    }
    words
}

/// Masks of any keys: for each request none, a prefix that sees itself, blocks of the diagonal, any keys, rows that see no key, bits
/// for the last keys alone, or a tree.
pub fn masks(batch: &Batch, seed: u64) -> Masks {
    let mut rng = Rng(seed);
    let mut masks = Masks::default();
    for request in 0..batch.requests() {
        let (q_len, kv_len) = (batch.q_len(request), batch.kv_len(request) as u32);
        let first = kv_len - q_len.min(kv_len);
        match rng.below(7) {
            0 => masks.push_open(q_len),
            1 => {
                let prefix = rng.below(kv_len as usize + 1) as u32;
                masks.push(q_len, kv_len, |query, key| {
                    key <= first + query || key < prefix
                });
            }
            2 => {
                let block = 1 + rng.below(90) as u32;
                masks.push(q_len, kv_len, |query, key| {
                    key / block == (first + query) / block
                });
            }
            3 => {
                let bytes = (q_len * kv_len).div_ceil(8);
                let bytes: Vec<u8> = (0..bytes).map(|_| rng.bits() as u8).collect();
                masks.push_packed(q_len, kv_len, &bytes).unwrap();
            }
            4 => {
                // Few keys, and of some rows none.
                let flags = (0..q_len * kv_len).map(|_| rng.below(40) == 0);
                let flags: Vec<_> = flags.collect();
                masks.push_flags(q_len, &flags).unwrap();
            }
            5 => {
                let each = rng.below(4) as u32;
                let words: Vec<_> = (0..q_len * each).map(|_| rng.bits()).collect();
                masks.push_words(q_len, &words).unwrap();
            }
            _ => {
                let parent = |token: u32| {
                    let at = rng.below(token as usize + 1).checked_sub(1);
                    at.map(|at| at as u32)
                };
                masks.push_tree(&(0..q_len).map(parent).collect::<Vec<_>>());
            }
        }
    }
    masks
}

/// Sinks for some of the problems, and masks as bits.
pub fn enrich(spec: &mut Spec, batch: &mut Batch, seed: u64) {
    spec.variant.sinks = seed % 3 == 1;
    if batch.parts.len() > 1 {
        // Row blocks of several requests, which know no distances.
        return;
    }
    if spec.variant.soft_cap.is_none() && spec.head_dim_qk <= 128 && seed % 7 == 3 {
        *spec = spec.with_hooks(&ALIBI);
    }
    if spec.variant.causal && seed % 5 < 2 {
        *batch = batch.clone().with_ancestors(ancestors(batch, seed));
    } else if seed % 5 >= 3 {
        *batch = batch.clone().with_masks(masks(batch, seed));
    }
}

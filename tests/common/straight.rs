//! Attention by the formula as one would write it on tensors of 16 bits, every step rounded: by how much it is
//! wrong says how much a kernel may be.
// Each program uses its own part of this.
#![allow(dead_code)]

use rayon::prelude::*;
use tandem_attn::{
    problem::{Batch, Spec},
    tensor::Element,
};

use super::{numeric::to_f64, problems::Tensors};

/// `softmax(Q·Kᵀ · scale)·V`, with sums in f32 and each tensor between two steps of the type `T`. Of batches
/// with one part.
pub fn attention<T: Element>(spec: &Spec, batch: &Batch, tensors: &Tensors<T, T>) -> Vec<f64> {
    let (part, pools) = (&batch.parts[0], &tensors.parts[0]);
    let (dim, dim_v, heads) = (
        spec.head_dim_qk as usize,
        spec.head_dim_v as usize,
        spec.q_heads as usize,
    );
    let round = |x: f32| T::from_f32(x).to_f32();
    let mut out = vec![T::zeroed(); batch.total_q() as usize * heads * dim_v];
    out.par_chunks_mut(dim_v)
        .enumerate()
        .for_each(|(row, out)| {
            let (token, head) = ((row / heads) as u32, (row % heads) as u32);
            let request = (0..batch.requests())
                .find(|&request| part.q_range(request).contains(&token))
                .expect("every token is a request's");
            let position =
                part.first_position(request) + (token - part.q_range(request).start) as i32;
            let keys = spec.variant.visible(position, part.kv_len(request));
            let pages = part.table.pages(request);
            let place = |key: u32, strides: &tandem_attn::kv::KvStrides| {
                let page = pages[(key / strides.page_size) as usize] as usize;
                let in_page = key % strides.page_size * strides.token;
                page * strides.page as usize
                    + (in_page + head / spec.group() * strides.head) as usize
            };
            let query = &tensors.q[row * dim..][..dim];
            let logits: Vec<f32> = keys
                .clone()
                .map(|key| {
                    let key = &pools.k[place(key, &pools.k_strides)..][..dim];
                    let dot: f32 = query
                        .iter()
                        .zip(key)
                        .map(|(q, k)| q.to_f32() * k.to_f32())
                        .sum();
                    let logit = round(round(dot) * spec.scale);
                    match spec.variant.soft_cap {
                        Some(cap) => round(cap * round(round(logit / cap).tanh())),
                        None => logit,
                    }
                })
                .collect();
            let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f32 = logits.iter().map(|logit| (logit - most).exp()).sum();
            let mut sums = vec![0.0; dim_v];
            for (key, logit) in keys.zip(&logits) {
                let weight = round((logit - most).exp() / sum);
                let value = &pools.v[place(key, &pools.v_strides)..][..dim_v];
                for (sum, value) in sums.iter_mut().zip(value) {
                    *sum += weight * value.to_f32();
                }
            }
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = T::from_f32(sum);
            }
        });
    to_f64(&out)
}

/// What is worse about `got` than twice the error of `straight`, and than the rounding of a result: the largest
/// errors of both.
pub fn excess<T: Element>(
    got: &[f64],
    right: &[f64],
    straight: &[f64],
    round: impl Fn(f32) -> T,
) -> Option<String> {
    let largest = |of: &mut dyn Iterator<Item = f64>| of.fold(0.0, f64::max);
    let error = |of: &[f64]| largest(&mut of.iter().zip(right).map(|(x, y)| (x - y).abs()));
    let rounding = largest(
        &mut right
            .iter()
            .map(|&x| (f64::from(round(x as f32).to_f32()) - x).abs()),
    );
    let (got, straight) = (error(got), error(straight));
    (got > 2.0 * straight.max(rounding))
        .then(|| format!("error {got:e}, by the straightforward formula {straight:e}"))
}

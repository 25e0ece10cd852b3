//! One query token against keys that are cut into pieces.

use tandem_attn::{
    Error,
    abi::MergeRow,
    exec::cpu::{Partials, merge_states},
    kv::KvView,
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
    state::Softmax,
};

const PAGE: u32 = 16;

/// How far two results are apart at most.
pub struct Distance {
    pub out: f64,
    pub lse: f64,
}

/// Cuts `keys` keys into `pieces` pieces, merges their states, and compares with attention in one go.
pub fn check(spec: &Spec, keys: u32, pieces: u32) -> Result<Distance, Error> {
    let (heads, dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
    let pages: Vec<u32> = (0..keys.div_ceil(PAGE)).rev().collect();
    let pool = pages.len() * (PAGE * spec.kv_heads * spec.head_dim_qk) as usize;
    let (q, k, v) = (wave(heads * dim, 0.37), wave(pool, 0.61), wave(pool, 0.83));
    let kv = KvView::new(spec, KvLayout::Nhd, PAGE, &k, &v);

    // One state per piece and head.
    let mut partial_out = Vec::new();
    let mut partial_lse = Vec::new();
    for piece in 0..pieces {
        let (begin, end) = (keys * piece / pieces, keys * (piece + 1) / pieces);
        for (head, q) in q.chunks_exact(dim).enumerate() {
            let kv_head = head as u32 / spec.group();
            let at = |key: u32| (pages[(key / PAGE) as usize], key % PAGE);
            let state = attend(
                (begin..end).map(|key| {
                    let (page, offset) = at(key);
                    let dot: f32 = q
                        .iter()
                        .zip(kv.key(page, offset, kv_head, spec.head_dim_qk))
                        .map(|(a, b)| a * b)
                        .sum();
                    let value = kv.value(page, offset, kv_head, spec.head_dim_v);
                    (dot * spec.scale * std::f32::consts::LOG2_E, value)
                }),
                dim,
            );
            partial_out.extend(state.0);
            partial_lse.push(state.1);
        }
    }
    let partials = Partials {
        out: &partial_out,
        lse: &partial_lse,
        q_heads: heads,
        head_dim_v: dim,
    };
    let row = MergeRow {
        token: 0,
        slots_begin: 0,
        slots: pieces,
        reserved: 0,
    };
    let slots: Vec<u32> = (0..pieces).collect();
    let (mut out, mut lse) = (vec![0.0_f32; heads * dim], vec![0.0; heads]);
    merge_states(&partials, &[row], &slots, &mut out, Some(&mut lse))?;

    let mut table = PageTable::new(PAGE, pages.len() as u32);
    table.push(&pages, keys);
    let batch = Batch::new(vec![0, 1], table);
    batch.check(spec)?;
    let exact = reference::attention(spec, &batch, &q, &[kv])?;
    Ok(Distance {
        out: distance(&out, &exact.out),
        lse: distance(&lse, &exact.lse),
    })
}

/// Online softmax over logits (base 2) and values: normalised output, and log-sum in base 2.
fn attend<'a>(keys: impl Iterator<Item = (f32, &'a [f32])>, dim: usize) -> (Vec<f32>, f32) {
    let mut softmax = Softmax::EMPTY;
    let mut out = vec![0.0; dim];
    for (logit, value) in keys {
        let factor = softmax.raise(logit);
        let weight = softmax.weight(logit);
        softmax.sum += weight;
        for (out, value) in out.iter_mut().zip(value) {
            *out = *out * factor + weight * value;
        }
    }
    let norm = softmax.norm();
    out.iter_mut().for_each(|x| *x *= norm);
    (out, softmax.lse())
}

/// Numbers between −1 and 1 that do not repeat.
fn wave(count: usize, frequency: f64) -> Vec<f32> {
    (0..count)
        .map(|i| (i as f64 * frequency + (i as f64).sqrt()).sin() as f32)
        .collect()
}

fn distance(got: &[f32], right: &[f64]) -> f64 {
    got.iter()
        .zip(right)
        .map(|(&got, right)| (f64::from(got) - right).abs())
        .fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_number_of_pieces_gives_the_whole() {
        let spec = Spec::new(4, 2, 64);
        for (keys, pieces) in [(1, 1), (5, 7), (100, 1), (333, 10)] {
            let distance = check(&spec, keys, pieces).unwrap();
            assert!(
                distance.out < 1e-5 && distance.lse < 1e-5,
                "{keys} keys in {pieces} pieces: {}, {}",
                distance.out,
                distance.lse
            );
        }
    }
}

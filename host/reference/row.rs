//! One query token of one head: which keys it sees, and the softmax over them.

use kernels_gpu::{
    masks::sees,
    variant::{Hook, Key, Pair, Query, Variant},
};

use super::Pool;
use crate::{
    kv::ScaleAt,
    problem::{Batch, Part, Spec},
    step::Rope,
};

/// One query head.
pub(super) struct Row<'a, V> {
    pub(super) variant: &'a V,
    pub(super) spec: &'a Spec,
    pub(super) token: u32,
    pub(super) head: u32,
    /// Logits in base 2.
    pub(super) sink: Option<f64>,
}

impl<V: Variant> Row<'_, V> {
    /// Writes the output and returns the LSE.
    pub(super) fn attend(
        &self,
        batch: &Batch,
        q: &[f64],
        kv: &[&dyn Pool],
        out: &mut [f64],
    ) -> f64 {
        let seen: Vec<Seen<'_>> = batch
            .parts
            .iter()
            .zip(kv)
            .filter_map(|(part, view)| Some((part, row_block_of(part, self.token)?, *view)))
            .flat_map(|(part, row_block, view)| self.visible(batch, part, row_block, q, view))
            .collect();
        let max = seen
            .iter()
            .map(|seen| seen.logit)
            .chain(self.sink)
            .fold(f64::NEG_INFINITY, f64::max);
        // A sink has a weight, but no value.
        let weighs = |sink: f64| {
            if sink == f64::NEG_INFINITY {
                0.0
            } else {
                (sink - max).exp2()
            }
        };
        let mut sum = self.sink.map_or(0.0, weighs);
        for &Seen {
            logit,
            view,
            place: (page, offset),
            scale,
            at,
        } in &seen
        {
            // A logit of −∞ is a hidden key, also if all are.
            let weight = match V::SOFTMAX {
                true if logit == f64::NEG_INFINITY => 0.0,
                true => (logit - max).exp2(),
                false => logit,
            };
            let mut value = view.value(page, offset, at.head, self.spec.head_dim_v);
            transform(&mut value, |pair, dim| {
                self.variant.value(pair, dim, at).plain()
            });
            sum += weight;
            out.iter_mut()
                .zip(value)
                .for_each(|(o, v)| *o += weight * scale * v);
        }
        if V::SOFTMAX && sum != 0.0 {
            out.iter_mut().for_each(|o| *o /= sum);
        }
        let at = Query {
            token: self.token,
            head: self.head,
            position: 0,
        };
        transform(out, |pair, dim| self.variant.output(pair, dim, at).plain());
        match V::SOFTMAX {
            false => 0.0,
            true if sum == 0.0 => f64::NEG_INFINITY,
            true => (max + sum.log2()) * std::f64::consts::LN_2,
        }
    }

    /// The keys of a row block that the query sees.
    fn visible<'a>(
        &self,
        batch: &Batch,
        part: &Part,
        row_block: usize,
        q: &[f64],
        kv: &'a dyn Pool,
    ) -> Vec<Seen<'a>> {
        let &Self {
            variant,
            spec,
            token,
            head,
            ..
        } = self;
        let position = part.position_of(row_block, token);
        let mut query = q.to_vec();
        let asks = Query {
            token,
            head,
            position,
        };
        let rotary = spec.rotary.map(Turns::new);
        if let Some(rotary) = &rotary {
            rotary.turn(&mut query, position.into());
        }
        transform(&mut query, |pair, dim| {
            variant.query(pair, dim, asks).plain()
        });
        let (first, last) = variant.visible_keys(position);
        let pages = part.table.pages(row_block);
        let page_size = part.table.page_size;
        let ancestors = batch.ancestors.get(token as usize).copied().into_iter();
        let ancestors: Vec<u64> = ancestors.collect();
        let seen = (0..part.kv_len(row_block)).filter(|&key| {
            (first..=last).contains(&(key as i32))
                && sees(&ancestors, 0, position, key as i32)
                && batch.masks.sees(token, position, key as i32)
                && variant.visible(Pair::new(variant, asks, key)).plain()
        });
        seen.map(|key| {
            let (page, offset) = (pages[(key / page_size) as usize], key % page_size);
            let at = Key {
                position: key,
                // In the pool of a part with several heads.
                head: token % part.heads * spec.kv_heads + head / spec.group(),
            };
            let mut k = kv.key(spec, page, offset, at.head);
            if let Some(rotary) = &rotary {
                rotary.turn(&mut k, key.into());
            }
            transform(&mut k, |pair, dim| variant.key(pair, dim, at).plain());
            let dot: f64 = query.iter().zip(&k).map(|(q, k)| q * k).sum();
            let scale_at = ScaleAt {
                token: token / part.heads,
                head: at.head,
                page,
                offset,
            };
            let [k_scale, v_scale] = kv.scales(spec.kv_heads * part.heads, scale_at);
            let logit = variant.base_2(dot * k_scale, Pair::new(variant, asks, key));
            Seen {
                logit,
                view: kv,
                place: (page, offset),
                scale: v_scale,
                at,
            }
        })
        .collect()
    }
}

/// The rotary embedding by its definition.
struct Turns {
    rope: Rope,
    inverse_frequencies: Vec<f64>,
}

impl Turns {
    fn new(rope: Rope) -> Self {
        Self {
            rope,
            inverse_frequencies: rope.inverse_frequencies().expect("it was checked"),
        }
    }

    fn turn(&self, head: &mut [f64], position: i64) {
        let magnitude = self.rope.magnitude();
        for (pair, inverse_frequency) in self.inverse_frequencies.iter().enumerate() {
            let [a, b] = self.rope.pairing.elements(pair, self.rope.dim as usize);
            let (sine, cosine) = (position as f64 * inverse_frequency).sin_cos();
            let (first, second) = (head[a], head[b]);
            head[a] = (first * cosine - second * sine) * magnitude;
            head[b] = (second * cosine + first * sine) * magnitude;
        }
    }
}

/// A key that a query sees.
struct Seen<'a> {
    logit: f64,
    view: &'a dyn Pool,
    /// Its page, and its offset in the page.
    place: (u32, u32),
    /// Scale of the value.
    scale: f64,
    at: Key,
}

/// The row block of a part that holds a query token.
fn row_block_of(part: &Part, token: u32) -> Option<usize> {
    let token = token / part.heads;
    let row_block = part
        .q_indptr
        .partition_point(|&start| start <= token)
        .checked_sub(1)?;
    (row_block < part.row_blocks()).then_some(row_block)
}

fn transform(row: &mut [f64], hook: impl Fn([f64; 2], u32) -> [f64; 2]) {
    // Assigned as arrays: a copy of slices is a call in builds with assertions, and took a third of the time of tests.
    for (index, pair) in row.as_chunks_mut().0.iter_mut().enumerate() {
        *pair = hook(*pair, 2 * index as u32);
    }
}

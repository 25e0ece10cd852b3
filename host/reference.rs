//! Attention by its definition, in f64: no plan, no tiles, no online softmax. The oracle of all tests.

use kernels_gpu::{
    tree::descends,
    variant::{Key, Pair, Query, Standard, Variant},
};
use rayon::prelude::*;

use crate::{
    kv::{KvView, ScaleAt},
    problem::{Batch, Part, Spec},
    step::Rope,
    tensor::{Element, HeadTensors, ShapeError, check_softmax},
};

/// What attention gives, in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[total_q, q_heads, head_dim_v]`; zero where a query sees no key.
    pub out: Vec<f64>,
    /// `[total_q, q_heads]`, natural log; −∞ where a query sees no key.
    pub lse: Vec<f64>,
}

/// Attention of a batch, with the variant that the spec describes. One KV view for each part.
///
/// The batch is taken as checked ([`Batch::check`]).
///
/// # Errors
/// Where a tensor does not have the shape that the batch says.
pub fn attention<Q: Element, T: Element>(
    spec: &Spec,
    batch: &Batch,
    q: &[Q],
    kv: &[KvView<'_, T>],
) -> Result<Output, ShapeError> {
    attention_heads(spec, batch, q, kv, &HeadTensors::default())
}

/// [`attention`] with what the spec's variant has for each query head.
///
/// # Errors
/// Where a tensor does not have the shape that the batch says, or the spec does not ask for it.
pub fn attention_heads<Q: Element, T: Element>(
    spec: &Spec,
    batch: &Batch,
    q: &[Q],
    kv: &[KvView<'_, T>],
    heads: &HeadTensors<'_>,
) -> Result<Output, ShapeError> {
    if let Some(hooks) = spec.variant.hooks {
        return Err(ShapeError::Hooks { hooks });
    }
    check(spec, batch, q.len(), kv)?;
    heads.check(spec)?;
    Ok(standard(
        spec,
        batch,
        &rows_of(spec, q),
        &pools_of(kv),
        heads,
    ))
}

/// With the variant that the spec describes: compiled here, and not by each program that calls it.
fn standard(
    spec: &Spec,
    batch: &Batch,
    q: Rows<'_>,
    kv: &[&dyn Pool],
    heads: &HeadTensors<'_>,
) -> Output {
    let params = spec.variant_params();
    match spec.variant.soft_cap {
        None => attend(&Standard::<false>(params), spec, batch, q, kv, heads),
        Some(_) => attend(&Standard::<true>(params), spec, batch, q, kv, heads),
    }
}

/// Attention of a batch with any variant; mask and logits are the variant's, not the spec's.
///
/// # Errors
/// As [`attention_heads`].
pub fn attention_with<V: Variant, Q: Element, T: Element>(
    variant: &V,
    spec: &Spec,
    batch: &Batch,
    q: &[Q],
    kv: &[KvView<'_, T>],
    heads: &HeadTensors<'_>,
) -> Result<Output, ShapeError> {
    check(spec, batch, q.len(), kv)?;
    heads.check(spec)?;
    check_softmax(spec, V::SOFTMAX)?;
    Ok(attend(
        variant,
        spec,
        batch,
        &rows_of(spec, q),
        &pools_of(kv),
        heads,
    ))
}

/// The rows of queries in f64, by token and head. A function of its own for each variant is enough; with one for each
/// type of queries and keys, programs take a third longer to compile.
type Rows<'a> = &'a (dyn Fn(usize) -> Vec<f64> + Sync);

fn rows_of<Q: Element>(spec: &Spec, q: &[Q]) -> impl Fn(usize) -> Vec<f64> + Sync {
    let dim = spec.head_dim_qk as usize;
    move |row| {
        q[row * dim..][..dim]
            .iter()
            .map(|x| x.to_f32().into())
            .collect()
    }
}

/// Pages of any type, in f64.
trait Pool: Sync {
    fn key(&self, page: u32, offset: u32, head: u32, dim: u32) -> Vec<f64>;
    fn value(&self, page: u32, offset: u32, head: u32, dim: u32) -> Vec<f64>;
    /// Of keys and values.
    fn scales(&self, kv_heads: u32, at: ScaleAt) -> [f64; 2];
}

impl<T: Element> Pool for KvView<'_, T> {
    fn key(&self, page: u32, offset: u32, head: u32, dim: u32) -> Vec<f64> {
        self.wide_key(page, offset, head, dim)
    }

    fn value(&self, page: u32, offset: u32, head: u32, dim: u32) -> Vec<f64> {
        self.wide_value(page, offset, head, dim)
    }

    fn scales(&self, kv_heads: u32, at: ScaleAt) -> [f64; 2] {
        self.scales.at(kv_heads, at).map(f64::from)
    }
}

fn pools_of<'a, T: Element>(kv: &'a [KvView<'_, T>]) -> Vec<&'a dyn Pool> {
    kv.iter().map(|view| view as &dyn Pool).collect()
}

fn attend<V: Variant>(
    variant: &V,
    spec: &Spec,
    batch: &Batch,
    q: Rows<'_>,
    kv: &[&dyn Pool],
    heads: &HeadTensors<'_>,
) -> Output {
    let sinks = heads.sinks;
    let (q_heads, dim_v) = (spec.q_heads as usize, spec.head_dim_v as usize);
    let heads = batch.total_q() as usize * q_heads;
    let mut output = Output {
        out: vec![0.0; heads * dim_v],
        lse: vec![0.0; heads],
    };
    let rows = output.out.par_chunks_mut(dim_v).zip(&mut output.lse);
    rows.enumerate().for_each(|(index, (out, lse))| {
        let (token, head) = ((index / q_heads) as u32, (index % q_heads) as u32);
        *lse = Row {
            variant,
            spec,
            token,
            head,
            sink: sinks.map(|sinks| f64::from(sinks[head as usize]) * std::f64::consts::LOG2_E),
        }
        .attend(batch, &q(index), kv, out);
    });
    output
}

fn check<T: Element>(
    spec: &Spec,
    batch: &Batch,
    q_len: usize,
    kv: &[KvView<'_, T>],
) -> Result<(), ShapeError> {
    let expected = batch.total_q() as usize * spec.q_heads as usize * spec.head_dim_qk as usize;
    ShapeError::length("q", q_len, "[total_q, q_heads, head_dim_qk]", expected)?;
    if kv.len() != batch.parts.len() {
        return Err(ShapeError::Parts {
            got: kv.len(),
            expected: batch.parts.len(),
        });
    }
    for (index, (view, Part { table, .. })) in kv.iter().zip(&batch.parts).enumerate() {
        view.check(spec, index, table.page_size, table.pool_pages)?;
        let pages = [table.page_size, table.pool_pages];
        view.scales
            .check(T::DTYPE, index, spec.kv_heads, batch.total_q(), pages)?;
    }
    Ok(())
}

/// One query head.
struct Row<'a, V> {
    variant: &'a V,
    spec: &'a Spec,
    token: u32,
    head: u32,
    /// In base 2.
    sink: Option<f64>,
}

impl<V: Variant> Row<'_, V> {
    /// Writes the output and returns the LSE.
    fn attend(&self, batch: &Batch, q: &[f64], kv: &[&dyn Pool], out: &mut [f64]) -> f64 {
        let seen: Vec<Seen<'_>> = batch
            .parts
            .iter()
            .zip(kv)
            .filter_map(|(part, view)| Some((part, row_block_of(part, self.token)?, *view)))
            .flat_map(|(part, row_block, view)| {
                let ancestors = batch.ancestors.get(self.token as usize);
                self.visible(
                    part,
                    row_block,
                    ancestors.copied().unwrap_or(u64::MAX),
                    q,
                    view,
                )
            })
            .collect();
        let max = seen
            .iter()
            .map(|seen| seen.logit)
            .chain(self.sink)
            .fold(f64::NEG_INFINITY, f64::max);
        // A sink weighs, and has no value.
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
            let weight = if V::SOFTMAX {
                (logit - max).exp2()
            } else {
                logit
            };
            let mut value = view.value(page, offset, at.head, self.spec.head_dim_v);
            transform(&mut value, |pair, dim| self.variant.value(pair, dim, at));
            sum += weight;
            out.iter_mut()
                .zip(value)
                .for_each(|(o, v)| *o += weight * scale * v);
        }
        let nothing = seen.is_empty() && self.sink.is_none();
        if V::SOFTMAX && !seen.is_empty() {
            out.iter_mut().for_each(|o| *o /= sum);
        }
        let at = Query {
            token: self.token,
            head: self.head,
            position: 0,
        };
        transform(out, |pair, dim| self.variant.output(pair, dim, at));
        match (V::SOFTMAX, nothing) {
            (false, _) => 0.0,
            (true, true) => f64::NEG_INFINITY,
            (true, false) => (max + sum.log2()) * std::f64::consts::LN_2,
        }
    }

    /// The keys of a row block that the query sees.
    fn visible<'a>(
        &self,
        part: &Part,
        row_block: usize,
        ancestors: u64,
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
        let position = part.first_position(row_block) + (token - part.q_indptr[row_block]) as i32;
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
        transform(&mut query, |pair, dim| variant.query(pair, dim, asks));
        let (first, last) = variant.visible_keys(position);
        let pages = part.table.pages(row_block);
        let page_size = part.table.page_size;
        let seen = (0..part.kv_len(row_block)).filter(|&key| {
            (first..=last).contains(&(key as i32))
                && descends(ancestors, position, key as i32)
                && variant.visible(Pair::new(variant, asks, key))
        });
        seen.map(|key| {
            let (page, offset) = (pages[(key / page_size) as usize], key % page_size);
            let at = Key {
                position: key,
                head: head / spec.group(),
            };
            let mut k = kv.key(page, offset, at.head, spec.head_dim_qk);
            if let Some(rotary) = &rotary {
                rotary.turn(&mut k, key.into());
            }
            transform(&mut k, |pair, dim| variant.key(pair, dim, at));
            let dot: f64 = query.iter().zip(&k).map(|(q, k)| q * k).sum();
            let scale_at = ScaleAt {
                token,
                head: at.head,
                page,
                offset,
            };
            let [k_scale, v_scale] = kv.scales(spec.kv_heads, scale_at);
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

/// A rotary embedding by its definition.
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
    /// Its page, and where it is there.
    place: (u32, u32),
    /// Of the value.
    scale: f64,
    at: Key,
}

/// The row block of a part that holds a query token.
fn row_block_of(part: &Part, token: u32) -> Option<usize> {
    let row_block = part
        .q_indptr
        .partition_point(|&start| start <= token)
        .checked_sub(1)?;
    (row_block < part.row_blocks()).then_some(row_block)
}

fn transform(row: &mut [f64], hook: impl Fn([f64; 2], u32) -> [f64; 2]) {
    for (index, pair) in row.chunks_exact_mut(2).enumerate() {
        pair.copy_from_slice(&hook([pair[0], pair[1]], 2 * index as u32));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::{Dtype, KvLayout, PageTable};

    /// One head of dimension 16 of which only the first element is used: logits are `q · k`, outputs `v`.
    fn attend(spec: &Spec, batch: &Batch, q: &[f32], kv: &[(f32, f32)]) -> Output {
        let row = |x: f32| std::iter::once(x).chain(std::iter::repeat_n(0.0, 15));
        let q: Vec<f32> = q.iter().copied().flat_map(row).collect();
        let k: Vec<f32> = kv.iter().flat_map(|&(k, _)| row(k)).collect();
        let v: Vec<f32> = kv.iter().flat_map(|&(_, v)| row(v)).collect();
        let view = KvView::new(spec, KvLayout::Nhd, 1, &k, &v);
        attention(spec, batch, &q, &vec![view; batch.parts.len()]).unwrap()
    }

    fn spec() -> Spec {
        Spec::new(1, 1, 16).with_dtype(Dtype::F32).with_scale(1.0)
    }

    fn table(pages: &[u32]) -> PageTable {
        let mut table = PageTable::new(1, 8);
        table.push(pages, pages.len() as u32);
        table
    }

    const KV: [(f32, f32); 8] = [
        (0.0, 1.0),
        (1.0, 2.0),
        (2.0, 3.0),
        (9.0, 9.0),
        (9.0, 9.0),
        (9.0, 9.0),
        (9.0, 9.0),
        (9.0, 9.0),
    ];

    fn close(got: f64, right: f64) {
        assert!((got - right).abs() < 1e-6, "{got} is not {right}");
    }

    #[test]
    fn weights_are_a_softmax() {
        let batch = Batch::new(vec![0, 1], table(&[2, 0]));
        let Output { out, lse } = attend(&spec(), &batch, &[1.0], &KV);
        let sum = 1.0 + 2f64.exp();
        close(out[0], (1.0 + 3.0 * 2f64.exp()) / sum);
        close(lse[0], sum.ln());
    }

    #[test]
    fn causal_and_window_hide_keys() {
        let batch = Batch::new(vec![0, 2], table(&[0, 1, 2]));
        let first = |spec: &Spec| attend(spec, &batch, &[0.0, 0.0], &KV).out;
        let causal = first(&spec());
        close(causal[0], 1.5);
        close(causal[16], 2.0);
        let window = first(&spec().with_window_left(0));
        close(window[0], 2.0);
        close(window[16], 3.0);
        close(first(&spec().non_causal())[0], 2.0);
    }

    #[test]
    fn the_cap_flattens() {
        let batch = Batch::new(vec![0, 1], table(&[0, 2]));
        let capped = attend(&spec().with_soft_cap(1.0), &batch, &[1.0], &KV);
        let weight = 2f64.tanh().exp();
        close(capped.out[0], (1.0 + 3.0 * weight) / (1.0 + weight));
    }

    #[test]
    fn parts_are_one_softmax() {
        let prefix = Part::new(vec![0, 1], table(&[2])).with_keys_after(vec![2]);
        let suffix = Part::new(vec![0, 1], table(&[0, 1]));
        let parts = Batch::composed(vec![0, 1], vec![prefix, suffix]);
        let whole = Batch::new(vec![0, 1], table(&[2, 0, 1]));
        for spec in [
            spec(),
            spec().with_window_left(1),
            spec().with_window_left(2),
        ] {
            let (parts, whole) = (
                attend(&spec, &parts, &[0.7], &KV),
                attend(&spec, &whole, &[0.7], &KV),
            );
            close(parts.out[0], whole.out[0]);
            close(parts.lse[0], whole.lse[0]);
        }
    }

    #[test]
    fn no_key_gives_zero() {
        let mut keyless = table(&[0]);
        keyless.push(&[], 0);
        let batch = Batch::new(vec![0, 0, 1], keyless);
        let Output { out, lse } = attend(&spec(), &batch, &[5.0], &KV);
        assert_eq!((out, lse), (vec![0.0; 16], vec![f64::NEG_INFINITY]));
    }

    #[test]
    fn wrong_shapes_are_named() {
        let batch = Batch::new(vec![0, 1], table(&[2, 0]));
        let (q, pool) = ([0.0f32; 16], [0.0f32; 8 * 16]);
        let view = KvView::new(&spec(), KvLayout::Nhd, 1, &pool, &pool[..100]);
        let shape = "[total_q, q_heads, head_dim_qk]";
        let error =
            |q: &[f32], kv: &[KvView<'_, f32>]| attention(&spec(), &batch, q, kv).unwrap_err();
        assert_eq!(
            error(&q[1..], &[view]),
            ShapeError::Length {
                name: "q",
                got: 15,
                shape,
                expected: 16
            }
        );
        assert_eq!(
            error(&q, &[]),
            ShapeError::Parts {
                got: 0,
                expected: 1
            }
        );
        let small = ShapeError::PoolTooSmall {
            part: 0,
            tensor: "v",
            got: 100,
            needed: 128,
            pool_pages: 8,
        };
        assert_eq!(error(&q, &[view]), small);
        let coarse = KvView::new(&spec(), KvLayout::Nhd, 4, &pool, &pool);
        assert_eq!(
            error(&q, &[coarse]),
            ShapeError::PageSize {
                part: 0,
                got: 4,
                expected: 1
            }
        );
    }
}

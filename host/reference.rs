//! Reference attention in f64, by the definition: no plan, no tiles, no online softmax. All tests compare with it.

mod row;

use kernels_gpu::variant::{Standard, Variant};
use rayon::prelude::*;

use self::row::Row;
use crate::{
    kv::{KvView, ScaleAt},
    problem::{Batch, Part, Spec},
    tensor::{Element, HeadTensors, ShapeError, check_softmax},
};

/// Results of attention, in f64.
#[derive(Clone, Debug, PartialEq)]
pub struct Output {
    /// `[total_q, q_heads, head_dim_v]`; zero where a query sees no key.
    pub out: Vec<f64>,
    /// `[total_q, q_heads]`, natural log; −∞ where a query sees no key.
    pub lse: Vec<f64>,
}

/// Attention of a batch, with the variant that the spec describes. One KV view for each part.
///
/// Check the batch first ([`Batch::check`]).
///
/// # Errors
/// If the shape of a tensor does not match the batch.
pub fn attention<Q: Element, T: Element>(
    spec: &Spec,
    batch: &Batch,
    q: &[Q],
    kv: &[KvView<'_, T>],
) -> Result<Output, ShapeError> {
    attention_heads(spec, batch, q, kv, &HeadTensors::default())
}

/// [`attention`] with the variant's data for each query head.
///
/// # Errors
/// If the shape of a tensor does not match the batch, or the spec does not need the tensor.
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

/// The spec's variant: compiled here, and not again in each program that calls it.
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
    const { V::AGREES };
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

/// The rows of queries in f64, by token and head. Not generic over the types of queries and keys: with one function for
/// each type, programs take a third longer to compile.
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
    fn key(&self, spec: &Spec, page: u32, offset: u32, head: u32) -> Vec<f64>;
    fn value(&self, page: u32, offset: u32, head: u32, dim: u32) -> Vec<f64>;
    /// The scales of a key and of its value.
    fn scales(&self, kv_heads: u32, at: ScaleAt) -> [f64; 2];
}

impl<T: Element> Pool for KvView<'_, T> {
    fn key(&self, spec: &Spec, page: u32, offset: u32, head: u32) -> Vec<f64> {
        self.wide_key(spec, page, offset, head)
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
        let of_token = (token % spec.variant.sink_tokens.max(1)) as usize * q_heads;
        let sink = |sinks: &[f32]| f64::from(sinks[of_token + head as usize]);
        *lse = Row {
            variant,
            spec,
            token,
            head,
            sink: sinks.map(|sinks| sink(sinks) * std::f64::consts::LOG2_E),
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
    for (index, (view, Part { table, heads, .. })) in kv.iter().zip(&batch.parts).enumerate() {
        ShapeError::named(index, table.page_size, table.pool_pages)?;
        let (spec, tokens) = (&spec.times(*heads), batch.total_q() / heads);
        view.check(spec, index, table.page_size, table.pool_pages)?;
        let pages = [table.page_size, table.pool_pages];
        view.scales
            .check(T::DTYPE, index, spec.kv_heads, tokens, pages)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;

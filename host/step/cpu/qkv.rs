//! From a fused QKV projection to queries for attention, and keys and values in their pages.

use rayon::prelude::*;

use super::normalise;
use crate::{
    Error,
    checks::check_same,
    exec::Cpu,
    kv::{AppendScales, KvScales, KvViewMut},
    problem::{Integer, ProblemError, Spec},
    step::{RmsNorm, RopeTable, StepError},
    tensor::{Element, ShapeError},
};

/// Normalisation of each query and key head.
#[derive(Clone, Copy, Debug)]
pub struct QkNorm<'a, T> {
    /// The norm.
    pub norm: RmsNorm,
    /// `[head_dim]`: weights for queries.
    pub q: &'a [T],
    /// `[head_dim]`: weights for keys.
    pub k: &'a [T],
}

/// The inputs of [`qkv`].
#[derive(Clone, Copy, Debug)]
pub struct QkvStep<'a, T> {
    /// `[tokens, (q_heads + 2 · kv_heads) · head_dim]`: the heads of the queries, of the keys, of the values.
    pub qkv: &'a [T],
    /// Bias: one such row, added to each row.
    pub bias: Option<&'a [T]>,
    /// Normalisation.
    pub norm: Option<QkNorm<'a, T>>,
    /// Rotary embedding, and the position of each token.
    pub rope: Option<(&'a RopeTable, &'a [u32])>,
}

/// Prepares a fused QKV projection for attention: adds the bias, normalises the heads of queries and keys, applies the
/// rotary embedding, appends keys and values to their pages, and writes the queries to `q` (`[tokens, q_heads,
/// head_dim]`).
///
/// `slots` are as in [`Cpu::append_paged_kv`]. The queries of a token are written even if its slot says that its keys and values
/// are not. For 8-bit pools, `scales` is as in [`Cpu::append_quantised`]; for others, give [`KvScales::One`].
///
/// ```
/// use tandem_attn::{
///     kv::{AppendScales, KvScales, KvViewMut},
///     problem::{Dtype, KvLayout, Spec},
///     step::{Rope, cpu::{QkvStep, qkv}},
/// };
///
/// let spec = Spec::new(2, 1, 16).with_dtype(Dtype::F32);
/// let (mut k, mut v) = ([0.0_f32; 4 * 16], [0.0_f32; 4 * 16]); // a page of four tokens
/// let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
/// let rope = Rope::new(16, 10_000.0).table()?;
/// let step = QkvStep {
///     qkv: &[1.0; 4 * 16],
///     bias: None,
///     norm: None,
///     rope: Some((&rope, &[3])),
/// };
/// let mut q = [0.0; 2 * 16];
/// qkv(&spec, &step, &[3], &mut q, &mut pool, 1, AppendScales::Given(KvScales::One))?;
/// assert_eq!(q[0], 3_f32.cos() - 3_f32.sin());
/// assert_eq!((k[3 * 16], v[3 * 16]), (q[0], 1.0));
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`], [`Error::Step`], [`Error::DtypesDiffer`], and those of the append; nothing is written then.
pub fn qkv<T: Element, C: Element>(
    spec: &Spec,
    step: &QkvStep<'_, T>,
    slots: &[impl Integer],
    q: &mut [T],
    pool: &mut KvViewMut<'_, C>,
    pool_pages: u32,
    scales: AppendScales<'_>,
) -> Result<(), Error> {
    let tokens = slots.len();
    step.check(spec, tokens, q.len())?;
    if tokens == 0 {
        return Ok(());
    }
    let heads = Heads::new(spec, step, tokens);
    let (q_heads, kv_heads) = (spec.q_heads as usize, spec.kv_heads as usize);
    let (k, v) = (q_heads..q_heads + kv_heads, q_heads + kv_heads);
    let keys = |out: &mut [f32], token| {
        heads.read(
            token,
            k.clone(),
            step.norm.map(|norm| (norm.norm, norm.k)),
            true,
            out,
        )
    };
    let values = |out: &mut [f32], token| heads.read(token, v..v + kv_heads, None, false, out);

    // Keys and values come first, because the append has its own checks.
    let row = kv_heads * heads.dim;
    let (mut k, mut v) = (vec![0.0; tokens * row], vec![0.0; tokens * row]);
    let rows = k.par_chunks_mut(row).zip(v.par_chunks_mut(row));
    rows.enumerate().for_each(|(token, (k, v))| {
        keys(k, token);
        values(v, token);
    });
    append(spec, slots, &k, &v, pool, pool_pages, scales, T::DTYPE)?;

    let weights = step.norm.map(|norm| (norm.norm, norm.q));
    let rows = q.par_chunks_mut(q_heads * heads.dim).enumerate();
    rows.for_each_init(Vec::new, |scratch: &mut Vec<f32>, (token, q)| {
        scratch.resize(q.len(), 0.0);
        heads.read(token, 0..q_heads, weights, true, scratch);
        q.iter_mut()
            .zip(scratch)
            .for_each(|(q, x)| *q = T::from_f32(*x));
    });
    Ok(())
}

impl<T> QkvStep<'_, T> {
    fn check(&self, spec: &Spec, tokens: usize, q: usize) -> Result<(), Error> {
        let head_dim = spec.fused_head_dim()?;
        spec.check_fused_heads()?;
        if head_dim == 0 {
            let name = "head_dim_qk";
            return Err(ProblemError::HeadDim { name, got: 0 }.into());
        }
        let dim = head_dim as usize;
        let row = spec.total_heads() * dim;
        let shape = "[tokens, (q_heads + 2 · kv_heads) · head_dim]";
        ShapeError::length("qkv", self.qkv.len(), shape, tokens * row)?;
        let of_q = tokens * spec.q_heads as usize * dim;
        ShapeError::length("q", q, "[tokens, q_heads, head_dim]", of_q)?;
        if let Some(bias) = self.bias {
            let shape = "[(q_heads + 2 · kv_heads) · head_dim]";
            ShapeError::length("the bias", bias.len(), shape, row)?;
        }
        if let Some(norm) = &self.norm {
            ShapeError::length("the weights of queries", norm.q.len(), "[head_dim]", dim)?;
            ShapeError::length("the weights of keys", norm.k.len(), "[head_dim]", dim)?;
        }
        if let Some((table, positions)) = self.rope {
            ShapeError::length("positions", positions.len(), "[tokens]", tokens)?;
            StepError::rope_dim(table.dim(), head_dim)?;
        }
        Ok(())
    }
}

/// The heads of a projection, and the sines and cosines of its tokens.
struct Heads<'a, T> {
    step: &'a QkvStep<'a, T>,
    dim: usize,
    /// Elements of a token.
    row: usize,
    /// For each token and pair.
    sines: Vec<[f32; 2]>,
}

impl<'a, T: Element> Heads<'a, T> {
    fn new(spec: &Spec, step: &'a QkvStep<'a, T>, tokens: usize) -> Self {
        let dim = spec.head_dim_qk as usize;
        let mut sines = Vec::new();
        if let Some((table, positions)) = step.rope {
            let pairs = table.dim() as usize / 2;
            sines.resize(tokens * pairs, [0.0; 2]);
            let tokens = sines.par_chunks_mut(pairs).zip(positions);
            tokens.for_each(|(sines, &position)| {
                let of_position = table.sines(position.into());
                sines
                    .iter_mut()
                    .zip(of_position)
                    .for_each(|(to, sine)| *to = sine);
            });
        }
        Self {
            step,
            dim,
            row: spec.total_heads() * dim,
            sines,
        }
    }

    /// Some heads of a token, ready.
    fn read(
        &self,
        token: usize,
        heads: std::ops::Range<usize>,
        weights: Option<(RmsNorm, &[T])>,
        turned: bool,
        out: &mut [f32],
    ) {
        let part = heads.start * self.dim..heads.end * self.dim;
        let source = &self.step.qkv[token * self.row..][part.clone()];
        for (out, x) in out.iter_mut().zip(source) {
            *out = x.to_f32();
        }
        if let Some(bias) = self.step.bias {
            for (out, bias) in out.iter_mut().zip(&bias[part]) {
                *out += bias.to_f32();
            }
        }
        for head in out.chunks_exact_mut(self.dim) {
            if let Some((norm, weights)) = weights {
                normalise(norm, head, weights);
            }
            if let Some((table, _)) = self.step.rope.filter(|_| turned) {
                let pairs = table.dim() as usize / 2;
                table.turn_by(head, self.sines[token * pairs..][..pairs].iter().copied());
            }
        }
    }
}

/// Appends to pages of the projection's type, or of 8 bits.
#[expect(clippy::too_many_arguments, reason = "those of the appends")]
fn append<C: Element>(
    spec: &Spec,
    slots: &[impl Integer],
    k: &[f32],
    v: &[f32],
    pool: &mut KvViewMut<'_, C>,
    pool_pages: u32,
    scales: AppendScales<'_>,
    dtype: crate::problem::Dtype,
) -> Result<(), Error> {
    if C::DTYPE.bytes() == 1 {
        return Cpu::append_quantised(spec, pool_pages, slots, k, v, pool, scales);
    }
    if !matches!(scales, AppendScales::Given(KvScales::One)) {
        let dtype = C::DTYPE;
        return Err(ShapeError::Scaled { dtype }.into());
    }
    check_same("qkv", dtype, "the KV pool", C::DTYPE)?;
    let narrow = |rows: &[f32]| rows.par_iter().map(|&x| C::from_f32(x)).collect::<Vec<_>>();
    Cpu::append_paged_kv(spec, pool_pages, slots, &narrow(k), &narrow(v), pool)
}

impl Spec {
    /// Heads of queries, keys and values.
    pub(crate) const fn total_heads(&self) -> usize {
        self.q_heads as usize + 2 * self.kv_heads as usize
    }

    /// Checks that a fused projection has heads of queries and of keys. Their numbers need not be multiples.
    pub(crate) const fn check_fused_heads(&self) -> Result<(), ProblemError> {
        let &Self {
            q_heads, kv_heads, ..
        } = self;
        if q_heads == 0 || kv_heads == 0 {
            return Err(ProblemError::GroupSize { q_heads, kv_heads });
        }
        Ok(())
    }

    /// The dimension of all heads of a fused projection.
    pub(crate) const fn fused_head_dim(&self) -> Result<u32, StepError> {
        let &Self {
            head_dim_qk,
            head_dim_v,
            latent,
            ..
        } = self;
        if head_dim_qk == head_dim_v && !latent {
            return Ok(head_dim_qk);
        }
        Err(StepError::Heads {
            head_dim_qk,
            head_dim_v,
            latent,
        })
    }
}

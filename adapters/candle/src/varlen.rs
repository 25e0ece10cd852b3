//! Packed sequences without a cache.

use candle_core::{Result, Tensor, bail};
use tandem_attn::problem::{Batch, PageTable};

use crate::{
    layer::Layer,
    ops::attend,
    step::{Attention, Step},
    tables::Lengths,
    wrap,
};

impl Attention {
    /// A step of packed sequences for [`varlen_attention`]: request `r` has the queries
    /// `seqlens_q[r]..seqlens_q[r + 1]` and the keys `seqlens_k[r]..seqlens_k[r + 1]`. Make it once for all layers,
    /// because lengths in tensors on a GPU are read back.
    ///
    /// # Errors
    /// If the lengths are not cumulative, or have different numbers of requests.
    pub fn varlen(
        &self,
        seqlens_q: &(impl Lengths + ?Sized),
        seqlens_k: &(impl Lengths + ?Sized),
    ) -> Result<Step> {
        let (seqlens_q, seqlens_k) = (seqlens_q.to_host()?, seqlens_k.to_host()?);
        for (name, ends) in [("seqlens_q", &seqlens_q), ("seqlens_k", &seqlens_k)] {
            if ends.first() != Some(&0) || !ends.is_sorted() {
                bail!(
                    "{name} is {ends:?}: cumulative lengths ascend from 0, one more of them than there are requests"
                );
            }
        }
        if seqlens_q.len() != seqlens_k.len() {
            bail!(
                "seqlens_q and seqlens_k have {} and {} entries",
                seqlens_q.len(),
                seqlens_k.len()
            );
        }
        let keys = seqlens_k[seqlens_k.len() - 1];
        let runs: Vec<_> = seqlens_k.windows(2).map(|ends| ends[0]..ends[1]).collect();
        let table = PageTable::contiguous(keys, &runs).map_err(wrap)?;
        Ok(self.of_batch(Batch::new(seqlens_q, table), Some(keys as usize)))
    }
}

/// Computes attention of packed queries to packed keys.
///
/// - `q`: `[queries, q_heads, head_dim]`
/// - `k`, `v`: `[keys, kv_heads, head_dim]`
/// - `step`: from [`Attention::varlen`]
///
/// The queries are the last tokens of their requests: under a causal mask, the last query sees all keys.
///
/// # Errors
/// If tensors, step and layer do not match, or if there is no kernel for the heads. If a request has more queries than keys under
/// a causal mask, which flash-attn answers with zeros for the first of them. On a GPU, some head dimensions (such as 48 and 160) have only kernels
/// that load 8 tokens at a time: then each sequence must begin at a multiple of 8 tokens of `k` and `v`.
pub fn varlen_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    step: &Step,
    layer: &Layer,
) -> Result<Tensor> {
    let Some(keys) = step.packed() else {
        bail!("the step is of a paged cache: use paged_attention");
    };
    for (name, tensor) in [("k", k), ("v", v)] {
        let (tokens, ..) = tensor.dims3()?;
        if tokens != keys {
            bail!("{name} has {tokens} tokens, and the lengths end at {keys}");
        }
    }
    attend(q, k, v, step, layer)
}

/// The function of candle-flash-attn, with the same name and shapes, also on the CPU: packed queries and keys, with
/// cumulative lengths as tensors. Each call plans, and on a GPU reads the lengths back. If several layers have the same
/// lengths, [`varlen_attention`] with one step for all of them is faster.
///
/// `max_seqlen_q` and `max_seqlen_k` are checked against the lengths.
///
/// # Errors
/// As [`varlen_attention`], and if a sequence is longer than the stated maximum.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        None,
        causal.then_some(0),
    )
}

/// [`flash_attn_varlen`] with windows. `window_size_right` must be `Some(0)`, for a causal mask, or none.
///
/// # Errors
/// As [`flash_attn_varlen`], and for other windows to the right.
#[allow(clippy::too_many_arguments)]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let mut layer = Layer::new(softmax_scale);
    layer.causal = match window_size_right {
        Some(0) => true,
        None => false,
        Some(right) => {
            bail!("a window of {right} keys to the right: only 0 (causal) and none are possible")
        }
    };
    layer.window_left = match window_size_left.map(u32::try_from) {
        None => None,
        Some(Ok(left)) => Some(left),
        Some(Err(_)) => {
            bail!("a window of {window_size_left:?} keys is wider than any sequence: give None")
        }
    };
    let (ends_q, ends_k) = (seqlens_q.to_host()?, seqlens_k.to_host()?);
    let step = Attention::new(q.device())?.varlen(&ends_q, &ends_k)?;
    for (name, ends, most) in [
        ("max_seqlen_q", &ends_q, max_seqlen_q),
        ("max_seqlen_k", &ends_k, max_seqlen_k),
    ] {
        let longest = ends.windows(2).map(|ends| ends[1] - ends[0]).max();
        if let Some(longest) = longest.filter(|&longest| longest as usize > most) {
            bail!("{name} is {most}, and a sequence has {longest} tokens");
        }
    }
    varlen_attention(q, k, v, &step, &layer)
}

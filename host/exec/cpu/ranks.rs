//! Merges results of attention to different keys, also those of ranks.

use std::f32::consts::LOG2_E;

use kernels_gpu::abi::MergeRow;

use super::{Cpu, Partials, merge_states};
use crate::{
    Error,
    checks::extent,
    tensor::{Element, ShapeError},
};

impl Cpu {
    /// Merges results of attention of the same queries to different keys, as if all keys had been seen at once, in the order in
    /// which they are given.
    ///
    /// `results` are outputs `[tokens, q_heads, head_dim_v]` with their LSEs `[tokens, q_heads]`, as [`run`](Self::run) writes
    /// them; `out` and `lse` are likewise. A result whose LSE is −∞ saw no key; its output is not used. No key may be in two
    /// runs. Sinks count in every run, so let only one of them have a spec [with sinks](crate::problem::Spec::with_sinks).
    ///
    /// ```
    /// use tandem_attn::Cpu;
    ///
    /// // A head of 8 elements: two results, as much weight in each.
    /// let (first, second) = (([1.0_f32; 8], [0.0]), ([3.0; 8], [0.0]));
    /// let results = [(&first.0[..], &first.1[..]), (&second.0, &second.1)];
    /// let (mut out, mut lse) = ([0.0_f32; 8], [0.0]);
    /// Cpu::merge_results(&results, 1, 8, &mut out, Some(&mut lse))?;
    /// assert_eq!((out, lse), ([2.0; 8], [std::f32::consts::LN_2]));
    /// # Ok::<(), tandem_attn::Error>(())
    /// ```
    ///
    /// Any number of results but none is merged in one call. Results of a variant
    /// [without a softmax](crate::problem::Variant::adds_up) are sums, with LSEs of 0: add them instead.
    ///
    /// # Errors
    /// [`Error::Extent`] without results, [`Error::Shape`] or [`Error::HeadDim`]; nothing is written then.
    pub fn merge_results<T: Element>(
        results: &[(&[T], &[f32])],
        q_heads: usize,
        head_dim_v: usize,
        out: &mut [T],
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        if results.is_empty() {
            return Err(extent("the call", "results", 0, "1 or more"));
        }
        let results = results.iter().map(|&(out, lse)| RankState { out, lse });
        let results: Vec<_> = results.collect();
        merge_ranks(&results, q_heads, head_dim_v, out, lse)
    }
}

/// The results of a rank, in host memory.
#[derive(Clone, Copy, Debug)]
pub struct RankState<'a, T> {
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: &'a [T],
    /// `[tokens, q_heads]`, natural log; −∞ where a query saw no key (its output is not read then).
    pub lse: &'a [f32],
}

/// Merges the results of ranks that hold different keys of the same heads and queries
/// ([`Share::group`](crate::shard::Share::group)), in the order in which they are given.
///
/// The results are rounded to their element type before they are merged: give it the precision that is wanted.
///
/// ```
/// use tandem_attn::exec::cpu::{RankState, merge_ranks};
///
/// // A head of 8 elements: two ranks with as much weight.
/// let states = [([1.0_f32; 8], [0.0_f32]), ([3.0; 8], [0.0])];
/// let states = states.each_ref().map(|(out, lse)| RankState { out, lse });
/// let (mut out, mut lse) = ([0.0_f32; 8], [0.0]);
/// merge_ranks(&states, 1, 8, &mut out, Some(&mut lse))?;
/// assert_eq!((out, lse), ([2.0; 8], [std::f32::consts::LN_2]));
/// # Ok::<(), tandem_attn::Error>(())
/// ```
///
/// # Errors
/// [`Error::Shape`] or [`Error::HeadDim`]; nothing is written then.
pub fn merge_ranks<T: Element>(
    states: &[RankState<'_, T>],
    q_heads: usize,
    head_dim_v: usize,
    out: &mut [T],
    lse: Option<&mut [f32]>,
) -> Result<(), Error> {
    crate::exec::check_merged_heads("out", q_heads, head_dim_v)?;
    let tokens = out.len() / (q_heads * head_dim_v);
    for state in states {
        let lengths = [
            ("the out of a result", state.out.len(), out.len()),
            ("the lse of a result", state.lse.len(), tokens * q_heads),
        ];
        for (name, got, expected) in lengths {
            let shape = "[tokens, q_heads], and head_dim_v of out";
            ShapeError::length(name, got, shape, expected)?;
        }
    }
    let widened = states.iter().flat_map(|state| state.out);
    let partial_out: Vec<f32> = widened.map(|x| x.to_f32()).collect();
    let logs = states.iter().flat_map(|state| state.lse);
    let partial_lse: Vec<f32> = logs.map(|log| log * LOG2_E).collect();
    let ranks = states.len() as u32;
    let rows: Vec<MergeRow> = (0..tokens as u32)
        .map(|token| MergeRow {
            token,
            slots_begin: token * ranks,
            slots: ranks,
            reserved: 0,
        })
        .collect();
    let of_token = |token| (0..ranks).map(move |rank| rank * tokens as u32 + token);
    let slots: Vec<u32> = (0..tokens as u32).flat_map(of_token).collect();
    let partials = Partials {
        out: &partial_out,
        lse: &partial_lse,
        q_heads,
        head_dim_v,
    };
    merge_states(&partials, &rows, &slots, out, lse)
}

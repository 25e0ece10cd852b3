//! The second pass: from states to outputs.

use std::f32::consts::LOG2_E;

use kernels_gpu::{
    state::{Softmax, natural, with_sink},
    variant::{Hook, Query, Variant},
};
use rayon::prelude::*;

use super::sources::{Row, Source, Sources};
use crate::{plan::Plan, tensor::Element};

/// Everything that outputs are made of.
pub(super) struct Finish<'a, V> {
    pub(super) variant: &'a V,
    pub(super) plan: &'a Plan,
    pub(super) sources: &'a Sources,
    /// Outputs of all rows.
    pub(super) out: &'a [f32],
    /// Base-2 log-sums of all rows.
    pub(super) lse: &'a [f32],
    /// Natural logits, one for each query head of each of the sinks' tokens.
    pub(super) sinks: Option<&'a [f32]>,
}

impl<V: Variant> Finish<'_, V> {
    /// Writes every query token's output, and its LSE if it is needed. Tokens are `token_stride` elements apart, the
    /// heads of a token `head_stride`.
    pub(super) fn write<O: Element>(
        &self,
        out: &mut [O],
        (token_stride, head_stride): (usize, usize),
        lse: Option<&mut [f32]>,
    ) {
        let heads = self.plan.spec.q_heads as usize;
        let tokens = out.par_chunks_mut(token_stride);
        let tokens = tokens.take(self.plan.total_q as usize).enumerate();
        let tokens = tokens.with_min_len(16);
        match lse {
            Some(lse) => {
                let tokens = tokens.zip(lse.par_chunks_mut(heads));
                tokens.for_each_init(Vec::new, |state, ((token, out), lse)| {
                    self.token(token, (out, head_stride), Some(lse), state)
                });
            }
            None => tokens.for_each_init(Vec::new, |state, (token, out)| {
                self.token(token, (out, head_stride), None, state)
            }),
        }
    }

    fn token<O: Element>(
        &self,
        token: usize,
        (out, head_stride): (&mut [O], usize),
        mut lse: Option<&mut [f32]>,
        state: &mut Vec<f32>,
    ) {
        let spec = &self.plan.spec;
        for head in 0..spec.q_heads as usize {
            let out = &mut out[head * head_stride..][..spec.head_dim_v as usize];
            let mut head_lse = match self.sources.of_token[token] {
                Source::Row(row) => {
                    let at = self.state_of(row, head);
                    state.clear();
                    state.extend_from_slice(self.out_of(at));
                    self.lse[at]
                }
                Source::Merge(merge) => self.merge(merge, head, state),
                Source::Nothing => unreachable!("every token has a source"),
            };
            if let Some(sinks) = self.sinks {
                let (tokens, heads) = (spec.variant.sink_tokens, spec.q_heads);
                let of_token = token as u32 % tokens * heads;
                let sink = sinks[(of_token + head as u32) as usize];
                let (factor, with) = with_sink(head_lse, sink * LOG2_E);
                state.iter_mut().for_each(|x| *x *= factor);
                head_lse = with;
            }
            if V::TRANSFORMS_OUTPUT {
                let at = Query {
                    token: token as u32,
                    head: head as u32,
                    position: 0,
                };
                for (pair, x) in state.chunks_exact_mut(2).enumerate() {
                    x.copy_from_slice(
                        &self
                            .variant
                            .output([x[0], x[1]], 2 * pair as u32, at)
                            .plain(),
                    );
                }
            }
            out.iter_mut()
                .zip(&*state)
                .for_each(|(out, &x)| *out = O::from_f32(x));
            if let Some(lse) = lse.as_deref_mut() {
                lse[head] = if V::SOFTMAX { natural(head_lse) } else { 0.0 };
            }
        }
    }

    /// Merges the states of a row, in the order of the merge's slots. Returns the log-sum.
    fn merge(&self, merge: usize, head: usize, state: &mut Vec<f32>) -> f32 {
        let slots = self.plan.slots_of(&self.plan.merges[merge]);
        let states = || {
            slots
                .iter()
                .map(|&slot| self.state_of(self.sources.of_slot[slot as usize], head))
        };
        state.clear();
        state.resize(self.plan.spec.head_dim_v as usize, 0.0);
        if !V::SOFTMAX {
            states().for_each(|at| {
                state
                    .iter_mut()
                    .zip(self.out_of(at))
                    .for_each(|(sum, x)| *sum += x)
            });
            return 0.0;
        }
        // The weights are computed first, from all log-sums, so that outputs are read only once.
        let mut softmax = Softmax::EMPTY;
        let max = states()
            .map(|at| self.lse[at])
            .fold(f32::NEG_INFINITY, f32::max);
        let _ = softmax.raise(max);
        softmax.sum = states().map(|at| softmax.weight(self.lse[at])).sum();
        let norm = softmax.norm();
        for at in states().filter(|&at| self.lse[at] != f32::NEG_INFINITY) {
            let weight = softmax.weight(self.lse[at]) * norm;
            state
                .iter_mut()
                .zip(self.out_of(at))
                .for_each(|(sum, x)| *sum += weight * x);
        }
        softmax.lse()
    }

    /// Index of a row's state for a query head: states of an item are `[kv_heads, rows, group]`.
    fn state_of(&self, row: Row, head: usize) -> usize {
        let (heads, group) = (
            self.plan.spec.q_heads as usize,
            self.plan.spec.group() as usize,
        );
        row.before * heads + (head / group * row.of_item + row.index) * group + head % group
    }

    fn out_of(&self, state: usize) -> &[f32] {
        let dim = self.plan.spec.head_dim_v as usize;
        &self.out[state * dim..(state + 1) * dim]
    }
}

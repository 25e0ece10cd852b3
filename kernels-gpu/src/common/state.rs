//! Partial attention states, and how they are merged.
//!
//! The state of a query over some keys is its output over them and the log of the sum of their weights (LSE). Two
//! states over different keys merge exactly to the state over all of them (⊕); the empty state is neutral. Logs are in
//! base 2, since that is what the hardware computes; [`natural`] converts one at the very end.
//!
//! # Infinities and NaN
//! - A state with LSE −∞ has seen no key. Its output is ignored, not even multiplied by zero, so it may be
//!   uninitialised memory.
//! - A logit of −∞ is a masked key and has weight 0, even if no key was visible before it.
//! - A logit of +∞ or NaN gives NaN in its own row's result, and in no other's.

use core::f32::consts::LN_2;

use crate::common::math::exp2;

/// From a log in base 2 to a natural one.
#[inline(always)]
#[must_use]
pub fn natural(log2: f32) -> f32 {
    log2 * LN_2
}

/// `log₂ x` for `x > 0`; −∞ at zero.
#[inline(always)]
#[must_use]
pub fn log2(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::math::lg2(x)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        x.log2()
    }
}

/// The larger number; `a` if `b` is NaN (the NaN then appears in the weights, see [`Softmax::weight`]).
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The online softmax of one row: the largest logit so far, and the sum of the weights relative to it. The caller's
/// accumulated outputs are rescaled by the factor that [`Softmax::raise`] returns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Softmax {
    /// The largest base-2 logit so far; −∞ while no key was visible.
    pub max: f32,
    /// Sum of `2^(logit − max)` over the keys so far.
    pub sum: f32,
}

impl Softmax {
    /// No key yet.
    pub const EMPTY: Self = Self {
        max: f32::NEG_INFINITY,
        sum: 0.0,
    };

    /// A [sink](with_sink) in base 2, which is a weight without a key.
    #[inline(always)]
    #[must_use]
    pub fn of_sink(sink: f32) -> Self {
        Self {
            max: sink,
            sum: if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 },
        }
    }

    /// Raises the maximum to that of the next keys. Returns the factor for everything accumulated so far, except the
    /// sum, which is scaled here.
    #[inline(always)]
    #[must_use]
    pub fn raise(&mut self, max: f32) -> f32 {
        let max = larger(self.max, max);
        // Nothing was accumulated yet, and −∞ − (−∞) would be NaN.
        let factor = if self.max == f32::NEG_INFINITY {
            1.0
        } else {
            exp2(self.max - max)
        };
        self.max = max;
        self.sum *= factor;
        factor
    }

    /// The reference that is subtracted from logits: the maximum, or 0 while every key was masked.
    #[inline(always)]
    #[must_use]
    pub fn offset(&self) -> f32 {
        if self.max == f32::NEG_INFINITY {
            0.0
        } else {
            self.max
        }
    }

    /// The weight of a logit that is at most the maximum. It still has to be added to the sum.
    #[inline(always)]
    #[must_use]
    pub fn weight(&self, logit: f32) -> f32 {
        exp2(logit - self.offset())
    }

    /// The final factor of accumulated outputs; 0 where no key was visible.
    #[inline(always)]
    #[must_use]
    pub fn norm(&self) -> f32 {
        if self.sum == 0.0 {
            0.0
        } else {
            crate::common::math::recip(self.sum)
        }
    }

    /// The log of the sum of all weights, base 2; −∞ where no key was visible.
    #[inline(always)]
    #[must_use]
    pub fn lse(&self) -> f32 {
        self.offset() + log2(self.sum)
    }
}

/// Adds a sink to a finished row: a learned logit that counts in the denominator and has no value. `lse` and `sink` are
/// base-2 logs. Returns the factor for the row's output, and the LSE including the sink.
///
/// A row that saw no key gets output 0 and the sink as its LSE. A sink of −∞ changes nothing.
#[inline(always)]
#[must_use]
pub fn with_sink(lse: f32, sink: f32) -> (f32, f32) {
    let mut softmax = Softmax::EMPTY;
    let _ = softmax.raise(larger(lse, sink));
    let seen = softmax.weight(lse);
    softmax.sum = seen + softmax.weight(sink);
    (seen * softmax.norm(), softmax.lse())
}

/// The largest number of tokens that have sinks of their own.
pub const MOST_SINK_TOKENS: u32 = 255;

/// 1 as a fraction of 24 bits.
const ONE: u32 = 1 << 24;

/// A number of tokens with sinks of their own as [`sink_index`] takes it: the number in the low 8 bits, and above them its
/// reciprocal, as a fraction of 24 bits that is rounded up. That of 1 is 0.
#[must_use]
pub const fn sink_word(tokens: u32) -> u32 {
    assert!(tokens > 0 && tokens <= MOST_SINK_TOKENS, "checked before");
    ONE.div_ceil(tokens) << 8 | tokens
}

/// So many tokens, from the first on, have exact [indices](sink_index): the error of the fraction must not reach 1.
#[must_use]
pub const fn exact_sinks(tokens: u32) -> u32 {
    let error = ONE.div_ceil(tokens) * tokens - ONE;
    match error {
        0 => u32::MAX,
        _ => ONE.div_ceil(error),
    }
}

/// The index of a row's sink among `[tokens, heads]` sinks: token `t` has those of `t % tokens`. `word` is the [`sink_word`] of
/// `tokens`, or 0 as for 1.
///
/// A remainder takes 20 instructions, and kernels that nobody asks for sinks read these, too. The fraction of `t / tokens` takes
/// two products: what is before its point wraps around.
#[inline(always)]
#[must_use]
pub const fn sink_index(word: u32, heads: u32, token: u32, head: u32) -> u32 {
    let fraction = token.wrapping_mul(word & !0xff);
    let remainder = (fraction as u64 * (word & 0xff) as u64) >> 32;
    remainder as u32 * heads + head
}

/// The sink of a row as a natural logit: that of a query head of a token of the batch.
///
/// # Safety
/// `params.sinks` is the address of sinks as [`AttentionParams`](crate::abi::AttentionParams::sinks) says, and `head` is one of
/// its query heads.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn natural_sink(params: &crate::abi::AttentionParams, token: u32, head: u32) -> f32 {
    let index = sink_index(params.variant.sink_tokens, params.q_heads, token, head);
    // SAFETY: the caller's promise; the remainder is one of the sinks' tokens.
    unsafe { load_sink(params.sinks, index) }
}

/// [`natural_sink`] in base 2.
///
/// # Safety
/// As there.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn sink_of_row(params: &crate::abi::AttentionParams, token: u32, head: u32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { natural_sink(params, token, head) * core::f32::consts::LOG2_E }
}

/// The sink of a query head in base 2: `sinks` is the address of natural logits.
///
/// # Safety
/// `sinks` is the address of one logit per query head, and `head` is one of these heads.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn sink_of(sinks: u64, head: u32) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { load_sink(sinks, head) * core::f32::consts::LOG2_E }
}

/// # Safety
/// `sinks` is the address of more than `index` logits.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
unsafe fn load_sink(sinks: u64, index: u32) -> f32 {
    // SAFETY: the caller's promise; nobody writes sinks while a kernel runs.
    f32::from_bits(unsafe {
        cuda_std::ptr::load_nc_u32((sinks + u64::from(index) * 4) as *const u32)
    })
}

/// A partial state: output and LSE over some keys, for `N` neighbouring elements of one head.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct State<const N: usize> {
    /// The normalised output.
    pub out: [f32; N],
    /// Log of the sum of the weights, base 2.
    pub lse: f32,
}

impl<const N: usize> State<N> {
    /// The state over no keys.
    pub const EMPTY: Self = Self {
        out: [0.0; N],
        lse: f32::NEG_INFINITY,
    };

    /// This state of a finished row, with a base-2 [sink](with_sink) added to its denominator.
    #[inline(always)]
    #[must_use]
    pub fn with_sink(mut self, sink: f32) -> Self {
        let (factor, lse) = with_sink(self.lse, sink);
        let mut i = 0;
        while i < N {
            // The output of an empty state is ignored.
            self.out[i] = if self.lse == f32::NEG_INFINITY {
                0.0
            } else {
                self.out[i] * factor
            };
            i += 1;
        }
        self.lse = lse;
        self
    }

    /// The sum over all keys, for a variant [without a softmax](crate::variant::Variant::SOFTMAX). Its partial states
    /// are sums with LSE 0, so ⊕ of `n` of them is their mean, with LSE log₂ `n`; this multiplies by `n`.
    #[inline(always)]
    #[must_use]
    pub fn added_up(mut self) -> Self {
        let states = exp2(self.lse);
        let mut i = 0;
        while i < N {
            // The output of an empty state is ignored.
            self.out[i] = if self.lse == f32::NEG_INFINITY {
                0.0
            } else {
                self.out[i] * states
            };
            i += 1;
        }
        self.lse = 0.0;
        self
    }

    /// The state over the keys of both (⊕).
    #[inline(always)]
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let mut merger = Merger::EMPTY;
        merger.push(self);
        merger.push(other);
        merger.finish()
    }
}

/// ⊕ over any number of states, in the order in which they are pushed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merger<const N: usize> {
    /// The softmax over the states' LSEs.
    pub softmax: Softmax,
    /// The weighted sum of their outputs.
    pub out: [f32; N],
}

impl<const N: usize> Merger<N> {
    /// No state yet.
    pub const EMPTY: Self = Self {
        softmax: Softmax::EMPTY,
        out: [0.0; N],
    };

    /// Adds a state.
    #[inline(always)]
    pub fn push(&mut self, state: State<N>) {
        self.push_all([state]);
    }

    /// Adds several states with one rescale. Straight-line code, so that a kernel can have the loads of all of them in
    /// flight at once.
    #[inline(always)]
    pub fn push_all<const STATES: usize>(&mut self, states: [State<N>; STATES]) {
        let mut max = f32::NEG_INFINITY;
        let mut s = 0;
        while s < STATES {
            max = larger(max, states[s].lse);
            s += 1;
        }
        let factor = self.softmax.raise(max);
        let mut i = 0;
        while i < N {
            self.out[i] *= factor;
            i += 1;
        }
        s = 0;
        while s < STATES {
            let State { out, lse } = states[s];
            let weight = self.softmax.weight(lse);
            self.softmax.sum += weight;
            i = 0;
            while i < N {
                let seen = if lse == f32::NEG_INFINITY {
                    0.0
                } else {
                    out[i]
                };
                self.out[i] += seen * weight;
                i += 1;
            }
            s += 1;
        }
    }

    /// The state over the keys of all.
    #[inline(always)]
    #[must_use]
    pub fn finish(self) -> State<N> {
        let norm = self.softmax.norm();
        let mut out = self.out;
        let mut i = 0;
        while i < N {
            out[i] *= norm;
            i += 1;
        }
        State {
            out,
            lse: self.softmax.lse(),
        }
    }
}

#[cfg(test)]
mod tests;

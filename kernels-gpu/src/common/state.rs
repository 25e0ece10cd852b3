//! Attention states: what a softmax over some of the keys leaves behind, and how two of them combine.
//!
//! A query that has seen some keys is described by its output over them and the log of the sum of their
//! weights. Two such states over different keys combine to the state over all of them (⊕); the empty
//! state is neutral. Logs are in base 2, since that is what the hardware computes; [`natural`] turns one
//! over at the very end.
//!
//! # Infinities and NaN
//! - A state whose log is −∞ has seen no key: its output is never looked at, not even multiplied by zero,
//!   so that unwritten memory may stand there.
//! - Logits of −∞ are masked keys and weigh nothing, also where no key before was visible.
//! - A logit of +∞ or NaN gives NaN: in this row's result, and in no other's.

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
fn log2(x: f32) -> f32 {
    #[cfg(target_arch = "nvptx64")]
    {
        cuda_std::math::lg2(x)
    }
    #[cfg(not(target_arch = "nvptx64"))]
    {
        x.log2()
    }
}

/// The larger; the first where the second is NaN (a NaN then shows in the weights, see [`Softmax::weight`]).
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The softmax of one row while its logits stream by: the largest so far, and the sum of the weights
/// relative to it. Outputs accumulated beside it are rescaled by what [`Softmax::raise`] returns.
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

    /// Takes note of the largest logit of the next keys. Returns the factor for everything accumulated
    /// so far, the sum excepted, which is scaled here.
    #[inline(always)]
    #[must_use]
    pub fn raise(&mut self, max: f32) -> f32 {
        let max = larger(self.max, max);
        // Where nothing was accumulated there is nothing to scale, and −∞ − −∞ is to be kept out.
        let factor = if self.max == f32::NEG_INFINITY {
            1.0
        } else {
            exp2(self.max - max)
        };
        self.max = max;
        self.sum *= factor;
        factor
    }

    /// What logits are taken relative to: the maximum, or 0 while every key was masked.
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

    /// What accumulated outputs are multiplied by in the end; 0 where no key was visible.
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

/// Takes a sink into a finished row: a learned logit that is in the denominator and has no value. `lse` and `sink`
/// are base-2 logs. Returns what the row's output is multiplied by, and its log of the denominator, the sink included.
///
/// A row that saw no key has output 0 and the sink as its log. A sink of −∞ changes nothing.
#[inline(always)]
#[must_use]
pub fn with_sink(lse: f32, sink: f32) -> (f32, f32) {
    let mut softmax = Softmax::EMPTY;
    let _ = softmax.raise(larger(lse, sink));
    let seen = softmax.weight(lse);
    softmax.sum = seen + softmax.weight(sink);
    (seen * softmax.norm(), softmax.lse())
}

/// The sink of a query head in base 2: `sinks` is the address of natural logits.
///
/// # Safety
/// There are sinks, and the head is one of theirs.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn sink_of(sinks: u64, head: u32) -> f32 {
    // SAFETY: the caller's promise; nobody writes sinks while a kernel runs.
    let sink = unsafe { cuda_std::ptr::load_nc_u32((sinks + u64::from(head) * 4) as *const u32) };
    f32::from_bits(sink) * core::f32::consts::LOG2_E
}

/// Output and log-sum over some keys, for `N` neighbouring elements of one head.
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

    /// The state of a finished row, with a base-2 [sink](with_sink) in its denominator.
    #[inline(always)]
    #[must_use]
    pub fn with_sink(mut self, sink: f32) -> Self {
        let (factor, lse) = with_sink(self.lse, sink);
        let mut i = 0;
        while i < N {
            // An empty state's output is not looked at.
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

    /// The sum over all keys of a variant [without a softmax](crate::variant::Variant::SOFTMAX). Its states are sums
    /// with a log of 0, so that ⊕ makes of any number of them their mean, and the log of their number.
    #[inline(always)]
    #[must_use]
    pub fn added_up(mut self) -> Self {
        let states = exp2(self.lse);
        let mut i = 0;
        while i < N {
            // An empty state's output is not looked at.
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

/// ⊕ over any number of states, in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Merger<const N: usize> {
    /// Of the logs of the states.
    pub softmax: Softmax,
    /// Their outputs, weighted and added up.
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

    /// Adds several states, with one rescaling of what was there. Straight-line code, so that a kernel
    /// which loads the states can have all loads under way at once.
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

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
mod tests {
    use super::*;
    use proptest::prelude::*;

    const EMPTY: State<4> = State::EMPTY;

    fn state() -> impl Strategy<Value = State<4>> {
        let lse = prop_oneof![
            8 => -40.0..40.0_f32,
            1 => -1e4..1e4_f32,
            1 => Just(f32::NEG_INFINITY),
        ];
        (prop::array::uniform4(-8.0..8.0_f32), lse).prop_map(|(out, lse)| {
            // An empty state may hold anything.
            let out = if lse == f32::NEG_INFINITY {
                [f32::NAN; 4]
            } else {
                out
            };
            State { out, lse }
        })
    }

    /// Of one state: within rounding, or empty as well.
    fn close(a: State<4>, b: State<4>) -> bool {
        if a.lse == f32::NEG_INFINITY || b.lse == f32::NEG_INFINITY {
            return a == EMPTY && b == EMPTY;
        }
        (a.lse - b.lse).abs() <= 2e-6 * a.lse.abs().max(1.0)
            && a.out.iter().zip(b.out).all(|(a, b)| (a - b).abs() <= 2e-5)
    }

    /// The definition, in f64.
    fn exact(states: &[State<4>]) -> State<4> {
        let seen = || states.iter().filter(|s| s.lse > f32::NEG_INFINITY);
        let max = seen()
            .map(|s| f64::from(s.lse))
            .fold(f64::NEG_INFINITY, f64::max);
        if max == f64::NEG_INFINITY {
            return EMPTY;
        }
        let weight = |s: &State<4>| (f64::from(s.lse) - max).exp2();
        let sum: f64 = seen().map(weight).sum();
        let mut out = [0.0; 4];
        for (i, out) in out.iter_mut().enumerate() {
            *out = (seen().map(|s| weight(s) * f64::from(s.out[i])).sum::<f64>() / sum) as f32;
        }
        State {
            out,
            lse: (max + sum.log2()) as f32,
        }
    }

    proptest! {
        /// States of a variant without a softmax, among them some of no keys, are added up by ⊕ in any grouping.
        #[test]
        fn sums_add_up(sums in prop::collection::vec(prop::array::uniform4(-8.0..8.0_f32), 0..30), group in 1..9_usize) {
            let mut states: Vec<_> = sums.iter().map(|&out| State { out, lse: 0.0 }).collect();
            let merge = |states: &[State<4>]| {
                let mut merger = Merger::EMPTY;
                states.iter().for_each(|&state| merger.push(state));
                merger.finish()
            };
            states.push(State { out: [f32::NAN; 4], ..EMPTY });
            let groups: Vec<_> = states.chunks(group).map(merge).collect();
            let got = merge(&groups).added_up();
            prop_assert_eq!(got.lse, 0.0);
            for (i, got) in got.out.into_iter().enumerate() {
                let right: f64 = sums.iter().map(|out| f64::from(out[i])).sum();
                prop_assert!((f64::from(got) - right).abs() < 1e-4, "{} {}", got, right);
            }
        }
    }

    proptest! {
        #[test]
        fn merging_commutes(a in state(), b in state()) {
            prop_assert!(close(a.merge(b), b.merge(a)), "{:?} {:?}", a.merge(b), b.merge(a));
        }

        #[test]
        fn merging_associates(a in state(), b in state(), c in state()) {
            let (left, right) = (a.merge(b).merge(c), a.merge(b.merge(c)));
            prop_assert!(close(left, right), "{left:?} {right:?}");
        }

        #[test]
        fn the_empty_state_is_neutral(a in state()) {
            let cleaned = a.merge(EMPTY);
            prop_assert_eq!(cleaned, EMPTY.merge(a));
            prop_assert!(close(cleaned, exact(&[a])), "{:?}", cleaned);
        }

        #[test]
        fn any_number_of_states_is_as_defined(states in prop::collection::vec(state(), 0..40)) {
            let mut merger = Merger::EMPTY;
            for &state in &states {
                merger.push(state);
            }
            let mut by_threes = Merger::EMPTY;
            for chunk in states.chunks(3) {
                match *chunk {
                    [a, b, c] => by_threes.push_all([a, b, c]),
                    [a, b] => by_threes.push_all([a, b]),
                    _ => by_threes.push(chunk[0]),
                }
            }
            let right = exact(&states);
            for got in [merger.finish(), by_threes.finish()] {
                prop_assert!(close(got, right), "{got:?} {right:?}");
            }
        }

        #[test]
        fn streaming_in_tiles_is_the_softmax(
            logits in prop::collection::vec(prop_oneof![9 => -30.0..30.0_f32, 1 => Just(f32::NEG_INFINITY)], 0..200),
            tile in 1..33_usize,
        ) {
            let mut softmax = Softmax::EMPTY;
            let mut index_sum = 0.0; // an "output": the weighted index
            for (t, tile_logits) in logits.chunks(tile).enumerate() {
                let max = tile_logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                index_sum *= softmax.raise(max);
                for (i, &logit) in tile_logits.iter().enumerate() {
                    let weight = softmax.weight(logit);
                    softmax.sum += weight;
                    index_sum += weight * (t * tile + i) as f32;
                }
            }
            let sum: f64 = logits.iter().map(|&x| f64::from(x).exp2()).sum();
            if sum == 0.0 {
                prop_assert_eq!((softmax.lse(), index_sum * softmax.norm()), (f32::NEG_INFINITY, 0.0));
            } else {
                let index: f64 = logits.iter().enumerate().map(|(i, &x)| f64::from(x).exp2() * i as f64).sum();
                prop_assert!((f64::from(softmax.lse()) - sum.log2()).abs() < 1e-5);
                prop_assert!((f64::from(index_sum * softmax.norm()) - index / sum).abs() < 1e-3);
            }
        }
    }

    #[test]
    fn nan_and_plus_infinity_show() {
        let good = State {
            out: [1.0; 4],
            lse: 2.0,
        };
        let nan_lse = State {
            out: [1.0; 4],
            lse: f32::NAN,
        };
        let infinite = State {
            out: [1.0; 4],
            lse: f32::INFINITY,
        };
        for bad in [nan_lse, infinite] {
            for merged in [good.merge(bad), bad.merge(good), bad.merge(EMPTY)] {
                assert!(
                    merged.out.iter().all(|x| x.is_nan()) && merged.lse.is_nan(),
                    "{bad:?}: {merged:?}"
                );
            }
        }
        let nan_out = State {
            out: [1.0, f32::NAN, 1.0, 1.0],
            lse: 0.0,
        };
        let merged = good.merge(nan_out);
        assert!(merged.out[1].is_nan() && merged.out[0] == 1.0);
    }

    #[test]
    fn a_sink_is_a_state_without_output() {
        let (state, sink) = (
            State {
                out: [3.0, -1.0],
                lse: 2.5,
            },
            State {
                out: [0.0; 2],
                lse: 4.0,
            },
        );
        let (got, right) = (state.with_sink(4.0), state.merge(sink));
        assert!((got.lse - right.lse).abs() < 1e-6, "{got:?} {right:?}");
        assert!(
            (got.out[0] - right.out[0]).abs() < 1e-6 && (got.out[1] - right.out[1]).abs() < 1e-6
        );
        assert_eq!(state.with_sink(f32::NEG_INFINITY), state);
        let empty = State {
            out: [f32::NAN; 2],
            lse: f32::NEG_INFINITY,
        };
        assert_eq!(empty.with_sink(4.0), sink);
        assert_eq!(empty.with_sink(f32::NEG_INFINITY), State::EMPTY);
        // Far apart: no weight overflows.
        assert_eq!(
            state.with_sink(1e4),
            State {
                out: [0.0; 2],
                lse: 1e4
            }
        );
        assert!(state.with_sink(f32::NAN).out[0].is_nan());
    }

    #[test]
    fn logs_far_apart_keep_the_larger() {
        let (low, high) = (
            State {
                out: [5.0; 4],
                lse: -3e4,
            },
            State {
                out: [1.0; 4],
                lse: 3e4,
            },
        );
        assert_eq!(low.merge(high), high);
        assert_eq!(high.merge(low), high);
    }
}

//! ⊕ against its definition in f64, and sinks, infinities and NaN.

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
        // The output of an empty state may be anything.
        let out = if lse == f32::NEG_INFINITY {
            [f32::NAN; 4]
        } else {
            out
        };
        State { out, lse }
    })
}

/// Whether two states agree within rounding, or are both empty.
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
    /// ⊕ adds up the states of a variant without a softmax in any grouping, including states without keys.
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
fn tokens_have_the_same_sinks_or_take_turns() {
    for word in [0, sink_word(1)] {
        assert_eq!(sink_index(word, 4, 7, 3), 3);
    }
    let of_heads = [0, 1, 2, 3, 6].map(|token| sink_index(sink_word(3), 4, token, 1));
    assert_eq!(of_heads, [1, 5, 9, 1, 1]);
    for tokens in 1..=MOST_SINK_TOKENS {
        let word = sink_word(tokens);
        let end = exact_sinks(tokens);
        assert!(end > 65_000);
        for token in (0..5000).chain(end - 5000..end) {
            assert_eq!(
                sink_index(word, 1, token, 0),
                token % tokens,
                "{token} % {tokens}"
            );
        }
    }
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
    assert!((got.out[0] - right.out[0]).abs() < 1e-6 && (got.out[1] - right.out[1]).abs() < 1e-6);
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

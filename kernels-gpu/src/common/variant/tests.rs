//! Hooks of the built-in variants: intervals, caps, and the same formula in f32 and f64.

use core::f32::consts::LOG2_E;

use super::*;

fn at() -> Pair {
    let query = Query {
        token: 0,
        head: 0,
        position: 0,
    };
    Pair::new(&Standard::<false>(params(0.0, i32::MAX, 1)), query, 0)
}

fn params(soft_cap: f32, window_left: i32, causal: u32) -> VariantParams {
    let scale = 0.125;
    VariantParams {
        scale_log2: scale * LOG2_E,
        scale,
        soft_cap,
        window_left,
        causal,
        sink_tokens: 0,
    }
}

#[test]
fn the_interval_is_causal_and_windowed() {
    let keys = |window, causal, position| {
        Standard::<false>(params(0.0, window, causal)).visible_keys(position)
    };
    assert_eq!(keys(i32::MAX, 0, 7).1, i32::MAX);
    assert!(keys(i32::MAX, 0, 7).0 <= 0);
    assert_eq!(keys(i32::MAX, 1, 7).1, 7);
    assert_eq!(keys(3, 1, 7), (4, 7));
    assert_eq!(keys(3, 0, 7), (4, i32::MAX));
    assert_eq!(keys(i32::MAX, 1, -7), (i32::MIN, -7));
}

#[test]
fn the_cap_bounds_logits_and_keeps_small_ones() {
    let variant = Standard::<true>(params(50.0, i32::MAX, 1));
    let natural = |dot: f64| variant.base_2(dot, at()) / f64::from(LOG2_E);
    assert!((natural(1e9) - 50.0).abs() < 1e-5);
    assert!((natural(0.8) - 0.1).abs() < 1e-5);
    assert!((natural(800.0) - 50.0 * 2.0f64.tanh()).abs() < 1e-4);
}

#[test]
fn f32_and_f64_run_the_same_formula() {
    let cap = Standard::<true>(params(30.0, i32::MAX, 1));
    let sigmoid = Sigmoid {
        params: params(0.0, i32::MAX, 1),
        bias: -3.0,
    };
    for step in -200..200 {
        let dot = step as f32 * 3.7;
        let close = |x: f32, y: f64| (f64::from(x) - y).abs() <= 1e-5 * y.abs().max(1.0);
        assert!(
            close(cap.base_2(dot, at()), cap.base_2(f64::from(dot), at())),
            "cap at {dot}"
        );
        assert!(
            close(
                sigmoid.logit(dot, at()).plain(),
                sigmoid.logit(f64::from(dot), at()).plain()
            ),
            "sigmoid at {dot}"
        );
    }
}

#[test]
fn hooks_that_are_not_implemented_are_left_out() {
    const { assert!(!Standard::<false>::TRANSFORMS_LOGITS && Standard::<true>::TRANSFORMS_LOGITS) };
    const { assert!(!Standard::<true>::MASKS && !Standard::<true>::TRANSFORMS_QUERY) };
    const { assert!(!Sigmoid::SOFTMAX) };
}

/// Implements the hooks on logits.
#[derive(Clone, Copy)]
struct Logits;

/// Implements the hooks on rows.
#[derive(Clone, Copy)]
struct Rows;

/// Implements nothing.
#[derive(Clone, Copy)]
struct Nothing;

static NONE: VariantParams = VariantParams {
    scale_log2: 1.0,
    scale: 1.0,
    soft_cap: 0.0,
    window_left: i32::MAX,
    causal: 1,
    sink_tokens: 0,
};

impl Variant for Logits {
    fn params(&self) -> &VariantParams {
        &NONE
    }

    fn unit(&self) -> impl Hook<f32> {
        2.0
    }

    fn logit<R: Real>(&self, dot: R, _: Pair) -> impl Hook<R> {
        dot + dot
    }

    fn logits(&self, dots: [f32; 4], _: [Pair; 4]) -> impl Hook<[f32; 4]> {
        dots.map(|dot| dot + dot)
    }

    fn visible(&self, _: Pair) -> impl Hook<bool> {
        false
    }
}

impl Variant for Rows {
    fn params(&self) -> &VariantParams {
        &NONE
    }

    fn query<R: Real>(&self, x: [R; 2], _: u32, _: Query) -> impl Hook<[R; 2]> {
        x
    }

    fn key<R: Real>(&self, x: [R; 2], _: u32, _: Key) -> impl Hook<[R; 2]> {
        x
    }

    fn value<R: Real>(&self, x: [R; 2], _: u32, _: Key) -> impl Hook<[R; 2]> {
        x
    }

    fn output<R: Real>(&self, x: [R; 2], _: u32, _: Query) -> impl Hook<[R; 2]> {
        x
    }
}

impl Variant for Nothing {
    fn params(&self) -> &VariantParams {
        &NONE
    }
}

/// The constants by which executors and kernels call hooks.
fn called<V: Variant>() -> [bool; 8] {
    [
        V::TRANSFORMS_LOGITS,
        V::MIXES_KEYS,
        V::KEEPS_UNIT,
        V::MASKS,
        V::TRANSFORMS_QUERY,
        V::TRANSFORMS_KEY,
        V::TRANSFORMS_VALUE,
        V::TRANSFORMS_OUTPUT,
    ]
}

#[test]
fn hooks_that_a_variant_implements_are_called_and_no_others() {
    let (on, off) = ([true; 4], [false; 4]);
    assert_eq!(called::<Logits>(), [on, off].concat()[..]);
    assert_eq!(called::<Rows>(), [off, on].concat()[..]);
    assert_eq!(called::<Nothing>(), [off, off].concat()[..]);
    // Constant parameters may decide.
    assert_eq!(called::<Standard<false>>(), [off, off].concat()[..]);
    assert_eq!(
        called::<Standard<true>>(),
        [true, true, true, false, false, false, false, false]
    );
}

#[test]
fn hooks_that_a_variant_does_not_implement_change_nothing() {
    let at = at();
    let query = Query {
        token: 0,
        head: 0,
        position: 0,
    };
    let key = Key {
        position: 0,
        head: 0,
    };
    assert!(Nothing.visible(at).plain());
    assert_eq!(Nothing.logit(3.0_f64, at).plain(), 3.0);
    assert_eq!(
        Nothing.logits([1.0, 2.0, 3.0, 4.0], [at; 4]).plain(),
        [1.0, 2.0, 3.0, 4.0]
    );
    assert_eq!(Nothing.query([1.0, 2.0], 0, query).plain(), [1.0, 2.0]);
    assert_eq!(Nothing.key([1.0, 2.0], 0, key).plain(), [1.0, 2.0]);
    assert_eq!(Nothing.value([1.0, 2.0], 0, key).plain(), [1.0, 2.0]);
    assert_eq!(Nothing.output([1.0, 2.0], 0, query).plain(), [1.0, 2.0]);
}

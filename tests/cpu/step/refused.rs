//! What is refused, and that nothing is written then.

use tandem_attn::{
    Error,
    kv::{AppendScales, KvScales, KvViewMut},
    problem::{Dtype, KvLayout, Spec},
    step::{
        Activation, RmsNorm, Rope, RopeScaling, Sampling, StepError, Yarn,
        cpu::{QkNorm, QkvStep, embed, gate, qkv, rms_norm, sample},
    },
    tensor::ShapeError,
};

#[test]
fn embeddings_that_mean_nothing() {
    let good = Rope::new(64, 1e4);
    let scaled = |scaling| good.with_scaling(scaling);
    let llama = |factor, low, high, original| RopeScaling::Llama3 {
        factor,
        low_freq_factor: low,
        high_freq_factor: high,
        original_positions: original,
    };
    let yarn = Yarn::new(4.0, 4096);
    for (rope, named) in [
        (Rope::new(63, 1e4), "the dimension"),
        (Rope::new(0, 1e4), "the dimension"),
        (Rope::new(64, 1.0), "the base theta"),
        (Rope::new(64, f64::NAN), "the base theta"),
        (scaled(RopeScaling::Linear { factor: 0.0 }), "the factor"),
        (scaled(llama(f64::INFINITY, 1.0, 4.0, 8192)), "the factor"),
        (
            scaled(llama(8.0, 0.0, 4.0, 8192)),
            "the low frequency factor",
        ),
        (
            scaled(llama(8.0, 4.0, 4.0, 8192)),
            "the high frequency factor",
        ),
        (
            scaled(llama(8.0, 1.0, 4.0, 0)),
            "the number of original positions",
        ),
        (
            scaled(RopeScaling::Yarn(Yarn {
                factor: -1.0,
                ..yarn
            })),
            "the factor",
        ),
        (
            scaled(RopeScaling::Yarn(Yarn {
                beta_slow: 0.0,
                ..yarn
            })),
            "beta_slow",
        ),
        (
            scaled(RopeScaling::Yarn(Yarn {
                beta_fast: f64::NAN,
                ..yarn
            })),
            "beta_fast",
        ),
        (
            scaled(RopeScaling::Yarn(Yarn {
                beta_fast: 1.0,
                beta_slow: 32.0,
                ..yarn
            })),
            "beta_fast",
        ),
        (
            scaled(RopeScaling::Yarn(Yarn {
                attention_factor: Some(0.0),
                ..yarn
            })),
            "the magnitude",
        ),
    ] {
        match rope.table() {
            Err(StepError::Rope { what, .. }) => assert_eq!(what, named),
            other => panic!("{rope:?} gave {other:?}"),
        }
    }
    assert!(good.table().is_ok());
}

#[test]
fn samplings_that_mean_nothing() {
    let good = Sampling {
        temperature: 1.0,
        ..Sampling::GREEDY
    };
    for (sampling, named) in [
        (
            Sampling {
                temperature: -1.0,
                ..good
            },
            "the temperature",
        ),
        (
            Sampling {
                temperature: 1e-5,
                ..good
            },
            "the temperature",
        ),
        (
            Sampling {
                temperature: f32::INFINITY,
                ..good
            },
            "the temperature",
        ),
        (
            Sampling {
                temperature: f32::NAN,
                ..good
            },
            "the temperature",
        ),
        (Sampling { top_p: 0.0, ..good }, "top_p"),
        (Sampling { top_p: 1.1, ..good }, "top_p"),
        (
            Sampling {
                min_p: -0.1,
                ..good
            },
            "min_p",
        ),
        (
            Sampling {
                min_p: f32::NAN,
                ..good
            },
            "min_p",
        ),
    ] {
        match sampling.draw(0) {
            Err(StepError::Sampling { what, .. }) => assert_eq!(what, named),
            other => panic!("{sampling:?} gave {other:?}"),
        }
    }
}

/// As it was written, and not as the nearest number of 32 bits is in 64.
#[test]
fn a_wrong_number_of_a_sampling_is_printed_as_it_was_given() {
    let cold = Sampling {
        temperature: 1e-5,
        ..Sampling::GREEDY
    };
    let error = cold.draw(0).unwrap_err().to_string();
    assert!(error.contains("is 0.00001: it must be"), "{error}");
}

/// Two tokens of one head each for queries, keys and values.
fn attempt(
    change: impl FnOnce(&mut Spec, &mut QkvStep<'_, f32>, &mut Vec<u32>, &mut usize),
    scales: AppendScales<'_>,
) -> Error {
    let mut spec = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    let (source, positions) = ([1.0; 2 * 48], [0, 1]);
    let table = Rope::new(16, 1e4).table().unwrap();
    let mut step = QkvStep {
        qkv: &source,
        bias: None,
        norm: None,
        rope: Some((&table, &positions)),
    };
    let (mut slots, mut of_q) = (vec![0, 1], 32);
    change(&mut spec, &mut step, &mut slots, &mut of_q);
    let (mut k, mut v) = ([7.0_f32; 64], [7.0_f32; 64]);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
    let mut q = vec![7.0_f32; of_q];
    let result = qkv(&spec, &step, &slots, &mut q, &mut pool, 1, scales);
    let untouched = q.iter().chain(&k).chain(&v).all(|&x| x == 7.0);
    assert!(untouched, "written before it was refused");
    result.expect_err("it is refused")
}

const ONE: AppendScales<'_> = AppendScales::Given(KvScales::One);

#[test]
fn projections_that_do_not_fit() {
    let length = |error| match error {
        Error::Shape(ShapeError::Length {
            name,
            got,
            expected,
            ..
        }) => (name, got, expected),
        other => panic!("{other:?}"),
    };
    let got = attempt(|_, step, _, _| step.qkv = &step.qkv[1..], ONE);
    assert_eq!(length(got), ("qkv", 95, 96));
    assert_eq!(
        length(attempt(|_, _, _, of_q| *of_q = 31, ONE)),
        ("q", 31, 32)
    );
    let got = attempt(|_, step, _, _| step.bias = Some(&[0.0; 47]), ONE);
    assert_eq!(length(got), ("the bias", 47, 48));
    let norm = QkNorm {
        norm: RmsNorm::new(0.0),
        q: &[1.0; 16],
        k: &[1.0; 15],
    };
    let got = attempt(|_, step, _, _| step.norm = Some(norm), ONE);
    assert_eq!(length(got), ("the weights of keys", 15, 16));
    let got = attempt(
        |_, step, _, _| step.rope = Some((step.rope.unwrap().0, &[0])),
        ONE,
    );
    assert_eq!(length(got), ("positions", 1, 2));

    let got = attempt(|_, _, slots, _| slots[1] = 4, ONE);
    assert!(matches!(
        got,
        Error::IndexOutOfRange {
            array: "slots",
            index: 1,
            got: 4,
            ..
        }
    ));
    let got = attempt(|_, _, slots, _| slots[1] = 0, ONE);
    assert!(matches!(
        got,
        Error::WrittenTwice {
            array: "slots",
            index: 1,
            got: 0
        }
    ));
    let got = attempt(
        |_, _, _, _| {},
        AppendScales::Given(KvScales::Tensor { k: 2.0, v: 1.0 }),
    );
    assert_eq!(got, Error::Shape(ShapeError::Scaled { dtype: Dtype::F32 }));
    let got = attempt(|spec, _, _, _| *spec = spec.with_head_dim_v(8), ONE);
    let heads = StepError::Heads {
        head_dim_qk: 16,
        head_dim_v: 8,
        latent: false,
    };
    assert_eq!(got, Error::Step(heads));
}

#[test]
fn turning_more_than_a_head_has() {
    let table = Rope::new(18, 1e4).table().unwrap();
    let spec = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    let (mut k, mut v, mut q) = ([0.0_f32; 64], [0.0_f32; 64], [0.0; 16]);
    let mut pool = KvViewMut::new(&spec, KvLayout::Nhd, 4, &mut k, &mut v);
    let step = QkvStep {
        qkv: &[1.0; 48],
        bias: None,
        norm: None,
        rope: Some((&table, &[0])),
    };
    let error = qkv(&spec, &step, &[0], &mut q, &mut pool, 1, ONE).unwrap_err();
    assert_eq!(
        error,
        Error::Step(StepError::RopeDim {
            got: 18,
            head_dim: 16
        })
    );
}

#[test]
fn rows_that_do_not_fit() {
    let norm = RmsNorm::new(1e-6);
    let mut out = [7.0_f32; 4];
    let errors = [
        rms_norm(norm, &[1.0; 4], &[1.0; 3], None, &mut out),
        rms_norm(norm, &[1.0; 4], &[], None, &mut out),
        rms_norm(norm, &[1.0; 6], &[1.0; 2], None, &mut out),
        rms_norm(norm, &[1.0; 4], &[1.0; 2], Some(&mut [1.0; 2]), &mut out),
        gate(Activation::Silu, &[1.0; 7], 2, &mut out),
        gate(Activation::Silu, &[1.0; 8], 0, &mut out),
        embed(&[1.0; 6], 2, &[0], 1.0, &mut out),
        embed(&[1.0; 5], 2, &[0, 1], 1.0, &mut out),
        embed(&[1.0; 6], 2, &[0, 3], 1.0, &mut out),
    ];
    for (index, error) in errors.into_iter().enumerate() {
        assert!(error.is_err(), "case {index}");
    }
    assert_eq!(out, [7.0; 4]);
    let draw = Sampling::GREEDY.draw(0).unwrap();
    let mut ids = [7];
    assert!(sample(&[1.0_f32; 4], 0, &[draw], &mut ids).is_err());
    assert!(sample(&[1.0_f32; 4], 3, &[draw], &mut ids).is_err());
    assert!(sample(&[1.0_f32; 4], 4, &[draw; 2], &mut ids).is_err());
    assert_eq!(ids, [7]);
}

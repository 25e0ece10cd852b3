//! What is refused before anything is launched.

use tandem_attn::{
    Error,
    exec::gpu::{
        AppendScales, DeviceArray, DeviceTensor, KvPool, KvScales, QkNorm, QkvStep, Stream,
    },
    problem::{Dtype, KvLayout, ProblemError, Spec},
    step::{Activation, RmsNorm, Rope, StepError},
    tensor::ShapeError,
};

use super::common;

/// Nothing is there: a launch would fail.
const NOWHERE: u64 = 1 << 40;

struct Call<'a> {
    spec: Spec,
    step: QkvStep<'a>,
    slots: DeviceArray<u32>,
    q: DeviceTensor<3>,
    pool: KvPool,
    scales: AppendScales,
}

#[test]
fn projections_that_do_not_fit() {
    let Some(gpu) = common::gpu("projections_that_do_not_fit") else {
        return;
    };
    let rope = gpu.rope(&Rope::new(64, 1e4).table().unwrap()).unwrap();
    let bf16 = Dtype::BF16;
    let attempt = |change: &dyn Fn(&mut Call<'_>)| {
        let spec = Spec::new(4, 2, 32);
        let mut call = Call {
            step: QkvStep {
                qkv: DeviceTensor::new(NOWHERE, bf16, [5, 256]),
                bias: None,
                norm: None,
                rope: None,
            },
            slots: DeviceArray::new(NOWHERE, 5),
            q: DeviceTensor::new(NOWHERE, bf16, [5, 4, 32]),
            pool: KvPool::new(&spec, KvLayout::Nhd, 16, 1, NOWHERE, NOWHERE),
            scales: AppendScales::Given,
            spec,
        };
        change(&mut call);
        let Call {
            spec,
            step,
            slots,
            q,
            pool,
            scales,
        } = call;
        // SAFETY: refused before anything is launched.
        unsafe { gpu.qkv_step(&spec, &step, slots, &q, &pool, scales, Stream::DEFAULT) }
            .expect_err("it is refused")
    };
    let extent = |error| match error {
        Error::Extent { tensor, got, .. } => (tensor, got),
        other => panic!("{other:?}"),
    };
    assert_eq!(extent(attempt(&|c| c.slots.len = 4)), ("qkv", 5));
    assert_eq!(
        extent(attempt(&|c| c.step.qkv.shape[1] = 248)),
        ("qkv", 248)
    );
    assert_eq!(extent(attempt(&|c| c.q.shape[1] = 3)), ("q", 3));
    let bias = DeviceTensor::new(NOWHERE, bf16, [128]);
    assert_eq!(
        extent(attempt(&|c| c.step.bias = Some(bias))),
        ("the bias", 128)
    );
    let weights = DeviceTensor::new(NOWHERE, bf16, [64]);
    let norm = QkNorm {
        norm: RmsNorm::new(0.0),
        q: weights,
        k: weights,
    };
    let got = extent(attempt(&|c| c.step.norm = Some(norm)));
    assert_eq!(got, ("the weights of queries", 64));
    let short = DeviceTensor::new(NOWHERE, bf16, [5, 4, 32]).with_stride(0, 132);
    let got = attempt(&|c| c.q = short);
    assert!(
        matches!(
            got,
            Error::Stride {
                tensor: "q",
                got: 132,
                ..
            }
        ),
        "{got:?}"
    );
    let got = attempt(&|c| c.step.qkv.address += 8);
    assert!(
        matches!(got, Error::Misaligned { tensor: "qkv", .. }),
        "{got:?}"
    );
    let got = attempt(&|c| c.q.dtype = Dtype::F16);
    assert!(
        matches!(got, Error::DtypesDiffer { tensor: "q", .. }),
        "{got:?}"
    );
    let got = attempt(&|c| c.step.qkv.dtype = Dtype::F32);
    assert!(matches!(got, Error::Dtype { tensor: "qkv", .. }), "{got:?}");
    let got = attempt(&|c| c.pool.dtype = Dtype::F16);
    assert!(
        matches!(
            got,
            Error::DtypesDiffer {
                tensor: "the KV pool",
                ..
            }
        ),
        "{got:?}"
    );
    let got = attempt(&|c| c.scales = AppendScales::Computed);
    assert!(matches!(got, Error::NoInstance { .. }), "{got:?}");
    let scale = DeviceTensor::new(NOWHERE, Dtype::F32, [1]);
    let got = attempt(&|c| c.pool.scales = KvScales::Tensor { k: scale, v: scale });
    assert_eq!(got, Error::Shape(ShapeError::Scaled { dtype: bf16 }));
    let got = attempt(&|c| c.spec = c.spec.with_head_dim_v(64));
    assert!(
        matches!(got, Error::Step(StepError::Heads { .. })),
        "{got:?}"
    );
    // All tensors fit a specification without keys and values, or without queries.
    let heads = |q_heads, kv_heads| {
        let got = attempt(&|c| {
            (c.spec.q_heads, c.spec.kv_heads) = (q_heads, kv_heads);
            let row = (q_heads + 2 * kv_heads) as usize * 32;
            c.step.qkv = DeviceTensor::new(NOWHERE, bf16, [5, row]);
            c.q = DeviceTensor::new(NOWHERE, bf16, [5, q_heads as usize, 32]);
        });
        assert_eq!(
            got,
            Error::Problem(ProblemError::GroupSize { q_heads, kv_heads })
        );
    };
    heads(4, 0);
    heads(0, 2);
    let got = attempt(&|c| c.spec = Spec::new(4, 2, 40));
    assert!(
        matches!(
            got,
            Error::HeadDim {
                got: 40,
                multiple: 16,
                ..
            }
        ),
        "{got:?}"
    );
    // More than a head is turned.
    let positions = DeviceArray::new(NOWHERE, 5);
    let spec = Spec::new(4, 2, 32);
    let step = QkvStep {
        qkv: DeviceTensor::new(NOWHERE, bf16, [5, 256]),
        bias: None,
        norm: None,
        rope: Some((&rope, positions)),
    };
    let q = DeviceTensor::new(NOWHERE, bf16, [5, 4, 32]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 1, NOWHERE, NOWHERE);
    let (slots, given) = (DeviceArray::new(NOWHERE, 5), AppendScales::Given);
    // SAFETY: refused before anything is launched.
    let got = unsafe { gpu.qkv_step(&spec, &step, slots, &q, &pool, given, Stream::DEFAULT) };
    let too_many = StepError::RopeDim {
        got: 64,
        head_dim: 32,
    };
    assert_eq!(got, Err(Error::Step(too_many)));
    let odd = gpu
        .rope(&Rope::new(24, 1e4).table().unwrap())
        .expect_err("it is refused");
    assert!(
        matches!(
            odd,
            Error::NoInstance {
                kernel: "qkv_step",
                ..
            }
        ),
        "{odd:?}"
    );
}

#[test]
fn rows_that_do_not_fit() {
    let Some(gpu) = common::gpu("rows_that_do_not_fit") else {
        return;
    };
    let tensor = |dtype, shape| DeviceTensor::<2>::new(NOWHERE, dtype, shape);
    let (x, stream) = (tensor(Dtype::BF16, [2, 64]), Stream::DEFAULT);
    let weight = |width| DeviceTensor::<1>::new(NOWHERE, Dtype::BF16, [width]);
    let norm = RmsNorm::new(0.0);
    let long = tensor(Dtype::BF16, [2, 32_776]);
    let ids = |len| DeviceArray::new(NOWHERE, len);
    // SAFETY: refused before anything is launched.
    let refused = unsafe {
        [
            gpu.rms_norm(norm, &x, &weight(56), None, &x, stream),
            gpu.rms_norm(
                norm,
                &x,
                &weight(64),
                None,
                &tensor(Dtype::F16, [2, 64]),
                stream,
            ),
            gpu.rms_norm(
                norm,
                &x,
                &weight(64),
                Some(&tensor(Dtype::BF16, [1, 64])),
                &x,
                stream,
            ),
            gpu.rms_norm(norm, &long, &weight(32_776), None, &long, stream),
            gpu.gate(Activation::Silu, &x, &x, stream),
            gpu.gate(Activation::Silu, &tensor(Dtype::F32, [2, 128]), &x, stream),
            gpu.embed(&x, ids(3), 1.0, &x, stream),
            gpu.embed(&tensor(Dtype::BF16, [2, 56]), ids(2), 1.0, &x, stream),
            gpu.sample(&x, DeviceArray::new(NOWHERE, 2), ids(1), stream),
            gpu.sample(&x, DeviceArray::new(NOWHERE, 1), ids(2), stream),
            gpu.sample(
                &x.with_stride(0, 68),
                DeviceArray::new(NOWHERE, 2),
                ids(2),
                stream,
            ),
            gpu.sample(
                &tensor(Dtype::F8E4M3, [2, 64]),
                DeviceArray::new(NOWHERE, 2),
                ids(2),
                stream,
            ),
            gpu.sample(
                &tensor(Dtype::F32, [2, 400_000]),
                DeviceArray::new(NOWHERE, 2),
                ids(2),
                stream,
            ),
        ]
    };
    for (index, result) in refused.into_iter().enumerate() {
        let error = result.expect_err("it is refused");
        assert!(
            !matches!(error, Error::Driver { .. }),
            "call {index}: {error:?}"
        );
    }
}

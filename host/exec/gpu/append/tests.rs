use super::*;
use crate::problem::{Dtype, KvLayout, ProblemError};

const A: u64 = 1 << 20;

struct Call {
    spec: Spec,
    pool: KvPool,
    slots: DeviceArray<u32>,
    k: DeviceTensor<3>,
    v: DeviceTensor<3>,
}

impl Call {
    fn good() -> Self {
        let spec = Spec::new(8, 4, 128).with_head_dim_v(64);
        Self {
            pool: KvPool::new(&spec, KvLayout::Hnd, 16, 100, A, A),
            slots: DeviceArray::new(A, 5),
            k: DeviceTensor::new(A, Dtype::BF16, [5, 4, 128]),
            v: DeviceTensor::new(A, Dtype::BF16, [5, 4, 64]).with_stride(0, 6144),
            spec,
        }
    }

    fn check(&self) -> Result<(AppendParams, u32), Error> {
        parameters(&self.spec, &self.pool, self.slots, &self.k, &self.v)
    }
}

#[test]
fn a_good_call_becomes_parameters() {
    let (params, vector) = Call::good().check().unwrap();
    assert_eq!(
        (vector, params.pool_slots, params.page_size.get()),
        (16, 1600, 16)
    );
    assert_eq!(
        (params.k.vectors, params.k.source_token, params.k.head),
        (5 * 64, 64, 16 * 16)
    );
    assert_eq!(
        (params.v.vectors, params.v.source_token, params.v.page),
        (5 * 32, 768, 16 * 32)
    );
    assert_eq!(
        (
            params.k.vectors_per_token.get(),
            params.k.vectors_per_head.get()
        ),
        (64, 16)
    );
}

#[test]
fn heads_that_follow_each_other_are_one_row() {
    let mut call = Call::good();
    call.pool = KvPool::new(&call.spec, KvLayout::Nhd, 16, 100, A, A);
    assert_eq!(call.check().unwrap().0.k.vectors_per_head.get(), 64);
    call.k = DeviceTensor::new(A, Dtype::BF16, [5, 4, 128]).with_stride(1, 256);
    assert_eq!(call.check().unwrap().0.k.vectors_per_head.get(), 16);
}

#[test]
fn rows_that_are_not_on_16_bytes_are_copied_by_8() {
    let mut call = Call::good();
    call.k.address = A + 8;
    assert_eq!(call.check().unwrap().1, 8);
    call.k.address = A + 4;
    assert!(matches!(
        call.check(),
        Err(Error::Misaligned {
            tensor: "k",
            align: 8,
            ..
        })
    ));

    let spec = Spec::new(2, 2, 72).with_dtype(Dtype::F8E4M3);
    let tensor = DeviceTensor::new(A, Dtype::F8E4M3, [5, 2, 72]);
    let call = Call {
        pool: KvPool::new(&spec, KvLayout::Nhd, 3, 100, A, A),
        k: tensor,
        v: tensor,
        spec,
        ..Call::good()
    };
    let (params, vector) = call.check().unwrap();
    assert_eq!((vector, params.k.vectors_per_token.get()), (8, 18));
}

#[test]
fn each_thing_that_is_wrong_has_its_error() {
    use Error::{DtypesDiffer, Extent, HeadDim, NullPointer, Problem, Stride};
    let broken = |change: &dyn Fn(&mut Call)| {
        let mut call = Call::good();
        change(&mut call);
        call.check().unwrap_err()
    };
    assert!(matches!(
        broken(&|c| c.k.dtype = Dtype::F16),
        DtypesDiffer { tensor: "k", .. }
    ));
    assert!(matches!(
        broken(&|c| c.v.dtype = Dtype::F32),
        DtypesDiffer { tensor: "v", .. }
    ));
    // Values would be written over the keys.
    let latent = broken(&|c| c.spec.latent = true);
    assert!(latent.to_string().contains("append_rows"), "{latent}");
    // A pool of 8 bits needs another call, which the error names.
    let narrow = broken(&|c| {
        c.spec.kv_dtype = Dtype::F8E4M3;
        c.pool.dtype = Dtype::F8E4M3;
    });
    assert!(narrow.to_string().contains("append_quantised"), "{narrow}");
    assert!(matches!(
        broken(&|c| c.pool.dtype = Dtype::F16),
        DtypesDiffer {
            tensor: "the KV pool",
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.slots.len = 4),
        Extent {
            tensor: "k",
            got: 5,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.v.shape[0] = 4),
        Extent {
            tensor: "v",
            got: 4,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.k.shape[1] = 8),
        Extent {
            tensor: "k",
            got: 8,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.v.shape[2] = 128),
        Extent {
            tensor: "v",
            got: 128,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| (c.spec.kv_heads, c.k.shape[1]) = (0, 0)),
        Extent { got: 0, .. }
    ));
    assert!(matches!(
        broken(&|c| (c.spec.head_dim_qk, c.k.shape[2]) = (100, 100)),
        HeadDim { got: 100, .. }
    ));
    assert!(matches!(
        broken(&|c| c.k.strides[2] = 2),
        Stride {
            tensor: "k",
            got: 2,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.v.strides[0] = 6142),
        Stride {
            tensor: "v",
            got: 6142,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.pool.k_strides.token = 126),
        Stride {
            tensor: "the key pool",
            got: 126,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.k.address = 0),
        NullPointer { tensor: "k" }
    ));
    assert!(matches!(
        broken(&|c| c.pool.v = 0),
        NullPointer {
            tensor: "the value pool"
        }
    ));
    assert!(matches!(
        broken(&|c| c.slots.address = 0),
        NullPointer { tensor: "slots" }
    ));
    assert!(matches!(
        broken(&|c| c.pool.k_strides.page_size = 0),
        Problem(ProblemError::PageSize { got: 0, .. })
    ));
    assert!(matches!(
        broken(&|c| c.pool.k_strides.page_size = 4097),
        Problem(ProblemError::PageSize { got: 4097, .. })
    ));
    assert!(matches!(
        broken(&|c| c.pool.v_strides.page_size = 8),
        Extent {
            tensor: "the value pool",
            got: 8,
            ..
        }
    ));
    assert!(matches!(
        broken(&|c| c.pool.pages = u32::MAX),
        Problem(ProblemError::TooLarge { .. })
    ));
    // Rows that overlap would be written in any order.
    for (change, pool) in [
        (
            (|pool| pool.k_strides.token = 0) as fn(&mut KvPool),
            "the key pool",
        ),
        (|pool| pool.v_strides.head = 64, "the value pool"),
        (|pool| pool.v_strides.page = 8, "the value pool"),
    ] {
        let error = broken(&|call| change(&mut call.pool));
        let named = matches!(&error, Stride { tensor, .. } if *tensor == pool);
        assert!(named, "{error}");
        assert!(error.to_string().contains("no two rows overlap"), "{error}");
    }
}

#[test]
fn no_tokens_need_no_memory() {
    let mut call = Call::good();
    call.slots = DeviceArray::new(0, 0);
    (call.k.shape[0], call.k.address) = (0, 0);
    (call.v.shape[0], call.v.address) = (0, 0);
    assert_eq!(call.check().unwrap().0.k.vectors, 0);
}

#[test]
fn rows_of_one_tensor_have_the_parameters_that_both_have() {
    let pairs = |a: &AppendParams| bytemuck::bytes_of(&a.k).to_vec();
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let mut call = Call::good();
        call.pool = KvPool::new(&call.spec, layout, 16, 100, A, A);
        let (both, vector) = call.check().unwrap();
        let pool = match layout {
            KvLayout::Nhd => DeviceTensor::new(A, Dtype::BF16, [100, 16, 4, 128]),
            KvLayout::Hnd => DeviceTensor::new(A, Dtype::BF16, [100, 16, 4, 128])
                .with_stride(1, 128)
                .with_stride(2, 16 * 128),
        };
        let (one, one_vector) = row_parameters(&call.k, call.slots, &pool).unwrap();
        assert_eq!((pairs(&one), one_vector), (pairs(&both), vector));
        assert_eq!((one.slots, one.pool_slots), (both.slots, both.pool_slots));
        assert_eq!(one.page_size.get(), 16);
    }
}

#[test]
fn rows_that_do_not_fit_their_pool_are_refused() {
    let call = Call::good();
    let pool = DeviceTensor::new(A, Dtype::BF16, [100, 16, 4, 128]);
    let check = |pool: &DeviceTensor<4>| row_parameters(&call.k, call.slots, pool).unwrap_err();
    let with_shape = |shape| check(&DeviceTensor::new(A, Dtype::BF16, shape));
    let heads = with_shape([100, 16, 2, 128]);
    assert!(heads.to_string().contains("rows has 4 KV heads"), "{heads}");
    let pages = with_shape([100, 4097, 4, 128]);
    assert!(matches!(
        pages,
        Error::Problem(ProblemError::PageSize { got: 4097, .. })
    ));
    let apart = check(&pool.with_stride(3, 2));
    assert!(matches!(apart, Error::Stride { got: 2, .. }), "{apart:?}");
    let over = check(&pool.with_stride(1, 0));
    assert!(matches!(over, Error::Stride { got: 0, .. }), "{over:?}");
    let null = check(&DeviceTensor { address: 0, ..pool });
    assert!(
        matches!(null, Error::NullPointer { tensor: "the pool" }),
        "{null:?}"
    );
    let far = check(&pool.with_stride(0, 1 << 40));
    assert!(
        matches!(far, Error::Problem(ProblemError::TooLarge { .. })),
        "{far:?}"
    );
    let half = check(&DeviceTensor {
        dtype: Dtype::F16,
        ..pool
    });
    assert!(
        matches!(half, Error::DtypesDiffer { tensor: "rows", .. }),
        "{half:?}"
    );
}

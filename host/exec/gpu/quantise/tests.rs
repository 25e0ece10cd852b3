//! A pool of 8 bits is checked against the specification and the keys.

use super::*;
use crate::problem::KvLayout;

const A: u64 = 1 << 20;

fn check(spec: &Spec, pool: &KvPool) -> Result<QuantiseParams, Error> {
    let [k, v] = [spec.head_dim_qk, spec.head_dim_v]
        .map(|dim| DeviceTensor::new(A, Dtype::BF16, [5, 4, dim as usize]));
    let slots = DeviceArray::new(A, 5);
    parameters(spec, pool, AppendScales::Given, slots, [&k, &v])
}

/// The kernel takes a single number of tokens, and writes the pool's type.
#[test]
fn a_pool_is_as_the_specification_and_the_keys_say() {
    let spec = Spec::new(8, 4, 128).with_kv_dtype(Dtype::F8E4M3);
    let good = KvPool::new(&spec, KvLayout::Hnd, 16, 100, A, A);
    assert_eq!(check(&spec, &good).unwrap().pool_slots, 1600);

    let of_32 = KvLayout::Hnd.strides(32, 4, 128);
    let mixed = good.with_strides(good.k_strides, of_32);
    let error = check(&spec, &mixed).unwrap_err().to_string();
    let said = "the value pool has 32 tokens in a page: it must be 16, as in the key pool";
    assert_eq!(error, said);

    let error = check(&spec.with_kv_dtype(Dtype::F8E5M2), &good);
    assert!(
        matches!(
            error,
            Err(Error::DtypesDiffer {
                got: Dtype::F8E4M3,
                ..
            })
        ),
        "{error:?}"
    );

    // Zero is a multiple of 8.
    let nowhere = KvPool { v: 0, ..good };
    let tensor = "the value pool";
    assert_eq!(check(&spec, &nowhere), Err(Error::NullPointer { tensor }));
    let odd = KvPool { k: A + 4, ..good };
    let error = check(&spec, &odd).unwrap_err().to_string();
    assert!(
        error.starts_with("the key pool starts at 0x100004"),
        "{error}"
    );
}

/// Values would be written over the keys.
#[test]
fn latent_keys_are_appended_without_values() {
    let mut spec = Spec::new(8, 4, 128).with_kv_dtype(Dtype::F8E4M3);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 100, A, A);
    assert!(check(&spec, &pool).is_ok());
    spec.latent = true;
    let error = check(&spec, &pool).unwrap_err();
    assert!(matches!(error, Error::NoInstance { .. }), "{error:?}");
    assert!(
        error.to_string().contains("append_rows_quantised"),
        "{error}"
    );
}

/// Two of them would be one number, whichever warp writes last.
#[test]
fn scales_that_are_written_do_not_overlap() {
    let spec = Spec::new(4, 2, 64).with_kv_dtype(Dtype::F8E4M3);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 3, 1 << 20, 1 << 21);
    let dense = DeviceTensor::new(1 << 22, Dtype::F32, [3, 16, 2]);
    let overlapping = dense.with_stride(1, 1);
    let mode_of = |k, v, scales| mode(scales, &pool.with_scales(KvScales::Token { k, v }));
    assert_eq!(mode_of(dense, dense, AppendScales::Computed), Ok(COMPUTED));
    let refused = mode_of(dense, overlapping, AppendScales::Computed);
    assert!(
        matches!(
            refused,
            Err(Error::Stride {
                tensor: VALUES,
                dimension: "heads",
                ..
            })
        ),
        "{refused:?}"
    );
    // One scale for all heads may be read.
    let given = mode_of(dense, dense.with_stride(2, 0), AppendScales::Given);
    assert_eq!(given, Ok(GIVEN_BY_TOKEN));
}

/// The scales that an append computes need a place for each token.
#[test]
fn computed_scales_are_those_of_tokens() {
    let spec = Spec::new(4, 2, 64).with_kv_dtype(Dtype::F8E4M3);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 3, A, A);
    let of_heads = DeviceTensor::new(A, Dtype::F32, [2]);
    let (k, v) = (of_heads, of_heads);
    for scales in [KvScales::One, KvScales::Head { k, v }] {
        let [keys, values] = [(); 2].map(|()| DeviceTensor::new(A, Dtype::BF16, [5, 2, 64]));
        let refused = |scales_of, pool: &KvPool| {
            parameters(
                &spec,
                pool,
                scales_of,
                DeviceArray::new(A, 5),
                [&keys, &values],
            )
        };
        let pool = pool.with_scales(scales);
        assert!(refused(AppendScales::Given, &pool).is_ok(), "{scales:?}");
        let error = refused(AppendScales::Computed, &pool).unwrap_err();
        assert!(
            matches!(
                error,
                Error::NoInstance {
                    kernel: "append",
                    ..
                }
            ),
            "{error:?}"
        );
        assert!(error.to_string().contains("KvScales::Token"), "{error}");
    }
}

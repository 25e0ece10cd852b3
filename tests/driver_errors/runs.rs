//! Runs of plans: what is wrong is refused before anything is launched, and layers share what was made for the first.

use std::{ffi::c_void, mem, ptr::NonNull};

use tandem_attn::{
    Error,
    exec::gpu::{DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, Stream, Workspace},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    step::Rope,
    tensor::ShapeError,
};

use crate::driver::{launches, planned, with_driver, with_young_driver, workspace};

#[test]
fn a_run_is_refused_before_anything_is_launched() {
    if !with_driver(a_run_is_refused_before_anything_is_launched, "threads=1024") {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = |spec: &Spec| {
        let mut table = PageTable::new(16, 20);
        table.push(&[7, 3], 20);
        table.push(&[1, 2, 4, 5, 6, 8], 90);
        let batch = Batch::new(vec![0, 1, 41], table);
        planned(&gpu, spec, &batch)
    };
    let whole = plan(&spec);
    let mut workspace = workspace(&gpu, &whole);
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [41, 8, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
    let stream = Stream::DEFAULT;
    let run = |workspace: &mut Workspace, q: &DeviceTensor<3>, pools: &[KvPool]| {
        // SAFETY: nothing is there to be touched.
        unsafe { gpu.run(workspace, q, pools, q, None, stream) }
    };
    assert_eq!(run(&mut workspace, &q, &[pool]), Err(Error::NoPlan));
    // SAFETY: as above.
    let error = unsafe { workspace.upload(&plan(&Spec::new(4, 2, 128)), stream) }.unwrap_err();
    assert!(matches!(error, Error::OtherSpec { .. }), "{error}");
    // SAFETY: as above.
    unsafe { workspace.upload(&whole, stream) }.unwrap();
    let error = run(&mut workspace, &q, &[]).unwrap_err();
    let (got, expected) = (0, 1);
    assert_eq!(error, Error::Pools { got, expected });
    let mut few = pool;
    few.pages = 8;
    let error = run(&mut workspace, &q, &[few]).unwrap_err();
    assert!(error.to_string().contains("at least 9"), "{error}");
    let mut eight_bits = pool;
    eight_bits.dtype = Dtype::F8E4M3;
    let error = run(&mut workspace, &q, &[eight_bits]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the KV pool is F8E4M3 and the spec's KV is BF16: convert one of them"
    );
    let one_row = KvPool::latent(&spec, 16, 20, 1 << 30);
    let error = run(&mut workspace, &q, &[one_row]).unwrap_err();
    let (part, kv_heads) = (0, 2);
    assert_eq!(error, ShapeError::OneHead { part, kv_heads }.into());
    let f16 = DeviceTensor::new(1 << 30, Dtype::F16, [41, 8, 128]);
    let error = run(&mut workspace, &f16, &[pool]).unwrap_err();
    assert!(matches!(error, Error::DtypesDiffer { .. }), "{error}");
    // This driver knows no tensor maps: all launches are checked before the first is made.
    let error = run(&mut workspace, &q, &[pool]).unwrap_err();
    assert!(matches!(error, Error::OldDriver { .. }), "{error}");
    assert_eq!(launches(), 0);
}

/// By decodes alone and by prefills alone, whose kernels have checks of their own.
/// Prefills read copies of keys that were turned, and asked nobody whether the pool itself has scales.
#[test]
fn scales_of_16_bits_are_refused_where_keys_are_turned() {
    if !with_young_driver(scales_of_16_bits_are_refused_where_keys_are_turned) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let plain = Spec::new(8, 2, 128);
    let turned = plain.with_rotary(Rope::new(128, 1e4));
    for (spec, queries) in [(plain, 160), (turned, 160), (turned, 1)] {
        let mut table = PageTable::new(16, 20);
        table.push(&(0..10).collect::<Vec<_>>(), 160);
        let plan = planned(&gpu, &spec, &Batch::new(vec![0, queries], table));
        let mut workspace = workspace(&gpu, &plan);
        let q = DeviceTensor::new(1 << 30, Dtype::BF16, [queries as usize, 8, 128]);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 33, 1 << 34);
        let of_heads = DeviceTensor::new(1 << 35, Dtype::F32, [2]);
        let (k, v) = (of_heads, of_heads);
        let scaled = pool.with_scales(KvScales::Head { k, v });
        // SAFETY: the fake driver follows no address.
        unsafe {
            workspace.upload(&plan, Stream::DEFAULT).unwrap();
            let mut run = |pool| gpu.run(&mut workspace, &q, &[pool], &q, None, Stream::DEFAULT);
            let error = run(scaled).expect_err(&format!("{spec:?}"));
            assert!(
                matches!(error, Error::Shape(ShapeError::Scaled { .. })),
                "{error}"
            );
            run(pool).unwrap();
        }
    }
}

#[test]
fn outputs_do_not_overlap_and_log_sums_are_floats() {
    if !with_young_driver(outputs_do_not_overlap_and_log_sums_are_floats) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    for queries in [1, 40] {
        let mut table = PageTable::new(16, 20);
        table.push(&[1, 2, 4, 5, 6, 8], 90);
        table.push(&[7, 3, 9, 10, 11], 80);
        let batch = Batch::new(vec![0, queries, 2 * queries], table);
        let plan = planned(&gpu, &spec, &batch);
        let mut workspace = workspace(&gpu, &plan);
        let stream = Stream::DEFAULT;
        // SAFETY: nothing is there to be touched.
        unsafe { workspace.upload(&plan, stream) }.unwrap();
        let tokens = 2 * queries as usize;
        let right = DeviceTensor::new(1 << 30, Dtype::BF16, [tokens, 8, 128]);
        let lse = DeviceTensor::new(1 << 31, Dtype::F32, [tokens, 8]);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 30, 1 << 30);
        let mut run = |pool: KvPool, out: &DeviceTensor<3>, lse: &DeviceTensor<2>| {
            // SAFETY: as above.
            unsafe { gpu.run(&mut workspace, &right, &[pool], out, Some(lse), stream) }
        };
        let before = launches();
        for stride in [0, 8 * 128 - 8] {
            let error = run(pool, &right.with_stride(0, stride), &lse).unwrap_err();
            assert!(
                matches!(error, Error::Stride { tensor: "out", .. }),
                "{error}"
            );
        }
        let half = DeviceTensor {
            dtype: Dtype::F16,
            ..lse
        };
        let error = run(pool, &right, &half).unwrap_err();
        assert!(
            matches!(error, Error::Dtype { tensor: "lse", .. }),
            "{error}"
        );
        let mut other = pool;
        other.v_strides.page_size = 32;
        let error = run(other, &right, &lse).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("32") && text.contains("16, as in the plan"),
            "{text}"
        );
        assert_eq!(launches(), before);
        run(pool, &right, &lse).unwrap();
    }
}

/// From layer to layer only addresses change: launches are made once, and tensor maps once for each tensor.
#[test]
fn layers_share_what_was_made_for_the_first() {
    if !with_young_driver(layers_share_what_was_made_for_the_first) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(32, 8, 128);
    let mut table = PageTable::new(16, 400);
    table.push(&(0..100).collect::<Vec<_>>(), 1600);
    table.push(&(100..400).collect::<Vec<_>>(), 4800);
    let batch = Batch::new(vec![0, 1, 301], table);
    let plan = planned(&gpu, &spec, &batch);
    let mut workspace = workspace(&gpu, &plan);
    let stream = Stream::DEFAULT;
    // SAFETY: nothing is there to be touched, here and below.
    unsafe { workspace.upload(&plan, stream) }.unwrap();
    let symbol = |name| libcuda::symbol(name).unwrap();
    // SAFETY: the types are those of the functions in the fake driver.
    let (encodes, word) = unsafe {
        (
            mem::transmute::<NonNull<c_void>, extern "C" fn() -> i32>(symbol(c"fake_encodes")),
            mem::transmute::<NonNull<c_void>, extern "C" fn(usize) -> u64>(symbol(
                c"fake_first_word",
            )),
        )
    };
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [301, 32, 128]);
    let pool = |layer: u64| {
        let [k, v] = [2 * layer, 2 * layer + 1].map(|at| (1 << 33) + at * (1 << 24));
        KvPool::new(&spec, KvLayout::Nhd, 16, 400, k, v)
    };
    let mut run = |q: &DeviceTensor<3>, layer: u64| {
        let before = (encodes(), launches());
        let done = unsafe { gpu.run(&mut workspace, q, &[pool(layer)], q, None, stream) };
        let after = (encodes(), launches());
        done.map(|()| (after.0 - before.0, after.1 - before.1))
    };
    let merging = usize::from(!plan.merges.is_empty());
    let count = (plan.groups.len() + merging) as i32;
    let (made, launched) = run(&q, 0).unwrap();
    // Outputs lie where the queries do, and pages are described to prefill as they are to decode.
    assert!(plan.groups.len() == 2 && made == 3, "{made} maps, {plan}");
    assert_eq!(launched, count);
    // Another layer has other keys and values.
    assert_eq!(run(&q, 1), Ok((2, count)));
    assert_eq!(run(&q, 0), Ok((0, count)));
    assert_eq!(run(&q, 1), Ok((0, count)));
    // The prefill's first parameter is the map of the queries, decode's that of the keys.
    let words_are_of = |layer, q: &DeviceTensor<3>| {
        let words: Vec<_> = (0..count as usize).map(|back| word(back)).collect();
        let both = [pool(layer).k, q.address];
        assert!(both.iter().all(|at| words.contains(at)), "{words:?}");
    };
    words_are_of(1, &q);
    let other = DeviceTensor {
        address: q.address + 4096,
        ..q
    };
    run(&other, 0).unwrap();
    words_are_of(0, &other);
    // What is wrong with an address is said as it is the first time, and nothing is launched.
    let odd = DeviceTensor {
        address: q.address + 2,
        ..q
    };
    let before = launches();
    let wrong = run(&odd, 0).unwrap_err();
    assert!(matches!(wrong, Error::Misaligned { .. }), "{wrong}");
    assert_eq!(launches(), before);
    assert_eq!(run(&q, 0).unwrap().1, count);

    let runs = 20_000;
    let start = std::time::Instant::now();
    for layer in 0..runs {
        run(&q, layer % 32).unwrap();
    }
    let each = start.elapsed().as_nanos() as u64 / runs;
    println!("{each} ns of host time a run of {count} launches");
    assert!(each < 100_000, "{each} ns");
}

/// One request of 20 keys.
#[test]
fn scales_that_do_not_fit_are_refused_before_anything_is_launched() {
    if !with_young_driver(scales_that_do_not_fit_are_refused_before_anything_is_launched) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let address = 1 << 30;
    let run = |dtype: Dtype, scales| {
        // Kernels with a soft cap take no scales of each token.
        let cap = matches!(scales, KvScales::Token { .. }).then_some(30.0);
        let mut spec = Spec::new(8, 2, 128).with_kv_dtype(dtype);
        spec.variant.soft_cap = cap;
        let mut table = PageTable::new(16, 2);
        table.push(&[1, 0], 20);
        let plan = planned(&gpu, &spec, &Batch::new(vec![0, 1], table));
        let mut workspace = workspace(&gpu, &plan);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 2, address, address).with_scales(scales);
        let q = DeviceTensor::new(address, Dtype::BF16, [1, 8, 128]);
        let before = launches();
        // SAFETY: the fake driver follows no address.
        let ran = unsafe {
            workspace.upload(&plan, Stream::DEFAULT).unwrap();
            gpu.run(&mut workspace, &q, &[pool], &q, None, Stream::DEFAULT)
        };
        (ran, launches() - before)
    };
    let error = |dtype, scales| {
        let (refused, launched) = run(dtype, scales);
        assert_eq!(launched, 0, "{scales:?}");
        refused.expect_err("the scales are wrong")
    };
    let one = |len: usize| DeviceTensor::new(address, Dtype::F32, [len]);
    let heads = |k: DeviceTensor<1>, v: DeviceTensor<1>| KvScales::Head { k, v };
    let e4m3 = Dtype::F8E4M3;
    let (ran, launched) = run(e4m3, heads(one(2), one(2)));
    assert!(ran.is_ok() && launched > 0, "{ran:?}");
    assert!(matches!(
        error(e4m3, heads(one(3), one(2))),
        Error::Extent { got: 3, .. }
    ));
    assert!(matches!(
        error(e4m3, heads(one(2), one(1))),
        Error::Extent { got: 1, .. }
    ));
    let missing = DeviceTensor::new(0, Dtype::F32, [2]);
    assert!(matches!(
        error(e4m3, heads(one(2), missing)),
        Error::NullPointer { .. }
    ));
    let odd = DeviceTensor::new(address + 2, Dtype::F32, [2]);
    assert!(matches!(
        error(e4m3, heads(odd, one(2))),
        Error::Misaligned { .. }
    ));
    let narrow = DeviceTensor::new(address, Dtype::BF16, [2]);
    assert!(matches!(
        error(e4m3, heads(narrow, one(2))),
        Error::Dtype { .. }
    ));
    let by_token = DeviceTensor::new(address, Dtype::F32, [2, 16, 2]);
    let by_token = KvScales::Token {
        k: by_token,
        v: by_token,
    };
    assert!(matches!(error(e4m3, by_token), Error::NoInstance { .. }));
    let by_request = |requests: usize| {
        let of = |requests| DeviceTensor::new(address, Dtype::F32, [requests, 2]);
        KvScales::Request {
            k: of(4),
            v: of(requests),
            of_token: DeviceArray::new(address, 1),
        }
    };
    assert!(matches!(
        error(e4m3, by_request(3)),
        Error::Extent { got: 3, .. }
    ));
    assert!(matches!(
        error(Dtype::BF16, heads(one(2), one(2))),
        Error::Shape(ShapeError::Scaled { dtype: Dtype::BF16 })
    ));
}

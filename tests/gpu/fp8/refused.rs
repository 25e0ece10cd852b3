//! What is refused before anything is launched.

use super::*;

/// A workspace with room for fewer converted keys than a plan has prefills of.
#[test]
fn more_keys_of_prefills_than_the_bound_has_are_refused() {
    let Some(gpu) = gpu("more_keys_of_prefills_than_the_bound_has_are_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let mut table = PageTable::new(16, 40);
    table.push(&(0..40).collect::<Vec<_>>(), 640);
    let batch = Batch::new(vec![0, 100], table);
    let limits = BatchLimits::decodes(4, 640, 16).with_query_tokens(100);
    let options = PlanOptions::default();
    let plan = |prefill_keys| {
        let limits = limits.with_prefill_keys(prefill_keys);
        let bound = Bound::new(&spec, &gpu.device(), &options, &limits).expect("limits");
        let options = options.with_bound(bound);
        let bytes = WorkspaceLayout::new(&spec, &bound).bytes;
        let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &options);
        (bytes, plan.map(drop))
    };
    let ((more, fits), (less, refused)) = (plan(640), plan(64));
    assert_eq!(fits, Ok(()));
    assert!(
        matches!(
            refused,
            Err(PlanError::Bound {
                needed: 10,
                bound: 5,
                ..
            })
        ),
        "{refused:?}"
    );
    // Keys and values of 2 heads of 128, 16 bits each.
    assert!(more - less >= (640 - 64) * 2 * 2 * 128 * 2);
}

/// One request of 20 keys, and a plan for it.
fn small(spec: &Spec, gpu: &Gpu) -> Plan {
    let mut table = PageTable::new(16, 2);
    table.push(&[1, 0], 20);
    let batch = Batch::new(vec![0, 1], table);
    Planner::new()
        .plan(spec, &batch, &gpu.device(), &PlanOptions::default())
        .expect("it can be planned")
}

#[test]
fn scales_that_do_not_fit_are_refused_before_anything_is_launched() {
    let Some(gpu) = gpu("scales_that_do_not_fit_are_refused_before_anything_is_launched") else {
        return;
    };
    let memory = Memory::of_bytes(1 << 16);
    let address = memory.address();
    let error = |dtype: Dtype, scales| -> Error {
        // Kernels with a soft cap take no scales of each token.
        let cap = matches!(scales, gpu::KvScales::Token { .. }).then_some(30.0);
        let mut spec = Spec::new(8, 2, 128).with_kv_dtype(dtype);
        spec.variant.soft_cap = cap;
        let plan = small(&spec, gpu);
        let mut workspace = gpu
            .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
            .expect("there is memory for it");
        let stream = Stream::new();
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 2, address, address).with_scales(scales);
        let q = memory.tensor(Dtype::BF16, [1, 8, 128]);
        // SAFETY: refused before anything is launched.
        unsafe {
            workspace
                .upload(&plan, stream.0)
                .expect("the bound is the plan's");
            let refused = gpu.run(&mut workspace, &q, &[pool], &q, None, stream.0);
            stream.wait();
            refused.expect_err("the scales are wrong")
        }
    };
    let one = |len: usize| memory.tensor(Dtype::F32, [len]);
    let heads = |k: DeviceTensor<1>, v: DeviceTensor<1>| gpu::KvScales::Head { k, v };
    let e4m3 = Dtype::F8E4M3;
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
    let narrow = memory.tensor(Dtype::BF16, [2]);
    assert!(matches!(
        error(e4m3, heads(narrow, one(2))),
        Error::Dtype { .. }
    ));
    let by_token = memory.tensor(Dtype::F32, [2, 16, 2]);
    let by_token = gpu::KvScales::Token {
        k: by_token,
        v: by_token,
    };
    assert!(matches!(error(e4m3, by_token), Error::NoInstance { .. }));
    let by_request = |requests: usize| gpu::KvScales::Request {
        k: memory.tensor(Dtype::F32, [4, 2]),
        v: memory.tensor(Dtype::F32, [requests, 2]),
        of_token: memory.array(),
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

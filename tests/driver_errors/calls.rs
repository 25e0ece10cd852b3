//! Single calls whose tensors, launches or driver are wrong, and the thread's context around them.

use std::ptr;

use kernels_gpu::registry::{Element, Family};
use tandem_attn::{
    Error,
    abi::MergeRow,
    exec::gpu::{
        DecodeCall, DecodeTile, DeviceArray, DeviceBuffer, DeviceTensor, Gpu, KernelId, KvPool,
        PartialStates, PrefillCall, Stream, Swizzle, TensorMap, WorkspaceOptions,
    },
    plan::Bound,
    problem::{Dtype, KvLayout, Spec},
    variants::ALIBI,
};

use crate::driver::{assert_fails_in, launches, with_driver, with_young_driver};

const A: u64 = 1 << 20;

/// A call of each operation, with the output (or the pool) at an address of choice.
fn call_both(gpu: &Gpu, target: u64) -> [Result<(), Error>; 2] {
    let partials = PartialStates {
        out: DeviceTensor::new(A, Dtype::F32, [4, 2, 64]),
        lse: DeviceTensor::new(A, Dtype::F32, [4, 2]),
    };
    let rows = DeviceArray::<MergeRow>::new(A, 1);
    let out = DeviceTensor::new(target, Dtype::BF16, [1, 2, 64]);
    let spec = Spec::new(2, 2, 64);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 10, target, target);
    let new = DeviceTensor::new(A, Dtype::BF16, [5, 2, 64]);
    let slots = DeviceArray::new(A, 5);
    // SAFETY: the fake driver follows no address.
    unsafe {
        [
            gpu.merge_states(
                &partials,
                rows,
                DeviceArray::new(A, 4),
                &out,
                None,
                Stream::DEFAULT,
            ),
            gpu.append_paged_kv(&spec, &pool, slots, &new, &new, Stream::DEFAULT),
        ]
    }
}

#[test]
fn bad_tensors_launch_nothing() {
    if with_driver(bad_tensors_launch_nothing, "devices=1") {
        let gpu = Gpu::new(0).unwrap();
        for target in [0, A + 4] {
            for result in call_both(&gpu, target) {
                let error = result.unwrap_err();
                assert!(
                    matches!(error, Error::NullPointer { .. } | Error::Misaligned { .. }),
                    "{error:?}"
                );
            }
        }
        assert_eq!(launches(), 0);
        assert_eq!(call_both(&gpu, A), [Ok(()), Ok(())]);
        assert_eq!(launches(), 2);
    }
}

/// A kernel of Ampere with a soft cap, which those of variants replace.
fn capped(family: Family) -> KernelId {
    let is = |kernel: &KernelId| {
        let row = kernel.info();
        let of = (row.family, row.element, row.head_dim);
        of == (family, Element::Bf16, 128) && row.cache.is_none() && row.cap && !row.turns
    };
    KernelId::all().find(is).expect("there is one")
}

/// A decode and a prefill by these kernels.
fn call_capped(gpu: &Gpu, spec: &Spec) -> [Result<(), Error>; 2] {
    let q = DeviceTensor::new(A, Dtype::BF16, [1, 8, 128]);
    let partials = PartialStates {
        out: DeviceTensor::new(A, Dtype::F32, [1, 8, 128]),
        lse: DeviceTensor::new(A, Dtype::F32, [1, 8]),
    };
    let pool = KvPool::new(spec, KvLayout::Nhd, 16, 10, A, A);
    let [of_decode, of_prefill] = [Family::Sm80Decode, Family::Sm80Prefill].map(capped);
    let decode = DecodeCall {
        spec,
        tile: DecodeTile {
            kernel: of_decode,
            rows: of_decode.info().rows,
            run: 1,
            long: false,
        },
        items: DeviceArray::new(A, 1),
        rows: DeviceArray::new(A, 1),
        page_ids: DeviceArray::new(A, 1),
        merges: DeviceArray::new(A, 1),
        merge_slots: DeviceArray::new(A, 1),
        q: &q,
        pool: &pool,
        out: &q,
        lse: None,
        partials: &partials,
        arrivals: None,
        ticket: DeviceArray::new(A, 1),
        record: None,
        extras: Default::default(),
    };
    let prefill = PrefillCall {
        spec,
        kernel: of_prefill,
        rows: of_prefill.info().rows,
        pack: 1,
        items: DeviceArray::new(A, 1),
        page_ids: DeviceArray::new(A, 1),
        q: &q,
        pool: &pool,
        out: &q,
        lse: None,
        partials: None,
        ticket: DeviceArray::new(A, 1),
        record: None,
        extras: Default::default(),
    };
    // SAFETY: the fake driver follows no address.
    unsafe {
        [
            gpu.decode(&decode, Stream::DEFAULT),
            gpu.prefill(&prefill, Stream::DEFAULT),
        ]
    }
}

/// The kernel with the soft cap was launched, and gave other results.
#[test]
fn single_calls_refuse_hooks() {
    if with_young_driver(single_calls_refuse_hooks) {
        let gpu = Gpu::new(0).unwrap();
        let spec = Spec::new(8, 2, 128);
        for result in call_capped(&gpu, &spec.with_hooks(&ALIBI)) {
            let error = result.unwrap_err();
            assert!(matches!(error, Error::NoInstance { .. }), "{error}");
            assert!(error.to_string().contains("Gpu::run_with"), "{error}");
        }
        assert_eq!(launches(), 0);
        let capped = call_capped(&gpu, &spec.with_soft_cap(30.0));
        assert_eq!(capped, [Ok(()), Ok(())]);
        assert_eq!(launches(), 2);
    }
}

/// A prefill with these partial states and a ticket of so many words.
fn prefill_with(gpu: &Gpu, partials: PartialStates, ticket: usize) -> Result<(), Error> {
    let spec = Spec::new(8, 2, 128).with_soft_cap(30.0);
    let kernel = capped(Family::Sm80Prefill);
    let q = DeviceTensor::new(A, Dtype::BF16, [1, 8, 128]);
    let call = PrefillCall {
        spec: &spec,
        kernel,
        rows: kernel.info().rows,
        pack: 1,
        items: DeviceArray::new(A, 1),
        page_ids: DeviceArray::new(A, 1),
        q: &q,
        pool: &KvPool::new(&spec, KvLayout::Nhd, 16, 10, A, A),
        out: &q,
        lse: None,
        partials: Some(&partials),
        ticket: DeviceArray::new(A, ticket),
        record: None,
        extras: Default::default(),
    };
    // SAFETY: the fake driver follows no address.
    unsafe { gpu.prefill(&call, Stream::DEFAULT) }
}

/// Decodes refused these already.
#[test]
fn prefills_refuse_partial_states_that_are_not_theirs() {
    if with_young_driver(prefills_refuse_partial_states_that_are_not_theirs) {
        let gpu = Gpu::new(0).unwrap();
        let (out, lse) = (
            DeviceTensor::new(A, Dtype::F32, [3, 8, 128]),
            DeviceTensor::new(A, Dtype::F32, [3, 8]),
        );
        let right = PartialStates { out, lse };
        let of_16_bits = DeviceTensor::new(A, Dtype::BF16, [3, 8, 128]);
        let lse_of = |dtype, shape| PartialStates {
            out,
            lse: DeviceTensor::new(A, dtype, shape),
        };
        for (partials, ticket, what) in [
            (
                PartialStates {
                    out: of_16_bits,
                    lse,
                },
                1,
                "partial_out",
            ),
            (lse_of(Dtype::BF16, [3, 8]), 1, "partial_lse"),
            (lse_of(Dtype::F32, [2, 8]), 1, "partial_lse"),
            (lse_of(Dtype::F32, [3, 4]), 1, "partial_lse"),
            (right, 0, "ticket"),
        ] {
            let error = prefill_with(&gpu, partials, ticket).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
        }
        assert_eq!(launches(), 0);
        assert_eq!(prefill_with(&gpu, right, 1), Ok(()));
        assert_eq!(launches(), 1);
    }
}

#[test]
fn a_launch_that_fails() {
    if with_driver(a_launch_that_fails, "launch=701") {
        for result in call_both(&Gpu::new(0).unwrap(), A) {
            assert_fails_in(("cuLaunchKernel", 701), &result.unwrap_err());
        }
    }
}

#[test]
fn a_launch_beyond_the_kernel() {
    if with_driver(a_launch_beyond_the_kernel, "threads=16") {
        for result in call_both(&Gpu::new(0).unwrap(), A) {
            let error = result.unwrap_err();
            let Error::LaunchLimit { got, limit, .. } = error else {
                panic!("{error:?}")
            };
            assert!(got > 16 && limit == 16, "{error}");
        }
        assert_eq!(launches(), 0);
    }
}

#[test]
fn a_driver_without_tensor_maps() {
    if with_driver(a_driver_without_tensor_maps, "devices=1") {
        let map = TensorMap {
            name: "k",
            address: A,
            dtype: Dtype::BF16,
            dims: &[64, 128],
            strides: &[128],
            box_dims: &[64, 64],
            swizzle: Swizzle::Bytes128,
        };
        let expected = Error::OldDriver {
            function: "cuTensorMapEncodeTiled",
            since: "12.0",
        };
        assert_eq!(map.encode().unwrap_err(), expected);
        let bad = TensorMap {
            strides: &[100],
            ..map
        };
        assert!(matches!(
            bad.encode().unwrap_err(),
            Error::TensorMap { got: 100, .. }
        ));
    }
}

#[test]
fn the_context_of_the_thread_stays() {
    if with_driver(the_context_of_the_thread_stays, "devices=1") {
        let current = || {
            let mut context = libcuda::Context::NULL;
            // SAFETY: writes one pointer.
            let _ = unsafe { libcuda::cuCtxGetCurrent(&mut context) };
            context.as_raw().addr()
        };
        let gpu = Gpu::new(0).unwrap();
        assert_eq!(
            current(),
            77,
            "none was current before, so the primary one is now"
        );
        // SAFETY: the fake driver only stores it.
        let _ = unsafe {
            libcuda::cuCtxSetCurrent(libcuda::Context::from_raw(ptr::without_provenance_mut(5)))
        };
        assert!(Gpu::new(0).is_ok());
        assert_eq!(call_both(&gpu, A), [Ok(()), Ok(())]);
        assert_eq!(current(), 5, "another one was current, and is again");
        gpu.make_current().unwrap();
        assert_eq!(current(), 77);
    }
}

#[test]
fn a_workspace_wants_memory() {
    if with_driver(a_workspace_wants_memory, "threads=1024 memory=2") {
        let gpu = Gpu::new(0).unwrap();
        let bound = Bound {
            items: 1,
            ..Bound::default()
        };
        let spec = Spec::new(8, 2, 128);
        let bytes = bound.workspace_bytes(&spec) as usize;
        let (free, total) = (1000, 8000);
        let expected = Error::OutOfMemory { bytes, free, total };
        let workspace = gpu.workspace(&spec, &bound, WorkspaceOptions::default());
        assert_eq!(workspace.unwrap_err(), expected);
        assert_eq!(
            DeviceBuffer::<u8>::zeroed(&gpu, bytes).unwrap_err(),
            expected
        );
    }
}

/// More bytes than a number of bytes can say: the product must not wrap to a small one.
#[test]
fn device_buffers_have_no_more_bytes_than_can_be_counted() {
    if with_driver(device_buffers_have_no_more_bytes_than_can_be_counted, "") {
        let gpu = Gpu::new(0).unwrap();
        let most = usize::MAX / size_of::<u32>();
        for got in [most + 1, most + 2, usize::MAX] {
            let expected = Error::Extent {
                tensor: "a device buffer",
                dimension: "elements",
                got,
                rule: format!("at most {most} of 4 bytes each"),
            };
            assert_eq!(
                DeviceBuffer::<u32>::zeroed(&gpu, got).unwrap_err(),
                expected
            );
        }
        let buffer = DeviceBuffer::<f32>::zeroed(&gpu, 6).unwrap();
        assert_eq!(buffer.tensor([2, 3]).shape, [2, 3]);
        for shape in [[2, 4], [1 << 63, 2], [usize::MAX, usize::MAX]] {
            let tensor = std::panic::catch_unwind(|| buffer.tensor(shape));
            let said = tensor.unwrap_err().downcast::<String>().unwrap();
            assert!(said.contains("in a buffer of 6 elements"), "{said}");
        }
    }
}

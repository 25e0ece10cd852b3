//! Contexts, threads, streams, graphs and tensor maps on a GPU.

use std::ptr;

use crate::common::{self, Memory, Rng, Stream};
use cust::sys;
use tandem_attn::{
    exec::gpu::{Gpu, KvPool, Stream as Handle, Swizzle, TensorMap},
    problem::{Dtype, KvLayout, Spec},
};

const TOKENS: usize = 40;

/// New keys (the values are the same) and an empty pool to append them to.
struct Append {
    spec: Spec,
    new: Memory,
    slots: Memory,
    pool: Memory,
}

impl Append {
    fn new(seed: u64) -> Self {
        let mut rng = Rng(seed);
        let values: Vec<u16> = (0..TOKENS * 2 * 64).map(|_| rng.bits() as u16).collect();
        Self {
            spec: Spec::new(2, 2, 64),
            new: Memory::new(&values),
            slots: Memory::new(&(0..TOKENS as u32).collect::<Vec<_>>()),
            pool: Memory::new(&vec![0_u16; 2 * values.len()]),
        }
    }

    fn queue(&self, gpu: &Gpu, stream: Handle) {
        let k = self.pool.address();
        let v = k + (TOKENS * 2 * 64 * 2) as u64;
        let pool = KvPool::new(&self.spec, KvLayout::Nhd, 8, 5, k, v);
        let new = self.new.tensor(Dtype::BF16, [TOKENS, 2, 64]);
        // SAFETY: everything is there as described until the stream is done.
        unsafe { gpu.append_paged_kv(&self.spec, &pool, self.slots.array(), &new, &new, stream) }
            .expect("a good call");
    }

    fn is_done(&self) -> bool {
        self.pool.read::<u16>() == self.new.read::<u16>().repeat(2)
    }
}

#[test]
fn two_handles_and_other_threads_share_the_context() {
    let Some(gpu) = common::gpu("two_handles_and_other_threads_share_the_context") else {
        return;
    };
    let second = Gpu::new(0).expect("the device is there");
    assert!(gpu.multiprocessors() > 0 && gpu.compute_capability() == second.compute_capability());
    let append = Append::new(1);
    std::thread::scope(|scope| {
        // This thread has no context of its own.
        scope
            .spawn(|| append.queue(&second, Handle::DEFAULT))
            .join()
            .unwrap();
    });
    drop(second);
    // SAFETY: waits for the default stream.
    assert_eq!(
        unsafe { sys::cuStreamSynchronize(ptr::null_mut()) },
        sys::CUresult::CUDA_SUCCESS
    );
    assert!(append.is_done());
}

#[test]
fn a_captured_call_replays() {
    let Some(gpu) = common::gpu("a_captured_call_replays") else {
        return;
    };
    let append = Append::new(2);
    let stream = Stream::new();
    let (mut graph, mut instance) = (ptr::null_mut(), ptr::null_mut());
    let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let ok = sys::CUresult::CUDA_SUCCESS;
    // SAFETY: the stream lives; graph and instance are made before they are used.
    unsafe {
        assert_eq!(
            sys::cuStreamBeginCapture_v2(stream.0.as_raw().cast(), mode),
            ok
        );
        append.queue(gpu, stream.0);
        assert_eq!(
            sys::cuStreamEndCapture(stream.0.as_raw().cast(), &mut graph),
            ok
        );
        assert_eq!(
            sys::cuGraphInstantiateWithFlags(&mut instance, graph, 0),
            ok
        );
    }
    assert!(!append.is_done(), "capturing runs nothing");
    // SAFETY: as above.
    unsafe { assert_eq!(sys::cuGraphLaunch(instance, stream.0.as_raw().cast()), ok) };
    stream.wait();
    assert!(append.is_done());
    // SAFETY: neither is used any more.
    unsafe {
        assert_eq!(sys::cuGraphExecDestroy(instance), ok);
        assert_eq!(sys::cuGraphDestroy(graph), ok);
    }
}

#[test]
fn a_page_pool_has_a_tensor_map() {
    if common::gpu("a_page_pool_has_a_tensor_map").is_none() {
        return;
    }
    let memory = Memory::of_bytes(1 << 20);
    // 32 pages of 16 tokens, 8 heads of 128: half rows of 64, tokens in groups of 8.
    let map = TensorMap {
        name: "k",
        address: memory.address(),
        dtype: Dtype::BF16,
        dims: &[64, 8, 16, 2, 32],
        strides: &[2048, 128, 16_384, 32_768],
        box_dims: &[64, 8, 2, 2, 1],
        swizzle: Swizzle::Bytes128,
    };
    let encoded = map
        .encode()
        .expect("the driver takes what our checks let pass");
    let plain = TensorMap {
        swizzle: Swizzle::None,
        ..map
    }
    .encode()
    .unwrap();
    assert!(
        encoded.contains(&memory.address()),
        "the address is in the map"
    );
    assert_ne!(encoded, plain);
}

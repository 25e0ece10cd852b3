//! Rounds of planning, uploading and running from four threads on two streams: memory stays as it is.

use half::bf16;
use tandem_attn::{
    exec::gpu::{DeviceBuffer, Gpu, WorkspaceOptions},
    plan::{Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, Spec},
};

use super::{
    common::{Rng, Stream, problems::Tensors},
    graph::{PAGE, bound, free_bytes, random_batch, rounds},
    hopper,
    problem::{OnDevice, check_results},
};

const THREADS: usize = 4;

/// Batches of each thread, one after the other, again and again.
const BATCHES: usize = 8;

/// A workspace and a buffer are made anew after so many rounds.
const RENEWED: usize = 64;

/// Of so many rounds the results of one are compared.
const COMPARED: usize = 16;

/// Bytes by which the process may grow: what its allocator keeps, not a leak of some bytes each round. 0.2 to 4.2 MB were
/// seen, as much after 20,000 rounds as after 400,000.
const GROWTH: usize = 8 << 20;

/// Bytes of this process that are in memory.
fn resident_bytes() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages = statm
        .split_whitespace()
        .nth(1)
        .and_then(|pages| pages.parse().ok());
    pages.unwrap_or(0_usize) * 4096
}

/// A batch on the device, and what is right for it, to the bit.
struct Known {
    batch: Batch,
    device: OnDevice,
    right: (Vec<u16>, Vec<u32>),
}

/// A thread's rounds.
fn work(gpu: &Gpu, thread: usize, rounds: usize, stream: &Stream) {
    gpu.make_current().unwrap();
    let spec = Spec::new(8, 2, 64).with_dtype(Dtype::BF16);
    let device = gpu.device();
    let bound = bound(false);
    let options = PlanOptions::default().with_bound(bound);
    let mut planner = Planner::new();
    let mut plan = Plan::empty(spec);
    let renewed = || {
        let workspace = gpu
            .workspace(&spec, &bound, WorkspaceOptions::default())
            .unwrap();
        (workspace, DeviceBuffer::<u8>::zeroed(gpu, 1 << 16).unwrap())
    };
    let mut own = renewed();
    let mut rng = Rng(thread as u64 + 1);
    let batches = (0..BATCHES).map(|at| random_batch(&mut rng, at % 2 == 0, PAGE));
    let known: Vec<Known> = batches
        .map(|batch| {
            let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 1);
            let on_device = OnDevice::new(&spec, &batch, &tensors);
            planner
                .plan_into(&spec, &batch, &device, &options, &mut plan)
                .unwrap();
            // SAFETY: the workspace is this thread's.
            unsafe { own.0.upload(&plan, stream.0) }.unwrap();
            let right = on_device.run(gpu, &mut own.0, stream);
            check_results(&spec, &batch, &tensors, &right).unwrap();
            Known {
                batch,
                device: on_device,
                right,
            }
        })
        .collect();
    for round in 0..rounds {
        if round % RENEWED == RENEWED - 1 {
            stream.wait();
            own = renewed();
        }
        let known = &known[round % BATCHES];
        planner
            .plan_into(&spec, &known.batch, &device, &options, &mut plan)
            .unwrap();
        // SAFETY: the workspace is this thread's; all that is read lives until the end.
        unsafe { own.0.upload(&plan, stream.0) }.unwrap();
        if round % COMPARED == round / BATCHES % COMPARED {
            let got = known.device.run(gpu, &mut own.0, stream);
            assert!(
                got == known.right,
                "thread {thread}, round {round}: other bits"
            );
        } else {
            known.device.launch(gpu, &mut own.0, stream);
        }
    }
    stream.wait();
}

/// All threads' rounds, and what the GPU has free and the process holds when everything of theirs was given back.
fn after(gpu: &Gpu, rounds: usize) -> (usize, usize) {
    let streams = [Stream::new(), Stream::new()];
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let stream = &streams[thread % 2];
            scope.spawn(move || work(gpu, thread, rounds / THREADS, stream));
        }
    });
    drop(streams);
    (free_bytes(), resident_bytes())
}

/// `TANDEM_ROUNDS` rounds. With it the test is to be run alone: other tests take memory, too.
#[test]
fn memory_stays_as_it_is() {
    let Some(gpu) = hopper("memory_stays_as_it_is") else {
        return;
    };
    let (rounds, alone) = rounds();
    // The driver and the allocator keep what they needed once.
    let (free, resident) = after(gpu, (rounds / 10).max(RENEWED));
    let (free_at_end, resident_at_end) = after(gpu, rounds);
    eprintln!(
        "{rounds} rounds: free {free}, {free_at_end}; resident {resident}, {resident_at_end}"
    );
    if alone {
        assert_eq!(free, free_at_end, "bytes that the GPU has free");
        assert!(
            resident_at_end <= resident + GROWTH,
            "bytes of the process: {resident}, {resident_at_end}"
        );
    }
}

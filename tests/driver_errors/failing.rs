//! Each call of the driver fails once: by running out of memory, or because the device is lost and all that follows
//! fails, too.

use std::{
    ffi::{CStr, c_char, c_void},
    mem,
    panic::{self, AssertUnwindSafe},
    ptr::NonNull,
};

use tandem_attn::{
    Error,
    exec::gpu::{
        DeviceBuffer, DeviceTensor, Gpu, Image, KvPool, LaunchSet, MODULES, Module, NcclId,
        RankOptions, RunTensors, Workspace, WorkspaceOptions,
    },
    plan::{BatchLimits, Bound, Plan, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Part, Spec},
    step::Rope,
};

use crate::driver::with_young_driver;

const OUT_OF_MEMORY: i32 = 2;
const LAUNCH_FAILED: i32 = 719;

/// What the fake driver counts.
const KINDS: [&str; 6] = [
    "contexts",
    "modules",
    "streams",
    "events",
    "device memory",
    "pinned memory",
];

type Symbol = NonNull<c_void>;
type Fail = extern "C" fn(i32, i32, i32);
type Failed = extern "C" fn() -> *const c_char;
type Alive = extern "C" fn(i32) -> i32;

/// What the fake driver saw: counts and states.
const WAITS: i32 = 0;
const DEFAULT_COPIES: i32 = 1;
const CONTEXT_WAITS: i32 = 2;
const BUSY: i32 = 3;
const FREED_BUSY: i32 = 4;
const OVERLAPS: i32 = 5;
const CAPTURES: i32 = 6;

/// The fake driver's own functions.
struct Fake {
    fail: Fail,
    failed: Failed,
    alive: Alive,
    seen: Alive,
}

impl Fake {
    fn new() -> Self {
        let symbol = |name| libcuda::symbol(name).expect("it is the fake driver");
        // SAFETY: the types are those of the functions in the fake driver.
        unsafe {
            Self {
                fail: mem::transmute::<Symbol, Fail>(symbol(c"fake_fail")),
                failed: mem::transmute::<Symbol, Failed>(symbol(c"fake_failed")),
                alive: mem::transmute::<Symbol, Alive>(symbol(c"fake_alive")),
                seen: mem::transmute::<Symbol, Alive>(symbol(c"fake_seen")),
            }
        }
    }

    /// The call that failed first.
    fn failed(&self) -> Option<&'static str> {
        let name = (self.failed)();
        // SAFETY: null, or a string that is compiled into the library.
        (!name.is_null()).then(|| unsafe { CStr::from_ptr(name) }.to_str().unwrap())
    }

    fn alive(&self) -> Vec<(&'static str, i32)> {
        let counts = KINDS
            .iter()
            .zip(0..)
            .map(|(&name, kind)| (name, (self.alive)(kind)));
        counts.filter(|&(_, count)| count != 0).collect()
    }
}

/// Everything that a program does: a GPU, a stream, memory, a workspace, plans one after the other, a captured launch set.
fn everything(modules: &[Module], spec: &Spec, batch: &Batch, plan: &Plan) -> Result<(), Error> {
    let gpu = Gpu::builder().modules(modules).build(0)?;
    let stream = gpu.stream()?;
    let buffer = DeviceBuffer::<u8>::zeroed(&gpu, 1 << 10)?;
    let tokens = batch.total_q() as usize;
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [tokens, 32, 128]);
    let out = DeviceTensor::new(1 << 31, Dtype::BF16, [tokens, 32, 128]);
    let pool = KvPool::new(spec, KvLayout::Nhd, 16, 400, 1 << 33, 1 << 34);
    let captured = WorkspaceOptions::default().with_launches(LaunchSet::new().and(plan));
    for options in [WorkspaceOptions::default(), captured] {
        let mut workspace: Workspace = gpu.workspace(spec, &Bound::of(plan), options)?;
        for _ in 0..3 {
            // SAFETY: the fake driver follows no address.
            unsafe {
                workspace.upload(plan, *stream)?;
                gpu.run(&mut workspace, &q, &[pool], &out, None, *stream)?;
            }
        }
    }
    drop(buffer);
    stream.synchronize()
}

/// A decode and a prompt, whose keys are split.
fn decode_and_prompt(spec: &Spec, options: &PlanOptions) -> Plan {
    let mut table = PageTable::new(16, 400);
    table.push(&(0..100).collect::<Vec<_>>(), 1600);
    table.push(&(100..400).collect::<Vec<_>>(), 4800);
    let batch = Batch::new(vec![0, 1, 301], table);
    let device = Gpu::new(0).unwrap().device();
    let plan = Planner::new().plan(spec, &batch, &device, options);
    plan.unwrap()
}

/// Their addresses and their context are given back when they are dropped, and not to the next one's.
#[test]
fn buffers_and_streams_keep_their_context() {
    if !with_young_driver(buffers_and_streams_keep_their_context) {
        return;
    }
    let fake = Fake::new();
    let contexts = || (fake.alive)(0);
    let gpu = Gpu::new(0).unwrap();
    let mut buffer = DeviceBuffer::<u8>::zeroed(&gpu, 100).unwrap();
    let stream = gpu.stream().unwrap();
    drop(gpu);
    assert!(contexts() > 0, "the buffer's memory is gone");
    buffer.write(0, &[1]).unwrap();
    drop(buffer);
    assert!(contexts() > 0, "the stream is gone");
    stream.synchronize().unwrap();
    drop(stream);
    assert_eq!(fake.alive(), []);
}

#[test]
fn memory_that_is_copied_from_is_not_freed() {
    if !with_young_driver(memory_that_is_copied_from_is_not_freed) {
        return;
    }
    let fake = Fake::new();
    let spec = Spec::new(32, 8, 128);
    let plan = decode_and_prompt(&spec, &PlanOptions::default());
    let gpu = Gpu::new(0).unwrap();
    let stream = gpu.stream().unwrap();
    let workspace = || gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
    let mut one = workspace().unwrap();
    // SAFETY: the fake driver follows no address, here and below.
    unsafe { one.upload(&plan, *stream) }.unwrap();
    assert_eq!((fake.seen)(BUSY), 1);
    drop(one);
    assert_eq!((fake.seen)(FREED_BUSY), 0);

    // Where no event says when the copies are done, nobody writes what they read before they are.
    let mut one = workspace().unwrap();
    let mut at = 1;
    loop {
        (fake.fail)(at, OUT_OF_MEMORY, 0);
        let uploaded = unsafe { one.upload(&plan, *stream) };
        let Some(failed) = fake.failed() else { break };
        assert!(uploaded.is_err(), "{failed}");
        assert_eq!((fake.seen)(BUSY), 0, "{failed}");
        at += 1;
    }
    assert!(at > 3, "{at}");
}

#[test]
fn launches_are_not_those_of_a_gpu_that_is_gone() {
    if !with_young_driver(launches_are_not_those_of_a_gpu_that_is_gone) {
        return;
    }
    let spec = Spec::new(32, 8, 128);
    let plan = decode_and_prompt(&spec, &PlanOptions::default());
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [301, 32, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 400, 1 << 33, 1 << 34);
    let gpu = Gpu::new(0).unwrap();
    let stream = gpu.stream().unwrap();
    let workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
    let mut workspace = workspace.unwrap();
    // SAFETY: the fake driver follows no address, here and below.
    unsafe { workspace.upload(&plan, *stream) }.unwrap();
    let mut run = |gpu: &Gpu| unsafe { gpu.run(&mut workspace, &q, &[pool], &q, None, *stream) };
    run(&gpu).unwrap();
    drop(gpu);
    let gpu = Gpu::new(0).unwrap();
    assert_eq!(run(&gpu), Ok(()));
}

/// What comes next on the caller's stream would not wait for launches beside it.
#[test]
fn a_failing_launch_leaves_no_stream_on_its_own() {
    if !with_young_driver(a_failing_launch_leaves_no_stream_on_its_own) {
        return;
    }
    let fake = Fake::new();
    let spec = Spec::new(32, 8, 128);
    let options = PlanOptions::default().with_pod(PodMode::Streams);
    let plan = decode_and_prompt(&spec, &options);
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [301, 32, 128]);
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 400, 1 << 33, 1 << 34);
    let gpu = Gpu::new(0).unwrap();
    let workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
    let mut workspace = workspace.unwrap();
    let stream = gpu.stream().unwrap();
    // SAFETY: the fake driver follows no address, here and below.
    unsafe { workspace.upload(&plan, *stream) }.unwrap();
    let (mut at, mut launches) = (1, 0);
    loop {
        (fake.fail)(at, OUT_OF_MEMORY, 0);
        let before = (fake.seen)(WAITS);
        let done = unsafe { gpu.run(&mut workspace, &q, &[pool], &q, None, *stream) };
        let waits = (fake.seen)(WAITS) - before;
        let Some(failed) = fake.failed() else { break };
        assert!(done.is_err(), "{failed}");
        if failed.starts_with("cuLaunchKernel") {
            assert_eq!(waits, 2, "call {at}");
            launches += 1;
        }
        at += 1;
    }
    assert!(launches > 1, "{plan}");
}

/// Kernels of other GPUs read it, and wait for what the host says.
#[test]
fn memory_of_ranks_is_there_for_all_of_them() {
    if !with_young_driver(memory_of_ranks_is_there_for_all_of_them) {
        return;
    }
    let fake = Fake::new();
    let seen = |what| (fake.seen)(what);
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let ranks = Gpu::ranks(&[&gpu, &gpu], &spec, 4, &RankOptions::default());
    let ranks = ranks.unwrap();
    // The default stream waits for streams that block, on which such kernels may be.
    let before = seen(DEFAULT_COPIES);
    ranks[1].stop("out of pages");
    assert_eq!((seen(DEFAULT_COPIES), seen(BUSY)), (before, 0));
    let before = seen(CONTEXT_WAITS);
    drop(ranks);
    assert_eq!(seen(CONTEXT_WAITS) - before, 2);
}

/// What converts or turns keys is made for the type that the specification names.
#[test]
fn a_pool_of_another_type_is_not_converted() {
    if !with_young_driver(a_pool_of_another_type_is_not_converted) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let heads = Spec::new(8, 2, 128);
    let turned = heads.with_rotary(Rope::new(128, 1e4));
    let of_8_bits = heads.with_kv_dtype(Dtype::F8E4M3).with_compute(Compute::F8);
    for (spec, got) in [
        (turned, Dtype::F16),
        (turned, Dtype::F8E4M3),
        (of_8_bits, Dtype::F8E5M2),
    ] {
        let mut table = PageTable::new(16, 20);
        table.push(&(0..10).collect::<Vec<_>>(), 160);
        let batch = Batch::new(vec![0, 160], table);
        let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default());
        let plan = plan.unwrap();
        let workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
        let mut workspace = workspace.unwrap();
        let stream = gpu.stream().unwrap();
        let q = DeviceTensor::new(1 << 30, Dtype::BF16, [160, 8, 128]);
        let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 33, 1 << 34);
        let mut other = pool;
        other.dtype = got;
        // SAFETY: the fake driver follows no address.
        unsafe {
            workspace.upload(&plan, *stream).unwrap();
            let error = gpu.run(&mut workspace, &q, &[other], &q, None, *stream);
            let expected = Error::DtypesDiffer {
                tensor: "the KV pool",
                got,
                other: "the spec's KV",
                expected: spec.kv_dtype,
            };
            assert_eq!(error, Err(expected));
            gpu.run(&mut workspace, &q, &[pool], &q, None, *stream)
                .unwrap();
        }
    }
}

/// Whatever waits for other ranks is ended after a while: the default stream would wait for runs on streams that block.
#[test]
fn announcements_over_nccl_stay_off_the_default_stream() {
    if !with_young_driver(announcements_over_nccl_stay_off_the_default_stream) {
        return;
    }
    let fake = Fake::new();
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let (id, options) = (NcclId::new().unwrap(), RankOptions::default());
    let mut rank = gpu.nccl_rank(&id, [0, 1], &spec, 4, &options).unwrap();
    let before = (fake.seen)(DEFAULT_COPIES);
    // What the fake driver reads back are zeros.
    rank.announce(0).unwrap();
    assert_eq!((fake.seen)(DEFAULT_COPIES), before);
}

/// The last launch in front of it may have nothing to do in a graph, and end before the decodes.
#[test]
fn results_of_a_launch_set_are_there_before_they_are_announced() {
    if !with_young_driver(results_of_a_launch_set_are_there_before_they_are_announced) {
        return;
    }
    let fake = Fake::new();
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let mut table = PageTable::new(16, 20);
    table.push(&[1, 2, 3], 40);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default());
    let plan = plan.unwrap();
    let captured = WorkspaceOptions::default().with_launches(LaunchSet::new().and(&plan));
    let mut ranks = Gpu::ranks(&[&gpu], &spec, 1, &RankOptions::default()).unwrap();
    ranks[0].announce(1).unwrap();
    let q = DeviceTensor::new(1 << 30, Dtype::BF16, [1, 8, 128]);
    let pools = [KvPool::new(&spec, KvLayout::Nhd, 16, 20, 1 << 33, 1 << 34)];
    let tensors = RunTensors::new(&q, &pools, &q);
    let stream = gpu.stream().unwrap();
    let bound = Bound {
        merges: 1,
        slots: 2,
        ..Bound::of(&plan)
    };
    for (options, overlaps) in [(WorkspaceOptions::default(), 1), (captured, 0)] {
        let mut workspace = gpu.workspace(&spec, &bound, options).unwrap();
        // SAFETY: the fake driver follows no address.
        unsafe {
            workspace.upload(&plan, *stream).unwrap();
            ranks[0]
                .run(&gpu, &mut workspace, &tensors, 0..1, *stream)
                .unwrap();
        }
        assert_eq!((fake.seen)(OVERLAPS), overlaps);
    }
}

/// A stream that stays in capture refuses whatever comes next.
#[test]
fn a_capture_ends_where_its_work_panics() {
    if !with_young_driver(a_capture_ends_where_its_work_panics) {
        return;
    }
    let (fake, gpu) = (Fake::new(), Gpu::new(0).unwrap());
    let stream = gpu.stream().unwrap();
    let panicked = panic::catch_unwind(AssertUnwindSafe(|| {
        stream.capture(|_| {
            assert_eq!((fake.seen)(CAPTURES), 1);
            panic!("within a capture")
        })
    }));
    panicked.unwrap_err();
    assert_eq!((fake.seen)(CAPTURES), 0);
}

#[test]
fn a_driver_that_instantiates_no_graphs_is_too_old() {
    if !with_young_driver(a_driver_that_instantiates_no_graphs_is_too_old) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let graph = gpu.stream().unwrap().capture(|_| Ok(()));
    let expected = Error::OldDriver {
        function: "cuGraphInstantiate",
        since: "11.4",
    };
    assert_eq!(graph.unwrap_err(), expected);
}

/// Each launch has a ticket, and there are as many as a run may have launches.
#[test]
fn a_plan_of_too_many_launches_is_refused() {
    if !with_young_driver(a_plan_of_too_many_launches_is_refused) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    let spec = Spec::new(8, 2, 128);
    let plan = |parts: u32| {
        let part = |at: u32| {
            let mut table = PageTable::new(16, 20);
            table.push(&[1], 16);
            Part::new(vec![0, 1], table).with_keys_after(vec![16 * (parts - 1 - at)])
        };
        let batch = Batch::composed(vec![0, 1], (0..parts).map(part).collect());
        let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default());
        plan.unwrap()
    };
    let stream = gpu.stream().unwrap();
    for (parts, fits) in [(64, true), (65, false)] {
        let plan = plan(parts);
        let workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
        // SAFETY: the fake driver follows no address.
        let uploaded = unsafe { workspace.unwrap().upload(&plan, *stream) };
        let expected = match fits {
            true => Ok(()),
            false => Err(Error::LaunchLimit {
                kernel: "a run".into(),
                what: "launches",
                got: 65,
                limit: 64,
            }),
        };
        assert_eq!(uploaded, expected);
    }
}

#[test]
fn a_failing_call_is_an_error_and_nothing_stays_behind() {
    if !with_young_driver(a_failing_call_is_an_error_and_nothing_stays_behind) {
        return;
    }
    let spec = Spec::new(32, 8, 128);
    let mut table = PageTable::new(16, 400);
    table.push(&(0..100).collect::<Vec<_>>(), 1600);
    table.push(&(100..400).collect::<Vec<_>>(), 4800);
    let batch = Batch::new(vec![0, 1, 301], table);
    let device = Gpu::new(0).unwrap().device();
    // Launches that depend on others, and streams that wait for each other.
    let plans = [PodMode::Serial, PodMode::Streams].map(|pod| {
        let options = PlanOptions::default().with_pod(pod);
        let plan = Planner::new().plan(&spec, &batch, &device, &options);
        let plan = plan.unwrap();
        assert!(plan.groups.len() > 1 && !plan.merges.is_empty(), "{plan}");
        plan
    });

    // Unpacked once: that is what loading takes most of its time for.
    let modules = MODULES.iter().filter(|module| module.arch == "sm_90a");
    let unpacked = modules.map(|module| {
        let cubin = module.cubin.as_ref().expect("machine code");
        let cubin = cubin.unpack().expect("it is whole").into_owned();
        Module {
            cubin: Some(Image::owned(cubin)),
            ..module.clone()
        }
    });
    let unpacked: Vec<Module> = unpacked.collect();

    let fake = Fake::new();
    assert_eq!(fake.alive(), [], "a GPU that was dropped leaves nothing");
    for (code, for_good) in [(OUT_OF_MEMORY, 0), (LAUNCH_FAILED, 1)] {
        let mut seen = std::collections::BTreeSet::new();
        for plan in &plans {
            let mut at = 1;
            loop {
                (fake.fail)(at, code, for_good);
                let done = everything(&unpacked, &spec, &batch, plan);
                let failed = fake.failed();
                assert_eq!(fake.alive(), [], "call {at}, {failed:?}, {code}");
                let Some(failed) = failed else {
                    assert_eq!(done, Ok(()), "no call failed");
                    break;
                };
                // A workspace that is dropped tells nobody that it could not wait.
                let by_drop = failed == "cuEventQuery";
                if by_drop && done.is_ok() {
                    at += 1;
                    continue;
                }
                let error = done.expect_err(failed);
                let named = match &error {
                    Error::Driver {
                        call, code: got, ..
                    } => (*call == failed || by_drop) && *got == code.unsigned_abs(),
                    Error::ModuleRefused { .. } => failed == "cuModuleLoadDataEx",
                    Error::OutOfMemory { .. } => failed == "cuMemAlloc" && code == OUT_OF_MEMORY,
                    _ => false,
                };
                assert!(named, "call {at} of {failed} answers {code}: {error:?}");
                seen.insert(failed);
                at += 1;
            }
            println!("{code}: {} calls, {seen:?}", at - 1);
        }
        for call in [
            "cuMemAlloc",
            "cuMemHostAlloc",
            "cuModuleLoadDataEx",
            "cuLaunchKernelEx",
            "cuStreamWaitEvent",
            "cuStreamSynchronize",
        ] {
            assert!(seen.contains(call), "{call} never failed: {seen:?}");
        }
    }
}

/// Streams that do not block would not wait for what is on its way.
#[test]
fn writes_to_the_device_are_done_when_the_call_returns() {
    if !with_young_driver(writes_to_the_device_are_done_when_the_call_returns) {
        return;
    }
    let copying = libcuda::symbol(c"fake_copying").expect("it is the fake driver");
    // SAFETY: the type is that of the function in the fake driver.
    let copying: extern "C" fn() -> i32 = unsafe { mem::transmute::<Symbol, _>(copying) };
    let gpu = Gpu::new(0).unwrap();
    let buffer = DeviceBuffer::from_slice(&gpu, &[1_u8, 2, 3]).unwrap();
    assert_eq!(copying(), 0, "{buffer:?}");
    // Its frequencies are written.
    let spec = Spec::new(32, 8, 128).with_rotary(Rope::new(128, 1e4));
    let limits = BatchLimits::decodes(4, 1024, 16);
    let bound = Bound::new(&spec, &gpu.device(), &PlanOptions::default(), &limits).unwrap();
    let workspace = gpu.workspace(&spec, &bound, WorkspaceOptions::default());
    assert_eq!(copying(), 0, "{:?}", workspace.unwrap().spec());
}

//! What a step and a layer take of the host: `Planner::plan`, `Planner::update`, `Workspace::upload` and `Gpu::run`,
//! the last beside the driver's own calls for as many launches.
//!
//! The GPU is not waited for within a measurement; each is the least of many. `cargo bench --features cust --bench
//! gpu_host`.

#[path = "../tests/common/mod.rs"]
mod common;

use std::{
    ffi::c_void,
    hint::black_box,
    ptr,
    time::{Duration, Instant},
};

use common::{Memory, Stream};
use cust::{module::Module as Loaded, sys};
use kernels_gpu::registry::{KERNELS, Op};
use tandem_attn::{
    exec::gpu::{Gpu, KvPool, MODULES, WorkspaceOptions},
    plan::{Bound, PlanOptions, Planner, Update},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

const PAGE: u32 = 16;
/// Layers of a measurement: few enough for the driver's queue not to be full.
const LAYERS: u32 = 8;

fn main() {
    // Without the flag this is `cargo test`, which only wants to know that it starts.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let Some(gpu) = common::gpu("gpu_host") else {
        return;
    };
    println!(
        "{:<34} {:>7} {:>7} {:>7} {:>9} {:>9} {:>9} {:>9}",
        "µs of the host", "plan", "update", "upload", "launches", "run", "new ptrs", "driver"
    );
    for (name, requests) in [
        ("16 decodes at 1024", vec![(1, 1024); 16]),
        ("64 decodes at 8192", vec![(1, 8192); 64]),
        ("1 decode at 131072", vec![(1, 131_072)]),
        ("a prompt of 2048", vec![(2048, 2048)]),
        (
            "512 at 8192 beside 32 decodes",
            [vec![(512, 8192)], vec![(1, 8192); 32]].concat(),
        ),
    ] {
        measure(gpu, name, &requests);
    }
}

/// The least time of a call.
fn least(mut call: impl FnMut() -> Duration) -> f64 {
    let times = (0..200).map(|_| call());
    times.min().expect("some").as_secs_f64() * 1e6
}

/// The time of `calls` calls on an empty queue, for each of them.
fn queued(stream: &Stream, calls: u32, mut call: impl FnMut(u32)) -> f64 {
    least(|| {
        stream.wait();
        let begin = Instant::now();
        (0..calls).for_each(&mut call);
        begin.elapsed() / calls
    })
}

fn measure(gpu: &Gpu, name: &str, requests: &[(u32, u32)]) {
    let spec = Spec::new(32, 8, 128);
    // Room for a page more each.
    let pages: u32 = requests.iter().map(|(_, keys)| keys / PAGE + 1).sum();
    let mut table = PageTable::new(PAGE, pages);
    let (mut next, mut tokens) = (0, vec![0]);
    for &(queries, keys) in requests {
        let more = keys.div_ceil(PAGE);
        table.push(&(next..next + more).collect::<Vec<_>>(), keys - 8);
        next += more;
        tokens.push(tokens[tokens.len() - 1] + queries.min(keys - 8));
    }
    let mut batch = Batch::new(tokens, table);
    let (device, options) = (gpu.device(), PlanOptions::default());
    let mut planner = Planner::new();
    let mut plan = planner.plan(&spec, &batch, &device, &options).unwrap();
    let planned = least(|| {
        let begin = Instant::now();
        planner
            .plan_into(&spec, &batch, &device, &options, &mut plan)
            .unwrap();
        begin.elapsed()
    });

    let stream = Stream::new();
    let workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default());
    let mut workspace = workspace.unwrap();
    // SAFETY: the workspace is used on this stream alone.
    let mut upload = || unsafe { workspace.upload(&plan, stream.0) }.unwrap();
    let uploaded = queued(&stream, 1, |_| upload());

    let elements = (pages * PAGE * 8 * 128) as usize;
    let [k, v] = [(); 2].map(|()| Memory::of_bytes(elements * 2));
    let rows = (batch.total_q() * 32 * 128) as usize;
    let [q, out] = [(); 2].map(|()| Memory::of_bytes(rows * 2 * LAYERS as usize));
    let tensor = |memory: &Memory, layer: u32| {
        let mut tensor = memory.tensor(Dtype::BF16, [batch.total_q() as usize, 32, 128]);
        tensor.address += u64::from(layer) * rows as u64 * 2;
        tensor
    };
    let pool = KvPool::new(&spec, KvLayout::Nhd, PAGE, pages, k.address(), v.address());
    let mut run = |layer: u32| {
        let (q, out) = (tensor(&q, layer), tensor(&out, layer));
        // SAFETY: everything lives until the stream was waited for.
        unsafe { gpu.run(&mut workspace, &q, &[pool], &out, None, stream.0) }.unwrap();
    };
    let same = queued(&stream, LAYERS, |_| run(0));
    let new_pointers = queued(&stream, LAYERS, &mut run);
    let launches = launches(&stream, || run(0));
    let driver = queued_launches(&stream, launches * LAYERS) * f64::from(launches);

    // As a decode step has it: a token more, within the last page.
    let mut lengths = 0..;
    let updated = least(|| {
        let more = lengths.next().unwrap_or(0) % 2 == 0;
        for len in &mut batch.parts[0].table.last_page_len {
            *len = if more { *len + 1 } else { *len - 1 };
        }
        let begin = Instant::now();
        let update = planner.update(&spec, &batch, &device, &options, &mut plan);
        let time = begin.elapsed();
        // Shorter than before is a new plan.
        match update.unwrap() {
            Update::Patched => time,
            _ => Duration::MAX,
        }
    });
    let updated = match updated < 1e6 {
        true => format!("{updated:.2}"),
        false => "–".to_owned(),
    };
    println!(
        "{name:<34} {planned:>7.1} {updated:>7} {uploaded:>7.1} {launches:>9} {same:>9.2} {new_pointers:>9.2} {driver:>9.2}"
    );
}

/// Kernels that a call launches.
fn launches(stream: &Stream, call: impl FnOnce()) -> u32 {
    let (mut graph, mut count) = (ptr::null_mut(), 0);
    // SAFETY: the stream is idle and ours; the graph is destroyed once.
    unsafe {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let raw: sys::CUstream = stream.0.as_raw().cast();
        assert_eq!(
            sys::cuStreamBeginCapture_v2(raw, mode),
            sys::cudaError_enum::CUDA_SUCCESS
        );
        call();
        sys::cuStreamEndCapture(raw, &mut graph);
        sys::cuGraphGetNodes(graph, ptr::null_mut(), &mut count);
        sys::cuGraphDestroy(graph);
    }
    count as u32
}

/// The driver's own time for a launch of a kernel that ends at once.
fn queued_launches(stream: &Stream, calls: u32) -> f64 {
    let module = MODULES
        .iter()
        .find(|module| module.family == "passes" && module.arch == "sm_90a");
    let image = module
        .expect("it is inside")
        .cubin
        .as_ref()
        .expect("with machine code");
    let module = Loaded::from_cubin(image.unpack().expect("it is whole"), &[]).expect("it loads");
    let pads = KERNELS.iter().find(|row| row.op == Op::Pad);
    let name = pads.expect("it is in the registry").name;
    let kernel = module.get_function(name).expect("it is there");
    let params = [0_u64; 32];
    queued(stream, calls, |_| {
        let mut arguments = [params.as_ptr().cast_mut().cast::<c_void>()];
        // SAFETY: with no chunks to write the kernel does nothing.
        let code = unsafe {
            sys::cuLaunchKernel(
                kernel.to_raw(),
                1,
                1,
                1,
                256,
                1,
                1,
                0,
                stream.0.as_raw().cast(),
                black_box(arguments.as_mut_ptr()),
                ptr::null_mut(),
            )
        };
        assert_eq!(code, sys::cudaError_enum::CUDA_SUCCESS);
    })
}

//! How near `merge_states` and `append_paged_kv` come to the copy bandwidth of the same run.
//!
//! Times are CUDA events around one launch, the median of many. Bytes are those that must move: states read
//! and rows written, or rows read and written. Buffers are larger than L2 and hold random data.

#[path = "../tests/common/mod.rs"]
mod common;

use std::{ptr, time::Instant};

use common::{Memory, Rng, Stream};
use cust::{context::Context, device::Device, sys};
use tandem_attn::{
    abi::MergeRow,
    exec::gpu::{DeviceTensor, Gpu, KvPool, MODULES, Module, PartialStates, Stream as Handle},
    problem::{Dtype, KvLayout, Spec},
};

const SIZES: [(usize, &str); 2] = [(256 << 20, "256 MB"), (1 << 30, "1 GB")];

fn main() {
    // Without the flag this is `cargo test`, which only wants to know that it starts.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let Some(gpu) = start() else { return };
    let stream = Stream::new();
    for (bytes, size) in SIZES {
        let ceiling = copy_ceiling(stream.0, bytes);
        println!("\n{size}, device-to-device copy {ceiling:.0} GB/s (read + written)");
        println!("{:<46} {:>9} {:>9} {:>8}", "", "µs", "GB/s", "of copy");
        for (heads, dim, slots) in [
            (32, 128, 2),
            (32, 128, 4),
            (32, 128, 9),
            (8, 64, 3),
            (128, 512, 2),
        ] {
            merge(gpu, stream.0, bytes, ceiling, heads, dim, slots);
        }
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            for page_size in [1, 16, 128] {
                append(
                    gpu,
                    stream.0,
                    bytes,
                    ceiling,
                    layout,
                    page_size,
                    Dtype::BF16,
                );
            }
        }
        append(
            gpu,
            stream.0,
            bytes,
            ceiling,
            KvLayout::Nhd,
            16,
            Dtype::F8E4M3,
        );
    }
}

/// Loads the kernels in all ways, with the times they take.
fn start() -> Option<&'static Gpu> {
    // The context first: making it is not what is measured.
    let _context = match cust::init(cust::CudaFlags::empty())
        .and_then(|()| Context::new(Device::get_device(0)?))
    {
        Ok(context) => context,
        Err(error) => {
            println!("skipped: gpu_merge_append: {error}");
            return None;
        }
    };
    let begin = Instant::now();
    let gpu = common::gpu("gpu_merge_append")?;
    println!("{}, kernels for {}", gpu.name(), gpu.arch());
    let embedded = if MODULES.iter().all(|module| module.cubin.is_some()) {
        "cubins"
    } else {
        "PTX"
    };
    println!(
        "modules loaded from {embedded} in {:.1} ms",
        begin.elapsed().as_secs_f64() * 1e3
    );
    let ptx: Vec<_> = MODULES
        .iter()
        .map(|module| Module {
            cubin: None,
            ..module.clone()
        })
        .collect();
    let begin = Instant::now();
    Gpu::builder()
        .modules(&ptx)
        .compile_ptx(&mut |_| {})
        .build(0)
        .expect("the driver compiles our PTX");
    println!(
        "modules loaded from PTX in {:.1} ms",
        begin.elapsed().as_secs_f64() * 1e3
    );
    Some(gpu)
}

/// Median microseconds of a launch.
fn time(stream: Handle, mut launch: impl FnMut()) -> f64 {
    let event = || {
        let mut event = ptr::null_mut();
        // SAFETY: writes one handle.
        let code = unsafe { sys::cuEventCreate(&mut event, 0) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        event
    };
    let (begin, end) = (event(), event());
    let mut times: Vec<f32> = (0..60)
        .map(|_| {
            let mut milliseconds = 0.0;
            // SAFETY: events and stream live.
            unsafe {
                let _ = sys::cuEventRecord(begin, stream.as_raw().cast());
                launch();
                let _ = sys::cuEventRecord(end, stream.as_raw().cast());
                assert_eq!(sys::cuEventSynchronize(end), sys::CUresult::CUDA_SUCCESS);
                let _ = sys::cuEventElapsedTime(&mut milliseconds, begin, end);
            }
            milliseconds
        })
        .skip(10)
        .collect();
    times.sort_by(f32::total_cmp);
    f64::from(times[times.len() / 2]) * 1e3
}

/// GB/s, read and written, of the driver's copy of half of `bytes`.
fn copy_ceiling(stream: Handle, bytes: usize) -> f64 {
    let (from, to) = (random_memory(bytes / 2), Memory::of_bytes(bytes / 2));
    let microseconds = time(stream, || {
        // SAFETY: both buffers live and are this long.
        let code = unsafe {
            sys::cuMemcpyDtoDAsync_v2(
                to.address(),
                from.address(),
                bytes / 2,
                stream.as_raw().cast(),
            )
        };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    });
    bytes as f64 / microseconds / 1e3
}

/// Finite floats of any type: bytes whose exponents are neither all ones nor all zeros.
fn random_memory(bytes: usize) -> Memory {
    let mut rng = Rng(1);
    let words: Vec<u64> = (0..bytes.div_ceil(8))
        .map(|_| rng.bits() & 0xBFBF_BFBF_BFBF_BFBF | 0x2020_2020_2020_2020)
        .collect();
    Memory::new(&words)
}

fn report(what: &str, bytes: usize, microseconds: f64, ceiling: f64) {
    let speed = bytes as f64 / microseconds / 1e3;
    println!(
        "{what:<46} {microseconds:>9.1} {speed:>9.0} {:>7.1}%",
        100.0 * speed / ceiling
    );
}

fn merge(
    gpu: &Gpu,
    stream: Handle,
    bytes: usize,
    ceiling: f64,
    heads: usize,
    dim: usize,
    slots: usize,
) {
    // Per row: states read, slot ids and the row itself; output and log written.
    let row_bytes = slots * (heads * (dim + 1) * 4 + 4) + 16 + heads * (dim * 2 + 4);
    let tokens = bytes / row_bytes;
    let states = tokens * slots;
    let mut rng = Rng(2);
    let partial_out = random_memory(states * heads * dim * 4);
    let partial_lse = Memory::new(&rng.floats(states * heads, -20.0, 20.0));
    let rows: Vec<MergeRow> = (0..tokens as u32)
        .map(|token| MergeRow {
            token,
            slots_begin: token * slots as u32,
            slots: slots as u32,
            reserved: 0,
        })
        .collect();
    let rows = Memory::new(&rows);
    let merge_slots = Memory::new(&(0..states as u32).collect::<Vec<_>>());
    let (out, lse) = (
        Memory::of_bytes(tokens * heads * dim * 2),
        Memory::of_bytes(tokens * heads * 4),
    );
    let partials = PartialStates {
        out: partial_out.tensor(Dtype::F32, [states, heads, dim]),
        lse: partial_lse.tensor(Dtype::F32, [states, heads]),
    };
    let out = out.tensor(Dtype::BF16, [tokens, heads, dim]);
    let lse = lse.tensor(Dtype::F32, [tokens, heads]);
    let microseconds = time(stream, || {
        // SAFETY: everything is there as described; `time` waits for it.
        unsafe {
            gpu.merge_states(
                &partials,
                rows.array(),
                merge_slots.array(),
                &out,
                Some(&lse),
                stream,
            )
        }
        .unwrap();
    });
    report(
        &format!("merge_states, {slots} × {heads} heads × {dim}, bf16"),
        tokens * row_bytes,
        microseconds,
        ceiling,
    );
}

fn append(
    gpu: &Gpu,
    stream: Handle,
    bytes: usize,
    ceiling: f64,
    layout: KvLayout,
    page_size: u32,
    dtype: Dtype,
) {
    let spec = Spec::new(8, 8, 128).with_dtype(dtype);
    let token_bytes = 8 * 128 * dtype.bytes() as usize;
    // Keys and values, read and written, and a slot.
    let tokens = bytes / (4 * token_bytes) / page_size as usize * page_size as usize;
    let mut pages: Vec<u32> = (0..tokens as u32 / page_size).collect();
    Rng(3).shuffle(&mut pages);
    let slots: Vec<u32> = pages
        .iter()
        .flat_map(|page| page * page_size..(page + 1) * page_size)
        .collect();
    let slots = Memory::new(&slots);
    let [k, v] = [(); 2].map(|()| random_memory(tokens * token_bytes));
    let [k_pool, v_pool] = [(); 2].map(|()| Memory::of_bytes(tokens * token_bytes));
    let pool = KvPool::new(
        &spec,
        layout,
        page_size,
        pages.len() as u32,
        k_pool.address(),
        v_pool.address(),
    );
    let tensor = |memory: &Memory| -> DeviceTensor<3> { memory.tensor(dtype, [tokens, 8, 128]) };
    let (k, v) = (tensor(&k), tensor(&v));
    let microseconds = time(stream, || {
        // SAFETY: everything is there as described; `time` waits for it.
        unsafe { gpu.append_paged_kv(&spec, &pool, slots.array(), &k, &v, stream) }.unwrap();
    });
    let moved = tokens * (4 * token_bytes + 4);
    report(
        &format!("append_paged_kv, {layout:?}, pages of {page_size}, {dtype:?}"),
        moved,
        microseconds,
        ceiling,
    );
}

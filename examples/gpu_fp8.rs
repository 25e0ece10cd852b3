//! Keys and values of 8 bits on a GPU: new ones are quantised as they are appended, with a scale for each token and KV head.
//!
//! Run it with `cargo run --release --features cuda --example gpu_fp8` on a GPU of compute capability 8.0 or newer. On an
//! older one, or without one, it prints what is missing and ends. In a program of your own, the comparison with f64 takes the
//! feature `unstable`.

use std::error::Error as StdError;

use half::bf16;
use tandem_attn::{
    Error,
    gpu::{AppendScales, DeviceBuffer, Gpu, KvPool, KvScales as DeviceScales, WorkspaceOptions},
    kv::{KvScales, KvView},
    plan::{Bound, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    reference,
    tensor::F8E4M3,
};

const PAGE_SIZE: u32 = 16;
const PAGES: u32 = 32;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn StdError>> {
    let mut progress = |module| eprintln!("{module}");
    let gpu = match Gpu::builder().compile_ptx(&mut progress).build(0) {
        Ok(gpu) => gpu,
        Err(missing @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            println!("{missing}");
            return Ok(());
        }
        Err(error) => return Err(error.into()),
    };
    let (stream, device) = (gpu.stream()?, gpu.device());
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    // Before memory is allocated.
    if let Err(missing) = gpu.supports(&spec) {
        println!("{missing}");
        return Ok(());
    }

    // The cache of a layer: numbers `[pages, page_size, kv_heads, head_dim]`, scales `[pages, page_size, kv_heads]`.
    let [heads, dim] = [spec.kv_heads, spec.head_dim_qk].map(|extent| extent as usize);
    let shape = [PAGES as usize, PAGE_SIZE as usize, heads];
    let rows = shape.iter().product::<usize>();
    let numbers = || DeviceBuffer::<F8E4M3>::zeroed(&gpu, rows * dim);
    let scales = || DeviceBuffer::<f32>::zeroed(&gpu, rows);
    let (k, v, k_scales, v_scales) = (numbers()?, numbers()?, scales()?, scales()?);
    let pool = KvPool::new(
        &spec,
        KvLayout::Nhd,
        PAGE_SIZE,
        PAGES,
        k.address(),
        v.address(),
    )
    .with_scales(DeviceScales::Token {
        k: k_scales.tensor(shape),
        v: v_scales.tensor(shape),
    });

    // A prompt of 90 tokens, and a decode with 200 keys. Here the keys of all its tokens are new, too.
    let mut table = PageTable::new(PAGE_SIZE, PAGES);
    table.push(&[7, 1, 20, 3, 11, 2], 90);
    table.push(&[0, 4, 5, 6, 8, 9, 10, 12, 13, 14, 15, 16, 17], 200);
    let batch = Batch::new(vec![0, 90, 91], table);
    let table = &batch.parts[0].table;
    let slots = [table.slots(0, 0..90)?, table.slots(1, 0..200)?].concat();

    // What a model computes in 16 bits: the keys and values of the new tokens, and queries.
    let mut random = fastrand::Rng::with_seed(1);
    let mut numbers = |rows: usize, heads: usize| -> Vec<bf16> {
        let number = |_| bf16::from_f32(2.0 * random.f32() - 1.0);
        (0..rows * heads * dim).map(number).collect()
    };
    let new = [slots.len(), heads, dim];
    let new_k = DeviceBuffer::from_slice(&gpu, &numbers(slots.len(), heads))?;
    let new_v = DeviceBuffer::from_slice(&gpu, &numbers(slots.len(), heads))?;
    let slots = DeviceBuffer::from_slice(&gpu, &slots)?;
    let host_q = numbers(batch.total_q() as usize, spec.q_heads as usize);
    let q = DeviceBuffer::from_slice(&gpu, &host_q)?;
    let out = DeviceBuffer::<bf16>::zeroed(&gpu, host_q.len())?;
    let tokens = [batch.total_q() as usize, spec.q_heads as usize, dim];

    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default())?;
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())?;
    // SAFETY: all buffers live until the stream was waited for, and the slots are those of different tokens.
    unsafe {
        gpu.append_quantised(
            &spec,
            &pool,
            AppendScales::Computed,
            slots.array(),
            &new_k.tensor(new),
            &new_v.tensor(new),
            *stream,
        )?;
        workspace.upload(&plan, *stream)?;
        gpu.run(
            &mut workspace,
            &q.tensor(tokens),
            &[pool],
            &out.tensor(tokens),
            None,
            *stream,
        )?;
    }
    stream.synchronize()?;

    // The same numbers and scales in f64.
    let (k, v, k_scales, v_scales) = (k.read()?, v.read()?, k_scales.read()?, v_scales.read()?);
    let strides = KvLayout::Nhd.strides(PAGE_SIZE, spec.kv_heads, 1);
    let cache = KvView::new(&spec, KvLayout::Nhd, PAGE_SIZE, &k, &v).with_scales(KvScales::Token {
        k: &k_scales,
        v: &v_scales,
        k_strides: strides,
        v_strides: strides,
    });
    let exact = reference::attention(&spec, &batch, &host_q, &[cache])?;
    let errors = out.read()?.into_iter().zip(exact.out);
    let largest = errors
        .map(|(x, right)| (x.to_f64() - right).abs())
        .fold(0.0, f64::max);
    println!("{plan}\nthe largest difference from f64 on the same cache: {largest:.1e}");
    match largest < 1e-2 {
        true => Ok(()),
        false => Err(format!("a difference of {largest:.1e}").into()),
    }
}

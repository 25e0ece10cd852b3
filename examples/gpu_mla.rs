//! Latent attention (MLA) on a GPU: the decodes of DeepSeek-V3, with one row of 576 elements for a token, of which the first 512 are
//! its value.
//!
//! Run it with `cargo run --release --features cuda --example gpu_mla` on a Hopper GPU. On another GPU, or
//! without one, it prints what is missing and ends. In a program of your own, the comparison with f64 takes the feature `unstable`.

use std::error::Error as StdError;

use half::bf16;
use tandem_attn::{
    Error,
    gpu::{DeviceBuffer, Gpu, KvPool, WorkspaceOptions},
    kv::KvView,
    plan::{Bound, PlanOptions, Planner},
    problem::{Batch, PageTable, Spec},
    reference,
};

const PAGE_SIZE: u32 = 64;
const PAGES: u32 = 16;

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
    // 16 query heads of this GPU, multiplied by the up-projection of the keys: 512 latent elements and 64 rotated ones.
    let spec = Spec::latent(16, 512, 64);
    // Before memory is allocated.
    if let Err(missing) = gpu.supports(&spec) {
        println!("{missing}");
        return Ok(());
    }

    // The cache of a layer: `[pages, page_size, 1, 576]`.
    let row = spec.head_dim_qk as usize;
    let rows = (PAGES * PAGE_SIZE) as usize;
    let cache = DeviceBuffer::<bf16>::zeroed(&gpu, rows * row)?;
    let pool = KvPool::latent(&spec, PAGE_SIZE, PAGES, cache.address());

    // Two requests with one new token, and one with two (a draft token). Here the rows of all their tokens are new.
    let lengths = [130, 64, 257];
    let mut table = PageTable::new(PAGE_SIZE, PAGES);
    table.push(&[3, 0, 9], lengths[0]);
    table.push(&[5], lengths[1]);
    table.push(&[1, 2, 14, 7, 8], lengths[2]);
    let batch = Batch::new(vec![0, 1, 2, 4], table);
    let of_request = |request| batch.parts[0].table.slots(request, 0..lengths[request]);
    let slots = [of_request(0)?, of_request(1)?, of_request(2)?].concat();

    let mut random = fastrand::Rng::with_seed(1);
    let mut numbers = |count: usize| -> Vec<bf16> {
        let number = |_| bf16::from_f32(2.0 * random.f32() - 1.0);
        (0..count).map(number).collect()
    };
    let new = DeviceBuffer::from_slice(&gpu, &numbers(slots.len() * row))?;
    let [tokens, heads, dim_v] =
        [batch.total_q(), spec.q_heads, spec.head_dim_v].map(|x| x as usize);
    let host_q = numbers(tokens * heads * row);
    let q = DeviceBuffer::from_slice(&gpu, &host_q)?;
    let out = DeviceBuffer::<bf16>::zeroed(&gpu, tokens * heads * dim_v)?;
    let count = slots.len();
    let slots = DeviceBuffer::from_slice(&gpu, &slots)?;

    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default())?;
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())?;
    // SAFETY: all buffers live until the stream was waited for, and the slots are those of different tokens.
    unsafe {
        gpu.append_rows(
            &new.tensor([count, 1, row]),
            slots.array(),
            &cache.tensor([PAGES as usize, PAGE_SIZE as usize, 1, row]),
            *stream,
        )?;
        workspace.upload(&plan, *stream)?;
        gpu.run(
            &mut workspace,
            &q.tensor([tokens, heads, row]),
            &[pool],
            &out.tensor([tokens, heads, dim_v]),
            None,
            *stream,
        )?;
    }
    stream.synchronize()?;

    let cache = cache.read()?;
    let view = KvView::latent(&spec, PAGE_SIZE, &cache);
    let exact = reference::attention(&spec, &batch, &host_q, &[view])?;
    let errors = out.read()?.into_iter().zip(exact.out);
    let largest = errors
        .map(|(x, right)| (x.to_f64() - right).abs())
        .fold(0.0, f64::max);
    println!("{plan}\nthe largest difference from f64: {largest:.1e}");
    match largest < 1e-2 {
        true => Ok(()),
        false => Err(format!("a difference of {largest:.1e}").into()),
    }
}

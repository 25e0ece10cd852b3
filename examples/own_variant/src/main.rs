//! A variant of your own: the same ten lines of Rust run on the CPU, in the f64 reference, and in kernels on a GPU.

use own_variant_kernels::{CHUNKED, Chunked, Chunks};
use tandem_attn::{
    Cpu, Error,
    gpu::{DeviceBuffer, Gpu, Image, KvPool, Module, RunTensors, WorkspaceOptions},
    half::bf16,
    kv::KvView,
    plan::{Bound, PlanOptions, Planner},
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
    tensor::HeadTensors,
    variant::FromLaunch,
};

static MODULES: &[Module] = include!(concat!(env!("OUT_DIR"), "/modules.rs"));

fn main() -> Result<(), Error> {
    let spec = Spec::new(8, 2, 128).with_hooks(&CHUNKED);
    // A prompt of 300 tokens, and a request that decodes at position 700.
    let mut table = PageTable::new(16, 64);
    table.push(&(0..19).collect::<Vec<_>>(), 300);
    table.push(&(19..63).collect::<Vec<_>>(), 701);
    let batch = Batch::new(vec![0, 300, 301], table);
    let chunks = Chunks {
        tokens: 256,
        loss: 0.03,
        most: 100.0,
    };
    // SAFETY: there are no addresses in it.
    let variant = unsafe { Chunked::from_launch(spec.variant_params(), &chunks) };

    let noise = |count: usize, seed: u32| -> Vec<bf16> {
        let bits = |i: usize| {
            (i as u32 ^ seed)
                .wrapping_mul(0x9E37_79B1)
                .rotate_left(15)
                .wrapping_mul(0x85EB_CA77)
        };
        (0..count)
            .map(|i| bf16::from_f32(bits(i) as f32 / u32::MAX as f32 * 2.0 - 1.0))
            .collect()
    };
    let (q, k, v) = (
        noise(301 * 8 * 128, 1),
        noise(64 * 16 * 2 * 128, 2),
        noise(64 * 16 * 2 * 128, 3),
    );
    let view = KvView::new(&spec, KvLayout::Nhd, 16, &k, &v);
    let none = HeadTensors::default();
    let right = reference::attention_with(&variant, &spec, &batch, &q, &[view], &none)?.out;

    let (cpu, mut out) = (Cpu::new(), vec![bf16::ZERO; q.len()]);
    let plan = Planner::new().plan(&spec, &batch, &cpu.device(), &PlanOptions::default())?;
    cpu.run_with(&variant, &plan, &q, &[view], &mut out, None, &none)?;
    println!(
        "CPU: the largest difference from the reference is {:.5}",
        difference(&out, &right)
    );

    let mut progress = |module| eprintln!("{module}");
    let gpu = Gpu::builder()
        .variant(&CHUNKED, MODULES)
        .compile_ptx(&mut progress);
    let gpu = match gpu.build(0) {
        Ok(gpu) => gpu,
        Err(
            missing @ (Error::NoDriver { .. }
            | Error::NoDevice { .. }
            | Error::UnsupportedArchitecture { .. }
            // The variant was not built for this GPU.
            | Error::VariantArchitecture { .. }),
        ) if std::env::var_os("TANDEM_REQUIRE_GPU").is_none() => {
            println!("no GPU: {missing}");
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    let stream = gpu.stream()?;
    let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &PlanOptions::default())?;
    let mut workspace = gpu.workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())?;
    let [q, k, v] = [&q, &k, &v].map(|numbers| DeviceBuffer::from_slice(&gpu, numbers));
    let (q, k, v) = (q?, k?, v?);
    let results = DeviceBuffer::<bf16>::zeroed(&gpu, out.len())?;
    let pool = KvPool::new(&spec, KvLayout::Nhd, 16, 64, k.address(), v.address());
    let (q, to) = (q.tensor([301, 8, 128]), results.tensor([301, 8, 128]));
    let pools = [pool];
    let tensors = RunTensors::new(&q, &pools, &to).with_own(&chunks);
    // SAFETY: all buffers live until the stream was waited for, and the plan is the planner's.
    unsafe {
        workspace.upload(&plan, *stream)?;
        gpu.run_with(&mut workspace, &tensors, *stream)?;
    }
    stream.synchronize()?;
    println!(
        "{}: the largest difference is {:.5}",
        gpu.name(),
        difference(&results.read()?, &right)
    );
    Ok(())
}

/// The largest difference, which must be within the rounding of bf16.
fn difference(got: &[bf16], right: &[f64]) -> f64 {
    let pairs = got.iter().zip(right);
    let largest = pairs
        .map(|(got, right)| (got.to_f64() - right).abs())
        .fold(0.0, f64::max);
    assert!(largest < 0.01, "{largest}");
    largest
}

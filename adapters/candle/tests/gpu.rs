//! Tests on an NVIDIA GPU: the same results as on the CPU, in candle's memory and on its stream, and the host's time of
//! a call.
//!
//! Skipped if there is no driver; `TANDEM_REQUIRE_GPU=1` makes that an error.

use std::time::{Duration, Instant};

use candle_core::{DType, Device, Result, Tensor};
use tandem_candle::{
    Attention, KvLayout, Layer, flash_attn_varlen, paged_attention, reshape_and_cache,
    reshape_and_quantise,
};

const HEADS: usize = 32;
const KV_HEADS: usize = 8;
const DIM: usize = 128;
const BLOCK: usize = 16;

fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) if std::env::var_os("TANDEM_REQUIRE_GPU").is_some() => panic!("{error}"),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

fn randn(shape: &[usize], dtype: DType) -> Result<Tensor> {
    Tensor::randn(0_f32, 1.0, shape, &Device::Cpu)?.to_dtype(dtype)
}

fn assert_close(got: &Tensor, right: &Tensor) -> Result<()> {
    assert_eq!(got.dims(), right.dims());
    let (got, right) = (got.to_device(&Device::Cpu)?, right);
    let difference = (got.to_dtype(DType::F64)? - right.to_dtype(DType::F64)?)?
        .abs()?
        .max_all()?
        .to_scalar::<f64>()?;
    let tolerance = if got.dtype() == DType::F16 {
        4e-3
    } else {
        3.2e-2
    };
    assert!(difference < tolerance, "{difference} in {:?}", got.dtype());
    Ok(())
}

/// A step's tensors: caches with the old tokens, the new tokens, and their slots.
struct Case {
    caches: [Tensor; 2],
    new: [Tensor; 2],
    q: Tensor,
    slots: Tensor,
    tables: Vec<Vec<usize>>,
    lengths: Vec<usize>,
    queries: Vec<usize>,
}

impl Case {
    fn new(queries: &[usize], lengths: &[usize], layout: KvLayout, dtype: DType) -> Result<Self> {
        let blocks: usize = lengths.iter().map(|len| len.div_ceil(BLOCK)).sum();
        let shape = match layout {
            KvLayout::Nhd => [blocks, BLOCK, KV_HEADS, DIM],
            KvLayout::Hnd => [blocks, KV_HEADS, BLOCK, DIM],
        };
        let mut free = (0..blocks).rev();
        let tables: Vec<Vec<usize>> = lengths
            .iter()
            .map(|len| free.by_ref().take(len.div_ceil(BLOCK)).collect())
            .collect();
        let mut slots = Vec::new();
        for ((table, &len), &queries) in tables.iter().zip(lengths).zip(queries) {
            slots.extend(
                (len - queries..len).map(|at| (table[at / BLOCK] * BLOCK + at % BLOCK) as u32),
            );
        }
        let tokens = slots.len();
        let rows = [tokens, KV_HEADS, DIM];
        Ok(Self {
            caches: [randn(&shape, dtype)?, randn(&shape, dtype)?],
            new: [randn(&rows, dtype)?, randn(&rows, dtype)?],
            q: randn(&[tokens, HEADS, DIM], dtype)?,
            slots: Tensor::new(slots, &Device::Cpu)?,
            tables,
            lengths: lengths.to_vec(),
            queries: queries.to_vec(),
        })
    }

    /// Appends the new tokens and attends.
    fn run(&self, device: &Device, layer: &Layer) -> Result<Tensor> {
        let there = |tensor: &Tensor| tensor.to_device(device);
        let (k_cache, v_cache) = (there(&self.caches[0])?, there(&self.caches[1])?);
        let (k, v) = (there(&self.new[0])?, there(&self.new[1])?);
        let attention = Attention::new(device)?;
        let step = attention.step(&self.tables, &self.lengths, &self.queries, BLOCK)?;
        let slots = there(&self.slots)?;
        if layer.kv_scales.is_some() {
            reshape_and_quantise(&k, &v, &k_cache, &v_cache, &slots, layer)?;
        } else {
            reshape_and_cache(&k, &v, &k_cache, &v_cache, &slots, layer.layout)?;
        }
        paged_attention(&there(&self.q)?, &k_cache, &v_cache, &step, layer)
    }
}

/// Slots of I64 failed on GPUs: of no tokens, as the checks of strides have them, there is nothing to convert. Those of I32
/// have no conversion in candle.
#[test]
fn slots_may_be_of_any_integer_type() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let rows = randn(&[4, KV_HEADS, DIM], DType::BF16)?;
    let slots = Tensor::new(&[21_i64, -1, 3, 16], &Device::Cpu)?;
    let cached = |device: &Device, slots: &Tensor| -> Result<Tensor> {
        let cache = || Tensor::zeros((2, BLOCK, KV_HEADS, DIM), DType::BF16, device);
        let (k_cache, v_cache, rows) = (cache()?, cache()?, rows.to_device(device)?);
        let slots = slots.to_device(device)?;
        reshape_and_cache(&rows, &rows, &k_cache, &v_cache, &slots, KvLayout::Nhd)?;
        let both = Tensor::cat(&[k_cache, v_cache], 0)?.to_device(&Device::Cpu)?;
        both.to_dtype(DType::F32)?.flatten_all()
    };
    let right = cached(&Device::Cpu, &slots)?.to_vec1::<f32>()?;
    assert!(right.iter().any(|it| *it != 0.0));
    let in_32_bits: Vec<i32> = slots
        .to_vec1::<i64>()?
        .iter()
        .map(|&it| it as i32)
        .collect();
    let without_sign: Vec<u32> = in_32_bits.iter().map(|&it| it as u32).collect();
    let in_32_bits = Tensor::new(in_32_bits, &Device::Cpu)?;
    let without_sign = Tensor::new(without_sign, &Device::Cpu)?;
    for slots in [slots, in_32_bits, without_sign] {
        let got = cached(&gpu, &slots)?.to_vec1::<f32>()?;
        assert!(got == right, "slots of {:?}", slots.dtype());
    }
    // A step may have no new tokens.
    let none = |dims: &[usize], dtype| Tensor::zeros(dims, dtype, &Device::Cpu)?.to_device(&gpu);
    let cache = Tensor::zeros((2, BLOCK, KV_HEADS, DIM), DType::BF16, &gpu)?;
    if let (Ok(rows), Ok(slots)) = (
        none(&[0, KV_HEADS, DIM], DType::BF16),
        none(&[0], DType::I64),
    ) {
        reshape_and_cache(&rows, &rows, &cache, &cache.copy()?, &slots, KvLayout::Nhd)?;
    }
    Ok(())
}

/// Candle's stream is another one in each thread, with the same handle. Threads shared a workspace, in which one overwrote
/// the plan that the other's kernels read.
#[test]
fn threads_have_workspaces_of_their_own() -> Result<()> {
    let Some(_) = gpu() else { return Ok(()) };
    let layer = Layer::new(1.0 / (DIM as f32).sqrt());
    let work = |lengths: Vec<usize>| -> Result<()> {
        let gpu = Device::new_cuda(0)?;
        let queries = vec![1; lengths.len()];
        let case = Case::new(&queries, &lengths, KvLayout::Nhd, DType::BF16)?;
        let right = case.run(&Device::Cpu, &layer)?;
        let there = |tensor: &Tensor| tensor.to_device(&gpu);
        let [k_cache, v_cache] = [there(&case.caches[0])?, there(&case.caches[1])?];
        let [k, v] = [there(&case.new[0])?, there(&case.new[1])?];
        let (q, slots) = (there(&case.q)?, there(&case.slots)?);
        reshape_and_cache(&k, &v, &k_cache, &v_cache, &slots, layer.layout)?;
        let attention = Attention::new(&gpu)?;
        let mut last = Vec::new();
        for _ in 0..200 {
            // A step of its own each time, so that its plan is uploaded.
            let step = attention.step(&case.tables, &case.lengths, &case.queries, BLOCK)?;
            last.push(paged_attention(&q, &k_cache, &v_cache, &step, &layer)?);
        }
        last.iter().try_for_each(|out| assert_close(out, &right))
    };
    std::thread::scope(|scope| {
        let long = scope.spawn(|| work(vec![3000, 17, 900, 2000, 5]));
        let short = scope.spawn(|| work((1..=64).collect()));
        long.join().expect("no panic")?;
        short.join().expect("no panic")
    })
}

#[test]
fn paged_attention_on_a_gpu_is_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let layer = Layer::new(1.0 / (DIM as f32).sqrt());
    for dtype in [DType::BF16, DType::F16] {
        for layout in [KvLayout::Nhd, KvLayout::Hnd] {
            for (queries, lengths) in [
                (&[1, 1, 1][..], &[40, 7, 333][..]),
                (&[64, 1, 1], &[64, 100, 500]),
                (&[128], &[300]),
            ] {
                let case = Case::new(queries, lengths, layout, dtype)?;
                let layer = layer.clone().with_layout(layout);
                for layer in [layer.clone(), layer.with_window_left(31)] {
                    assert_close(&case.run(&gpu, &layer)?, &case.run(&Device::Cpu, &layer)?)?;
                }
            }
        }
    }
    Ok(())
}

#[test]
fn caches_of_8_bits_on_a_gpu_are_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let [k_scale, v_scale] = [0.02_f32, 0.015];
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let layer = Layer::new(1.0 / (DIM as f32).sqrt())
            .with_layout(layout)
            .with_kv_scales(k_scale, v_scale);
        for (queries, lengths) in [(&[1, 1, 1][..], &[40, 7, 333][..]), (&[64, 1], &[300, 500])] {
            let mut case = Case::new(queries, lengths, layout, DType::BF16)?;
            for (cache, scale) in case.caches.iter_mut().zip([k_scale, v_scale]) {
                let numbers = (cache.to_dtype(DType::F32)? / f64::from(scale))?;
                *cache = numbers.to_dtype(DType::F8E4M3)?;
            }
            assert_close(&case.run(&gpu, &layer)?, &case.run(&Device::Cpu, &layer)?)?;
        }
    }
    Ok(())
}

/// The sinks are a row of those of all layers, as a model may keep them.
#[test]
fn sinks_on_a_gpu_are_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let sinks = (randn(&[2, HEADS], DType::F32)? * 3.0)?;
    for dtype in [DType::BF16, DType::F16] {
        for (queries, lengths) in [(&[1, 1, 1][..], &[40, 7, 333][..]), (&[64, 1], &[300, 500])] {
            let case = Case::new(queries, lengths, KvLayout::Nhd, dtype)?;
            let on = |device: &Device| {
                let sinks = sinks.to_device(device)?.get(1)?;
                let layer = Layer::new(1.0 / (DIM as f32).sqrt()).with_sinks(sinks);
                case.run(device, &layer)
            };
            assert_close(&on(&gpu)?, &on(&Device::Cpu)?)?;
        }
    }
    Ok(())
}

#[test]
fn packed_attention_on_a_gpu_is_as_on_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let lengths = [70_u32, 1, 130];
    let tokens = 201;
    let indptr: Vec<u32> = vec![0, 70, 71, 201];
    let rows = |heads| randn(&[tokens, heads, DIM], DType::BF16);
    let (q, k, v) = (rows(HEADS)?, rows(KV_HEADS)?, rows(KV_HEADS)?);
    let longest = *lengths.iter().max().unwrap() as usize;
    let on = |device: &Device| {
        let there = |tensor: &Tensor| tensor.to_device(device);
        let indptr = Tensor::new(indptr.as_slice(), &Device::Cpu)?;
        flash_attn_varlen(
            &there(&q)?,
            &there(&k)?,
            &there(&v)?,
            &indptr,
            &indptr,
            longest,
            longest,
            1.0 / (DIM as f32).sqrt(),
            true,
        )
    };
    assert_close(&on(&gpu)?, &on(&Device::Cpu)?)
}

/// The host's time of a call that does not wait for the GPU.
fn host_time(device: &Device, mut call: impl FnMut() -> Result<()>) -> Result<Duration> {
    let mut least = Duration::MAX;
    for _ in 0..50 {
        device.synchronize()?;
        let begin = Instant::now();
        for _ in 0..8 {
            call()?;
        }
        least = least.min(begin.elapsed() / 8);
    }
    Ok(least)
}

#[test]
fn a_call_costs_the_host_five_microseconds_more_than_a_run() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let case = Case::new(&[1; 16], &[1024; 16], KvLayout::Nhd, DType::BF16)?;
    let layer = Layer::new(1.0 / (DIM as f32).sqrt());
    let there = |tensor: &Tensor| tensor.to_device(&gpu);
    let (k_cache, v_cache, q) = (
        there(&case.caches[0])?,
        there(&case.caches[1])?,
        there(&case.q)?,
    );
    let attention = Attention::new(&gpu)?;
    let step = attention.step(&case.tables, &case.lengths, &case.queries, BLOCK)?;
    let call = host_time(&gpu, || {
        paged_attention(&q, &k_cache, &v_cache, &step, &layer).map(drop)
    })?;
    let run = bare::run_time(&gpu, &case, [&q, &k_cache, &v_cache], &layer)?;
    println!("a call {call:?}, the run in it {run:?}");
    if !cfg!(debug_assertions) {
        assert!(
            call < run + Duration::from_micros(5),
            "{call:?} and {run:?}"
        );
    }
    Ok(())
}

/// The same run without candle.
mod bare {
    use candle_core::{Storage, cuda_backend::cudarc::driver::DevicePtr};
    use tandem_candle::tandem_attn::{
        gpu::{DeviceTensor, Gpu, KvPool, Stream, WorkspaceOptions},
        half::bf16,
        plan::{Bound, PlanOptions, Planner},
        problem::{Batch, Dtype, PageTable, Spec},
    };

    use super::*;

    fn address(tensor: &Tensor) -> u64 {
        let (storage, _) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            panic!("it is on the GPU")
        };
        let slice = storage.as_cuda_slice::<bf16>().unwrap();
        slice.device_ptr(slice.stream()).0
    }

    pub fn run_time(
        device: &Device,
        case: &Case,
        [q, k, v]: [&Tensor; 3],
        layer: &Layer,
    ) -> Result<Duration> {
        let spec = Spec::new(HEADS as u32, KV_HEADS as u32, DIM as u32).with_scale(layer.scale);
        let pages = k.dims()[0] as u32;
        let mut table = PageTable::new(BLOCK as u32, pages);
        for (pages, &len) in case.tables.iter().zip(&case.lengths) {
            let pages: Vec<u32> = pages.iter().map(|&page| page as u32).collect();
            table.push(&pages, len as u32);
        }
        let batch = Batch::new((0..=case.tables.len() as u32).collect(), table);
        let stream = device.as_cuda_device()?.cuda_stream();
        let gpu = Gpu::builder().build_in_cudarc(stream.context()).unwrap();
        let stream = Stream::from_raw(stream.cu_stream().cast());
        let plan = Planner::new()
            .plan(&spec, &batch, &gpu.device(), &PlanOptions::default())
            .unwrap();
        let mut workspace = gpu
            .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
            .unwrap();
        let shape = [case.tables.len(), HEADS, DIM];
        let out = q.zeros_like()?;
        let [q, out] =
            [q, &out].map(|tensor| DeviceTensor::new(address(tensor), Dtype::BF16, shape));
        let pool = KvPool::new(
            &spec,
            KvLayout::Nhd,
            BLOCK as u32,
            pages,
            address(k),
            address(v),
        );
        // SAFETY: the tensors are alive and have these shapes; the stream is candle's.
        unsafe { workspace.upload(&plan, stream) }.unwrap();
        host_time(device, || {
            // SAFETY: as above.
            unsafe { gpu.run(&mut workspace, &q, &[pool], &out, None, stream) }.unwrap();
            Ok(())
        })
    }
}

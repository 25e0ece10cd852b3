//! The CPU executor beside what the machine can do.
//!
//! First prints the roofline: the rate of fused multiply-adds and of reading memory, measured on as many
//! threads, and for each case the time that whichever binds would take. `RAYON_NUM_THREADS` sets the threads.

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use rayon::prelude::*;
use tandem_attn::{
    exec::Cpu,
    kv::KvView,
    plan::{Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    tensor::{Element, F8E4M3, TensorMut, TensorRef},
};

#[path = "../tests/common/numeric.rs"]
mod numeric;

use numeric::Rng;

const PAGE: u32 = 16;

/// Requests of `q` new tokens each, of `kv` in all, on shuffled pages.
fn batch(requests: u32, q: u32, kv: u32) -> Batch {
    let pages_each = kv.div_ceil(PAGE);
    let mut pages: Vec<u32> = (0..requests * pages_each).collect();
    Rng(1).shuffle(&mut pages);
    let mut table = PageTable::new(PAGE, requests * pages_each);
    for pages in pages.chunks(pages_each as usize) {
        table.push(pages, kv);
    }
    Batch::new((0..=requests).map(|r| r * q).collect(), table)
}

/// A plan and the tensors to run it with.
struct Case<T> {
    name: &'static str,
    plan: Plan,
    q: Vec<bf16>,
    k: Vec<T>,
    v: Vec<T>,
    flops: f64,
    bytes: f64,
}

impl<T: Element> Case<T> {
    fn new(name: &'static str, spec: &Spec, cpu: &Cpu, (requests, q, kv): (u32, u32, u32)) -> Self {
        let spec = spec.with_kv_dtype(T::DTYPE);
        let batch = batch(requests, q, kv);
        let plan = Planner::new()
            .plan(&spec, &batch, &cpu.device(), &PlanOptions::default())
            .expect("the batch can be planned");
        let mut rng = Rng(2);
        let pool =
            (batch.parts[0].table.pool_pages * PAGE * spec.kv_heads * spec.head_dim_qk) as usize;
        let queries = (batch.total_q() * spec.q_heads * spec.head_dim_qk) as usize;
        let pairs = |r: usize| {
            let position = |i: u32| batch.parts[0].first_position(r) + i as i32;
            (0..q)
                .map(|i| spec.variant.visible(position(i), kv).len() as f64)
                .sum::<f64>()
        };
        let pairs: f64 = (0..requests as usize).map(pairs).sum();
        Self {
            name,
            q: (0..queries)
                .map(|_| bf16::from_f32(rng.between(-2.0, 2.0)))
                .collect(),
            k: (0..pool)
                .map(|_| T::from_f32(rng.between(-1.0, 1.0)))
                .collect(),
            v: (0..pool)
                .map(|_| T::from_f32(rng.between(-1.0, 1.0)))
                .collect(),
            flops: pairs * spec.flops_per_pair() as f64,
            bytes: f64::from(requests) * f64::from(kv) * spec.kv_bytes_per_token() as f64,
            plan,
        }
    }

    fn run(&self, cpu: &Cpu, out: &mut [bf16]) {
        let view = KvView::new(&self.plan.spec, KvLayout::Nhd, PAGE, &self.k, &self.v);
        cpu.run(&self.plan, &self.q, &[view], out, None)
            .expect("plan and tensors fit");
    }
}

/// What all threads together can do.
struct Roofline {
    flops_per_second: f64,
    bytes_per_second: f64,
}

impl Roofline {
    fn measure() -> Self {
        let threads = rayon::current_num_threads();
        let steps = 1_000_000;
        let compute = best(50, || {
            rayon::broadcast(|_| black_box(multiply_add(steps)));
        });
        let memory: Vec<u64> = (0..1 << 26).collect();
        let read = best(20, || {
            let sum = |chunk: &[u64]| chunk.iter().fold(0u64, |sum, &x| sum.wrapping_add(x));
            black_box(
                memory
                    .par_chunks(1 << 16)
                    .map(sum)
                    .reduce(|| 0, u64::wrapping_add),
            );
        });
        Self {
            flops_per_second: (threads * steps) as f64 * FLOPS_PER_STEP as f64
                / compute.as_secs_f64(),
            bytes_per_second: size_of_val(&memory[..]) as f64 / read.as_secs_f64(),
        }
    }

    /// The least that a case can take.
    fn bound<T>(&self, case: &Case<T>) -> (f64, &'static str) {
        let (compute, read) = (
            case.flops / self.flops_per_second,
            case.bytes / self.bytes_per_second,
        );
        if compute > read {
            (compute, "multiply-adds")
        } else {
            (read, "reading")
        }
    }
}

const CHAINS: usize = 16;
const FLOPS_PER_STEP: usize = CHAINS * 16 * 2;

/// Independent chains of multiply-adds, 16 numbers each, in registers only.
fn multiply_add(steps: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    {
        if is_x86_feature_detected!("avx512f") {
            // SAFETY: the feature is there.
            return unsafe { multiply_add_avx512(steps) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") {
            // SAFETY: the features are there.
            return unsafe { multiply_add_avx2(steps) };
        }
    }
    let mut chains = [[1.0f32; 16]; CHAINS];
    for _ in 0..steps {
        chains
            .iter_mut()
            .flatten()
            .for_each(|x| *x = *x * 0.999 + 0.5);
    }
    chains.iter().flatten().sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn multiply_add_avx512(steps: usize) -> f32 {
    use std::arch::x86_64::{_mm512_fmadd_ps, _mm512_reduce_add_ps, _mm512_set1_ps};
    let (a, b) = (_mm512_set1_ps(0.999), _mm512_set1_ps(0.5));
    let mut chains = [b; CHAINS];
    for _ in 0..steps {
        for chain in &mut chains {
            *chain = _mm512_fmadd_ps(*chain, a, b);
        }
    }
    chains
        .into_iter()
        .map(|chain| _mm512_reduce_add_ps(chain))
        .sum()
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn multiply_add_avx2(steps: usize) -> f32 {
    use std::arch::x86_64::{_mm256_cvtss_f32, _mm256_fmadd_ps, _mm256_set1_ps};
    let (a, b) = (_mm256_set1_ps(0.999), _mm256_set1_ps(0.5));
    // Half the width, twice the steps.
    let mut chains = [b; CHAINS];
    for _ in 0..2 * steps {
        for chain in &mut chains {
            *chain = _mm256_fmadd_ps(*chain, a, b);
        }
    }
    chains
        .into_iter()
        .map(|chain| _mm256_cvtss_f32(chain))
        .sum()
}

fn best(times: usize, mut f: impl FnMut()) -> Duration {
    let time = |_| {
        let start = Instant::now();
        f();
        start.elapsed()
    };
    (0..times).map(time).min().expect("at least once")
}

fn bench<T: Element>(criterion: &mut Criterion, cpu: &Cpu, roofline: &Roofline, case: &Case<T>) {
    let mut out = vec![bf16::ZERO; case.q.len()];
    let (bound, binds) = roofline.bound(case);
    // The best, as for the roofline: other programs take time away, none gives any.
    let time = best(15, || case.run(cpu, &mut out)).as_secs_f64();
    println!(
        "{}: {:.2} ms, {:.0} GFLOP/s, {:.1} GB/s; {binds} alone would take {:.2} ms: {:.0} % of the roofline",
        case.name,
        time * 1e3,
        case.flops / time / 1e9,
        case.bytes / time / 1e9,
        bound * 1e3,
        100.0 * bound / time,
    );
    let mut group = criterion.benchmark_group("cpu");
    group
        .sample_size(10)
        .throughput(Throughput::Bytes(case.bytes as u64));
    group.bench_function(BenchmarkId::from_parameter(case.name), |b| {
        b.iter(|| case.run(cpu, &mut out));
    });
    group.finish();
}

/// One new token of 8 heads of 128 in 8 bits, into pools of so many tokens: the time does not depend on them.
fn bench_append(criterion: &mut Criterion) {
    let row = vec![F8E4M3(0x38); 8 * 128];
    let row = TensorRef::new(&row, [1, 8, 128]).expect("as long as its shape");
    let mut group = criterion.benchmark_group("append one token");
    for tokens in [16_384, 1 << 24] {
        // Zeroed pages come from the system when they are first written: a pool costs what is touched of it.
        let mut pool = vec![0_u8; tokens * 8 * 128];
        let mut place = 0;
        group.bench_function(BenchmarkId::from_parameter(tokens), |b| {
            b.iter(|| {
                let shape = [tokens / 16, 16, 8, 128];
                let to = TensorMut::from_bytes(Dtype::F8E4M3, &mut pool, shape);
                // Among few places, so that what is measured is not how memory is handed out.
                place = (place + 7) % 1024;
                Cpu::append_rows(&row, &[place], to.expect("as long as its shape"))
                    .expect("a place in the pool");
            });
        });
    }
    group.finish();
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    bench_append(&mut criterion);
    let cpu = Cpu::new();
    let roofline = Roofline::measure();
    println!(
        "{} threads, {}: {:.0} GFLOP/s of f32 multiply-adds, {:.1} GB/s of reads",
        rayon::current_num_threads(),
        cpu.instruction_set(),
        roofline.flops_per_second / 1e9,
        roofline.bytes_per_second / 1e9,
    );
    let spec = Spec::new(32, 8, 128);
    bench(
        &mut criterion,
        &cpu,
        &roofline,
        &Case::<bf16>::new("prefill 2048", &spec, &cpu, (1, 2048, 2048)),
    );
    bench(
        &mut criterion,
        &cpu,
        &roofline,
        &Case::<bf16>::new("decode 16 × 4096", &spec, &cpu, (16, 1, 4096)),
    );
    bench(
        &mut criterion,
        &cpu,
        &roofline,
        &Case::<F8E4M3>::new("decode 16 × 4096, 8-bit keys", &spec, &cpu, (16, 1, 4096)),
    );
    bench(
        &mut criterion,
        &cpu,
        &roofline,
        &Case::<bf16>::new("chunk 256 at 4096", &spec, &cpu, (1, 256, 4096)),
    );
    let capped = spec.with_soft_cap(30.0);
    bench(
        &mut criterion,
        &cpu,
        &roofline,
        &Case::<bf16>::new("prefill 2048, soft cap", &capped, &cpu, (1, 2048, 2048)),
    );
    let one_each = Spec::new(32, 32, 128).with_dtype(Dtype::BF16);
    bench(
        &mut criterion,
        &cpu,
        &roofline,
        &Case::<bf16>::new(
            "decode 4 × 4096, 32 KV heads",
            &one_each,
            &cpu,
            (4, 1, 4096),
        ),
    );
    criterion.final_summary();
}

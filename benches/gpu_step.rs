//! How near the kernels around attention come to a copy of the same bytes in the same run, in the shapes of Llama 3 8B.
//!
//! Times are of a graph of launches, each on the next of several sets of buffers that together are larger than L2, by
//! the number of launches; the median of many. Bytes are those that must move, and the copy moves as many, read and
//! written together, in the same way.
//!
//! `cargo bench --features cust --bench gpu_step -- qkv_step` measures only lines that contain this text.
//! `TANDEM_MODULES` names a folder with kernels to measure instead of those in the program.

#[path = "../tests/common/mod.rs"]
mod common;

use std::ptr;

use common::{Memory, Rng};
use cust::sys;
use half::bf16;
use tandem_attn::{
    Error,
    exec::gpu::{
        AppendScales, DeviceTensor, Gpu, KvPool, KvScales, OwnedStream, QkNorm, QkvStep, Stream,
    },
    problem::{Dtype, KvLayout, Spec},
    step::{
        Activation, AdjustToken, LOG_PROBS, LogProb, LogProbRow, Penalties, RmsNorm, Rope, Sampling,
    },
    tensor::Element,
};

const HIDDEN: usize = 4096;
const FEED_FORWARD: usize = 14_336;
const VOCABULARY: usize = 128_256;
const HEADS: [usize; 2] = [32, 8];
const DIM: usize = 128;
const QKV: usize = (HEADS[0] + 2 * HEADS[1]) * DIM;
const DTYPE: Dtype = Dtype::BF16;

/// What all sets of buffers together are larger than, some times over.
const L2: usize = 50 << 20;

fn main() {
    // Without the flag this is `cargo test`, which only wants to know that it starts.
    if !std::env::args().any(|argument| argument == "--bench") {
        return;
    }
    let Some(gpu) = common::gpu("gpu_step") else {
        return;
    };
    let bench = Bench {
        gpu,
        stream: gpu.stream().expect("a stream"),
        random: random_memory(1 << 30),
        only: std::env::args()
            .skip(1)
            .find(|argument| !argument.starts_with("--")),
    };
    println!("{}, kernels for {}", gpu.name(), gpu.arch());
    for tokens in [16, 64, 512, 4096] {
        println!(
            "\n{:<34} {:>9} {:>9} {:>9} {:>8}",
            format!("{tokens} tokens"),
            "MB",
            "µs",
            "copy, µs",
            "of copy"
        );
        bench.qkv("qkv_step", tokens, Pages::Same, false);
        bench.qkv("qkv_step, norms and bias", tokens, Pages::Same, true);
        bench.qkv("qkv_step, pages of e4m3", tokens, Pages::Given, false);
        bench.qkv(
            "qkv_step, e4m3, computed scales",
            tokens,
            Pages::Computed,
            false,
        );
        bench.norm("rms_norm", tokens, false);
        bench.norm("rms_norm, residual", tokens, true);
        bench.gate(Activation::Silu, tokens);
        bench.gate(Activation::GeluTanh, tokens);
        bench.embed(tokens);
    }
    println!();
    let hot = Sampling {
        temperature: 0.8,
        ..Sampling::GREEDY
    };
    for (what, sampling) in [
        ("greedy", Sampling::GREEDY),
        ("temperature", hot),
        ("top-k 50", Sampling { top_k: 50, ..hot }),
        ("top-p 0.9", Sampling { top_p: 0.9, ..hot }),
        ("min-p 0.05", Sampling { min_p: 0.05, ..hot }),
        (
            "top-k 50, top-p 0.9",
            Sampling {
                top_k: 50,
                top_p: 0.9,
                ..hot
            },
        ),
    ] {
        for rows in [1, 16, 64, 256] {
            bench.sample::<bf16>(what, sampling, rows, 6.0);
            // As the engine has them.
            bench.sample::<f32>(&format!("{what}, f32"), sampling, rows, 6.0);
        }
    }
    // Logits that are nearly alike, as of random weights: most of the vocabulary stays.
    let flat = Sampling { top_p: 0.9, ..hot };
    bench.sample::<bf16>("top-p 0.9, flat", flat, 64, 0.5);
    bench.sample::<f32>("top-p 0.9, flat, f32", flat, 64, 0.5);
    for rows in [1, 16, 64] {
        for top in [0, 5, 20] {
            bench.log_probs(rows, top);
        }
        for tokens in [100, 1000] {
            bench.adjust(rows, tokens);
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Pages {
    Same,
    Given,
    Computed,
}

struct Bench {
    gpu: &'static Gpu,
    stream: OwnedStream,
    /// What inputs are cut from.
    random: Memory,
    /// The text that measured lines contain.
    only: Option<String>,
}

impl Bench {
    /// Whether a line is to be measured.
    fn wants(&self, what: &str) -> bool {
        self.only.as_ref().is_none_or(|only| what.contains(&**only))
    }

    /// Inputs of so many bytes, of which there are `sets`.
    fn input(&self, set: usize, bytes: usize) -> u64 {
        let whole = bytes.next_multiple_of(256);
        let most = (1_usize << 30) / whole;
        self.random.address() + (set % most.max(1) * whole) as u64
    }

    /// Microseconds of one of the launches that `queue` puts on the stream, one for each set of buffers.
    fn time(&self, sets: usize, queue: impl Fn(Stream, usize) -> Result<(), Error>) -> f64 {
        let launches = sets.max(20).next_multiple_of(sets);
        let graph = self
            .stream
            .capture(|stream| (0..launches).try_for_each(|at| queue(stream, at % sets)))
            .expect("a graph");
        let event = || {
            let mut event = ptr::null_mut();
            // SAFETY: writes one handle.
            let code = unsafe { sys::cuEventCreate(&mut event, 0) };
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
            event
        };
        let (begin, end) = (event(), event());
        let stream = (*self.stream).as_raw().cast();
        let mut times: Vec<f32> = (0..14)
            .map(|_| {
                let mut milliseconds = 0.0;
                // SAFETY: events, stream and graph live.
                unsafe {
                    let _ = sys::cuEventRecord(begin, stream);
                    graph.launch(*self.stream).expect("a launch");
                    let _ = sys::cuEventRecord(end, stream);
                    assert_eq!(sys::cuEventSynchronize(end), sys::CUresult::CUDA_SUCCESS);
                    let _ = sys::cuEventElapsedTime(&mut milliseconds, begin, end);
                }
                milliseconds
            })
            .skip(3)
            .collect();
        times.sort_by(f32::total_cmp);
        f64::from(times[times.len() / 2]) * 1e3 / launches as f64
    }

    fn report(
        &self,
        what: &str,
        bytes: usize,
        sets: usize,
        queue: impl Fn(Stream, usize) -> Result<(), Error>,
    ) {
        let half = bytes / 2;
        let to = Memory::of_bytes(half.next_multiple_of(256) * sets);
        let copy = |stream: Stream, set: usize| {
            let to = to.address() + (set * half.next_multiple_of(256)) as u64;
            // SAFETY: both buffers live and are this long.
            let code = unsafe {
                sys::cuMemcpyDtoDAsync_v2(to, self.input(set, half), half, stream.as_raw().cast())
            };
            assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
            Ok(())
        };
        // Copies before and behind: the clock may drift.
        let before = self.time(sets, copy);
        let microseconds = self.time(sets, queue);
        let copied = before.min(self.time(sets, copy));
        println!(
            "{what:<34} {:>9.2} {microseconds:>9.2} {copied:>9.2} {:>7.1}%",
            bytes as f64 / 1e6,
            100.0 * copied / microseconds
        );
    }

    fn qkv(&self, what: &str, tokens: usize, pages: Pages, extras: bool) {
        if !self.wants(what) {
            return;
        }
        let of_pool = match pages {
            Pages::Same => DTYPE,
            _ => Dtype::F8E4M3,
        };
        let size = of_pool.bytes() as usize;
        let [q_heads, kv_heads] = HEADS;
        let spec = Spec::new(q_heads as u32, kv_heads as u32, DIM as u32)
            .with_dtype(DTYPE)
            .with_kv_dtype(of_pool);
        let scale_bytes = match pages {
            Pages::Computed => 2 * tokens * kv_heads * 4,
            _ => 0,
        };
        let (source, q) = (tokens * QKV * 2, tokens * q_heads * DIM * 2);
        let pool = tokens * kv_heads * DIM * size;
        let bytes = source + q + 2 * pool + scale_bytes;
        let sets = sets(bytes);
        let out = Memory::of_bytes((q + 2 * pool) * sets);
        let scales = Memory::of_bytes(scale_bytes.max(16));
        let page_size = 16;
        let mut order: Vec<u32> = (0..(tokens / page_size) as u32).collect();
        Rng(3).shuffle(&mut order);
        let page = page_size as u32;
        let slots: Vec<u32> = order
            .iter()
            .flat_map(|at| at * page..(at + 1) * page)
            .collect();
        let slots = Memory::new(&slots);
        let positions: Vec<u32> = (0..tokens as u32).collect();
        let positions = Memory::new(&positions);
        let rope = Rope::new(DIM as u32, 500_000.0)
            .table()
            .expect("a good embedding");
        let rope = self.gpu.rope(&rope).expect("device memory");
        let weights = DeviceTensor::new(self.input(0, 256), DTYPE, [DIM]);
        let of_tokens = |half: usize| {
            let at = scales.address() + (half * scale_bytes / 2) as u64;
            DeviceTensor::new(at, Dtype::F32, [order.len(), page_size, kv_heads])
        };
        self.report(what, bytes, sets, |stream, set| {
            let at = out.address() + ((q + 2 * pool) * set) as u64;
            let (k, v) = (at + q as u64, at + (q + pool) as u64);
            let mut kv = KvPool::new(&spec, KvLayout::Nhd, page, order.len() as u32, k, v);
            let mut from = AppendScales::Given;
            if pages == Pages::Computed {
                let (k, v) = (of_tokens(0), of_tokens(1));
                kv = kv.with_scales(KvScales::Token { k, v });
                from = AppendScales::Computed;
            }
            let source = DeviceTensor::new(self.input(set, source), DTYPE, [tokens, QKV]);
            let step = QkvStep {
                qkv: source,
                bias: extras.then(|| DeviceTensor::new(self.input(1, 2 * QKV), DTYPE, [QKV])),
                norm: extras.then_some(QkNorm {
                    norm: RmsNorm::new(1e-6),
                    q: weights,
                    k: weights,
                }),
                rope: Some((&rope, positions.array())),
            };
            let q = DeviceTensor::new(at, DTYPE, [tokens, q_heads, DIM]);
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe {
                self.gpu
                    .qkv_step(&spec, &step, slots.array(), &q, &kv, from, stream)
            }
        });
    }

    fn norm(&self, what: &str, tokens: usize, with_residual: bool) {
        if !self.wants(what) {
            return;
        }
        let row = tokens * HIDDEN * 2;
        let bytes = if with_residual { 4 * row } else { 2 * row };
        let sets = sets(bytes);
        // Sums stay finite: what is added is the same as what they are made of, and signs differ.
        let (out, residuals) = (Memory::of_bytes(row * sets), random_memory(row * sets));
        let weight = DeviceTensor::new(self.input(0, 2 * HIDDEN), DTYPE, [HIDDEN]);
        self.report(what, bytes, sets, |stream, set| {
            let tensor = |at| DeviceTensor::new(at, DTYPE, [tokens, HIDDEN]);
            let x = tensor(self.input(set, row));
            let residual = tensor(residuals.address() + (row * set) as u64);
            let out = tensor(out.address() + (row * set) as u64);
            let residual = with_residual.then_some(&residual);
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe {
                self.gpu
                    .rms_norm(RmsNorm::new(1e-6), &x, &weight, residual, &out, stream)
            }
        });
    }

    fn gate(&self, activation: Activation, tokens: usize) {
        let what = format!("gate, {activation:?}");
        if !self.wants(&what) {
            return;
        }
        let row = tokens * FEED_FORWARD * 2;
        let sets = sets(3 * row);
        let out = Memory::of_bytes(row * sets);
        self.report(&what, 3 * row, sets, |stream, set| {
            let both = self.input(set, 2 * row);
            let both = DeviceTensor::new(both, DTYPE, [tokens, 2 * FEED_FORWARD]);
            let out = out.address() + (row * set) as u64;
            let out = DeviceTensor::new(out, DTYPE, [tokens, FEED_FORWARD]);
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe { self.gpu.gate(activation, &both, &out, stream) }
        });
    }

    fn embed(&self, tokens: usize) {
        if !self.wants("embed") {
            return;
        }
        let row = tokens * HIDDEN * 2;
        let sets = sets(2 * row);
        let out = Memory::of_bytes(row * sets);
        let vocabulary = (1 << 30) / (HIDDEN * 2);
        let mut rng = Rng(5);
        let ids: Vec<u32> = (0..tokens * sets)
            .map(|_| rng.below(vocabulary) as u32)
            .collect();
        let ids = Memory::new(&ids);
        let table = self.random.tensor(DTYPE, [vocabulary, HIDDEN]);
        self.report("embed", 2 * row, sets, |stream, set| {
            let out = out.address() + (row * set) as u64;
            let out = DeviceTensor::new(out, DTYPE, [tokens, HIDDEN]);
            let mut of_set = ids.array();
            of_set.address += (set * tokens * 4) as u64;
            of_set.len = tokens;
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe { self.gpu.embed(&table, of_set, 1.0, &out, stream) }
        });
    }

    fn sample<T: Element>(&self, what: &str, sampling: Sampling, rows: usize, reach: f32) {
        let what = format!("sample, {rows} rows, {what}");
        if !self.wants(&what) {
            return;
        }
        // The lowest of a few, so that large ones are rare.
        let mut rng = Rng(7);
        let logits: Vec<T> = (0..VOCABULARY + rows * 64)
            .map(|_| T::from_f32((0..6).map(|_| rng.between(-reach, reach)).sum()))
            .collect();
        let bytes = rows * VOCABULARY * size_of::<T>();
        let sets = sets(bytes).min(8);
        let mut all = Vec::with_capacity(rows * sets * VOCABULARY);
        for row in 0..rows * sets {
            all.extend_from_slice(&logits[row % rows * 64..][..VOCABULARY]);
        }
        let (logits, ids) = (Memory::new(&all), Memory::of_bytes(rows * 4));
        let draws: Vec<_> = (0..rows as u64)
            .map(|at| sampling.draw(at).unwrap())
            .collect();
        let draws = Memory::new(&draws);
        self.report(&what, bytes, sets, |stream, set| {
            let logits = logits.address() + (bytes * set) as u64;
            let logits = DeviceTensor::new(logits, T::DTYPE, [rows, VOCABULARY]);
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe { self.gpu.sample(&logits, draws.array(), ids.array(), stream) }
        });
    }

    fn log_probs(&self, rows: usize, top: u32) {
        let what = format!("log_probs, {rows} rows, top {top}");
        if !self.wants(&what) {
            return;
        }
        let bytes = rows * VOCABULARY * 4;
        let sets = sets(bytes).min(8);
        let logits = Rng(7).floats(rows * sets * VOCABULARY, -6.0, 6.0);
        let asked: Vec<_> = (0..rows as u32)
            .map(|row| LogProbRow { row, top })
            .collect();
        let (logits, asked) = (Memory::new(&logits), Memory::new(&asked));
        let ids = Memory::new(&vec![7_u32; rows]);
        let out = Memory::new(&vec![LogProb::default(); rows * LOG_PROBS as usize]);
        self.report(&what, bytes, sets, |stream, set| {
            let logits = logits.address() + (bytes * set) as u64;
            let logits = DeviceTensor::new(logits, Dtype::F32, [rows, VOCABULARY]);
            let (asked, ids, out) = (asked.array(), ids.array(), out.array());
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe { self.gpu.log_probs(&logits, asked, ids, out, stream) }
        });
    }

    /// One launch: what it adjusts is not restored.
    fn adjust(&self, rows: usize, of_row: usize) {
        let what = format!("adjust, {rows} rows of {of_row} tokens");
        if !self.wants(&what) {
            return;
        }
        let bytes = rows * VOCABULARY * 4;
        let sets = sets(bytes).min(8);
        let logits = Memory::of_bytes(bytes * sets);
        let token = |at: usize| AdjustToken {
            token: (at * 97 % VOCABULARY) as u32,
            bias: 0.0,
            seen: 1,
            logit: 0.0,
        };
        let tokens: Vec<_> = (0..rows).flat_map(|_| (0..=of_row).map(token)).collect();
        let row = |row: usize| {
            let first = row * (of_row + 1);
            Penalties::NONE.row(row as u32, first as u32..(first + of_row) as u32, Some(0))
        };
        let list: Vec<_> = (0..rows).map(row).collect();
        let (list, tokens) = (Memory::new(&list), Memory::new(&tokens));
        let ids = Memory::new(&[7_u32]);
        let moved = rows * of_row * 2 * (4 + 16);
        self.report(&what, moved, sets, |stream, set| {
            let logits = logits.address() + (bytes * set) as u64;
            let logits = DeviceTensor::new(logits, Dtype::F32, [rows, VOCABULARY]);
            let (list, tokens, ids) = (list.array(), tokens.array(), ids.array());
            // SAFETY: everything is there as described; `time` waits for it.
            unsafe { self.gpu.adjust(&logits, list, tokens, ids, stream) }
        });
    }
}

/// So many sets of buffers that none is in L2 when its turn comes again.
fn sets(bytes: usize) -> usize {
    (3 * L2).div_ceil(bytes).clamp(2, 40)
}

/// Finite bfloat16 numbers around 1, of both signs.
fn random_memory(bytes: usize) -> Memory {
    let mut rng = Rng(1);
    let pattern: Vec<bf16> = rng
        .floats(1 << 20, -2.0, 2.0)
        .into_iter()
        .map(bf16::from_f32)
        .collect();
    let memory = Memory::of_bytes(bytes);
    let mut at = 0;
    while at < bytes {
        let count = pattern.len().min((bytes - at) / 2);
        memory.write_at(at, &pattern[..count]);
        at += 2 * count;
    }
    memory
}

//! POD-Attention's figure 7: a memory-bound and a compute-bound loop, run one after the other, on two streams, and in
//! one launch whose blocks choose a loop in two ways.
//!
//! `cargo bench -p tandem-papers --features cust --bench overlap -- [json=FILE]`. Medians in microseconds, by CUDA events.

#[path = "../../tests/common/mod.rs"]
mod common;
#[path = "../../benches/gpu_decode/run.rs"]
mod run;

use common::{Memory, Stream};
use kernels_gpu::{abi::LoopsParams, measure::loops::Binding};
use run::Timer;
use tandem_attn::exec::gpu::{Gpu, Stream as Handle};

/// Number of elements of each array, and number of blocks of each loop.
const ELEMENTS: u32 = 1 << 28;
const BLOCKS: u32 = 2048;
/// Multiplications per element.
const ROUNDS: u32 = 200;
/// Number of counters: more than there are SMs.
const COUNTERS: usize = 1024;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // Without the flag, `cargo test` runs this only to check that it starts.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let Some(gpu) = common::gpu("overlap") else {
        return;
    };
    println!("{}, kernels for {}", gpu.name(), gpu.arch());
    let bench = Bench::new(gpu);
    println!(
        "{:>5} {:>8} {:>8} | {:>8} {:>8} {:>9} {:>9} | longer alone",
        "size", "memory", "compute", "serial", "streams", "by block", "by SM"
    );
    let mut lines = Vec::new();
    for size in (20..=200).step_by(20) {
        let [memory, compute, serial, streams, by_block, by_sm] = bench.measure(size);
        println!(
            "{size:>5} {memory:>8.0} {compute:>8.0} | {serial:>8.0} {streams:>8.0} {by_block:>9.0} {by_sm:>9.0} | {:.0}",
            memory.max(compute)
        );
        lines.push(format!(
            "  {{\"size\": {size}, \"memory_us\": {memory:.1}, \"compute_us\": {compute:.1}, \"serial_us\": \
             {serial:.1}, \"streams_us\": {streams:.1}, \"by_block_us\": {by_block:.1}, \"by_sm_us\": {by_sm:.1}}}"
        ));
    }
    if let Some(file) = arguments.iter().find_map(|a| a.strip_prefix("json=")) {
        std::fs::write(file, format!("[\n{}\n]\n", lines.join(",\n"))).expect("can be written");
    }
}

struct Bench<'a> {
    gpu: &'a Gpu,
    timer: Timer,
    arrays: [Memory; 4],
    counters: Memory,
    beside: Stream,
}

impl<'a> Bench<'a> {
    fn new(gpu: &'a Gpu) -> Self {
        Self {
            gpu,
            timer: Timer::new(),
            arrays: [(); 4].map(|()| Memory::of_bytes(ELEMENTS as usize * 4)),
            counters: Memory::of_bytes(COUNTERS * 4),
            beside: Stream::new(),
        }
    }

    /// Times of memory, compute, one after the other, two streams, chosen by block, chosen by SM.
    fn measure(&self, size: u32) -> [f64; 6] {
        let [a, b, c, d] = [0, 1, 2, 3].map(|at: usize| self.arrays[at].address());
        let params = LoopsParams {
            memory: [a, b, c],
            compute: d,
            counters: self.counters.address(),
            elements: ELEMENTS,
            products: (u64::from(ELEMENTS) * u64::from(size) / 200) as u32,
            factor: 0.999,
            rounds: ROUNDS,
            blocks: BLOCKS,
            binding: 0,
        };
        let run = |binding: Binding, stream: Handle| {
            // SAFETY: the arrays have the length in the parameters and live as long as the bench.
            unsafe { self.gpu.overlap_loops(binding, params, stream) }.expect("can be launched");
        };
        let time = |enqueue: &dyn Fn(Handle)| self.timer.median(7, enqueue);
        [
            time(&|stream| run(Binding::Memory, stream)),
            time(&|stream| run(Binding::Compute, stream)),
            time(&|stream| {
                run(Binding::Memory, stream);
                run(Binding::Compute, stream);
            }),
            time(&|stream| {
                self.timer.fork(stream, &self.beside);
                run(Binding::Compute, self.beside.0);
                run(Binding::Memory, stream);
                self.timer.join(stream, &self.beside);
            }),
            time(&|stream| run(Binding::ByBlock, stream)),
            time(&|stream| {
                self.counters.clear_on(COUNTERS * 4, stream);
                run(Binding::BySm, stream);
            }),
        ]
    }
}

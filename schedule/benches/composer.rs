//! Measures the time to compose a step.

use std::hint::black_box;

use criterion::{Criterion, criterion_main};
use tandem_attn::problem::Batch;
use tandem_schedule::{
    Composer, Limits, Request, Sampled, Step,
    policy::{Policy, PrefillFirst, Sarathi, SarathiServe},
};

/// 256 running requests of about 1000 tokens and 10,000 waiting ones. A new request replaces each that finishes.
struct Busy {
    composer: Composer,
    step: Step,
    submitted: u32,
}

impl Busy {
    fn new(policy: impl Policy + 'static) -> Self {
        let limits = Limits {
            step_tokens: 2048,
            step_requests: 256,
            running: 256,
            ..Limits::default()
        };
        let mut busy = Self {
            composer: Composer::new(limits, 1 << 16, 16, policy).unwrap(),
            step: Step::default(),
            submitted: 0,
        };
        (0..10_256).for_each(|_| busy.submit());
        // Warm up until running requests are at all stages of their lives.
        (0..2000).for_each(|_| busy.step());
        assert!(busy.composer.running() > 240 && busy.composer.waiting() >= 10_000);
        busy
    }

    fn submit(&mut self) {
        self.submitted += 1;
        let spread = self.submitted.wrapping_mul(2_654_435_761) >> 24;
        let request = Request::of_length(650 + spread, 300 + spread);
        self.composer.submit(request).unwrap();
    }

    fn step(&mut self) {
        self.composer.compose(&mut self.step);
        let finished = self.composer.complete(&self.step, |_| Sampled::Token(0));
        finished.iter().for_each(|_| self.submit());
    }
}

fn compose(c: &mut Criterion) {
    let mut group = c.benchmark_group("256 running, 10,000 waiting");
    let composers = [
        ("sarathi-serve", Busy::new(SarathiServe)),
        ("sarathi", Busy::new(Sarathi::new(1024, 128))),
        ("prefill-first", Busy::new(PrefillFirst)),
    ];
    for (name, mut busy) in composers {
        group.bench_function(format!("{name}: compose and complete"), |b| {
            b.iter(|| busy.step());
        });
        let mut batch = Batch::default();
        busy.composer.compose(&mut busy.step);
        group.bench_function(format!("{name}: batch for the planner"), |b| {
            b.iter(|| busy.composer.batch(black_box(&busy.step), &mut batch));
        });
    }
    group.finish();
}

/// The benchmarks.
fn benches() {
    compose(&mut Criterion::default().configure_from_args());
}

criterion_main!(benches);

//! Wide prefixes: one that all requests of a batch have, before decodes or before new tokens of a prompt.

use tandem_attn::{
    gpu::{Gpu, Stream as Handle, WorkspaceOptions},
    plan::{PackRule, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, KvLayout, PageTable, Spec},
};

use super::{
    common::Rng,
    run::{self, Pool, Step, Timer},
    shuffled, spec,
};

const PAGE: u32 = 16;

/// Requests behind a common prefix, with new tokens each and so many keys of their own, of which the new tokens' are the last.
struct Case {
    heads: (u32, u32),
    prefix: u32,
    own: Vec<u32>,
    new: u32,
}

/// What a batch is run as.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// The prefix is a part of its own.
    parts: bool,
    packing: PackRule,
    pod: PodMode,
    prefill_ctas: Option<u32>,
}

const DEFAULT: Way = Way {
    name: "default",
    parts: false,
    packing: PackRule::Fastest,
    pod: PodMode::Auto,
    prefill_ctas: None,
};

const fn beside(name: &'static str, prefill_ctas: u32) -> Way {
    Way {
        name,
        pod: PodMode::Fused,
        prefill_ctas: Some(prefill_ctas),
        ..DEFAULT
    }
}

const WAYS: [Way; 9] = [
    DEFAULT,
    Way {
        name: "decodes alone",
        pod: PodMode::Serial,
        ..DEFAULT
    },
    Way {
        name: "exact",
        packing: PackRule::Exact,
        ..DEFAULT
    },
    beside("on 80", 80),
    beside("on 100", 100),
    beside("on 120", 120),
    beside("on 132", 132),
    Way {
        name: "parts",
        parts: true,
        pod: PodMode::Fused,
        ..DEFAULT
    },
    Way {
        name: "parts on 100",
        parts: true,
        pod: PodMode::Fused,
        prefill_ctas: Some(100),
        ..DEFAULT
    },
];

/// So many lengths, evenly from the first to the last, shuffled.
fn ragged(count: u32, from: u32, to: u32) -> Vec<u32> {
    let mut own: Vec<u32> = (0..count)
        .map(|i| from + (to - from) * i / (count - 1))
        .collect();
    Rng(5).shuffle(&mut own);
    own
}

fn cases() -> Vec<Case> {
    let decodes = |q_heads, kv_heads, count, prefix, from, to| Case {
        heads: (q_heads, kv_heads),
        prefix,
        own: ragged(count, from, to),
        new: 1,
    };
    let prompts = |q_heads, count, prefix, new| Case {
        heads: (q_heads, 8),
        prefix,
        own: vec![new; count],
        new,
    };
    vec![
        decodes(32, 8, 160, 6000, 100, 800),
        decodes(64, 8, 160, 6000, 100, 800),
        decodes(28, 4, 160, 6000, 100, 800),
        decodes(40, 8, 160, 6000, 100, 800),
        decodes(32, 8, 64, 6000, 100, 800),
        decodes(32, 8, 256, 3000, 200, 2000),
        decodes(32, 8, 96, 6000, 200, 360),
        decodes(64, 8, 256, 2000, 100, 600),
        prompts(32, 24, 4096, 128),
        prompts(64, 24, 4096, 128),
        prompts(32, 8, 8192, 64),
    ]
}

impl Case {
    fn name(&self) -> String {
        let (q_heads, kv_heads) = self.heads;
        let (least, most) = (self.own.iter().min(), self.own.iter().max());
        format!(
            "{q_heads}/{kv_heads}, {} × ({} new, {}–{} own @ {})",
            self.own.len(),
            self.new,
            least.unwrap(),
            most.unwrap(),
            self.prefix
        )
    }

    fn unique_keys(&self) -> u32 {
        self.prefix + self.own.iter().sum::<u32>()
    }

    /// Without its prefix, or without what is each request's own.
    fn batch(&self, prefix: bool) -> Batch {
        let common = if prefix { self.prefix / PAGE } else { 0 };
        let pages: u32 = common + self.own.iter().map(|own| own.div_ceil(PAGE)).sum::<u32>();
        let mut table = PageTable::new(PAGE, pages);
        let mut next = common;
        for own in &self.own {
            let own_pages = own.div_ceil(PAGE);
            let pages: Vec<u32> = (0..common).chain(next..next + own_pages).collect();
            next += own_pages;
            table.push(&pages, common * PAGE + own);
        }
        let indptr = (0..=self.own.len() as u32).map(|request| request * self.new);
        shuffled(Batch::new(indptr.collect(), table), 1)
    }

    fn flops(&self, spec: &Spec) -> f64 {
        let pairs: f64 = self
            .own
            .iter()
            .map(|&own| f64::from(self.new) * f64::from(self.prefix + own - self.new / 2))
            .sum();
        pairs * spec.flops_per_pair() as f64
    }
}

/// A line for each batch: the time of each way, of a read of the unique bytes and of the own keys alone.
pub fn measure(gpu: &Gpu, timer: &Timer, pool: &Pool) {
    let device = gpu.device();
    let names = WAYS.map(|way| way.name);
    println!(
        "\nbatch | {}, own alone, read | TFLOP/s | launches",
        names.join(", ")
    );
    for case in cases() {
        let spec = spec(case.heads.0, case.heads.1);
        let batch = case.batch(true);
        let parts = batch.share_prefixes();
        let q = run::queries(&spec, batch.total_q());
        let step = |batch: &Batch, options: PlanOptions| {
            let plan = Planner::new().plan(&spec, batch, &device, &options);
            let plan = plan.expect("can be planned");
            let options = WorkspaceOptions::default();
            Step::new(gpu, plan, batch, pool, &q, KvLayout::Nhd, options)
        };
        let mut steps: Vec<Step<'_>> = WAYS
            .iter()
            .map(|way| {
                let options = PlanOptions::default()
                    .with_packing(way.packing)
                    .with_pod(way.pod)
                    .with_prefill_ctas(way.prefill_ctas);
                step(if way.parts { &parts } else { &batch }, options)
            })
            .collect();
        steps.push(step(&case.batch(false), PlanOptions::default()));
        let bytes = case.unique_keys() as usize * spec.kv_bytes_per_token() as usize;
        let enqueues: Vec<_> = steps
            .iter()
            .map(|step| |stream| step.enqueue(stream))
            .collect();
        let read = |stream| pool.read(gpu, bytes, stream);
        let mut ways: Vec<&dyn Fn(Handle)> = enqueues.iter().map(|way| way as _).collect();
        ways.push(&read);
        let times = timer.medians_of(&ways, 9);
        let mut differs: f32 = 0.0;
        let mut right = Vec::new();
        for step in &steps[..WAYS.len()] {
            step.clear();
            step.run();
            let output = step.output();
            if right.is_empty() {
                right = output;
            } else {
                differs = differs.max(run::difference(&right, &output));
            }
        }
        let shown: Vec<String> = times.iter().map(|time| format!("{time:>6.1}")).collect();
        let launches: Vec<String> = steps.iter().map(run::launches).collect();
        println!(
            "{:<40} | {} | {:.0} | {:.2} × read, differs {differs:.4} | {}",
            case.name(),
            shown.join(" "),
            case.flops(&spec) / times[0] / 1e6,
            times[0] / times[times.len() - 1],
            launches.join("; "),
        );
    }
}

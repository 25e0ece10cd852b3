//! Hybrid batches on a GPU, from the planner's plans: one after the other, on two streams, side by side.
//!
//! `cargo bench --features cuda --bench gpu_pod -- [listed] [sweep=300] [seed=1] [ctas=132,88] [config=0]
//! [kv=f8e4m3] [json=FILE]`. Times are CUDA events around all launches of a step; medians, modes in turn, L2 full of other
//! data. Pools hold random numbers, pages of 16 are shuffled.

#[path = "../tests/common/mod.rs"]
mod common;
#[path = "gpu_decode/run.rs"]
mod run;

use std::fmt::Write;

use common::{Memory, Rng};
use run::{Pool, Step, Timer};
use tandem_attn::{
    exec::gpu::{Arch, Gpu, WorkspaceOptions},
    plan::{
        DeviceDescription, PlanOptions, Planner, Rules,
        pod::{PodMode, Tickets},
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

const PAGE: u32 = 16;

/// A chunk of a prompt, and decodes of one query each.
#[derive(Clone, Copy, Debug)]
struct Hybrid {
    q_heads: u32,
    kv_heads: u32,
    /// Queries of the chunk, and the keys up to its last one.
    chunk: u32,
    keys: u32,
    decodes: u32,
    context: u32,
}

/// Batches at 32/8 heads: chunk, keys, decodes, context; and the bar in microseconds.
const LISTED: [([u32; 4], u32); 7] = [
    ([1024, 12288, 80, 12288], 1000),
    ([512, 16384, 54, 16384], 890),
    ([1024, 8192, 50, 8192], 450),
    ([2048, 16384, 27, 16384], 920),
    ([2048, 20480, 21, 20480], 1120),
    ([1024, 4096, 103, 4096], 440),
    ([4096, 8192, 64, 8192], 800),
];

fn listed() -> impl Iterator<Item = (Hybrid, u32)> {
    LISTED.into_iter().map(|(numbers, bar)| {
        let [chunk, keys, decodes, context] = numbers;
        let hybrid = Hybrid {
            q_heads: 32,
            kv_heads: 8,
            chunk,
            keys,
            decodes,
            context,
        };
        (hybrid, bar)
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // Without the flag this is `cargo test`, which only wants to know that it starts.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let value = |name: &str| arguments.iter().find_map(|a| a.strip_prefix(name));
    let Some(gpu) = common::gpu("gpu_pod") else {
        return;
    };
    println!("{}, kernels for {}", gpu.name(), gpu.arch());
    let ctas = value("ctas=").map_or(Vec::new(), |list| {
        list.split(',')
            .map(|ctas| ctas.parse().expect("a number"))
            .collect()
    });
    let mut device = DeviceDescription::named("h200").expect("it is built in");
    if let Some(config) = value("config=") {
        let configs = &mut device.pod.configs;
        *configs = vec![configs.swap_remove(config.parse().expect("a number"))];
    }
    let kv = match value("kv=") {
        Some("f8e4m3") => Dtype::F8E4M3,
        _ => Dtype::BF16,
    };
    let bench = Bench {
        kv,
        ctas,
        gpu,
        device,
        timer: Timer::new(),
        pool: Pool::random(5 << 29, kv),
        // Enough for any of the batches.
        q: run::queries(&Spec::new(32, 8, 128), 6000),
    };
    let mut lines = Vec::new();
    if arguments.iter().any(|argument| argument == "listed") {
        println!("{HEADER}");
        for (hybrid, bar) in listed() {
            let times = bench.measure(hybrid, 9);
            println!("{}  bar {bar}", times.line(&hybrid));
            lines.push(times.json(&hybrid));
        }
    }
    if arguments.iter().any(|argument| argument == "tickets") {
        println!("{TICKETS_HEADER}");
        for (hybrid, _) in listed() {
            lines.push(bench.tickets(hybrid));
        }
    }
    if let Some(count) = value("sweep=") {
        let count = count.parse().expect("a number of batches");
        let seed = value("seed=").map_or(1, |seed| seed.parse().expect("a number"));
        bench.sweep(count, seed, &mut lines);
    }
    if let Some(file) = value("json=") {
        std::fs::write(file, format!("[\n{}\n]\n", lines.join(",\n"))).expect("can be written");
    }
}

const HEADER: &str = "batch                             prefill  decode | serial streams  fused | auto         | \
                      serial/auto, peak";

const TICKETS_HEADER: &str = "Ampere's kernels                   prefill  decode | serial streams | tickets 50:50 | \
                              serial/tickets, peak";

struct Bench<'a> {
    /// Numbers of prefill CTAs to try beside the planner's.
    ctas: Vec<u32>,
    gpu: &'a Gpu,
    /// What keys and values are.
    kv: Dtype,
    device: DeviceDescription,
    timer: Timer,
    pool: Pool,
    q: Memory,
}

/// Microseconds.
struct Times {
    prefill: f64,
    decode: f64,
    serial: f64,
    streams: f64,
    fused: f64,
    auto: f64,
    chosen: PodMode,
    /// Side by side with so many prefill CTAs.
    by_ctas: Vec<(u32, f64)>,
}

impl Bench<'_> {
    /// Random batches of POD's figure 11 in which neither operation takes less than a fifth.
    fn sweep(&self, count: usize, seed: u64, lines: &mut Vec<String>) {
        println!("sweep of {count} batches, seed {seed}\n{HEADER}");
        // One batch for every chunk of a prompt, each as likely as any other.
        let all: Vec<Hybrid> = include_str!("../tests/data/pod_fig11.txt")
            .lines()
            .filter(|line| !line.starts_with('#'))
            .flat_map(|line| {
                let words: Vec<u32> = line
                    .split(' ')
                    .map(|word| word.parse().expect("a number"))
                    .collect();
                let [q_heads, kv_heads, chunk, context, decodes] = words[..] else {
                    panic!("five numbers");
                };
                (1..=context / chunk).map(move |chunks| Hybrid {
                    q_heads,
                    kv_heads,
                    chunk,
                    keys: chunk * chunks,
                    decodes,
                    context,
                })
            })
            .collect();
        let mut random = Rng(seed);
        let (mut speedups, mut near_peak, mut well_chosen, mut least) =
            (Vec::new(), 0, 0, f64::MAX);
        while speedups.len() < count {
            let hybrid = all[random.below(all.len())];
            let alone = self.alone(hybrid);
            if alone[0].min(alone[1]) < 0.2 * (alone[0] + alone[1]) {
                continue;
            }
            let times = self.measure(hybrid, 5);
            println!("{}", times.line(&hybrid));
            lines.push(times.json(&hybrid));
            let best = times.serial.min(times.streams).min(times.fused);
            speedups.push(times.speedup());
            least = least.min(times.speedup());
            near_peak += usize::from(times.auto <= 1.1 * times.peak());
            well_chosen += usize::from(times.auto <= 1.03 * best);
        }
        let part = |n: usize| 100.0 * n as f64 / count as f64;
        println!(
            "speedup over serial: mean {:.3}, least {least:.3}; within 10 % of the peak {:.0} %; \
             chosen within 3 % of the best {:.0} %",
            speedups.iter().sum::<f64>() / count as f64,
            part(near_peak),
            part(well_chosen),
        );
    }

    /// Prefill and decode, each alone.
    fn alone(&self, hybrid: Hybrid) -> [f64; 2] {
        let steps = [(true, false), (false, true)]
            .map(|(prefill, decode)| self.step(hybrid, PodMode::Auto, prefill, decode));
        let times = self.timer.rested_medians(&[&steps[0], &steps[1]], 3);
        [times[0], times[1]]
    }

    /// The kernels of Ampere: apart, and in one kernel by tickets.
    fn tickets(&self, hybrid: Hybrid) -> String {
        let ampere = Some(Arch::Sm80);
        // In turns, however much work there is of each.
        let turns = Rules {
            tickets: Some(|prefill, decode| Tickets {
                prefill: prefill.min(1),
                decode: decode.min(1),
            }),
            ..Rules::default()
        };
        let in_proportion = Rules::default();
        let steps = [
            (PodMode::Auto, in_proportion, true, false),
            (PodMode::Auto, in_proportion, false, true),
            (PodMode::Serial, in_proportion, true, true),
            (PodMode::Streams, in_proportion, true, true),
            (PodMode::Tickets, in_proportion, true, true),
            (PodMode::Tickets, turns, true, true),
        ]
        .map(|(pod, rules, prefill, decode)| {
            let options = PlanOptions::default().with_pod(pod);
            self.step_by(rules, hybrid, options, ampere, prefill, decode)
        });
        let ways: Vec<&Step<'_>> = steps.iter().collect();
        let times = self.timer.rested_medians(&ways, 5);
        let [prefill, decode, serial, streams, tickets, turns] = times[..] else {
            panic!("six times");
        };
        let peak = prefill.max(decode) + 0.1 * prefill.min(decode);
        let name = hybrid.name();
        println!(
            "{name:<34} {prefill:>7.0} {decode:>7.0} | {serial:>6.0} {streams:>7.0} | {tickets:>7.0} \
             {turns:>5.0} | {:.2} {:.2}",
            serial / tickets,
            (prefill + decode) / peak,
        );
        format!(
            "  {{\"batch\": \"{name}\", \"prefill_us\": {prefill:.1}, \"decode_us\": {decode:.1}, \
             \"serial_us\": {serial:.1}, \"streams_us\": {streams:.1}, \"tickets_us\": {tickets:.1}, \
             \"fifty_fifty_us\": {turns:.1}}}"
        )
    }

    fn measure(&self, hybrid: Hybrid, times: usize) -> Times {
        let modes = [
            PodMode::Serial,
            PodMode::Streams,
            PodMode::Fused,
            PodMode::Auto,
        ];
        let mut steps = vec![
            self.step(hybrid, PodMode::Auto, true, false),
            self.step(hybrid, PodMode::Auto, false, true),
        ];
        steps.extend(modes.map(|mode| self.step(hybrid, mode, true, true)));
        let with_ctas = |&ctas| {
            let options = PlanOptions::default()
                .with_pod(PodMode::Fused)
                .with_prefill_ctas(ctas);
            self.step_as(hybrid, options, None, true, true)
        };
        steps.extend(self.ctas.iter().map(with_ctas));
        let ways: Vec<&Step<'_>> = steps.iter().collect();
        let all = self.timer.rested_medians(&ways, times);
        let chosen = steps[5].plan.pod.expect("a hybrid batch").mode;
        Times {
            prefill: all[0],
            decode: all[1],
            serial: all[2],
            streams: all[3],
            fused: all[4],
            auto: all[5],
            chosen,
            by_ctas: self
                .ctas
                .iter()
                .copied()
                .zip(all[6..].iter().copied())
                .collect(),
        }
    }

    fn step(&self, hybrid: Hybrid, mode: PodMode, prefill: bool, decode: bool) -> Step<'_> {
        let options = PlanOptions::default().with_pod(mode);
        self.step_as(hybrid, options, None, prefill, decode)
    }

    fn step_as(
        &self,
        hybrid: Hybrid,
        options: PlanOptions,
        arch: Option<Arch>,
        prefill: bool,
        decode: bool,
    ) -> Step<'_> {
        self.step_by(Rules::default(), hybrid, options, arch, prefill, decode)
    }

    fn step_by(
        &self,
        rules: Rules,
        hybrid: Hybrid,
        options: PlanOptions,
        arch: Option<Arch>,
        prefill: bool,
        decode: bool,
    ) -> Step<'_> {
        let spec = Spec::new(hybrid.q_heads, hybrid.kv_heads, 128).with_kv_dtype(self.kv);
        let batch = hybrid.batch(prefill, decode);
        let bytes = u64::from(batch.parts[0].table.pool_pages)
            * u64::from(PAGE)
            * spec.kv_bytes_per_token();
        assert!(
            bytes <= self.pool.bytes() as u64,
            "{bytes} bytes of keys and values"
        );
        let plan = Planner::with_rules(rules).plan(&spec, &batch, &self.device, &options);
        let plan = plan.expect("can be planned");
        let mut options = WorkspaceOptions::default();
        options.arch = arch;
        let layout = KvLayout::Nhd;
        Step::new(self.gpu, plan, &batch, &self.pool, &self.q, layout, options)
    }
}

impl Hybrid {
    fn name(&self) -> String {
        let Self {
            q_heads,
            kv_heads,
            chunk,
            keys,
            decodes,
            context,
        } = self;
        format!("{q_heads}/{kv_heads} {chunk} @ {keys} + {decodes} × {context}")
    }

    fn batch(&self, prefill: bool, decode: bool) -> Batch {
        let requests = prefill.then_some((self.chunk, self.keys));
        let requests = requests.into_iter().chain(std::iter::repeat_n(
            (1, self.context),
            if decode { self.decodes as usize } else { 0 },
        ));
        let requests: Vec<(u32, u32)> = requests.collect();
        let pages: u32 = requests
            .iter()
            .map(|request| request.1.div_ceil(PAGE))
            .sum();
        let mut places: Vec<u32> = (0..pages).collect();
        Rng(11).shuffle(&mut places);
        let (mut table, mut indptr, mut next) = (PageTable::new(PAGE, pages), vec![0], 0);
        for (queries, keys) in requests {
            let count = keys.div_ceil(PAGE) as usize;
            table.push(&places[next..next + count], keys);
            next += count;
            indptr.push(indptr[indptr.len() - 1] + queries);
        }
        Batch::new(indptr, table)
    }
}

impl Times {
    fn speedup(&self) -> f64 {
        self.serial / self.auto
    }

    /// The paper's bound: both at their best, a tenth of the shorter not hidden.
    fn peak(&self) -> f64 {
        self.prefill.max(self.decode) + 0.1 * self.prefill.min(self.decode)
    }

    fn line(&self, hybrid: &Hybrid) -> String {
        let name = hybrid.name();
        format!(
            "{name:<34} {:>6.0} {:>7.0} | {:>6.0} {:>7.0} {:>6.0} | {:>5.0} {:<7} | {:.2} {:.2}",
            self.prefill,
            self.decode,
            self.serial,
            self.streams,
            self.fused,
            self.auto,
            format!("{:?}", self.chosen).to_lowercase(),
            self.speedup(),
            (self.prefill + self.decode) / self.peak(),
        )
    }

    fn json(&self, hybrid: &Hybrid) -> String {
        let Hybrid {
            q_heads,
            kv_heads,
            chunk,
            keys,
            decodes,
            context,
        } = hybrid;
        let mut line = format!(
            "  {{\"heads\": [{q_heads}, {kv_heads}], \"prefill\": [{chunk}, {keys}], \
             \"decodes\": [{decodes}, {context}]"
        );
        for (name, time) in [
            ("prefill_us", self.prefill),
            ("decode_us", self.decode),
            ("serial_us", self.serial),
            ("streams_us", self.streams),
            ("fused_us", self.fused),
            ("auto_us", self.auto),
        ] {
            let _ = write!(line, ", \"{name}\": {time:.1}");
        }
        let _ = write!(line, ", \"chosen\": \"{:?}\"", self.chosen);
        for (ctas, time) in &self.by_ctas {
            let _ = write!(line, ", \"fused_{ctas}_us\": {time:.1}");
        }
        line.push('}');
        line
    }
}

//! Hybrid batches on a GPU, from the planner's plans: one after the other, on two streams, side by side.
//!
//! `cargo bench --features cuda --bench gpu_pod -- [listed] [sweep=300] [random=300] [seed=1] [ctas=132,88] [config=0]
//! [kv=f8e4m3] [json=FILE]`. `sweep` draws from the paper's figure 11, `random` heads of 64, 128 and 256, several chunks and
//! decodes of any lengths. Times are CUDA events around all launches of a step; medians, modes in turn, L2 full of other
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
        pod::{PodMode, PodPlan, Tickets},
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

const PAGE: u32 = 16;

/// Chunks of prompts, and decodes of one query each.
#[derive(Clone, Debug)]
struct Hybrid {
    q_heads: u32,
    kv_heads: u32,
    head_dim: u32,
    /// Queries of each chunk, and the keys up to its last one.
    chunks: Vec<[u32; 2]>,
    /// Keys of each decode.
    decodes: Vec<u32>,
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
            head_dim: 128,
            chunks: vec![[chunk, keys]],
            decodes: vec![context; decodes as usize],
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
    let mut device = gpu.device();
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
        q: run::queries(&Spec::new(64, 8, 256), 6500),
    };
    let seed = value("seed=").map_or(1, |seed| seed.parse().expect("a number"));
    let mut lines = Vec::new();
    if arguments.iter().any(|argument| argument == "listed") {
        println!("{HEADER}");
        for (hybrid, bar) in listed() {
            let times = bench.measure(&hybrid, 9);
            println!("{}  bar {bar}", times.line(&hybrid));
            lines.push(times.json(&hybrid));
        }
    }
    if arguments.iter().any(|argument| argument == "tickets") {
        println!("{TICKETS_HEADER}");
        for (hybrid, _) in listed() {
            lines.push(bench.tickets(&hybrid));
        }
    }
    if let Some(count) = value("sweep=") {
        let count = count.parse().expect("a number of batches");
        bench.sweep(figure_11(), count, seed, &mut lines);
    }
    if let Some(count) = value("random=") {
        let count = count.parse().expect("a number of batches");
        let most_bytes = bench.pool.bytes() as u64;
        bench.sweep(
            |random| anything(random, most_bytes),
            count,
            seed,
            &mut lines,
        );
    }
    if let Some(file) = value("json=") {
        std::fs::write(file, format!("[\n{}\n]\n", lines.join(",\n"))).expect("can be written");
    }
}

const HEADER: &str = "batch                             prefill  decode | serial streams  fused | auto         | \
                      serial/auto, peak | auto/best";

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
    /// What the planner chose, and by which forecast.
    pod: PodPlan,
    by_config: Vec<ByConfig>,
}

/// Side by side in one of the device's configurations.
struct ByConfig {
    config: usize,
    ctas: u32,
    forecast_ns: f64,
    us: f64,
}

/// Batches of POD's figure 11: one for every chunk of a prompt, each as likely as any other.
fn figure_11() -> impl FnMut(&mut Rng) -> Hybrid {
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
                head_dim: 128,
                chunks: vec![[chunk, chunk * chunks]],
                decodes: vec![context; decodes as usize],
            })
        })
        .collect();
    move |random| all[random.below(all.len())].clone()
}

/// One to five chunks of 64 to 4,096 new tokens together, in front of them up to 16,384 keys each, beside 4 to 192 decodes of
/// up to 24,576 keys, no more than there is room for.
fn anything(random: &mut Rng, most_bytes: u64) -> Hybrid {
    let log = |random: &mut Rng, from: f32, to: f32| random.between(from.ln(), to.ln()).exp();
    loop {
        let (q_heads, kv_heads) = [(28, 4), (32, 8), (40, 8), (64, 8)][random.below(4)];
        let head_dim = [64, 128, 256][random.below(3)];
        let chunks = 1 + random.below(5);
        let tokens = log(random, 128.0, 4096.0) / chunks as f32;
        let chunks = (0..chunks).map(|_| {
            let queries = (tokens * random.between(0.5, 1.5)).max(16.0) as u32;
            let before = if random.below(4) == 0 {
                0.0
            } else {
                log(random, 64.0, 16384.0)
            };
            [queries, queries + before as u32]
        });
        let chunks: Vec<_> = chunks.collect();
        let (count, mean) = (log(random, 4.0, 192.0) as u32, log(random, 512.0, 16384.0));
        // All alike, somewhat ragged, very much so.
        let ragged = [0.0, 0.5, 0.95][random.below(3)];
        let decodes =
            (0..count).map(|_| (mean * random.between(1.0 - ragged, 1.0 + ragged)) as u32);
        let hybrid = Hybrid {
            q_heads,
            kv_heads,
            head_dim,
            chunks,
            decodes: decodes.map(|keys| keys.clamp(16, 24_576)).collect(),
        };
        let keys = hybrid
            .requests(true, true)
            .map(|(_, keys)| u64::from(keys.next_multiple_of(PAGE)));
        let bytes = 4 * u64::from(kv_heads * head_dim);
        if keys.sum::<u64>() * bytes <= most_bytes {
            return hybrid;
        }
    }
}

impl Bench<'_> {
    /// Random batches in which neither operation takes less than a fifth.
    fn sweep(
        &self,
        mut draw: impl FnMut(&mut Rng) -> Hybrid,
        count: usize,
        seed: u64,
        lines: &mut Vec<String>,
    ) {
        println!("sweep of {count} batches, seed {seed}\n{HEADER}");
        let mut random = Rng(seed);
        let (mut speedups, mut near_peak, mut well_chosen, mut least) =
            (Vec::new(), 0, 0, f64::MAX);
        while speedups.len() < count {
            let hybrid = draw(&mut random);
            let alone = self.alone(&hybrid);
            if alone[0].min(alone[1]) < 0.2 * (alone[0] + alone[1]) {
                continue;
            }
            let times = self.measure(&hybrid, 5);
            println!("{}", times.line(&hybrid));
            lines.push(times.json(&hybrid));
            speedups.push(times.speedup());
            least = least.min(times.speedup());
            near_peak += usize::from(times.auto <= 1.1 * times.peak());
            well_chosen += usize::from(times.auto <= 1.03 * times.best());
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
    fn alone(&self, hybrid: &Hybrid) -> [f64; 2] {
        let steps = [(true, false), (false, true)]
            .map(|(prefill, decode)| self.step(hybrid, PodMode::Auto, prefill, decode));
        let times = self.timer.rested_medians(&[&steps[0], &steps[1]], 3);
        [times[0], times[1]]
    }

    /// The kernels of Ampere: apart, and in one kernel by tickets.
    fn tickets(&self, hybrid: &Hybrid) -> String {
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
            self.step_by(
                rules,
                &self.device,
                hybrid,
                options,
                ampere,
                prefill,
                decode,
            )
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

    fn measure(&self, hybrid: &Hybrid, times: usize) -> Times {
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
        // Each configuration alone, with the planner's CTAs and with others.
        let mut by_config = Vec::new();
        for config in 0..self.device.pod.configs.len() {
            let mut device = self.device.clone();
            let configs = &mut device.pod.configs;
            *configs = vec![configs.swap_remove(config)];
            let fused = PlanOptions::default().with_pod(PodMode::Fused);
            // Tickets have no number of CTAs.
            let by_tickets = device.pod.configs[0].by_tickets;
            let ctas = self.ctas.iter().filter(|_| !by_tickets);
            let of_ctas = ctas.map(|&ctas| fused.with_prefill_ctas(ctas));
            for options in [fused].into_iter().chain(of_ctas) {
                let step = self.step_for(&device, hybrid, options);
                let pod = step.plan.pod.expect("a hybrid batch");
                if pod.config.is_some() {
                    by_config.push(ByConfig {
                        config,
                        ctas: pod.ctas.prefill,
                        forecast_ns: pod.forecast.fused_ns,
                        us: 0.0,
                    });
                    steps.push(step);
                }
            }
        }
        let ways: Vec<&Step<'_>> = steps.iter().collect();
        let all = self.timer.rested_medians(&ways, times);
        let pod = steps[5].plan.pod.expect("a hybrid batch");
        for (by_config, us) in by_config.iter_mut().zip(&all[6..]) {
            by_config.us = *us;
        }
        Times {
            prefill: all[0],
            decode: all[1],
            serial: all[2],
            streams: all[3],
            fused: all[4],
            auto: all[5],
            pod,
            by_config,
        }
    }

    fn step(&self, hybrid: &Hybrid, mode: PodMode, prefill: bool, decode: bool) -> Step<'_> {
        let options = PlanOptions::default().with_pod(mode);
        self.step_as(hybrid, options, None, prefill, decode)
    }

    /// On a device that is described otherwise.
    fn step_for(
        &self,
        device: &DeviceDescription,
        hybrid: &Hybrid,
        options: PlanOptions,
    ) -> Step<'_> {
        let rules = Rules::default();
        self.step_by(rules, device, hybrid, options, None, true, true)
    }

    fn step_as(
        &self,
        hybrid: &Hybrid,
        options: PlanOptions,
        arch: Option<Arch>,
        prefill: bool,
        decode: bool,
    ) -> Step<'_> {
        self.step_by(
            Rules::default(),
            &self.device,
            hybrid,
            options,
            arch,
            prefill,
            decode,
        )
    }

    #[expect(clippy::too_many_arguments, reason = "what is varied")]
    fn step_by(
        &self,
        rules: Rules,
        device: &DeviceDescription,
        hybrid: &Hybrid,
        options: PlanOptions,
        arch: Option<Arch>,
        prefill: bool,
        decode: bool,
    ) -> Step<'_> {
        let spec =
            Spec::new(hybrid.q_heads, hybrid.kv_heads, hybrid.head_dim).with_kv_dtype(self.kv);
        let batch = hybrid.batch(prefill, decode);
        let bytes = u64::from(batch.parts[0].table.pool_pages)
            * u64::from(PAGE)
            * spec.kv_bytes_per_token();
        assert!(
            bytes <= self.pool.bytes() as u64,
            "{bytes} bytes of keys and values"
        );
        let plan = Planner::with_rules(rules).plan(&spec, &batch, device, &options);
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
            head_dim,
            chunks,
            decodes,
        } = self;
        let dim = match head_dim {
            128 => String::new(),
            dim => format!(" d {dim}"),
        };
        let chunks: Vec<String> = chunks
            .iter()
            .map(|[queries, keys]| format!("{queries} @ {keys}"))
            .collect();
        let (least, most) = (decodes.iter().min().unwrap(), decodes.iter().max().unwrap());
        let keys = match least == most {
            true => least.to_string(),
            false => format!("{least}–{most}"),
        };
        let count = decodes.len();
        format!(
            "{q_heads}/{kv_heads}{dim} {} + {count} × {keys}",
            chunks.join(", ")
        )
    }

    /// New tokens and keys of each request.
    fn requests(&self, prefill: bool, decode: bool) -> impl Iterator<Item = (u32, u32)> {
        let chunks = self.chunks.iter().filter(move |_| prefill);
        let decodes = self.decodes.iter().filter(move |_| decode);
        chunks
            .map(|&[queries, keys]| (queries, keys))
            .chain(decodes.map(|&keys| (1, keys)))
    }

    fn batch(&self, prefill: bool, decode: bool) -> Batch {
        let requests = self.requests(prefill, decode);
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

    /// The fastest of the forms, with any number of CTAs.
    fn best(&self) -> f64 {
        let apart = self.serial.min(self.streams).min(self.auto);
        let fused = self.by_config.iter().map(|by_config| by_config.us);
        fused.fold(apart, f64::min)
    }

    /// The paper's bound: both at their best, a tenth of the shorter not hidden.
    fn peak(&self) -> f64 {
        self.prefill.max(self.decode) + 0.1 * self.prefill.min(self.decode)
    }

    fn line(&self, hybrid: &Hybrid) -> String {
        let name = hybrid.name();
        format!(
            "{name:<34} {:>6.0} {:>7.0} | {:>6.0} {:>7.0} {:>6.0} | {:>5.0} {:<7} | {:.2} {:.2} | {:.3}",
            self.prefill,
            self.decode,
            self.serial,
            self.streams,
            self.fused,
            self.auto,
            format!("{:?}", self.pod.mode).to_lowercase(),
            self.speedup(),
            (self.prefill + self.decode) / self.peak(),
            self.auto / self.best(),
        )
    }

    fn json(&self, hybrid: &Hybrid) -> String {
        let Hybrid {
            q_heads,
            kv_heads,
            head_dim,
            chunks,
            decodes,
        } = hybrid;
        let mut line = format!(
            "  {{\"heads\": [{q_heads}, {kv_heads}], \"head_dim\": {head_dim}, \"prefill\": {chunks:?}, \
             \"decodes\": {decodes:?}"
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
        let PodPlan {
            mode,
            config,
            ctas,
            forecast,
            ..
        } = self.pod;
        let _ = write!(
            line,
            ", \"chosen\": \"{mode:?}\", \"config\": {}, \"ctas\": {}, \"forecast_us\": [{:.1}, {:.1}, {:.1}, {:.1}], \
             \"configs\": [",
            config.map_or(-1, |config| config as i32),
            ctas.prefill,
            forecast.prefill_ns / 1e3,
            forecast.decode_ns / 1e3,
            forecast.serial_ns / 1e3,
            forecast.streams_ns / 1e3,
        );
        for (index, of) in self.by_config.iter().enumerate() {
            let comma = if index > 0 { ", " } else { "" };
            let ByConfig {
                config,
                ctas,
                forecast_ns,
                us,
            } = of;
            let _ = write!(
                line,
                "{comma}[{config}, {ctas}, {:.1}, {us:.1}]",
                forecast_ns / 1e3
            );
        }
        line.push(']');
        line.push('}');
        line
    }
}

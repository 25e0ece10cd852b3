//! Decode on a GPU, from the planner's plans: PAT's prefix trees, and batches without prefixes.
//!
//! `cargo bench --features cuda --bench gpu_decode -- [pat [tree=1,2]] [trees=FILE] [random-trees=40 [seed=1]] [prefixes]
//! [batches [batch=16×1024,32/8] [page=16]] [layers] [sets]` prints the named tables; `trees` compares ways to plan the trees of a file like
//! `tests/data/trees_held_back.txt`, `random-trees` those of a seed; `prefixes` are wide ones, before decodes and prefills;
//! `layers` are those of a model in a graph, each with a KV cache of its own; `sets` are launch sets in graphs, all of their launches and the needed ones.
//! Times are CUDA events around all launches of a step, behind a write that flushes L2 and hides the host;
//! medians, configurations in turn; `read` reads as many bytes in the simplest way. Pools hold random bits of
//! finite numbers, pages are shuffled.

#[path = "gpu_decode/choices.rs"]
mod choices;
#[path = "../tests/common/mod.rs"]
mod common;
#[path = "gpu_decode/layers.rs"]
mod layers;
#[path = "gpu_decode/prefixes.rs"]
mod prefixes;
#[path = "gpu_decode/run.rs"]
mod run;
#[path = "gpu_decode/sets.rs"]
mod sets;
#[path = "../tests/common/trees.rs"]
mod trees;

use common::Rng;
use run::{Pool, Step, Timer};
use tandem_attn::{
    exec::gpu::{Gpu, Stream as Handle, WorkspaceOptions},
    plan::{DeviceDescription, Join, MergeMode, PackRule, PlanOptions, Planner, Rules, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};
use trees::{HEADS, trees};

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    // Without the flag this is `cargo test`, which only wants to know that it starts.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return;
    }
    let named = |name: &str| arguments.iter().any(|argument| argument == name);
    let Some(gpu) = common::gpu("gpu_decode") else {
        return;
    };
    println!("{}, kernels for {}", gpu.name(), gpu.arch());
    let timer = Timer::new();
    let only = arguments.iter().find_map(|a| a.strip_prefix("tree="));
    let pool = Pool::random(if only.is_some() { 5 << 30 } else { 9 << 30 }, Dtype::F16);
    if named("batches") {
        let batch = arguments.iter().find_map(|a| a.strip_prefix("batch="));
        let page = arguments.iter().find_map(|a| a.strip_prefix("page="));
        let page = page.map_or(16, |page| page.parse().expect("tokens"));
        batches(gpu, &timer, &pool, batch, page);
    }
    if let Some(file) = arguments.iter().find_map(|a| a.strip_prefix("trees=")) {
        let text = std::fs::read_to_string(file).expect("the file can be read");
        choices::compare(gpu, &timer, &pool, &trees::parse(&text));
    }
    if let Some(count) = arguments
        .iter()
        .find_map(|a| a.strip_prefix("random-trees="))
    {
        let seed = arguments.iter().find_map(|a| a.strip_prefix("seed="));
        let seed = seed.map_or(1, |seed| seed.parse().expect("a number"));
        let count = count.parse().expect("a number of trees");
        println!("{count} random trees, seed {seed}");
        choices::compare(gpu, &timer, &pool, &choices::random(count, seed));
    }
    if named("prefixes") {
        prefixes::measure(gpu, &timer, &pool);
    }
    if named("layers") {
        layers::measure(gpu, &timer, &pool);
    }
    if named("sets") {
        sets::measure(gpu, &timer, &pool);
    }
    if named("pat") {
        pat(gpu, &timer, &pool, only);
    }
}

/// Heads of 128, f16 throughout, as PAT was measured.
fn spec(q_heads: u32, kv_heads: u32) -> Spec {
    let mut spec = Spec::new(q_heads, kv_heads, 128);
    (spec.q_dtype, spec.kv_dtype, spec.out_dtype) = (Dtype::F16, Dtype::F16, Dtype::F16);
    spec
}

fn shuffled(mut batch: Batch, seed: u64) -> Batch {
    let table = &mut batch.parts[0].table;
    let mut places: Vec<u32> = (0..table.pool_pages).collect();
    Rng(seed).shuffle(&mut places);
    for page in &mut table.indices {
        *page = places[*page as usize];
    }
    batch
}

/// One query per request, as many keys as `lens` says.
fn without_prefixes(lens: &[u32], page: u32) -> Batch {
    let pages: u32 = lens.iter().map(|len| len.div_ceil(page)).sum();
    let mut table = PageTable::new(page, pages);
    let mut next = 0;
    for &len in lens {
        let ids: Vec<u32> = (next..next + len.div_ceil(page)).collect();
        next += ids.len() as u32;
        table.push(&ids, len);
    }
    Batch::new((0..=lens.len() as u32).collect(), table)
}

/// Lengths of 16 requests by Zipf's law, 1023 keys on average.
fn zipf() -> Vec<u32> {
    let weights: Vec<f64> = (1..=16).map(|rank| 1.0 / f64::from(rank)).collect();
    let total: f64 = weights.iter().sum();
    weights
        .iter()
        .map(|weight| (weight / total * 16.0 * 1023.0).round() as u32)
        .collect()
}

fn batches(gpu: &Gpu, timer: &Timer, pool: &Pool, only: Option<&str>, page: u32) {
    let device = gpu.device();
    println!(
        "\n{:<26} {:>6} {:>7} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9} {:>8}",
        "batch",
        "items",
        "merges",
        "fused µs",
        "kernel",
        "uncut",
        "HND",
        "read",
        "graph f",
        "graph k",
        "ideal"
    );
    for (name, lens, q_heads, kv_heads) in [
        ("64 × 8192, 32/8", vec![8192; 64], 32, 8),
        ("256 × 4096, 32/8", vec![4096; 256], 32, 8),
        ("128 × 2048, 32/8", vec![2048; 128], 32, 8),
        ("64 × 8192, 32/32", vec![8192; 64], 32, 32),
        ("16 × 1024, 32/8", vec![1024; 16], 32, 8),
        ("16 Zipf 1023, 32/8", zipf(), 32, 8),
        ("1 × 131072, 32/8", vec![131_072], 32, 8),
        ("4 × 16384, 32/8", vec![16384; 4], 32, 8),
        ("1 × 1024, 32/8", vec![1024], 32, 8),
        ("1024 × 32, 32/8", vec![32; 1024], 32, 8),
        ("1024 × 32, 32/32", vec![32; 1024], 32, 32),
    ] {
        if only.is_some_and(|only| only != name.replace(' ', "")) {
            continue;
        }
        let spec = spec(q_heads, kv_heads);
        let batch = shuffled(without_prefixes(&lens, page), 1);
        let q = run::queries(&spec, batch.total_q());
        let keys: u32 = lens.iter().sum();
        let ideal =
            f64::from(keys) * spec.kv_bytes_per_token() as f64 / (1e3 * device.read_bytes_per_ns);
        let nhd = KvLayout::Nhd;
        let steps = [
            (MergeMode::Fused, SplitMode::Makespan, nhd),
            (MergeMode::Kernel, SplitMode::Makespan, nhd),
            (MergeMode::Fused, SplitMode::Off, nhd),
            (MergeMode::Fused, SplitMode::Makespan, KvLayout::Hnd),
        ];
        let steps = steps.map(|(merge_mode, split, layout)| {
            let options = PlanOptions::default()
                .with_merge_mode(merge_mode)
                .with_split(split);
            Step::planned(gpu, (&spec, &batch), (&device, &options), pool, &q, layout)
        });
        let bytes = keys as usize * spec.kv_bytes_per_token() as usize;
        let ways = steps.each_ref().map(|step| |stream| step.enqueue(stream));
        let read = |stream| pool.read(gpu, bytes, stream);
        let mut ways: Vec<&dyn Fn(Handle)> = ways.iter().map(|way| way as _).collect();
        ways.push(&read);
        let times = timer.medians_of(&ways, 15);
        let graphs = [0, 1].map(|step| timer.graph(&steps[step]));
        let times: Vec<String> = times.iter().map(|time| format!("{time:>9.1}")).collect();
        println!(
            "{name:<26} {:>6} {:>7} {} {:>9.2} {:>9.2} {ideal:>8.1}",
            steps[0].plan.items.len(),
            steps[0].plan.merges.len(),
            times.join(" "),
            graphs[0],
            graphs[1],
        );
    }
}

/// PAT's own times, flushed: by tree, for each of [`HEADS`].
fn published() -> Vec<Vec<f64>> {
    include_str!("../tests/data/pat_h200.txt")
        .lines()
        .filter(|line| !line.starts_with('#'))
        .map(|line| {
            let flushed = line.split(';').nth(1).expect("three columns");
            flushed
                .split(',')
                .map(|time| time.trim().parse().expect("a number"))
                .collect()
        })
        .collect()
}

/// What is varied, one at a time.
const WAYS: [&str; 9] = [
    "default",
    "fused",
    "apart",
    "paper",
    "no split",
    "m64",
    "m128",
    "joint",
    "any bytes",
];

fn pat(gpu: &Gpu, timer: &Timer, pool: &Pool, only: Option<&str>) {
    let device = gpu.device();
    let with = |change: fn(&mut DeviceDescription)| {
        let mut other = device.clone();
        change(&mut other);
        other
    };
    let m64 = with(|device| device.decode.rows = vec![8, 16, 64]);
    let m128 = with(|device| device.decode.rows = vec![8, 16, 128]);
    let always = with(|device| {
        if let Some(joint) = &mut device.decode.joint {
            (joint.cut_ns, joint.apart_ns) = (1e6, 1e6);
        }
    });
    let any_bytes = with(|device| {
        if let Some(joint) = &mut device.decode.joint {
            joint.bytes = 1e9;
        }
    });
    println!(
        "\ntree heads  launches (rows: units), slots | unique MB, moved, ideal µs | PAT | {} | warm | PAT/default, off, differs",
        WAYS.join(", ")
    );
    let published = published();
    let mut logs = [0.0; WAYS.len()];
    let (mut cases, mut slower) = (0, 0);
    for tree in trees() {
        if only.is_some_and(|ids| !ids.split(',').any(|id| id == tree.id.to_string())) {
            continue;
        }
        for (column, &(q_heads, kv_heads)) in HEADS.iter().enumerate() {
            let spec = spec(q_heads, kv_heads);
            let batch = shuffled(tree.batch(32), 1);
            let unique = tree.unique_keys() as f64 * spec.kv_bytes_per_token() as f64;
            if unique > pool.bytes() as f64 {
                continue;
            }
            let q = run::queries(&spec, batch.total_q());
            let default = PlanOptions::default().with_merge_mode(MergeMode::Kernel);
            let step_by =
                |planner: &mut Planner, device: &DeviceDescription, options: PlanOptions| {
                    let plan = planner.plan(&spec, &batch, device, &options);
                    let plan = plan.expect("can be planned");
                    let options = WorkspaceOptions::default();
                    Step::new(gpu, plan, &batch, pool, &q, KvLayout::Nhd, options)
                };
            let step = |device: &DeviceDescription, options: PlanOptions| {
                step_by(&mut Planner::new(), device, options)
            };
            // PAT's paper joins a child of many rows.
            let mut paper = Planner::with_rules(Rules {
                join: Some(Join::has_many_rows),
                ..Rules::default()
            });
            let kernel = step(&device, default);
            let fused = default.with_merge_mode(MergeMode::Fused);
            let fused = step(&device, fused);
            let no_split = default.with_split(SplitMode::Off);
            let apart = default.with_packing(PackRule::Exact);
            let others = [
                step(&device, apart),
                step_by(&mut paper, &device, default),
                step(&device, no_split),
                step(&m64, default),
                step(&m128, default),
                step(&always, default),
                step(&any_bytes, default),
            ];
            let mut ways = vec![&kernel, &fused];
            ways.extend(&others);
            let times = timer.medians(&ways, 9);
            let warm = timer.warm(&kernel, 9);
            // What each way computes, against no packing.
            let off = default.with_packing(PackRule::Off);
            let unpacked = step(&device, off);
            let [unpacked_time] = timer.medians(&[&unpacked], 5)[..] else {
                unreachable!("one step, one time")
            };
            let right = unpacked.output();
            let mut differs: f32 = 0.0;
            for step in &ways {
                step.clear();
                step.run();
                differs = differs.max(run::difference(&right, &step.output()));
            }
            let pat = published[tree.id as usize - 1][column];
            if tree.nodes.len() > 1 {
                cases += 1;
                slower += u32::from(times[0] > pat);
                for (log, time) in logs.iter_mut().zip(&times) {
                    *log += (pat / time).ln();
                }
            }
            let launches: Vec<String> = kernel
                .plan
                .groups
                .iter()
                .map(|group| format!("{}: {}", group.tile.m, kernel.plan.units_of(group)))
                .collect();
            let shown: Vec<String> = times.iter().map(|time| format!("{time:>6.1}")).collect();
            println!(
                "{:>2} {q_heads:>2}/{kv_heads:<2} {} s{} | {:.0} {:.0} {:.1} | {pat:>6.1} | {} | {warm:>6.1} | {:.2} {unpacked_time:.1} {differs:.4}",
                tree.id,
                launches.join(", "),
                kernel.plan.slots,
                unique / 1e6,
                kernel.plan.traffic().bytes() as f64 / 1e6,
                unique / (1e3 * device.read_bytes_per_ns),
                shown.join(" "),
                pat / times[0],
            );
        }
    }
    let means: Vec<String> = WAYS
        .iter()
        .zip(&logs)
        .map(|(way, log)| format!("{way} {:.3}", (log / f64::from(cases)).exp()))
        .collect();
    println!(
        "geometric mean of PAT / ours over {cases} cases with prefixes ({slower} slower): {}",
        means.join(", ")
    );
}

//! How long planning takes: `cargo bench --bench planner`.
//!
//! One core, buffers warm, everything included: the checks of the batch, the copy of its page ids, the
//! prefix forest, packing, splits, merges.

use std::time::{Duration, Instant};

use criterion::{Criterion, criterion_main};
use tandem_attn::{
    plan::{DeviceDescription, Plan, PlanOptions, Planner, Update},
    problem::{Batch, PageTable, Spec},
};

const PAGE: u32 = 16;

/// Decodes with nothing in common.
fn apart(requests: u32, kv_len: u32) -> Batch {
    let pages = kv_len.div_ceil(PAGE);
    let mut table = PageTable::new(PAGE, requests * pages);
    for request in 0..requests {
        let pages: Vec<u32> = (request * pages..(request + 1) * pages).collect();
        table.push(&pages, kv_len);
    }
    Batch::new((0..=requests).collect(), table)
}

/// Decodes at the leaves of a tree with so many nodes per level, and so many keys in each; `stride` is
/// coprime to the number of leaves and shuffles them.
fn tree(nodes: &[u32], keys: &[u32], stride: u32) -> Batch {
    let mut next = 0;
    let mut tables = vec![Vec::new()];
    for (&nodes, &keys) in nodes.iter().zip(keys) {
        let above = tables;
        let table = |node: u32| {
            let mut table: Vec<u32> = above[node as usize * above.len() / nodes as usize].clone();
            table.extend(next..next + keys / PAGE);
            next += keys / PAGE;
            table
        };
        tables = (0..nodes).map(table).collect();
    }
    let leaves = tables.len() as u32;
    let mut table = PageTable::new(PAGE, next);
    for leaf in 0..leaves {
        let pages = &tables[(leaf * stride % leaves) as usize];
        table.push(pages, pages.len() as u32 * PAGE);
    }
    Batch::new((0..=leaves).collect(), table)
}

fn planning(c: &mut Criterion) {
    let heads = Spec::new(32, 8, 128);
    let one_kv_head = Spec::new(32, 1, 128);
    let device = DeviceDescription::named("h200").expect("comes with the crate");
    let options = PlanOptions::default();
    let levels = ([1, 4, 16, 64, 256, 1024], [256, 32, 256, 64, 32, 256]);
    let mut group = c.benchmark_group("plan");
    for (name, spec, batch) in [
        ("64 requests × 8K", heads, apart(64, 8192)),
        (
            "1024 requests, 6 levels",
            heads,
            tree(&levels.0, &levels.1, 1),
        ),
        (
            "1024 requests, 6 levels, shuffled",
            heads,
            tree(&levels.0, &levels.1, 389),
        ),
        ("16 requests × 1K", heads, apart(16, 1024)),
        ("1 request × 128K", heads, apart(1, 131_072)),
        (
            "64 requests × 4000, one KV head",
            one_kv_head,
            apart(64, 4000),
        ),
        ("1024 requests × 1K", heads, apart(1024, 1024)),
        ("20000 requests × 100", heads, apart(20_000, 100)),
    ] {
        let mut planner = Planner::new();
        let mut plan = Plan::empty(spec);
        group.bench_function(name, |bencher| {
            bencher.iter(|| planner.plan_into(&spec, &batch, &device, &options, &mut plan));
        });
        group.bench_function(format!("{name}, check only"), |bencher| {
            bencher.iter(|| batch.check(&spec));
        });
    }
}

/// A step of every request, while no request needs another page.
fn growing(c: &mut Criterion) {
    let spec = Spec::new(32, 8, 128);
    let device = DeviceDescription::named("h200").expect("comes with the crate");
    let options = PlanOptions::default();
    let levels = ([1, 4, 16, 64, 256, 1024], [256, 32, 256, 64, 32, 256]);
    let mut group = c.benchmark_group("grow");
    for (name, batch) in [
        ("64 requests × 8K", apart(64, 8192)),
        ("1024 requests, 6 levels", tree(&levels.0, &levels.1, 1)),
    ] {
        let steps: Vec<_> = (1..=PAGE)
            .map(|tokens| {
                let mut batch = batch.clone();
                batch.parts[0].table.last_page_len.fill(tokens);
                batch
            })
            .collect();
        let mut planner = Planner::new();
        let mut plan = Plan::empty(spec);
        group.bench_function(name, |bencher| {
            bencher.iter_custom(|iterations| {
                let mut time = Duration::ZERO;
                for iteration in 0..iterations {
                    let step = 1 + iteration as usize % (steps.len() - 1);
                    if step == 1 {
                        let made =
                            planner.plan_into(&spec, &steps[0], &device, &options, &mut plan);
                        made.expect("a sound batch");
                    }
                    let begin = Instant::now();
                    let update = plan.grow(&steps[step]);
                    time += begin.elapsed();
                    assert_eq!(update, Some(Update::Patched));
                }
                time
            });
        });
    }
}

/// The benchmarks.
fn benches() {
    growing(&mut Criterion::default().configure_from_args());
    planning(&mut Criterion::default().configure_from_args());
}

criterion_main!(benches);

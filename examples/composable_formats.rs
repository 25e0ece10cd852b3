//! Composable formats: one batch as several block-sparse parts, each with its own pages and row blocks.
//!
//! The first batch has a shared prefix as a part of its own; its results equal those of one table. The second is a tree of draft
//! tokens, whose mask is a table of single tokens. `cargo run --release --example composable_formats`
//!
//! To use this code in a program of your own, add the feature `unstable` and the crate `fastrand`.

use std::error::Error;

use tandem_attn::{
    Cpu,
    kv::{DraftTree, KvView},
    plan::{Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    reference,
};

const PAGE_SIZE: u32 = 16;
const PAGES: u32 = 64;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let spec = Spec::new(4, 2, 32).with_dtype(Dtype::F32);
    let mut random = fastrand::Rng::with_seed(5);
    let mut numbers =
        |count: u32| -> Vec<f32> { (0..count).map(|_| 2.0 * random.f32() - 1.0).collect() };
    let pool_elements = PAGES * PAGE_SIZE * spec.kv_heads * spec.head_dim_qk;
    let (k, v) = (numbers(pool_elements), numbers(pool_elements));
    let q = numbers(64 * spec.q_heads * spec.head_dim_qk);
    let pool = KvView::new(&spec, KvLayout::Nhd, PAGE_SIZE, &k, &v);

    let (cpu, mut planner) = (Cpu::new(), Planner::new());
    // Plans and runs a batch whose parts have these views; checks it against f64.
    let mut run =
        |batch: &Batch, views: &[KvView<'_, f32>]| -> Result<(Plan, Vec<f32>), Box<dyn Error>> {
            let plan = planner.plan(&spec, batch, &cpu.device(), &PlanOptions::default())?;
            let q = &q[..(batch.total_q() * spec.q_heads * spec.head_dim_qk) as usize];
            let mut out = vec![0.0; q.len()];
            cpu.run(&plan, q, views, &mut out, None)?;
            let right = reference::attention(&spec, batch, q, views)?;
            assert!(
                out.iter()
                    .zip(right.out)
                    .all(|(x, right)| (f64::from(*x) - right).abs() < 1e-5)
            );
            Ok((plan, out))
        };

    // Three samples of one prompt: 10 shared pages, and a few tokens of their own.
    let mut table = PageTable::new(PAGE_SIZE, PAGES);
    let mut qo_indptr = vec![0];
    for sample in 0..3 {
        let pages: Vec<u32> = (0..10).chain([10 + sample]).collect();
        table.push(&pages, 10 * PAGE_SIZE + 3 + sample);
        qo_indptr.push(sample + 1);
    }
    let one_part = Batch::new(qo_indptr, table);
    let two_parts = one_part.share_prefixes();
    println!(
        "{} parts: rows share {} keys, then have {} to {} of their own",
        two_parts.parts.len(),
        two_parts.parts[0].kv_len(0),
        two_parts.parts[1].kv_len(0),
        two_parts.parts[1].kv_len(2)
    );
    let (plan, composed) = run(&two_parts, &[pool, pool])?;
    println!("{plan}\n");
    let (_, whole) = run(&one_part, &[pool])?;
    assert!(
        composed
            .iter()
            .zip(&whole)
            .all(|(a, b)| (a - b).abs() < 1e-5)
    );

    // Speculative decoding: four draft tokens after a context of 70, one chain of two and two branches.
    let context = [20, 21, 22, 23, 24];
    let slot = |token: u32| 24 * PAGE_SIZE + 6 + token; // the context ends within page 24
    let tree = DraftTree {
        context: &context,
        context_len: 70,
        parents: &[None, Some(0), Some(0), None],
        slots: &[slot(0), slot(1), slot(2), slot(3)],
    };
    let drafted = DraftTree::batch(&spec, PAGE_SIZE, PAGES, &[tree]);
    let by_token = pool
        .by_token()
        .ok_or("the tokens of a page lie at equal distances")?;
    let (plan, _) = run(&drafted, &[pool, by_token])?;
    let seen: Vec<_> = (0..4).map(|token| tree.path(token)).collect();
    println!("drafted tokens see {seen:?} beside the context\n{plan}");
    Ok(())
}

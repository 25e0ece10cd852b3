//! A hybrid batch with shared prefixes: a prompt chunk, and decodes that begin with the same system prompt.
//!
//! The program does not declare what is shared. The prefix cache returns the same page ids, the planner finds them in the page
//! tables, and each shared page is read once. `cargo run --release --example shared_prefixes`
//!
//! To use this code in a program of your own, add the feature `unstable` and the crates `half` and `fastrand`.

use std::error::Error;

use half::bf16;
use tandem_attn::{
    Cpu,
    kv::{KvView, PagePool, PrefixCache, Sequence},
    plan::{DeviceDescription, PackRule, PlanOptions, Planner},
    problem::{Batch, KvLayout, PageTable, Spec},
    reference,
};

const PAGE_SIZE: u32 = 16;
const PAGES: u32 = 256;
const DECODES: u32 = 6;
const SYSTEM_PROMPT: u32 = 512;
const CHUNK: u32 = 40;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let spec = Spec::new(8, 2, 64);

    // The first request computes the system prompt and adds it to the cache. The others find it there.
    let mut pool = PagePool::new(PAGES, PAGE_SIZE);
    let mut cache = PrefixCache::new(PAGE_SIZE);
    let system_prompt: Vec<u32> = (0..SYSTEM_PROMPT).collect();
    let mut first = Sequence::default();
    let _ = first.append(&mut pool, SYSTEM_PROMPT)?;
    cache.insert(&mut pool, &system_prompt, &mut first);
    let mut requests = vec![first];
    for _ in 1..=DECODES {
        requests.push(cache.acquire(&mut pool, &system_prompt));
    }

    // Decodes have different lengths and one new token each. The last request is a prompt chunk.
    let mut table = PageTable::new(PAGE_SIZE, PAGES);
    let mut qo_indptr = vec![0];
    for (request, index) in requests.iter_mut().zip(0..) {
        let is_prompt = index == DECODES;
        let (own, queries) = if is_prompt {
            (CHUNK, CHUNK)
        } else {
            (10 + 7 * index, 1)
        };
        let _ = request.append(&mut pool, own)?;
        request.push_to(&mut table);
        qo_indptr.push(qo_indptr[index as usize] + queries);
    }
    let batch = Batch::new(qo_indptr, table);

    // The bytes that an H200 would read, with and without packing.
    let h200 = DeviceDescription::named("h200")?;
    let mut planner = Planner::new();
    for packing in [PackRule::Off, PackRule::Fastest] {
        let options = PlanOptions::default().with_packing(packing);
        let plan = planner.plan(&spec, &batch, &h200, &options)?;
        let moved = plan.traffic();
        println!(
            "{packing:?}: {} kB of keys and values, {} kB of partial states",
            moved.kv_bytes / 1000,
            moved.partial_bytes / 1000
        );
        println!("{plan}\n");
    }

    // The same batch on this machine, compared with reference attention.
    let mut random = fastrand::Rng::with_seed(1);
    let mut numbers = |count: u32| -> Vec<bf16> {
        let number = |_| bf16::from_f64(2.0 * random.f64() - 1.0);
        (0..count).map(number).collect()
    };
    let pool_elements = PAGES * PAGE_SIZE * spec.kv_heads * spec.head_dim_qk;
    let (k, v) = (numbers(pool_elements), numbers(pool_elements));
    let q = numbers(batch.total_q() * spec.q_heads * spec.head_dim_qk);
    let kv = KvView::new(&spec, KvLayout::Nhd, PAGE_SIZE, &k, &v);
    let cpu = Cpu::new();
    let plan = planner.plan(&spec, &batch, &cpu.device(), &PlanOptions::default())?;
    let mut out = vec![bf16::ZERO; q.len()];
    cpu.run(&plan, &q, &[kv], &mut out, None)?;

    let exact = reference::attention(&spec, &batch, &q, &[kv])?;
    let errors = out
        .iter()
        .zip(&exact.out)
        .map(|(x, right)| (x.to_f64() - right).abs());
    let largest = errors.fold(0.0, f64::max);
    println!("largest error against f64: {largest:.1e}");
    assert!(largest < 1e-2);
    Ok(())
}

//! Requests of very different lengths: how splits distribute them over an H200, and fixed splits, which make results
//! independent of the rest of the batch. Run it with `cargo run --release --example variable_lengths`

use std::error::Error;

use tandem_attn::{
    Cpu,
    kv::KvView,
    plan::{DeviceDescription, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

const PAGE_SIZE: u32 = 16;

/// One new token for each of the requests.
fn batch(lengths: &[u32]) -> Batch {
    let pages = |length: u32| length.div_ceil(PAGE_SIZE);
    let mut table = PageTable::new(PAGE_SIZE, lengths.iter().map(|&length| pages(length)).sum());
    let mut next = 0;
    for &length in lengths {
        let end = next + pages(length);
        table.push(&(next..end).collect::<Vec<_>>(), length);
        next = end;
    }
    Batch::new((0..=lengths.len() as u32).collect(), table)
}

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    // A few long requests among many short ones, in no order.
    let mut random = fastrand::Rng::with_seed(3);
    let mut lengths: Vec<u32> = (1..=48).map(|rank| 65_536 / rank).collect();
    random.shuffle(&mut lengths);
    let batch_of_many = batch(&lengths);
    let spec = Spec::new(32, 8, 128);
    let h200 = DeviceDescription::named("h200")?;
    let mut planner = Planner::new();
    println!(
        "{} requests of {} to {} keys",
        lengths.len(),
        lengths.iter().min().unwrap_or(&0),
        lengths.iter().max().unwrap_or(&0)
    );
    println!(
        "{:<10} {:>6} {:>8} {:>14} {:>6}",
        "splits", "items", "states", "predicted µs", "busy"
    );
    for (name, split) in [
        ("none", SplitMode::Off),
        ("fixed", SplitMode::Fixed { tokens: 1024 }),
        ("makespan", SplitMode::Makespan),
    ] {
        let options = PlanOptions::default().with_split(split);
        let plan = planner.plan(&spec, &batch_of_many, &h200, &options)?;
        let schedule = plan.schedule(&h200);
        let busy = schedule.busy_ns / f64::from(schedule.ctas) / schedule.makespan_ns;
        println!(
            "{name:<10} {:>6} {:>8} {:>14.1} {:>5.0}%",
            plan.items.len(),
            plan.slots,
            schedule.makespan_ns / 1e3,
            100.0 * busy,
        );
    }

    // A fixed split: the first request's output has the same bits alone and in a batch.
    let spec = Spec::new(4, 2, 32).with_dtype(Dtype::F32);
    let lengths = [700, 40, 3000];
    let (together, alone) = (batch(&lengths), batch(&lengths[..1]));
    let mut numbers =
        |count: u32| -> Vec<f32> { (0..count).map(|_| 2.0 * random.f32() - 1.0).collect() };
    let pool_elements =
        together.parts[0].table.pool_pages * PAGE_SIZE * spec.kv_heads * spec.head_dim_qk;
    let (k, v) = (numbers(pool_elements), numbers(pool_elements));
    let q = numbers(together.total_q() * spec.q_heads * spec.head_dim_qk);
    let kv = KvView::new(&spec, KvLayout::Nhd, PAGE_SIZE, &k, &v);
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 256 });
    let cpu = Cpu::new();
    let mut run = |batch: &Batch| -> Result<Vec<f32>, Box<dyn Error>> {
        let plan = planner.plan(&spec, batch, &cpu.device(), &options)?;
        let elements = (batch.total_q() * spec.q_heads * spec.head_dim_qk) as usize;
        let mut out = vec![0.0; elements];
        cpu.run(&plan, &q[..elements], &[kv], &mut out, None)?;
        Ok(out)
    };
    let (in_batch, by_itself) = (run(&together)?, run(&alone)?);
    assert_eq!(in_batch[..by_itself.len()], by_itself);
    println!(
        "\nwith fixed splits, the first of {} requests has the same bits alone",
        lengths.len()
    );
    Ok(())
}

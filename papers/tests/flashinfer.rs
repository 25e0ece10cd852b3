//! Compares FlashInfer's split with the planner's, on the schedule that the cost model predicts.

use tandem_attn::{
    plan::{DeviceDescription, PlanOptions, Planner, Schedule},
    problem::{Batch, PageTable, Spec},
};
use tandem_papers::flashinfer;

const PAGE: u32 = 16;

/// A batch with one new token for each request.
fn batch(lengths: &[u32]) -> Batch {
    let pages = |length: u32| length.div_ceil(PAGE);
    let mut table = PageTable::new(PAGE, lengths.iter().map(|&length| pages(length)).sum());
    let mut next = 0;
    for &length in lengths {
        let end = next + pages(length);
        table.push(&(next..end).collect::<Vec<_>>(), length);
        next = end;
    }
    Batch::new((0..=lengths.len() as u32).collect(), table)
}

/// `cargo test -p tandem-papers --test flashinfer -- --nocapture` prints the distribution.
#[test]
fn no_chunk_is_longer_than_the_mean_load() {
    let mut device = DeviceDescription::named("h200").unwrap();
    // A schedule ends before merges, so what they cost must not matter.
    for tile in &mut device.decode.tiles {
        tile.cut_ns = None;
    }
    let spec = Spec::new(32, 8, 128);
    let mut random = fastrand::Rng::with_seed(7);
    let (mut ours, mut theirs) = (Planner::new(), Planner::with_rules(flashinfer::SPLIT));
    let options = PlanOptions::default();
    let mut ratios = Vec::new();
    for case in 0..200 {
        let requests = random.u32(1..65);
        let lengths: Vec<u32> = (0..requests).map(|_| 1 << random.u32(4..17)).collect();
        let batch = batch(&lengths);
        let [plan, cut] = [&mut ours, &mut theirs].map(|planner| {
            let plan = planner.plan(&spec, &batch, &device, &options).unwrap();
            assert_eq!(plan.verify(&batch), Ok(()), "case {case}");
            plan
        });
        let keys: u64 = lengths.iter().map(|&keys| u64::from(keys)).sum();
        let mean = keys * u64::from(spec.kv_heads) / u64::from(device.sms);
        let longest = cut.items.iter().map(|item| item.kv_len()).max().unwrap();
        assert!(
            u64::from(longest) < mean + 2 * u64::from(PAGE),
            "case {case}"
        );
        let makespan = |schedule: Schedule| schedule.makespan_ns;
        ratios.push(makespan(cut.schedule(&device)) / makespan(plan.schedule(&device)));
    }
    ratios.sort_by(f64::total_cmp);
    let mean = ratios.iter().map(|ratio| ratio.ln()).sum::<f64>() / ratios.len() as f64;
    println!(
        "makespan of FlashInfer's split / of the planner's: mean {:.3}, median {:.3}, 90 % below {:.3}",
        mean.exp(),
        ratios[100],
        ratios[180],
    );
    assert!(mean.exp() > 1.0);
}

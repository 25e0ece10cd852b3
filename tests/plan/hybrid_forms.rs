//! Hybrid batches whose forms were measured on an H200.

use tandem_attn::{
    plan::{DeviceDescription, Kernel, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, PageTable, Spec},
};

const PAGE: u32 = 16;

/// Chunks with their keys, and decodes.
fn batch(chunks: &[[u32; 2]], decodes: &[u32]) -> Batch {
    let decodes = decodes.iter().map(|&keys| [1, keys]);
    let requests = || chunks.iter().copied().chain(decodes.clone());
    let pages = |keys: u32| keys.div_ceil(PAGE);
    let mut table = PageTable::new(PAGE, requests().map(|[_, keys]| pages(keys)).sum());
    let (mut next, mut indptr) = (0, vec![0]);
    for [tokens, keys] in requests() {
        table.push(&(next..next + pages(keys)).collect::<Vec<_>>(), keys);
        next += pages(keys);
        indptr.push(indptr[indptr.len() - 1] + tokens);
    }
    Batch::new(indptr, table)
}

/// Heads of 256 have no two kernels for an SM. On an H200 these batches took 1,034 and 281 µs one after the other, 1,033 and
/// 287 on two streams, and 932 and 248 on SMs apart, with 110 and 70 prefill CTAs.
#[test]
fn heads_of_256_run_on_sms_apart() {
    let device = DeviceDescription::named("h200").unwrap();
    let ragged = [6166, 10374, 10655, 11219, 11532, 12927, 14407];
    let long = (
        Spec::new(64, 8, 256),
        batch(&[[3715, 3922]], &[2140; 95]),
        88..=121,
    );
    let short = batch(&[[604, 604], [505, 5517]], &ragged);
    for (spec, batch, ctas) in [long, (Spec::new(32, 8, 256), short, 60..=99)] {
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let pod = plan.unwrap().pod.unwrap();
        assert_eq!(pod.mode, PodMode::Fused);
        assert!(ctas.contains(&pod.ctas.prefill), "{:?}", pod.ctas);
    }
}

/// Prefills with heads of 64 reach two thirds of the rate of other heads. So these take longer than the decodes, and are cut:
/// with 72 prefill CTAs, which were given 128 pieces, this batch took 176 µs on an H200, and with 104, whose tiles stayed
/// whole, 192 to 201.
#[test]
fn whether_prefills_take_longer_than_decodes_is_judged_by_the_rate_of_their_heads() {
    let device = DeviceDescription::named("h200").unwrap();
    let chunks = [[73, 15899], [60, 60], [32, 32], [49, 49], [69, 240]];
    let batch = batch(&chunks, &[13910; 22]);
    let options = PlanOptions::default().with_pod(PodMode::Fused);
    for ctas in [72, 104] {
        let options = options.with_prefill_ctas(ctas);
        let plan = Planner::new().plan(&Spec::new(40, 8, 64), &batch, &device, &options);
        let plan = plan.unwrap();
        let groups = plan.groups.iter();
        let prefills = groups.filter(|group| group.kernel == Kernel::Prefill);
        let units: u32 = prefills.map(|group| plan.units_of(group)).sum();
        assert!(units > 104, "{ctas} prefill CTAs: {plan}");
    }
}

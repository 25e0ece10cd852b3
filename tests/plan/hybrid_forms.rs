//! Hybrid batches whose forms were measured on an H200.

use tandem_attn::{
    plan::{DeviceDescription, Kernel, PlanOptions, Planner, pod::PodMode},
    problem::{Batch, PageTable, Spec},
};

const PAGE: u32 = 16;

/// Chunks with their keys, and decodes.
fn batch(chunks: &[[u32; 2]], decodes: &[u32]) -> Batch {
    let decodes = decodes.iter().map(|&keys| [1, keys]);
    of_requests(&[chunks, &decodes.collect::<Vec<_>>()].concat())
}

/// New tokens of each request with its keys.
fn of_requests(requests: &[[u32; 2]]) -> Batch {
    let pages = |keys: u32| keys.div_ceil(PAGE);
    let all = requests.iter().map(|&[_, keys]| pages(keys)).sum();
    let mut table = PageTable::new(PAGE, all);
    let (mut next, mut indptr) = (0, vec![0]);
    for &[tokens, keys] in requests {
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

/// On an H200 the first batch took 230 µs one after the other, 217 on two streams and 199 on SMs apart, the second 561, 552 and 633: its
/// decodes have 64 rows, whose products need all SMs. The third took 56, 43 and 44: decodes behind a prefill on the same stream begin
/// later.
#[test]
fn decodes_of_few_rows_run_on_sms_apart() {
    let device = DeviceDescription::named("h200").unwrap();
    let decodes = |chunks: &[[u32; 2]], count, decode| {
        let decodes: Vec<[u32; 2]> = vec![decode; count];
        of_requests(&[chunks, &decodes].concat())
    };
    let capped = |spec: Spec| spec.with_soft_cap(50.0);
    let few = decodes(&[[128, 16128]], 32, [3, 4000]);
    let many = [[1024, 9024], [512, 512], [2048, 3048]];
    let many = decodes(&many, 64, [2, 8000]);
    let short = decodes(&[[128, 4128]], 4, [5, 16000]);
    let windowed = Spec::new(32, 1, 64).with_window_left(1024);
    for (spec, batch, mode) in [
        (capped(Spec::new(32, 8, 128)), few, PodMode::Fused),
        (capped(Spec::new(32, 1, 128)), many, PodMode::Streams),
        (windowed, short, PodMode::Streams),
    ] {
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        assert_eq!(plan.unwrap().pod.unwrap().mode, mode);
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

//! Page lists by KV head, and in the same run requests whose heads read the same pages.

use half::bf16;
use proptest::prelude::*;
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{MergeMode, PlanOptions, Planner, pod::PodMode},
    tensor::{Element, F8E4M3},
};

use crate::{heads::Lists, no_failure, problems::cases, settings};

/// How a batch is planned and run.
fn options() -> impl Strategy<Value = (PlanOptions, u8, u64)> {
    let merge = prop_oneof![Just(MergeMode::Auto), Just(MergeMode::Kernel)];
    let pod = prop_oneof![
        Just(PodMode::Auto),
        Just(PodMode::Serial),
        Just(PodMode::Streams),
        Just(PodMode::Fused)
    ];
    (merge, pod, 0..3_u8, any::<u64>()).prop_map(|(merge, pod, schedule, seed)| {
        let options = PlanOptions::default().with_merge_mode(merge);
        (options.with_pod(pod), schedule, seed)
    })
}

fn check<T: Element>((options, schedule, seed): (PlanOptions, u8, u64)) -> Result<(), String> {
    let _others = no_failure();
    let emulated = Emulated::new(settings(schedule, seed)).expect("the emulator");
    let lists = Lists::<T>::mixed(seed);
    let by_head = lists.by_head();
    let batch = by_head.batch();
    let plan = Planner::new()
        .plan(by_head.spec(), &batch, &emulated.device(), &options)
        .expect("it can be planned");
    let views = [lists.view().by_head().expect("even heads"), lists.view()];
    let views = &views[..batch.parts.len()];
    let mut out = vec![bf16::NAN; lists.q.len()];
    let mut lse = vec![f32::NAN; out.len() / lists.spec.head_dim_qk as usize];
    emulated
        .run(&plan, &lists.q, views, &mut out, Some(&mut lse))
        .map_err(|error| error.to_string())?;
    lists.check(&out, &lse, true)
}

proptest! {
    #![proptest_config(cases(24))]

    #[test]
    fn lists_run_beside_whole_requests(case in options()) {
        check::<bf16>(case).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn lists_of_8_bits_run_beside_whole_requests(case in options()) {
        check::<F8E4M3>(case).map_err(TestCaseError::fail)?;
    }
}

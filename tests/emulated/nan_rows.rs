//! Numbers that make whole rows NaN.

use half::bf16;
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{PlanOptions, Planner, pod::PodMode},
    problem::{KvLayout, Spec},
};

use crate::{
    no_failure,
    passed_pages::run,
    problems::{Tensors, prefixed},
    settings,
};

/// The log-sum-exp was the sink alone, beside outputs that are NaN.
#[test]
fn rows_of_nan_with_sinks_are_nan() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    for dim in [64, 128, 256] {
        let spec = Spec::new(6, 2, dim).with_sinks();
        let batch = prefixed(&[(90, 0, 70), (70, 0, 1)], 16, false, 3);
        let options = PlanOptions::default().with_pod(PodMode::Serial);
        let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &options);
        let plan = plan.expect("it can be planned");
        let mut tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
        tensors.q.fill(bf16::NAN);
        let (out, lse) = run(&emulated, &plan, &tensors);
        assert!(out.iter().all(|x| x.is_nan()), "{dim}");
        assert!(lse.iter().all(|x| x.is_nan()), "{dim}");
    }
}

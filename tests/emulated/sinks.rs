//! Sinks in each place where kernels add them.

use half::bf16;
use tandem_attn::{
    exec::emulated::{Emulated, Settings},
    plan::Planner,
    problem::KvLayout,
};

use crate::{
    no_failure,
    problems::{Tensors, heads},
    settings,
    sinks_of_rows::{batch, check, options, sinks, specs},
};

#[test]
fn large_and_small_sinks_are_the_reference() {
    let _others = no_failure();
    for (dim, schedule, compute) in [(64, 1, 90), (128, 2, 90), (256, 0, 90), (128, 1, 80)] {
        let settings = Settings {
            compute,
            ..settings(schedule, 3)
        };
        let emulated = Emulated::new(settings).expect("the emulator");
        for spec in specs(dim) {
            let batch = batch();
            let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 5);
            for options in options() {
                let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &options);
                let plan = plan.expect("it can be planned");
                let rows = (plan.total_q * spec.q_heads) as usize;
                let mut out = vec![bf16::NAN; rows * dim as usize];
                let mut lse = vec![f32::NAN; rows];
                let sinks = Some(sinks(&spec));
                let (views, heads) = (tensors.views(), heads(&sinks));
                emulated
                    .run_heads(&plan, &tensors.q, &views, &mut out, Some(&mut lse), &heads)
                    .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
                check(&spec, &batch, &tensors, (&out, &lse));
            }
        }
    }
}

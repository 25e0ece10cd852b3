//! Numbers that make whole rows NaN.

use half::bf16;
use tandem_attn::{
    exec::emulated::Emulated,
    plan::{PlanOptions, Planner, pod::PodMode},
    problem::{Compute, Dtype, KvLayout, Spec},
    tensor::F8E4M3,
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

/// It became the largest number of e4m3.
#[test]
fn an_infinite_query_makes_rows_of_8_bit_products_nan() {
    let _others = no_failure();
    let emulated = Emulated::new(settings(1, 3)).expect("the emulator");
    for dim in [128, 256] {
        let spec = Spec::new(4, 2, dim).with_kv_dtype(Dtype::F8E4M3);
        let spec = spec.with_compute(Compute::F8);
        let batch = prefixed(&[(90, 0, 70)], 16, false, 3);
        let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default());
        let plan = plan.expect("it can be planned");
        let mut tensors = Tensors::<bf16, F8E4M3>::random(&spec, &batch, KvLayout::Nhd, 5);
        let (out, lse) = run(&emulated, &plan, &tensors);
        let dim = dim as usize;
        let infinite = |row: usize| row.is_multiple_of(3);
        for row in (0..lse.len()).filter(|&row| infinite(row)) {
            tensors.q[row * dim + 5] = bf16::INFINITY;
        }
        let with = run(&emulated, &plan, &tensors);
        for row in 0..lse.len() {
            let [out, with_out] = [&out, &with.0].map(|out| &out[row * dim..][..dim]);
            if infinite(row) {
                assert!(with_out.iter().all(|x| x.is_nan()), "{row}");
                assert!(with.1[row].is_nan(), "{row}");
            } else {
                assert!(out == with_out && lse[row] == with.1[row], "{row}");
            }
        }
    }
}

//! Prefixes of 8-bit keys that prefills read beside the keys that each decode has of its own.

use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::Gpu,
    plan::{Kernel, Planner, SplitMode, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use super::{Case, case, check_on};
use crate::{
    common::{gpu, problems::cases},
    run::wide_prefixes::batch,
};

/// Checks a batch whose plan has prefills and decodes.
fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let device = gpu.device();
    let spec = case.spec.with_dtype(T::DTYPE).with_kv_dtype(Dtype::F8E4M3);
    let plan = Planner::new().plan(&spec, &case.batch, &device, &case.options);
    let plan = plan.expect("the case can be planned");
    let has = |kernel| plan.groups.iter().any(|group| group.kernel == kernel);
    prop_assert!(Kernel::ALL.into_iter().all(has), "{plan}");
    check_on::<T, F8E4M3>(gpu, &device, case)
}

#[test]
fn prefixes_of_8_bit_keys_beside_other_keys_are_the_reference() {
    let Some(gpu) = gpu("prefixes_of_8_bit_keys_beside_other_keys_are_the_reference") else {
        return;
    };
    // Keys that few rows see are converted by a launch before both; others in the prefill.
    let prefix = (16..80_u32, 40..300_u32).prop_map(|(pages, count)| (16 * pages, count));
    let prefixes = prop::collection::vec(prefix, 1..3);
    let heads = (1..3_u32, 4..=8_u32);
    let mut runner = proptest::test_runner::TestRunner::new(cases(40));
    runner
        .run(
            &(case(1, 4), heads, prefixes),
            |(mut case, (kv_heads, group), prefixes)| {
                case.set_heads(Spec::new(kv_heads * group, kv_heads, 128));
                case.spec.variant.soft_cap = None;
                case.spec.variant.window_left = None;
                case.layout = KvLayout::Nhd;
                case.options = case.options.with_split(SplitMode::Makespan);
                case.options = case.options.with_pod(PodMode::Fused);
                // Prefills round products of keys and scales to 16 bits, decodes do not.
                case.powers = true;
                case.batch = batch([16, 1][case.seed as usize / 3 % 2], &prefixes, case.seed);
                match case.seed % 3 {
                    0 => check::<f16>(gpu, &case),
                    _ => check::<bf16>(gpu, &case),
                }
            },
        )
        .unwrap();
}

//! Prefills and decodes of 8-bit pages on the same SMs.

use std::cell::Cell;

use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::Gpu,
    plan::{Planner, SplitMode, pod::PodMode},
    problem::{Dtype, KvLayout, Spec},
    tensor::{Element, F8E4M3},
};

use super::{Case, case, check_on};
use crate::common::{
    gpu,
    problems::{ancestors, cases, kv_len, prefixed},
};
use half::{bf16, f16};

/// Checks a batch that is planned side by side if its requests fit those kernels. Returns whether they do.
fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<bool, TestCaseError> {
    let mut device = gpu.device();
    let configs = &mut device.pod.configs;
    configs.retain(|config| config.kv_bits == Some(8) && config.decode.is_some());
    check_on::<T, F8E4M3>(gpu, &device, case)?;
    let spec = case.spec.with_dtype(T::DTYPE).with_kv_dtype(Dtype::F8E4M3);
    let plan = Planner::new().plan(&spec, &case.batch, &device, &case.options);
    let plan = plan.expect("the case can be planned");
    Ok(plan.pod.is_some_and(|pod| pod.mode == PodMode::Fused))
}

#[test]
fn hybrids_of_8_bit_pages_are_the_reference() {
    let Some(gpu) = gpu("hybrids_of_8_bit_pages_are_the_reference") else {
        return;
    };
    let page = prop_oneof![2 => Just(16_u32), 1 => Just(8), 1 => Just(64), 2 => Just(1)];
    // Keys that few rows see are converted by a launch before both; others in the prefill.
    let tokens = prop_oneof![3 => 66..300_u32, 1 => 300..700_u32];
    let chunks = prop::collection::vec((kv_len(), 0..6_usize, tokens), 1..3);
    let decodes = prop::collection::vec((kv_len(), 0..6_usize, 1..=8_u32), 1..12);
    let requests = (page, chunks, decodes);
    let beside = Cell::new(0);
    let config = cases(100);
    // Of a few batches, none may fit.
    let enough = config.cases >= 20;
    let mut runner = proptest::test_runner::TestRunner::new(config);
    runner
        .run(
            &(case(1, 4), requests),
            |(mut case, (page, chunks, decodes))| {
                let (kv_heads, group) = (case.spec.kv_heads, case.spec.group().min(8));
                case.set_heads(Spec::new(kv_heads * group, kv_heads, 128));
                case.spec.variant.soft_cap = None;
                if case.seed % 5 > 0 {
                    case.layout = KvLayout::Nhd;
                }
                case.options = case.options.with_pod(PodMode::Fused);
                if let SplitMode::Fixed { tokens } = &mut case.options.split {
                    *tokens = tokens.next_multiple_of(page);
                }
                if case.seed % 7 > 0 {
                    case.options.split = SplitMode::Makespan;
                }
                // Sometimes more rows than a tile of those kernels has.
                let most = if case.seed % 6 == 0 { 8 } else { 8 / group };
                let few = |(keys, shared, tokens): (u32, usize, u32)| {
                    (keys, shared, tokens.min(most).max(1))
                };
                let mut requests = chunks;
                requests.extend(decodes.into_iter().map(few));
                case.batch = prefixed(&requests, page, false, case.seed);
                if case.spec.variant.causal && case.seed % 4 == 0 {
                    let ancestors = ancestors(&case.batch, case.seed);
                    case.batch = case.batch.clone().with_ancestors(ancestors);
                }
                let shares = match case.seed % 3 {
                    0 => check::<f16>(gpu, &case)?,
                    _ => check::<bf16>(gpu, &case)?,
                };
                beside.set(beside.get() + u32::from(shares));
                Ok(())
            },
        )
        .unwrap();
    assert!(beside.get() > 0 || !enough, "no batch ran side by side");
}

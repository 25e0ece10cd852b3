//! Tiles of 64 rows on 8-bit keys, also where the planner would choose others.

use std::cell::Cell;

use super::*;
use tandem_attn::{abi::WorkItem, plan::Tile};

/// The head dimensions of these kernels.
const DIMS: [u32; 3] = [64, 128, 256];
const TILE: Tile = Tile { m: 64, n: 64 };

#[test]
fn tiles_of_64_rows_on_8_bit_pages_are_the_reference() {
    let Some(gpu) = gpu("tiles_of_64_rows_on_8_bit_pages_are_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(8, 4), |mut case| {
            let dim = DIMS[case.seed as usize / 32 % DIMS.len()];
            case.set_heads(Spec::new(case.spec.q_heads, case.spec.kv_heads, dim));
            case.spec.variant.sinks = case.seed % 4 == 1;
            case.add_ancestors();
            case.options = case.options.with_decode_tile(Some(TILE));
            check_any(gpu, &case)
        })
        .unwrap();
}

/// As [`TILE`], by two warpgroups that share converted blocks.
#[test]
fn tiles_of_128_rows_on_8_bit_pages_are_the_reference() {
    let Some(gpu) = gpu("tiles_of_128_rows_on_8_bit_pages_are_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(200));
    runner
        .run(&case(24, 4), |mut case| {
            case.set_heads(Spec::new(case.spec.q_heads, case.spec.kv_heads, 128));
            case.spec.variant.sinks = case.seed % 4 == 1;
            case.add_ancestors();
            let tile = Tile { m: 128, n: 64 };
            case.options = case.options.with_decode_tile(Some(tile));
            check_any(gpu, &case)
        })
        .unwrap();
}

/// Requests with a common prefix, as the planner joins their rows in tiles of 64. With a `decode_tile` it joins none.
#[test]
fn joint_tiles_on_8_bit_pages_are_the_reference() {
    let Some(gpu) = gpu("joint_tiles_on_8_bit_pages_are_the_reference") else {
        return;
    };
    let prefix = (100..700_u32, Just(0_usize), 1..=2_u32);
    let own = prop_oneof![2 => 0..12_u32, 2 => 1..70_u32, 1 => 120..200_u32];
    let others = prop::collection::vec((own, 4..90_usize, 1..=2_u32), 2..20);
    let page = prop_oneof![
        3 => Just(16_u32), 2 => Just(8), 1 => Just(24), 1 => Just(64), 2 => Just(1), 1 => Just(5)
    ];
    let heads = (1..3_u32, 1..9_u32);
    let joint = Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(cases(100));
    runner
        .run(
            &(case(1, 4), prefix, others, page, heads),
            |(mut case, prefix, others, page, (kv_heads, group))| {
                let dim = DIMS[case.seed as usize / 32 % DIMS.len()];
                case.set_heads(Spec::new(kv_heads * group, kv_heads, dim));
                case.spec.variant.sinks = case.seed % 4 == 1;
                if case.seed % 3 > 0 {
                    case.spec.variant.window_left = None;
                }
                case.options.split = SplitMode::Makespan;
                let requests = [&[prefix][..], &others].concat();
                case.batch = prefixed(&requests, page, case.seed % 2 == 0, case.seed);
                check_any(gpu, &case)?;
                let dtype = if case.seed.is_multiple_of(3) {
                    Dtype::F16
                } else {
                    Dtype::BF16
                };
                let spec = case.spec.with_dtype(dtype).with_kv_dtype(Dtype::F8E4M3);
                let plan = Planner::new().plan(&spec, &case.batch, &gpu.device(), &case.options);
                let plan = plan.expect("the case can be planned");
                let is_joint = |group: &TileGroup| {
                    let items = group.items.start as usize..group.items.end as usize;
                    group.tile.m == 64 && plan.items[items].iter().any(WorkItem::is_joint)
                };
                joint.set(joint.get() + u32::from(plan.groups.iter().any(is_joint)));
                Ok(())
            },
        )
        .unwrap();
    assert!(
        joint.get() > 0 || cases(100).cases < 50,
        "no rows were joined"
    );
}

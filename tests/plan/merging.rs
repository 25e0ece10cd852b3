//! What is merged, by whom, and what lies in a joint tile.

use tandem_attn::{
    plan::{DeviceDescription, MergeMode, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, PageTable, Part, Spec},
};

fn plan_on(name: &str, spec: &Spec, batch: &Batch, split: SplitMode) -> Plan {
    let device = DeviceDescription::named(name).unwrap();
    let options = PlanOptions::default().with_split(split);
    let plan = Planner::new().plan(spec, batch, &device, &options);
    let plan = plan.unwrap();
    assert_eq!(plan.verify(batch), Ok(()), "{name}");
    plan
}

#[test]
fn the_merge_mode_is_chosen_by_tiles_and_merges() {
    let spec = Spec::new(32, 8, 128);
    let plan = |queries: &[u32], len: u32, split: SplitMode| {
        let pages = len.div_ceil(16);
        let mut table = PageTable::new(16, pages * queries.len() as u32);
        let mut qo_indptr = vec![0];
        for (index, &count) in queries.iter().enumerate() {
            let first = pages * index as u32;
            table.push(&(first..first + pages).collect::<Vec<_>>(), len);
            qo_indptr.push(qo_indptr[index] + count);
        }
        plan_on("h200", &spec, &Batch::new(qo_indptr, table), split)
    };
    let (auto, fixed) = (SplitMode::Makespan, SplitMode::Fixed { tokens: 512 });
    for (queries, len, split, merges, mode) in [
        (vec![1], 98304, auto, true, MergeMode::Fused),
        (vec![1; 256], 1024, auto, false, MergeMode::Kernel),
        (vec![1; 256], 1024, fixed, true, MergeMode::Kernel),
        (vec![1], 98304, fixed, true, MergeMode::Kernel),
        (vec![1, 300], 98304, auto, true, MergeMode::Kernel),
    ] {
        let plan = plan(&queries, len, split);
        assert_eq!(!plan.merges.is_empty(), merges, "{queries:?} × {len}");
        assert_eq!(plan.merge_mode, mode, "{queries:?} × {len}, {split:?}");
    }
}

/// A merge has the rows of a KV head's query heads. If these are many, CTAs that merge last are late.
#[test]
fn the_merge_mode_depends_on_the_rows_of_a_merge() {
    for (q_heads, kv_heads, head_dim, mode) in [
        (16, 8, 128, MergeMode::Fused),
        (32, 8, 128, MergeMode::Fused),
        (16, 8, 256, MergeMode::Fused),
        (64, 8, 64, MergeMode::Fused),
        (28, 4, 128, MergeMode::Kernel),
        (64, 8, 128, MergeMode::Kernel),
        (64, 4, 64, MergeMode::Kernel),
        (16, 2, 256, MergeMode::Kernel),
    ] {
        let mut table = PageTable::new(16, 6144);
        table.push(&(0..6144).collect::<Vec<_>>(), 98304);
        let spec = Spec::new(q_heads, kv_heads, head_dim);
        let batch = Batch::new(vec![0, 1], table);
        let plan = plan_on("h200", &spec, &batch, SplitMode::Makespan);
        assert!(!plan.merges.is_empty());
        assert_eq!(plan.merge_mode, mode, "{q_heads}/{kv_heads} × {head_dim}");
    }
}

/// A row of a joint tile sees all keys of its runs, which a mask of the last keys denies.
#[test]
fn masks_of_the_last_keys_keep_prefixes_out_of_joint_tiles() {
    let spec = Spec::new(32, 8, 128);
    let mut table = PageTable::new(16, 400);
    let prefix: Vec<u32> = (0..8).collect();
    for request in 0..64 {
        table.push(&[&prefix[..], &[8 + request]].concat(), 8 * 16 + 1);
    }
    let batch = Batch::new((0..=64).collect(), table);
    let joint = |batch: &Batch| {
        let plan = plan_on("h200", &spec, batch, SplitMode::Makespan);
        plan.items.iter().any(|item| item.is_joint())
    };
    assert!(joint(&batch));
    assert!(!joint(&batch.with_ancestors(vec![!0b10; 64])));
}

/// Two requests share a tile over their common keys, and one of them has keys of its own behind: its tokens leave states,
/// so those of the other do, too, and are merged alone.
#[test]
fn a_tile_of_tokens_with_one_item_and_with_two_is_merged() {
    let mut common = Part::new(vec![0, 200], PageTable::new(16, 40));
    common.table.push(&(0..20).collect::<Vec<_>>(), 320);
    let mut own = Part::new(vec![0, 100, 200], PageTable::new(16, 40));
    own.table.push(&[], 0);
    own.table.push(&(20..30).collect::<Vec<_>>(), 160);
    let batch = Batch::composed(vec![0, 100, 200], vec![common, own]);
    let mut spec = Spec::new(8, 2, 128);
    spec.variant.causal = false;
    for name in DeviceDescription::names() {
        let plan = plan_on(name, &spec, &batch, SplitMode::Off);
        let alone = plan.merges.iter().filter(|merge| merge.slots == 1).count();
        let mixed = plan.items.iter().any(|item| {
            !item.is_gathered()
                && item.part == 0
                && item.rows_begin < 100
                && item.rows_begin + item.rows > 100
        });
        assert!(!mixed || alone > 0, "{name}: {plan}");
    }
    let plan = plan_on("h200", &spec, &batch, SplitMode::Makespan);
    assert!(plan.merges.iter().any(|merge| merge.slots == 1), "{plan}");
}

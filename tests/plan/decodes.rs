//! Which requests run as decodes, in which tiles, and where their partial states are merged.

use tandem_attn::{
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, MergeMode, PlanOptions, Planner, SplitMode,
        TileGroup,
    },
    problem::{Batch, Dtype, PageTable, Spec},
};

use crate::prompts::{plan_for, plan_on};

/// The kernels of a plan: whether each is one for decodes, and its rows.
fn kernels(spec: &Spec, requests: &[(u32, u32)], options: &PlanOptions) -> Vec<(bool, u32)> {
    let plan = plan_for(spec, requests, options);
    let of = |group: &TileGroup| (group.kernel == Kernel::Decode, group.tile.m);
    plan.groups.iter().map(of).collect()
}

#[test]
fn few_new_tokens_run_in_decode_tiles_where_a_tile_holds_their_rows() {
    let spec = Spec::new(32, 8, 128);
    let options = PlanOptions::default();
    assert_eq!(kernels(&spec, &[(16, 4096); 4], &options), [(true, 64)]);
    assert!(!kernels(&spec, &[(17, 4096); 4], &options)[0].0);
    // Of 8-bit keys there are no decode tiles of 64 rows.
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    assert!(!kernels(&of_8_bits, &[(16, 4096); 4], &options)[0].0);
    // Results must not depend on the other requests.
    let fixed = options.with_split(SplitMode::Fixed { tokens: 1024 });
    assert!(!kernels(&spec, &[(16, 4096); 4], &fixed)[0].0);
}

#[test]
fn few_new_tokens_beside_decodes_or_prompts_are_prefills() {
    let spec = Spec::new(32, 8, 128);
    for other in [(1, 4096), (500, 500)] {
        let kernels = kernels(&spec, &[(16, 4096), other], &PlanOptions::default());
        assert!(kernels.iter().any(|&(decode, _)| !decode), "{other:?}");
    }
}

/// A slot of a batch that has no request now.
#[test]
fn requests_without_queries_do_not_count() {
    let spec = Spec::new(32, 8, 128);
    let requests = [(16, 4096), (0, 100), (16, 4096)];
    let options = PlanOptions::default();
    assert_eq!(kernels(&spec, &requests, &options), [(true, 64)]);
}

/// Kernels of 64 rows load parts of 8 tokens, and those that load one by one are of few rows.
#[test]
fn other_page_sizes_have_neither_few_new_tokens_nor_many_short_decodes_in_tiles_of_64() {
    let options = PlanOptions::default();
    for dim in [96, 128] {
        let plan = plan_on(12, &Spec::new(32, 8, dim), &[(16, 4096); 4], &options);
        assert_eq!(plan.groups[0].kernel, Kernel::Prefill, "{dim}");
    }
    let plan = plan_on(12, &Spec::new(64, 4, 128), &[(1, 1000); 64], &options);
    assert_eq!(plan.groups[0].tile.m, 16);
}

/// Two CTAs of 64 rows on each SM leave a state of each of up to 64 tokens.
#[test]
fn a_bound_has_room_for_the_states_of_few_new_tokens() {
    let device = DeviceDescription::named("h200").expect("described");
    for (heads, kv_heads, new) in [(16, 8, 32), (2, 1, 32), (8, 8, 64), (4, 4, 64)] {
        let spec = Spec::new(heads, kv_heads, 128);
        let limits = BatchLimits::decodes(1, 65536, 16).with_query_tokens(new);
        let options = PlanOptions::default();
        let bound = Bound::new(&spec, &device, &options, &limits).expect("a bound");
        let plan = plan_for(&spec, &[(new, 65536)], &options.with_bound(bound));
        assert!(
            plan.items.len() > 8,
            "{heads}/{kv_heads}: {}",
            plan.items.len()
        );
    }
}

/// A common prefix in tiles of 128 rows would leave a partial state of each row.
#[test]
fn few_new_tokens_read_a_common_prefix_each_by_itself() {
    let device = DeviceDescription::named("h200").expect("described");
    let mut table = PageTable::new(16, 64 + 24);
    for request in 0..24 {
        let pages: Vec<u32> = (0..64).chain([64 + request]).collect();
        table.push(&pages, 65 * 16);
    }
    let batch = Batch::new(
        (0..=24).map(|request| request * 16).collect::<Vec<_>>(),
        table,
    );
    let spec = Spec::new(32, 8, 128);
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    let plan = plan.expect("a plan");
    plan.verify(&batch).expect("it is right");
    assert_eq!((plan.groups.len(), plan.groups[0].tile.m), (1, 64));
    assert_eq!((plan.items.len(), plan.slots), (24, 0));
}

/// Tiles of 64 rows are faster than those of 16 with heads of 256.
#[test]
fn rows_in_heads_of_256_have_tiles_of_8_or_64() {
    let options = PlanOptions::default();
    let of = |heads| kernels(&Spec::new(heads, 2, 256), &[(1, 4096); 4], &options);
    assert_eq!(of(16), [(true, 8)]);
    assert_eq!(of(32), [(true, 64)]);
}

/// The CTA that arrives last merges all tokens of a request; more than one are faster in a kernel.
#[test]
fn several_new_tokens_are_merged_in_a_kernel() {
    let spec = Spec::new(32, 8, 128);
    let mode = |new| plan_for(&spec, &[(new, 16384)], &PlanOptions::default()).merge_mode;
    assert_eq!(mode(1), MergeMode::Fused);
    assert_eq!(mode(2), MergeMode::Kernel);
    assert_eq!(mode(4), MergeMode::Kernel);
}

/// Kernels for few rows take longer between short units than those for 64 rows.
#[test]
fn many_short_decodes_have_tiles_of_64_rows() {
    let options = PlanOptions::default();
    let rows = |heads, kv_heads, requests, keys| {
        let spec = Spec::new(heads, kv_heads, 128);
        kernels(&spec, &vec![(1, keys); requests], &options)
    };
    assert_eq!(rows(32, 8, 256, 300), [(true, 64)]);
    for (requests, keys) in [(256, 100), (256, 1000), (32, 300)] {
        assert_eq!(
            rows(32, 8, requests, keys),
            [(true, 8)],
            "{requests} × {keys}"
        );
    }
    assert_eq!(rows(64, 4, 64, 4096), [(true, 64)]);
    assert_eq!(rows(64, 4, 16, 4096), [(true, 16)]);
    // Of 8-bit keys there are no such tiles, and fixed splits do not look at the other requests.
    let spec = Spec::new(64, 4, 128);
    let many = [(1, 1000); 64];
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    assert_eq!(kernels(&of_8_bits, &many, &options), [(true, 16)]);
    let fixed = options.with_split(SplitMode::Fixed { tokens: 1024 });
    assert_eq!(kernels(&spec, &many, &fixed), [(true, 16)]);
}

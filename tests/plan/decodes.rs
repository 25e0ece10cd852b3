//! Which requests run as decodes, in which tiles, and where their partial states are merged.

use tandem_attn::{
    plan::{Kernel, MergeMode, PlanOptions, SplitMode, TileGroup},
    problem::{Dtype, Spec},
};

use crate::prompts::plan_for;

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

//! In which tiles prompts run, and in which order.

use tandem_attn::{
    plan::{DeviceDescription, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, Compute, Dtype, PageTable, Spec},
};

/// Requests of so many new query tokens and keys, in heads of 32/8.
fn plan_of(requests: &[(u32, u32)], options: &PlanOptions) -> Plan {
    plan_for(&Spec::new(32, 8, 128), requests, options)
}

pub fn plan_for(spec: &Spec, requests: &[(u32, u32)], options: &PlanOptions) -> Plan {
    plan_on(16, spec, requests, options)
}

/// On pages of so many tokens.
pub fn plan_on(
    page_size: u32,
    spec: &Spec,
    requests: &[(u32, u32)],
    options: &PlanOptions,
) -> Plan {
    let device = DeviceDescription::named("h200").expect("described");
    let pages = |keys: u32| keys.div_ceil(page_size);
    let mut table = PageTable::new(
        page_size,
        requests.iter().map(|&(_, keys)| pages(keys)).sum(),
    );
    let (mut next, mut queries) = (0, vec![0]);
    for &(new, keys) in requests {
        let end = next + pages(keys);
        table.push(&(next..end).collect::<Vec<_>>(), keys);
        next = end;
        queries.push(queries[queries.len() - 1] + new);
    }
    let batch = Batch::new(queries, table);
    let plan = Planner::new().plan(spec, &batch, &device, options);
    let plan = plan.expect("a plan");
    plan.verify(&batch).expect("it is right");
    plan
}

/// Rows of the tiles, group after group.
fn rows(requests: &[(u32, u32)]) -> Vec<u32> {
    let plan = plan_of(requests, &PlanOptions::default());
    plan.groups.iter().map(|group| group.tile.m).collect()
}

/// The keys of 16 prompts of 1024 are more than L2 holds, those of two of eight KV heads are not.
#[test]
fn kv_heads_take_turns_where_the_keys_of_all_do_not_fit_in_cache() {
    let together = |requests: &[(u32, u32)]| {
        let plan = plan_of(requests, &PlanOptions::default());
        let lengths: Vec<u32> = plan.items.iter().map(|item| item.kv_end).collect();
        assert!(lengths.is_sorted_by(|a, b| a >= b), "{lengths:?}");
        plan.groups[0].kv_heads_together
    };
    assert_eq!(together(&[(1024, 1024); 16]), 2);
    assert_eq!(together(&[(8192, 8192)]), 0);
    assert_eq!(together(&[(16384, 16384)]), 2);
    assert_eq!(together(&[(1024, 1024); 5]), 0);
    // So many that the last ones keep all SMs busy.
    assert_eq!(together(&[(2048, 16384)]), 4);
    // Work for 130 and for 128 of 132 SMs is enough.
    let spec = Spec::new(128, 128, 192).with_head_dim_v(128);
    let of_128_heads = |request| {
        let plan = plan_for(&spec, &[request], &PlanOptions::default());
        (plan.groups[0].tile.m, plan.groups[0].kv_heads_together)
    };
    assert_eq!(of_128_heads((8192, 8192)), (128, 4));
    assert_eq!(of_128_heads((512, 8192)), (128, 32));
}

/// The keys of one KV head of 80 prompts of 1024 are more than L2 holds. 34 are at work at a time.
#[test]
fn prompts_take_turns_where_the_keys_of_a_head_do_not_fit_in_cache() {
    let plan = plan_of(&[(1024, 1024); 80], &PlanOptions::default());
    assert_eq!(plan.groups[0].kv_heads_together, 1);
    let prompts: Vec<u32> = plan
        .items
        .iter()
        .map(|item| item.rows_begin / 1024)
        .collect();
    let third = prompts.len() / 3;
    assert!(prompts[..third].iter().all(|&prompt| prompt < 34));
    assert!(prompts[2 * third..].iter().all(|&prompt| prompt >= 34));
    // The longest first, in each turn.
    let begins =
        (1..plan.items.len()).filter(|&at| plan.items[at].kv_end > plan.items[at - 1].kv_end);
    assert_eq!(begins.count(), 2);
}

#[test]
fn prompts_stand_side_by_side_where_turns_bring_nothing() {
    for requests in [[(8192, 8192); 2], [(1024, 1024); 2]] {
        let plan = plan_of(&requests, &PlanOptions::default());
        let lengths: Vec<u32> = plan.items.iter().map(|item| item.kv_end).collect();
        assert!(lengths.is_sorted_by(|a, b| a >= b), "{lengths:?}");
    }
}

#[test]
fn prompts_have_the_tiles_with_which_they_are_done_first() {
    assert_eq!(rows(&[(1024, 1024); 16]), [192]);
    assert_eq!(
        rows(&[(700, 700), (50, 50), (1500, 1500), (333, 333)]),
        [192]
    );
    // Four waves of 128 rows take less than three of 192, and one less than one.
    assert_eq!(rows(&[(2048, 16384)]), [128]);
    assert_eq!(rows(&[(512, 8192)]), [128]);
    // A hundred tokens of one head are most of a tile, those of four heads two tiles and a twelfth.
    assert_eq!(rows(&[(100, 100); 32]), [192]);
    // Wide tiles gain more with heads of 64.
    let spec = Spec::new(64, 8, 64);
    let plan = plan_for(&spec, &[(2048, 8192); 2], &PlanOptions::default());
    assert_eq!(plan.groups[0].tile.m, 192);
}

/// The only kernel has 128 rows, whatever the length.
#[test]
fn tiles_of_8_bit_products_have_all_heads_of_a_group() {
    let spec = Spec::new(28, 4, 128)
        .with_kv_dtype(Dtype::F8E4M3)
        .with_compute(Compute::F8);
    for length in [300, 1000, 9000] {
        let plan = plan_for(&spec, &[(length, length)], &PlanOptions::default());
        assert_eq!((plan.groups[0].tile.m, plan.groups[0].pack), (128, 7));
    }
}

/// With fixed splits a request has the same tiles in any batch.
#[test]
fn with_fixed_splits_the_length_alone_decides() {
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 4096 });
    let tiles = |requests: &[(u32, u32)]| -> Vec<(u32, u32)> {
        let plan = plan_of(requests, &options);
        plan.groups
            .iter()
            .map(|group| (group.tile.m, group.pack))
            .collect()
    };
    assert_eq!(tiles(&[(1024, 1024)]), tiles(&[(1024, 1024); 16]));
}

/// Also of groups that do not divide a tile's rows. Tiles of fewer tokens have fewer keys that only some of their rows see.
#[test]
fn tiles_of_heads_of_256_have_all_heads_of_a_group() {
    let pack = |group: u32, length: u32| {
        let spec = Spec::new(4 * group, 4, 256);
        let plan = plan_for(&spec, &[(length, length)], &PlanOptions::default());
        plan.groups[0].pack
    };
    for length in [300, 1000, 9000] {
        let packs = [1, 2, 4, 5, 7, 8, 16].map(|group| pack(group, length));
        assert_eq!(packs, [1, 2, 4, 5, 7, 8, 8], "prompts of {length}");
    }
}

/// The keys of each piece, in launch order.
fn pieces(plan: &Plan) -> Vec<(u32, u32)> {
    let items = plan.items.iter();
    items.map(|item| (item.kv_begin, item.kv_end)).collect()
}

/// So they read the same keys at the same time. Four tiles whose keys are cut apart read memory four times.
#[test]
fn tiles_of_a_prompt_are_cut_at_the_same_keys_and_launched_piece_after_piece() {
    let spec = Spec::new(64, 8, 128);
    let options = PlanOptions::default();
    let plan = plan_for(&spec, &[(64, 65_536)], &options);
    let pieces = pieces(&plan);
    assert_eq!((plan.groups[0].tile.m, plan.groups[0].pack), (128, 8));
    for (nth, tiles) in pieces.chunks(4).enumerate() {
        let begin = 16_384 * nth as u32;
        assert!(tiles.iter().all(|keys| keys.0 == begin), "{pieces:?}");
    }
    assert_eq!(pieces.len(), 16);

    // Of two prompts in seven tiles, each prompt has cuts of its own.
    let plan = plan_for(&spec, &[(64, 50_000), (40, 38_000)], &options);
    let mut begins: Vec<u32> = plan.items.iter().map(|item| item.kv_begin).collect();
    assert_eq!(begins.iter().take_while(|&&begin| begin == 0).count(), 7);
    begins.sort_unstable();
    begins.dedup();
    assert_eq!((begins.len(), plan.items.len()), (3, 14), "{begins:?}");
}

/// Tiles of a prompt with a window begin at keys of their own, but are cut at the same ones, which are those of pages.
#[test]
fn windows_do_not_move_cuts() {
    let spec = Spec::new(64, 8, 128).with_window_left(40_000);
    let plan = plan_for(&spec, &[(64, 65_536)], &PlanOptions::default());
    let tiles = plan.items.iter().filter(|item| item.kv_end < 65_000);
    let mut cuts: Vec<u32> = tiles.map(|item| item.kv_end).collect();
    cuts.sort_unstable();
    cuts.dedup();
    assert!((1..8).contains(&cuts.len()), "{cuts:?}");
    assert!(cuts.iter().all(|cut| cut.is_multiple_of(128)), "{cuts:?}");
}

/// Chunks may begin at multiples of 128 tokens, whatever the group: tiles of 128 rows hold a power of two of heads.
#[test]
fn with_fixed_splits_tiles_divide_128_tokens() {
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 4096 });
    let f8 = |spec: Spec| spec.with_kv_dtype(Dtype::F8E4M3).with_compute(Compute::F8);
    for (group, heads) in [(1, 1), (3, 1), (5, 1), (6, 2), (7, 1), (8, 8)] {
        for spec in [
            Spec::new(2 * group, 2, 256),
            f8(Spec::new(2 * group, 2, 128)),
        ] {
            for length in [300, 3000] {
                let plan = plan_for(&spec, &[(length, length)], &options);
                assert_eq!(plan.groups[0].pack, heads, "{spec:?}");
            }
        }
    }
}

/// Fixed pieces are the same in any order.
#[test]
fn fixed_pieces_of_prompts_are_launched_one_after_the_other() {
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 2048 });
    let plan = plan_for(&Spec::new(64, 8, 128), &[(64, 16_384)], &options);
    let begins = pieces(&plan);
    assert_eq!(begins.len(), 32);
    assert!(begins.is_sorted_by_key(|keys| keys.0), "{begins:?}");
}

/// 368 tiles of one length for each of 4 KV heads are 11.15 rounds of 132 CTAs: only the tiles of the last round are cut.
#[test]
fn the_last_round_of_equal_tiles_is_cut() {
    let mut spec = Spec::new(28, 4, 256);
    spec.variant.causal = false;
    let plan = plan_for(&spec, &[(6609, 6609)], &PlanOptions::default());
    let whole = plan
        .items
        .iter()
        .filter(|item| item.kv_end - item.kv_begin == 6609);
    assert!(!plan.merges.is_empty());
    assert!(whole.count() > 11 * 132 / 4 - 10);
}

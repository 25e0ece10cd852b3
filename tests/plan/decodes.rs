//! Which requests run as decodes, in which tiles, and where their partial states are merged.

use tandem_attn::{
    plan::{
        BatchLimits, Bound, DeviceDescription, Kernel, MergeMode, PlanOptions, Planner, SplitMode,
        Tile, TileGroup,
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
    // Results must not depend on the other requests.
    let fixed = options.with_split(SplitMode::Fixed { tokens: 1024 });
    assert!(!kernels(&spec, &[(16, 4096); 4], &fixed)[0].0);
}

/// A prefill converts all keys of its requests first. Decodes in up to four of the widest tiles are faster, also beside others.
#[test]
fn few_new_tokens_on_8_bit_keys_are_decodes_in_several_tiles() {
    let spec = |heads, dim| Spec::new(heads, 8, dim).with_kv_dtype(Dtype::F8E4M3);
    let options = PlanOptions::default();
    for (heads, dim, most, dtype) in [
        (32, 128, 64, Dtype::F8E4M3),
        (40, 64, 51, Dtype::F8E4M3),
        (16, 256, 128, Dtype::F8E4M3),
        (32, 128, 64, Dtype::F8E5M2),
    ] {
        let spec = spec(heads, dim).with_kv_dtype(dtype);
        for requests in [
            vec![(most, 4096); 4],
            vec![(1, 4096), (most / 4, 4096), (9, 50)],
        ] {
            let plan = plan_for(&spec, &requests, &options);
            assert!(
                plan.groups
                    .iter()
                    .all(|group| group.kernel == Kernel::Decode)
            );
            let tokens: u32 = plan.items.iter().map(|item| item.rows).sum();
            assert!(tokens >= requests.iter().map(|&(new, _)| new).sum());
        }
        assert!(!kernels(&spec, &[(most + 1, 4096); 4], &options)[0].0);
        // Beside shorter ones, those of more rows than a tile has run side by side with these.
        let beside = kernels(&spec, &[(1, 4096), (most, 4096)], &options);
        assert!(beside.iter().any(|&(decode, _)| !decode));
        let fixed = options.with_split(SplitMode::Fixed { tokens: 1024 });
        assert!(!kernels(&spec, &[(most, 4096); 4], &fixed)[0].0);
    }
    // Keys that several requests share are converted once.
    let shared = Batch::new(vec![0, 16, 32], table_with_prefix(2, 4096));
    let device = DeviceDescription::named("h200").expect("described");
    let plan = Planner::new().plan(&spec(32, 128), &shared, &device, &options);
    let plan = plan.expect("a plan");
    assert!(
        plan.groups
            .iter()
            .all(|group| group.kernel == Kernel::Prefill)
    );
    // Beside a prompt they are prefills, and all share SMs.
    let beside = kernels(&spec(32, 128), &[(16, 4096), (500, 500)], &options);
    assert!(beside.iter().all(|&(decode, _)| !decode));
    // Other page sizes have the same kernels.
    let plan = plan_on(12, &spec(32, 128), &[(16, 4096); 4], &options);
    assert_eq!(plan.groups[0].kernel, Kernel::Decode);
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

/// An earlier version had only kernels of few rows on pages whose size is no multiple of 8.
#[test]
fn pages_of_any_size_have_the_same_decode_kernels() {
    let options = PlanOptions::default();
    let requests: [(Spec, &[(u32, u32)]); 4] = [
        (Spec::new(32, 8, 96), &[(16, 4096); 4]),
        (Spec::new(32, 8, 128), &[(16, 4096); 4]),
        (Spec::new(64, 4, 128), &[(1, 1000); 64]),
        (Spec::new(32, 8, 128), &[(1, 4096); 100]),
    ];
    for (spec, requests) in requests {
        let of = |page_size| {
            let plan = plan_on(page_size, &spec, requests, &options);
            let kernels = plan.groups.iter().map(|group| group.id);
            kernels.collect::<Vec<_>>()
        };
        assert_eq!(of(12), of(16), "{spec:?}");
        assert_eq!(of(1), of(16), "{spec:?}");
    }
}

/// Two CTAs of 64 rows on each SM leave a state of each of up to 64 tokens.
#[test]
fn a_bound_has_room_for_the_states_of_few_new_tokens() {
    let device = DeviceDescription::named("h200").expect("described");
    let (bf16, e4m3) = (Dtype::BF16, Dtype::F8E4M3);
    for (heads, kv_heads, new, dtype) in [
        (16, 8, 32, bf16),
        (2, 1, 32, bf16),
        (8, 8, 64, bf16),
        (4, 4, 64, bf16),
        (4, 4, 64, e4m3),
        (2, 1, 32, e4m3),
        (32, 8, 64, e4m3),
        (8, 8, 256, e4m3),
    ] {
        let spec = Spec::new(heads, kv_heads, 128).with_kv_dtype(dtype);
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

/// Requests with this many keys in common, and a page of their own.
fn table_with_prefix(requests: u32, keys: u32) -> PageTable {
    let shared = keys / 16;
    let mut table = PageTable::new(16, shared + requests);
    for request in 0..requests {
        let pages: Vec<u32> = (0..shared).chain([shared + request]).collect();
        table.push(&pages, (shared + 1) * 16);
    }
    table
}

/// A common prefix in tiles of 128 rows would leave a partial state of each row.
#[test]
fn few_new_tokens_read_a_common_prefix_each_by_itself() {
    let device = DeviceDescription::named("h200").expect("described");
    let batch = Batch::new(
        (0..=24).map(|request| request * 16).collect::<Vec<_>>(),
        table_with_prefix(24, 1024),
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

/// The CTA that arrives last merges all tokens of a request; more than one are faster in a kernel. So are few keys, whose kernel
/// merges nothing.
#[test]
fn several_new_tokens_are_merged_in_a_kernel() {
    let spec = Spec::new(32, 8, 128);
    let mode = |new, keys| plan_for(&spec, &[(new, keys)], &PlanOptions::default()).merge_mode;
    assert_eq!(mode(1, 131_072), MergeMode::Fused);
    assert_eq!(mode(2, 131_072), MergeMode::Kernel);
    assert_eq!(mode(4, 131_072), MergeMode::Kernel);
    assert_eq!(mode(1, 16_384), MergeMode::Kernel);
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
    // Tiles of 64 rows convert 8-bit keys, and fixed splits do not look at the other requests.
    let spec = Spec::new(64, 4, 128);
    let many = [(1, 1000); 64];
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    assert_eq!(kernels(&of_8_bits, &many, &options), [(true, 16)]);
    assert_eq!(kernels(&of_8_bits, &[(1, 300); 64], &options), [(true, 64)]);
    let fixed = options.with_split(SplitMode::Fixed { tokens: 1024 });
    assert_eq!(kernels(&spec, &many, &fixed), [(true, 16)]);
}

/// A tile of 64 rows converts 8-bit keys alone. Where several tiles of 16 rows run at the same time on different SMs, and are
/// not long, these are faster.
#[test]
fn few_decodes_of_8_bit_keys_have_several_tiles_of_16_rows() {
    let options = PlanOptions::default();
    let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
    let of =
        |spec: &Spec, requests, tokens| kernels(spec, &vec![(tokens, 1024); requests], &options);
    assert_eq!(of(&spec, 16, 16), [(true, 64)]);
    assert_eq!(of(&spec, 4, 16), [(true, 16)]);
    assert_eq!(of(&spec, 1, 64), [(true, 16)]);
    assert_eq!(of(&spec, 16, 10), [(true, 64)]);
    assert_eq!(of(&spec, 4, 17), [(true, 128)]);
    // The rows fit one such tile anyway, or there is no other.
    assert_eq!(of(&spec, 4, 4), [(true, 16)]);
    let e5m2 = spec.with_kv_dtype(Dtype::F8E5M2);
    assert_eq!(of(&e5m2, 16, 16), [(true, 64)]);
    assert_eq!(of(&spec.with_kv_dtype(Dtype::BF16), 4, 16), [(true, 64)]);
}

/// Own keys of latent decodes behind a common prefix: whether they join its tiles of 64 rows is the device's.
#[test]
fn own_keys_join_the_tiles_of_a_prefix_up_to_so_many_launches() {
    let mut table = PageTable::new(64, 64 + 2 * 96);
    for i in 0..96 {
        let own = [64 + 2 * i, 65 + 2 * i];
        table.push(&(0..64).chain(own).collect::<Vec<_>>(), 66 * 64);
    }
    let batch = Batch::new((0..=96).collect(), table);
    let rows = |joined| {
        let mut device = DeviceDescription::named("h200").unwrap();
        for tile in &mut device.decode.tiles {
            tile.joined = joined;
        }
        let spec = Spec::latent(16, 512, 64);
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let plan = plan.unwrap();
        let of = |group: &TileGroup| (group.tile.m, group.items.len());
        plan.groups.iter().map(of).collect::<Vec<_>>()
    };
    // The own keys alone, and their states, take 2.2 launches.
    assert_eq!(rows(None), [(64, 192)]);
    assert_eq!(rows(Some(2.5)), [(64, 192)]);
    assert_eq!(rows(Some(2.0)), [(64, 96), (16, 96)]);
}

/// Latent heads that fill several tiles have blocks of 48 keys, few keys blocks of 32. Fixed splits do not look at the other
/// requests.
#[test]
fn few_keys_of_many_latent_heads_have_shorter_blocks() {
    let options = PlanOptions::default();
    let blocks = |heads, requests: &[(u32, u32)], options: &PlanOptions| {
        let spec = Spec::latent(heads, 512, 64);
        let plan = plan_for(&spec, requests, options);
        let of = |group: &TileGroup| (group.tile.m, group.tile.n);
        plan.groups.iter().map(of).collect::<Vec<_>>()
    };
    assert_eq!(blocks(128, &[(1, 2000); 32], &options), [(64, 32)]);
    assert_eq!(blocks(128, &[(1, 32768)], &options), [(64, 32)]);
    assert_eq!(blocks(128, &[(1, 8192); 64], &options), [(64, 48)]);
    assert_eq!(blocks(128, &[(40, 8192); 8], &options), [(64, 48)]);
    assert_eq!(blocks(64, &[(1, 8192); 64], &options), [(64, 32)]);
    let fixed = options.with_split(SplitMode::Fixed { tokens: 1024 });
    assert_eq!(blocks(128, &[(1, 2000); 32], &fixed), [(64, 48)]);
}

/// Merging 64 rows for each state takes about 5 µs: cutting has to save more.
#[test]
fn tiles_of_64_rows_are_cut_only_if_that_saves_more_than_merging() {
    let is_cut = |spec: &Spec, requests: &[(u32, u32)]| {
        let plan = plan_for(spec, requests, &PlanOptions::default());
        assert!(plan.groups.iter().all(|group| group.tile.m == 64));
        !plan.merges.is_empty()
    };
    let spec = Spec::new(64, 8, 128);
    assert!(is_cut(&spec, &[(8, 2000); 4]));
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    assert!(!is_cut(&of_8_bits, &[(8, 512); 16]));
    assert!(!is_cut(&of_8_bits, &[(8, 512); 8]));
    assert!(is_cut(&of_8_bits, &[(8, 1000); 8]));
}

/// A tile of 128 rows converts 8-bit keys once for twice the rows. It takes an SM alone, so decodes of few rows beside it would be
/// slower.
#[test]
fn decodes_of_many_rows_on_8_bit_keys_have_tiles_of_128_rows() {
    let options = PlanOptions::default();
    let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
    assert_eq!(kernels(&spec, &[(17, 8000); 4], &options), [(true, 128)]);
    assert_eq!(kernels(&spec, &[(64, 2000); 16], &options), [(true, 128)]);
    assert_eq!(kernels(&spec, &[(16, 8000); 8], &options), [(true, 64)]);
    let with_one = [&[(17, 8000); 4][..], &[(1, 8000)]].concat();
    assert!(
        kernels(&spec, &with_one, &options)
            .iter()
            .all(|&(decode, m)| !decode || m < 128)
    );
    let capped = |mut spec: Spec| {
        spec.variant.soft_cap = Some(30.0);
        spec
    };
    assert_eq!(
        kernels(&capped(spec), &[(17, 8000); 4], &options),
        [(true, 128)]
    );
    // Other heads have no such tile.
    let of_256 = Spec::new(16, 8, 256).with_kv_dtype(Dtype::F8E4M3);
    let of = kernels(&of_256, &[(33, 8000); 4], &options);
    assert!(of.iter().all(|&(decode, m)| decode && m <= 64), "{of:?}");
    // A token that fits no other tile.
    let multi_query = Spec::new(100, 1, 128).with_kv_dtype(Dtype::F8E4M3);
    assert_eq!(
        kernels(&multi_query, &[(1, 8000); 4], &options),
        [(true, 128)]
    );
}

/// Pieces of latent heads are merged in the time of the device, not in that of other tiles of 64 rows.
#[test]
fn latent_heads_are_cut_where_that_saves_a_microsecond() {
    let spec = Spec::latent(128, 512, 64);
    let plan = plan_on(64, &spec, &[(1, 700); 200], &PlanOptions::default());
    assert!(!plan.merges.is_empty());
}

/// States of latent heads are written at the rate of the device, so that few decodes are cut into short pieces. CTAs with products
/// for all rows of a tile are no faster while others are idle. Rows of 656 bytes are read in pairs of 32 keys.
#[test]
fn few_latent_decodes_are_cut_into_short_pieces() {
    let pieces = |heads, requests: &[(u32, u32)]| {
        let of = |dtype| {
            let spec = Spec::latent(heads, 512, 64).with_kv_dtype(dtype);
            let plan = plan_for(&spec, requests, &PlanOptions::default());
            let lengths = plan.items.iter().map(|item| item.kv_end - item.kv_begin);
            lengths.collect::<Vec<_>>()
        };
        (of(Dtype::BF16), of(Dtype::F8E4M3))
    };
    assert_eq!(pieces(64, &[(1, 1024)]).0, [128; 8]);
    assert_eq!(pieces(64, &[(1, 1024); 16]).0, [256; 64]);
    assert_eq!(pieces(64, &[(1, 512); 64]).0, [512; 64]);
    assert_eq!(pieces(128, &[(1, 1024); 16]).0, [256; 64]);
    assert_eq!(pieces(128, &[(1, 2048); 32]).0, [1024; 64]);
    assert_eq!(pieces(64, &[(1, 2048)]).1, [128; 16]);
    for requests in 1..=16 {
        let lengths = pieces(64, &vec![(1, 2048); requests]).1;
        assert!(lengths.iter().all(|keys| keys % 64 == 0), "{lengths:?}");
        assert!(lengths.iter().all(|&keys| keys <= 512), "{lengths:?}");
    }
}

/// Few keys of few rows are read by the kernel that otherwise shares SMs with a prefill, which starts sooner. Many keys, more rows
/// and fixed tiles have the kernels that run alone.
#[test]
fn few_keys_have_the_kernel_that_starts_sooner() {
    let options = PlanOptions::default();
    let co_resident = |spec: &Spec, requests: &[(u32, u32)], options: &PlanOptions| {
        let plan = plan_for(spec, requests, options);
        let of = |group: &TileGroup| group.id.map(|id| id.info().co_resident);
        plan.groups.iter().map(of).collect::<Vec<_>>()
    };
    let spec = Spec::new(32, 8, 128);
    assert_eq!(co_resident(&spec, &[(1, 1024)], &options), [Some(true)]);
    assert_eq!(co_resident(&spec, &[(2, 1024); 16], &options), [Some(true)]);
    assert_eq!(co_resident(&spec, &[(4, 1024)], &options), [Some(false)]);
    assert_eq!(
        co_resident(&spec, &[(1, 8192); 64], &options),
        [Some(false)]
    );
    for spec in [Spec::new(16, 8, 256), spec.with_kv_dtype(Dtype::F8E4M3)] {
        assert_eq!(co_resident(&spec, &[(1, 1024)], &options), [Some(false)]);
    }
    let alone = options.with_decode_tile(Tile { m: 8, n: 32 });
    assert_eq!(co_resident(&spec, &[(1, 1024)], &alone), [Some(false)]);
}

/// A request that waits (its keys are in the pool, it has no queries) is none of the step.
#[test]
fn requests_that_wait_do_not_choose_the_kernel() {
    let of = |waiting: u32| {
        let mut table = PageTable::new(16, 8 * 63 + waiting);
        (0..8).for_each(|i| table.push(&(63 * i..63 * i + 63).collect::<Vec<_>>(), 1000));
        let mut ends: Vec<u32> = (0..=8).collect();
        if waiting > 0 {
            let pages: Vec<u32> = (8 * 63..8 * 63 + waiting).collect();
            table.push(&pages, 16 * waiting);
            ends.push(8);
        }
        let device = DeviceDescription::named("h200").unwrap();
        let (spec, batch) = (Spec::new(32, 8, 128), Batch::new(ends, table));
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let plan = plan.unwrap();
        plan.groups.iter().map(|group| group.id).collect::<Vec<_>>()
    };
    assert_eq!(of(0), of(6250));
}

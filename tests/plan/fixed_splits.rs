//! Plans with fixed splits: the kernels of a request are those that it has alone, also beside others on an SM.

use std::cell::Cell;

use kernels_gpu::registry::KernelId;
use proptest::{prelude::*, test_runner::TestRunner};
use tandem_attn::{
    kv::PagesByHead,
    plan::{
        DeviceDescription, MergeMode, Plan, PlanOptions, Planner, SplitMode, Tile, pod::PodMode,
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
};

use crate::{pieces::only, problems::cases};

const PAGE: u32 = 16;

/// Requests of so many new tokens among so many keys.
fn batch(requests: &[(u32, u32)], page: u32) -> Batch {
    let pages: u32 = requests.iter().map(|(_, keys)| keys.div_ceil(page)).sum();
    let mut table = PageTable::new(page, pages.max(1));
    let (mut first, mut indptr) = (0, vec![0]);
    for &(queries, keys) in requests {
        let next = first + keys.div_ceil(page);
        table.push(&(first..next).collect::<Vec<_>>(), keys);
        indptr.push(indptr[indptr.len() - 1] + queries);
        first = next;
    }
    Batch::new(indptr, table)
}

fn fixed(tokens: u32) -> PlanOptions {
    PlanOptions::default().with_split(SplitMode::Fixed { tokens })
}

fn plan(spec: &Spec, device: &DeviceDescription, batch: &Batch, options: &PlanOptions) -> Plan {
    let plan = Planner::new().plan(spec, batch, device, options).unwrap();
    assert_eq!(plan.verify(batch), Ok(()));
    plan
}

/// What computes a query token, in the order in which its states are merged: the kernel, query heads in a tile, the item's
/// rows, where the token stands among these, and keys.
fn computed_by(plan: &Plan, token: u32) -> Vec<(Option<KernelId>, [u32; 5])> {
    let mut by = Vec::new();
    for group in &plan.groups {
        for item in plan.items_of(group) {
            let place = match item.is_gathered() {
                true => plan.rows_of(item).iter().position(|row| row.token == token),
                false => (item.rows_begin..item.rows_begin + item.rows)
                    .contains(&token)
                    .then(|| (token - item.rows_begin) as usize),
            };
            if let Some(place) = place {
                let keys = [item.kv_begin, item.kv_end];
                by.push((
                    group.id,
                    [group.pack, item.rows, place as u32, keys[0], keys[1]],
                ));
            }
        }
    }
    by.sort_unstable_by_key(|(_, item)| item[3]);
    by
}

fn alike(a: &[(Option<KernelId>, [u32; 5])], b: &[(Option<KernelId>, [u32; 5])]) -> bool {
    let same = |a: Option<KernelId>, b: Option<KernelId>| match (a, b) {
        (Some(a), Some(b)) => a.same_bits(b),
        (a, b) => a == b,
    };
    let mut items = a.iter().zip(b);
    a.len() == b.len() && items.all(|(a, b)| same(a.0, b.0) && a.1 == b.1)
}

/// Batches of which one operation takes at least a fifth of the time, as in `cli/suites/pod.json`.
#[test]
fn hybrids_share_sms() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    for (queries, context, decodes, keys) in [
        (1024, 12288, 80, 12288),
        (512, 16384, 54, 16384),
        (512, 4096, 109, 4096),
        (1024, 8192, 50, 8192),
        (2048, 16384, 27, 16384),
        (2048, 20480, 21, 20480),
        (1024, 4096, 103, 4096),
        (4096, 8192, 64, 8192),
    ] {
        let mut requests = vec![(queries, context)];
        requests.extend(vec![(1, keys); decodes]);
        let batch = batch(&requests, PAGE);
        let plan = plan(&spec, &device, &batch, &fixed(4096));
        let pod = plan.pod.unwrap();
        assert_eq!(pod.mode, PodMode::Fused, "{queries} @ {context}");
        let config = &device.pod.configs[pod.config.unwrap() as usize];
        assert_eq!(config.name, "two kernels, prefill 128 × 80");
        let shares = |id: Option<KernelId>| id.is_some_and(|id| id.info().co_resident);
        assert!(plan.groups.iter().all(|group| shares(group.id)));
        // Cut as always, not as is best beside a prefill.
        let cut = |key: u32, end: u32| key.is_multiple_of(4096) || key == end;
        for item in plan.items.iter().filter(|item| item.is_gathered()) {
            assert!(cut(item.kv_begin, 0) && cut(item.kv_end, keys), "{item:?}");
        }
    }
}

/// New tokens decide, and whether a decode has one tile with few rows.
#[test]
fn kernels_follow_from_the_request() {
    let device = DeviceDescription::named("h200").unwrap();
    let named = |plan: &Plan| {
        let [group] = &plan.groups[..] else {
            panic!("{:?}", plan.groups)
        };
        (group.id.unwrap().info().name, group.pack)
    };
    let spec = Spec::new(32, 8, 128).with_dtype(Dtype::BF16);
    for (queries, name, pack) in [
        // The deepest of those that share SMs.
        (1, "decode_8x64_d128_bf16_co_resident", 4),
        (2, "decode_8x64_d128_bf16_co_resident", 4),
        (3, "decode_16x32_d128_bf16", 4),
        (8, "decode_64x64_d128_bf16", 4),
        (9, "prefill_128x128_d128_bf16", 4),
        (64, "prefill_128x128_d128_bf16", 4),
        (65, "prefill_128x80_d128_bf16_co_resident", 4),
        (4096, "prefill_128x80_d128_bf16_co_resident", 4),
        (4097, "prefill_192x80_d128_bf16", 4),
    ] {
        let of = |options: &PlanOptions, keys| {
            let batch = batch(&[(queries, keys)], PAGE);
            plan(&spec, &device, &batch, options)
        };
        for keys in [5000, 9000] {
            assert_eq!(
                named(&of(&fixed(1024), keys)),
                (name, pack),
                "{queries} of {keys}"
            );
        }
        // Where splits are not fixed, decodes have one tile, or their CTAs merge, kernels are those that run alone. Few keys take a
        // kernel that shares SMs all the same.
        for (options, keys) in [
            (PlanOptions::default(), 90_000),
            (fixed(1024).with_decode_tile(Tile { m: 16, n: 32 }), 5000),
            (fixed(1024).with_merge_mode(MergeMode::Fused), 5000),
        ] {
            let plan = of(&options, keys);
            assert!(!named(&plan).0.contains("co_resident"), "{options:?}");
        }
    }
    // Tiles of 128 tokens or of a part of them, whatever the heads.
    for (q_heads, kv_heads, pack) in [(8, 8, 1), (6, 2, 1), (12, 2, 2), (8, 1, 8)] {
        let spec = Spec::new(q_heads, kv_heads, 128).with_dtype(Dtype::BF16);
        let plan = plan(&spec, &device, &batch(&[(500, 5000)], PAGE), &fixed(1024));
        assert_eq!(named(&plan), ("prefill_128x80_d128_bf16_co_resident", pack));
    }
    // Heads of 64 have kernels of their own that share SMs.
    let spec = Spec::new(64, 8, 64).with_dtype(Dtype::BF16);
    for (queries, name, pack) in [
        (1, "decode_8x128_d64_bf16_co_resident", 8),
        (2, "decode_16x32_d64_bf16", 8),
        (500, "prefill_128x112_d64_bf16_co_resident", 8),
    ] {
        let plan = plan(
            &spec,
            &device,
            &batch(&[(queries, 5000)], PAGE),
            &fixed(1024),
        );
        assert_eq!(named(&plan), (name, pack), "{queries}");
    }
    // There are none for these, and on the last device nothing was measured.
    let eight_bits = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
    for (spec, name) in [
        (Spec::new(32, 8, 256), "h200"),
        (Spec::new(32, 8, 96), "h200"),
        (Spec::new(16, 1, 128), "h200"),
        (Spec::new(32, 8, 128).with_soft_cap(30.0), "h200"),
        (eight_bits, "h200"),
        (Spec::new(32, 8, 128), "a100"),
    ] {
        let device = DeviceDescription::named(name).unwrap();
        for requests in [
            vec![(1, 5000)],
            vec![(500, 5000)],
            vec![(500, 5000), (1, 5000)],
        ] {
            let plan = plan(&spec, &device, &batch(&requests, PAGE), &fixed(1024));
            let shares = |id: Option<KernelId>| id.is_some_and(|id| id.info().co_resident);
            assert!(
                plan.groups.iter().all(|group| !shares(group.id)),
                "{spec:?}"
            );
        }
    }
}

/// In a batch with what has other kernels alone, nothing shares SMs.
#[test]
fn batches_share_sms_if_all_of_their_kernels_can() {
    let spec = Spec::new(32, 8, 128);
    let prefills: Vec<_> = vec![(1024, 8192), (65, 3000)];
    let decodes = vec![(1, 8192); 50];
    for name in ["h200", "h100"] {
        let device = DeviceDescription::named(name).unwrap();
        for (other, shares) in [
            ((2, 500), true),
            ((4096, 4096), true),
            ((3, 500), false),
            ((64, 500), false),
            ((4097, 5000), false),
        ] {
            let requests = [&prefills[..], &decodes, &[other]].concat();
            let options = fixed(4096).with_pod(PodMode::Fused);
            let plan = plan(&spec, &device, &batch(&requests, PAGE), &options);
            let mode = plan.pod.unwrap().mode;
            assert_eq!(
                mode == PodMode::Fused,
                shares,
                "{name}, {other:?}: {mode:?}"
            );
        }
    }
}

/// Pages of 8 bits have kernels that run alone: beside each other on SMs of their own.
#[test]
fn hybrids_of_8_bit_pages_have_sms_of_their_own() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
    let mut requests = vec![(300, 4096), (30, 900), (5000, 6000)];
    requests.extend(vec![(1, 8192); 60]);
    let batch = batch(&requests, PAGE);
    let options = fixed(1024).with_pod(PodMode::Fused);
    let together = plan(&spec, &device, &batch, &options);
    let pod = together.pod.unwrap();
    assert_eq!(pod.mode, PodMode::Fused);
    assert_eq!(
        device.pod.configs[pod.config.unwrap() as usize].name,
        "SMs apart, 8 bits"
    );
    for request in 0..4 {
        let alone = plan(&spec, &device, &only(&batch, request), &options);
        let first = batch.qo_indptr[request];
        for token in 0..batch.q_len(request) {
            let by = computed_by(&together, first + token);
            assert!(alike(&by, &computed_by(&alone, token)), "{request}: {by:?}");
        }
    }
}

/// Items begin in the page of the first key that a row sees, and less than 64 keys before that key: pages that the window has passed may
/// hold anything. A plan that grew begins where a new one does.
#[test]
fn windows_begin_in_the_page_of_their_first_key() {
    let h200 = DeviceDescription::named("h200").unwrap();
    for (spec, queries) in [
        (Spec::new(32, 8, 128), 1),
        (Spec::new(32, 8, 128), 3),
        (Spec::latent(128, 512, 64), 4),
        (Spec::new(16, 2, 512), 700),
    ] {
        let spec = spec.with_dtype(Dtype::BF16).with_window_left(127);
        for page in [16, 64, 128] {
            let mut grown: Option<Plan> = None;
            let mut updates = 0;
            for keys in 4100..4400 {
                let batch = batch(&[(queries, keys)], page);
                let plan = plan(&spec, &h200, &batch, &fixed(4096));
                for item in &plan.items {
                    let rows = plan.rows_of(item).iter().map(|row| row.position as u32);
                    let seen = rows.min().unwrap() - 127;
                    let begin = item.kv_begin;
                    // Or at a cut, of which the keys before are another item's.
                    if begin > seen {
                        assert!(begin.is_multiple_of(4096), "{item:?}");
                        continue;
                    }
                    assert!(seen - begin < 64 && begin / page == seen / page, "{item:?}");
                }
                if let Some(grown) = &mut grown
                    && grown.grow(&batch).is_some()
                {
                    updates += 1;
                    // In launch order, which depends on lengths.
                    let keys_of = |plan: &Plan| {
                        let items = plan.items.iter();
                        let items = items.map(|item| (item.position, item.kv_begin, item.kv_end));
                        let mut items: Vec<_> = items.collect();
                        items.sort_unstable();
                        items
                    };
                    assert_eq!(
                        keys_of(grown),
                        keys_of(&plan),
                        "{keys} keys, pages of {page}"
                    );
                    assert_eq!(grown.verify(&batch), Ok(()));
                } else {
                    grown = Some(plan);
                }
            }
            // Most steps stay in the page, those of one tile at least.
            assert!(updates > 250 || queries > 1, "{updates} of pages of {page}");
        }
    }
}

/// Where decodes take prompts: each cut would write and read the states of all rows.
#[test]
fn prompts_of_heads_of_512_are_not_cut_at_every_split() {
    for dim in [512, 64] {
        are_not_cut_at_every_split(&Spec::new(16, 2, dim).with_head_dim_v(512));
    }
}

fn are_not_cut_at_every_split(spec: &Spec) {
    let h200 = DeviceDescription::named("h200").unwrap();
    let cuts = |requests: &[(u32, u32)]| {
        let plan = plan(spec, &h200, &batch(requests, PAGE), &fixed(4096));
        plan.merges.len()
    };
    assert_eq!(cuts(&[(8192, 8192)]), 0);
    assert_eq!(cuts(&[(1024, 16384)]), 0);
    // Few rows are work for all SMs only where they are cut.
    assert_eq!(cuts(&[(1, 16384)]), 1);
    // Each tile has the keys that its rows see, no more.
    let plan = plan(spec, &h200, &batch(&[(8192, 8192)], PAGE), &fixed(4096));
    let items = plan.groups.iter().flat_map(|group| plan.items_of(group));
    let keys: u64 = items
        .map(|item| u64::from(item.kv_end - item.kv_begin))
        .sum();
    assert!(keys < 8192 * 8192 / 8 * 51 / 100, "{keys}");
}

/// A planner keeps what follows from options.
#[test]
fn a_planner_plans_with_fixed_splits_and_without_in_turn() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    let batch = batch(&[(500, 5000), (1, 7000), (1, 300)], PAGE);
    let mut planner = Planner::new();
    let merging = fixed(1024).with_merge_mode(MergeMode::Fused);
    for options in [
        fixed(1024),
        PlanOptions::default(),
        merging,
        fixed(1024),
        fixed(512),
    ] {
        let kept = planner.plan(&spec, &batch, &device, &options).unwrap();
        assert_eq!(kept, plan(&spec, &device, &batch, &options), "{options:?}");
    }
}

fn spec() -> impl Strategy<Value = Spec> {
    let heads = prop::sample::select(&[(32, 8), (8, 8), (8, 1), (16, 2), (16, 1), (6, 2), (7, 1)]);
    let dim = prop_oneof![5 => Just(128), 1 => prop::sample::select(&[64, 96, 112, 256])];
    let dtype = prop_oneof![3 => Just(Dtype::BF16), 1 => Just(Dtype::F8E4M3)];
    let window = prop_oneof![3 => Just(None), 1 => (0u32..3000).prop_map(Some)];
    (heads, dim, dtype, window).prop_map(|((q_heads, kv_heads), dim, dtype, window)| {
        let mut spec = Spec::new(q_heads, kv_heads, dim);
        if matches!(dim, 64 | 128) {
            spec = spec.with_kv_dtype(dtype);
        }
        spec.variant.window_left = window;
        spec
    })
}

/// New tokens and keys.
fn request() -> impl Strategy<Value = (u32, u32)> {
    let edges = prop::sample::select(&[8u32, 9, 64, 65, 128, 4095, 4096, 4097]);
    let queries = prop_oneof![
        16 => Just(1u32),
        2 => 1u32..9,
        1 => 9u32..65,
        8 => 65u32..1500,
        1 => edges,
    ];
    let keys = prop_oneof![3 => 0u32..2000, 1 => 0u32..40_000];
    (queries, keys).prop_map(|(queries, keys)| (queries, queries + keys))
}

/// Every request of random batches has the kernels, tiles and pieces that it has alone, and many batches share SMs.
#[test]
fn every_request_is_computed_as_alone() {
    let config = cases(2000);
    let shared = Cell::new([0, 0]);
    let mut runner = TestRunner::new(config.clone());
    let names =
        prop_oneof![4 => Just("h200"), 1 => Just("h100"), 1 => Just("a100"), 1 => Just("cpu")];
    let pod = prop_oneof![
        2 => Just(PodMode::Auto),
        4 => Just(PodMode::Fused),
        1 => Just(PodMode::Streams),
        1 => Just(PodMode::Tickets),
    ];
    let merge = prop_oneof![4 => Just(MergeMode::Auto), 1 => Just(MergeMode::Fused)];
    let requests = prop::collection::vec(request(), 1..8);
    let page = prop_oneof![4 => Just(16u32), 1 => Just(64), 1 => Just(5)];
    runner
        .run(
            &(spec(), names, requests, page, (pod, merge), 1u32..40),
            |(spec, name, requests, page, (pod, merge), pages)| {
                let device = DeviceDescription::named(name).unwrap();
                let batch = batch(&requests, page);
                let options = fixed(16 * pages * page)
                    .with_pod(pod)
                    .with_merge_mode(merge);
                let mut planner = Planner::new();
                let Ok(together) = planner.plan(&spec, &batch, &device, &options) else {
                    // Such heads have no such merges there, or one of the requests no kernel for its pages.
                    let refused = |request| {
                        let own = only(&batch, request);
                        planner.plan(&spec, &own, &device, &options).is_err()
                    };
                    prop_assert!((0..batch.requests()).any(refused));
                    return Ok(());
                };
                prop_assert_eq!(together.verify(&batch), Ok(()));
                if let Some(config) = together.pod.and_then(|pod| pod.config) {
                    let apart = device.pod.configs[config as usize].decode.is_none();
                    let mut counts = shared.get();
                    counts[usize::from(apart)] += 1;
                    shared.set(counts);
                }
                for request in 0..batch.requests() {
                    let own = only(&batch, request);
                    let alone = planner.plan(&spec, &own, &device, &options).unwrap();
                    prop_assert_eq!(together.merge_mode, alone.merge_mode);
                    let (first, tokens) = (batch.qo_indptr[request], batch.q_len(request));
                    for token in [0, tokens / 3, tokens / 2, tokens - 1] {
                        let by = computed_by(&together, first + token);
                        let by_own = computed_by(&alone, token);
                        prop_assert!(alike(&by, &by_own), "{:?} and {:?}", by, by_own);
                    }
                }
                Ok(())
            },
        )
        .unwrap();
    let least = config.cases / 40;
    let shared = shared.get();
    assert!(shared.iter().all(|&count| count >= least), "{shared:?}");
}

/// A prompt beside page lists by KV head has all heads of its tokens, as it has in a batch of its own: 1,024 tokens of 32 heads are
/// not cut at 1,024 keys.
#[test]
fn prompts_beside_lists_are_cut_where_they_are_alone() {
    let (spec, keys) = (Spec::new(32, 8, 128), 16_384);
    let device = DeviceDescription::named("h200").unwrap();
    let pages: Vec<u32> = (0..keys / PAGE).collect();
    let strides = KvLayout::Hnd.strides(PAGE, 8, 128);
    for (tokens, pieces) in [(1024, 1), (100, 16)] {
        let mut lists = PagesByHead::new(&spec, strides, keys / PAGE).unwrap();
        lists.push_whole(tokens, &pages, keys).unwrap();
        let alone = batch(&[(tokens, keys)], PAGE);
        for (spec, batch) in [(spec, alone), (*lists.spec(), lists.batch())] {
            let plan = plan(&spec, &device, &batch, &fixed(1024));
            let last = plan.items.iter().map(|item| item.kv_begin).max();
            assert_eq!(last, Some((pieces - 1) * 1024), "{plan}");
        }
    }
}

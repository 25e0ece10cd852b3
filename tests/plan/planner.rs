//! Properties of plans, over random batches.
//!
//! `TANDEM_CASES=1000000 cargo test --release --test plan -- planner::` is the long run.

use proptest::prelude::*;
use tandem_attn::{
    plan::{
        BatchLimits, Bound, DeviceDescription, Join, Kernel, PackRule, Plan, PlanOptions, Planner,
        Rules, SplitMode, Tile, TileGroup, Update, WorkspaceLayout, pod::PodMode,
    },
    problem::{Batch, PageTable, Part, Spec},
};

fn cases(default: u32) -> ProptestConfig {
    let cases = std::env::var("TANDEM_CASES")
        .ok()
        .and_then(|cases| cases.parse().ok());
    ProptestConfig {
        cases: cases.unwrap_or(default),
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn spec() -> impl Strategy<Value = Spec> {
    let heads = prop_oneof![
        Just((4, 4)),
        Just((8, 2)),
        Just((32, 8)),
        Just((7, 1)),
        Just((16, 1))
    ];
    let window = prop_oneof![3 => Just(None), 1 => (0u32..200).prop_map(Some)];
    (heads, any::<bool>(), window).prop_map(|((q_heads, kv_heads), causal, window)| {
        let mut spec = Spec::new(q_heads, kv_heads, 128);
        spec.variant.causal = causal;
        spec.variant.window_left = window;
        spec
    })
}

/// One request: where it leaves the table of an earlier one, how long it goes on, and its queries.
#[derive(Clone, Debug)]
struct Request {
    parent: prop::sample::Index,
    shared: prop::sample::Index,
    own: u32,
    queries: u32,
}

fn request() -> impl Strategy<Value = Request> {
    let own = prop_oneof![8 => 0u32..40, 2 => 0u32..600, 1 => 0u32..6000];
    let queries = prop_oneof![1 => Just(0u32), 8 => Just(1), 3 => 1u32..9, 2 => 1u32..300];
    (
        any::<prop::sample::Index>(),
        any::<prop::sample::Index>(),
        own,
        queries,
    )
        .prop_map(|(parent, shared, own, queries)| Request {
            parent,
            shared,
            own,
            queries,
        })
}

/// A batch whose tables share prefixes, as a prefix cache hands them out.
fn batch() -> impl Strategy<Value = Batch> {
    let page_size = prop_oneof![Just(1u32), Just(3), Just(16), Just(64)];
    (page_size, prop::collection::vec(request(), 0..24)).prop_map(|(page_size, requests)| {
        let mut tables: Vec<(Vec<u32>, u32)> = Vec::new();
        let mut pages = 0;
        let mut q_indptr = vec![0];
        for request in &requests {
            let mut table = Vec::new();
            if !tables.is_empty() {
                let (parent, parent_len) = &tables[request.parent.index(tables.len())];
                let full = (parent_len / page_size) as usize;
                table.extend_from_slice(&parent[..request.shared.index(full + 1)]);
            }
            let kv_len = (table.len() as u32 * page_size + request.own).max(request.queries);
            let more = kv_len.div_ceil(page_size) - table.len() as u32;
            table.extend(pages..pages + more);
            pages += more;
            tables.push((table, kv_len));
            q_indptr.push(q_indptr.last().unwrap() + request.queries);
        }
        let mut table = PageTable::new(page_size, pages.max(1));
        for (pages, kv_len) in &tables {
            table.push(pages, *kv_len);
        }
        Batch::new(q_indptr, table)
    })
}

/// The same batch with its first requests' shared first pages as a part of their own.
fn composed(batch: &Batch) -> Batch {
    let [part] = batch.parts.as_slice() else {
        unreachable!("made of one part")
    };
    let table = &part.table;
    let mut prefix = Part::new(vec![0], PageTable::new(table.page_size, table.pool_pages));
    let mut suffix = Part::new(
        part.q_indptr.clone(),
        PageTable::new(table.page_size, table.pool_pages),
    );
    for row_block in 0..table.row_blocks() {
        let pages = table.pages(row_block);
        let queries = part.q_range(row_block).len() as u32;
        let kv_len = table.kv_len(row_block);
        // Leave every query its own position in the suffix.
        let cut = ((kv_len - queries) / table.page_size / 2) as usize;
        prefix
            .table
            .push(&pages[..cut], cut as u32 * table.page_size);
        prefix
            .keys_after
            .push(kv_len - cut as u32 * table.page_size);
        prefix.q_indptr.push(part.q_indptr[row_block + 1]);
        suffix
            .table
            .push(&pages[cut..], kv_len - cut as u32 * table.page_size);
    }
    Batch::composed(batch.qo_indptr.clone(), vec![prefix, suffix])
}

fn split() -> impl Strategy<Value = SplitMode> {
    prop_oneof![
        4 => Just(SplitMode::Makespan),
        1 => Just(SplitMode::Off),
        1 => (1u32..8).prop_map(|chunks| SplitMode::Fixed { tokens: chunks * 192 }),
    ]
}

fn packing() -> impl Strategy<Value = PackRule> {
    prop_oneof![
        4 => Just(PackRule::Fastest),
        2 => Just(PackRule::Exact),
        1 => Just(PackRule::Off),
    ]
}

/// The planner's own decisions, or some by rules, good or not.
fn rules() -> impl Strategy<Value = Rules> {
    let odd: fn(&Join) -> bool = |edge| (edge.rows_left + edge.parent_keys) % 2 == 1;
    let join = prop_oneof![
        6 => Just(None),
        1 => Just(Some(Join::has_many_rows as fn(&Join) -> bool)),
        1 => Just(Some(Join::has_many_rows_or_no_more_tiles as fn(&Join) -> bool)),
        1 => Just(Some(odd)),
    ];
    (join, prop::bool::weighted(0.2)).prop_map(|(join, by_mean_load)| Rules {
        join,
        chunk: by_mean_load.then_some(|chunk| {
            let keys = chunk.keys_of_units.div_ceil(u64::from(chunk.ctas));
            (keys.max(1) as u32).next_multiple_of(chunk.alignment)
        }),
        ..Rules::default()
    })
}

fn pod() -> impl Strategy<Value = PodMode> {
    prop::sample::select(
        &[
            PodMode::Auto,
            PodMode::Serial,
            PodMode::Streams,
            PodMode::Fused,
            PodMode::Tickets,
        ][..],
    )
}

fn device() -> impl Strategy<Value = DeviceDescription> {
    let names: Vec<_> = DeviceDescription::names().collect();
    prop::sample::select(names).prop_map(|name| DeviceDescription::named(name).unwrap())
}

proptest! {
    #![proptest_config(cases(20_000))]

    #[test]
    fn a_plan_computes_its_batch(
        spec in spec(),
        batch in batch(),
        in_parts in any::<bool>(),
        device in device(),
        split in split(),
        packing in packing(),
        rules in rules(),
        pod in pod(),
        states_per_token in 2u32..9,
        without_packing in any::<bool>(),
    ) {
        let batch = if in_parts { composed(&batch) } else { batch };
        let options = PlanOptions::default().with_packing(packing).with_split(split).with_pod(pod);
        let mut planner = Planner::with_rules(rules);
        let plan = planner.plan(&spec, &batch, &device, &options).unwrap();
        prop_assert_eq!(plan.verify(&batch), Ok(()));

        // The same again, whatever the planner saw before, is the same to the last bit.
        let again = Planner::with_rules(rules).plan(&spec, &batch, &device, &options).unwrap();
        prop_assert_eq!(&plan, &again);
        planner.plan_into(&spec, &batch, &device, &options, &mut plan.clone()).unwrap();

        // Within a bound that was known before.
        let kv_len = (0..batch.requests()).map(|request| batch.kv_len(request)).max();
        let limits = BatchLimits::decodes(batch.requests() as u32, kv_len.unwrap_or(0) as u32, 1)
            .with_query_tokens(batch.total_q())
            .with_page_ids(plan.page_ids.len() as u32)
            .with_parts(batch.parts.len() as u32)
            .with_states_per_token(states_per_token);
        // Or what it takes without packing, which packing may exceed: then the planner makes several attempts.
        let bound = match without_packing {
            true => Bound::of(&planner.plan(&spec, &batch, &device, &options.with_packing(PackRule::Off)).unwrap()),
            false => Bound::new(&spec, &device, &options, &limits).unwrap(),
        };
        let within = options.with_bound(bound);
        let bounded = planner.plan(&spec, &batch, &device, &within).unwrap();
        prop_assert_eq!(bounded.verify(&batch), Ok(()));
        prop_assert_eq!(bound.check(&Bound::of(&bounded)), Ok(()));
        let layout = WorkspaceLayout::new(&spec, &bound);
        prop_assert_eq!(layout.write(&bounded, &mut vec![0; layout.upload_bytes as usize]), Ok(()));
    }

    /// Tables that grow within their last pages: the plan is patched, or left as it is.
    #[test]
    fn a_plan_grows_with_its_batch(
        spec in spec(),
        batch in batch(),
        in_parts in any::<bool>(),
        evenly in any::<bool>(),
        growth in prop::collection::vec(0u32..20, 24),
        split in split(),
        packing in packing(),
        within_what_it_takes_without in any::<bool>(),
    ) {
        let batch = if in_parts { composed(&batch) } else { batch };
        let device = DeviceDescription::named("h200").unwrap();
        let options = PlanOptions::default().with_packing(packing).with_split(split);
        let mut planner = Planner::new();
        let mut within = options;
        if within_what_it_takes_without {
            let apart = options.with_packing(PackRule::Off);
            within.bound = Some(Bound::of(&planner.plan(&spec, &batch, &device, &apart).unwrap()));
        }
        let plan = planner.plan(&spec, &batch, &device, &within).unwrap();
        prop_assert_eq!(plan.clone().grow(&batch), plan.growable.then_some(Update::Kept));

        let mut later = batch.clone();
        let last = later.parts.len() - 1;
        let Part { table, .. } = &mut later.parts[last];
        let page_size = table.page_size;
        for (len, growth) in table.last_page_len.iter_mut().zip(&growth).filter(|(len, _)| **len > 0) {
            *len = (*len + if evenly { 1 } else { *growth }).min(page_size);
        }
        if last == 1 {
            let grown = batch.parts[1].table.last_page_len.iter().zip(&later.parts[1].table.last_page_len);
            let grown: Vec<_> = grown.map(|(before, after)| after - before).collect();
            for (after, grown) in later.parts[0].keys_after.iter_mut().zip(grown) {
                *after += grown;
            }
        }
        later.check(&spec).unwrap();
        let mut grown = plan.clone();
        match grown.grow(&later) {
            Some(_) => prop_assert_eq!(grown.verify(&later), Ok(())),
            None => prop_assert_eq!(&grown, &plan),
        }
        let one_each = batch.qo_indptr.windows(2).all(|pair| pair[1] - pair[0] == 1);
        let full = batch.parts[last].table.last_page_len.contains(&page_size);
        if one_each && evenly && !full && last == 0 && batch.requests() > 0 {
            let patched = (plan.grows_by != Some(0)).then_some(Update::Patched);
            prop_assert_eq!(plan.clone().grow(&later), patched);
            let slides = spec.variant.window_left.is_some();
            prop_assert_eq!(plan.grows_by.is_some(), slides && matches!(split, SplitMode::Fixed { .. }));
        }

        let mut updated = plan.clone();
        planner.update(&spec, &later, &device, &options, &mut updated).unwrap();
        prop_assert_eq!(updated.verify(&later), Ok(()));
        // Other pages: the plan is made anew.
        let table = &mut later.parts[last].table;
        if let Some(page) = table.indices.last_mut() {
            *page = table.pool_pages;
            table.pool_pages += 1;
            let mut updated = plan.clone();
            prop_assert_eq!(updated.grow(&later), None);
            let update = planner.update(&spec, &later, &device, &options, &mut updated);
            prop_assert_eq!(update, Ok(Update::Planned));
            prop_assert_eq!(updated.verify(&later), Ok(()));
        }
    }

    /// Token by token: a plan that was patched has the pieces of a new one.
    #[test]
    fn plans_with_fixed_splits_grow_into_new_ones(
        spec in spec(), batch in batch(), steps in prop::collection::vec(0u32..4, 1..6), chunks in 1u32..8,
    ) {
        let device = DeviceDescription::named("h200").unwrap();
        let split = SplitMode::Fixed { tokens: chunks * 192 };
        let options = PlanOptions::default().with_split(split);
        let mut planner = Planner::new();
        let mut plan = planner.plan(&spec, &batch, &device, &options).unwrap();
        let mut batch = batch;
        for step in steps {
            let table = &mut batch.parts[0].table;
            let page_size = table.page_size;
            for len in table.last_page_len.iter_mut().filter(|len| **len > 0) {
                *len = (*len + step).min(page_size);
            }
            planner.update(&spec, &batch, &device, &options, &mut plan).unwrap();
            prop_assert_eq!(plan.verify(&batch), Ok(()));
            let new = planner.plan(&spec, &batch, &device, &options).unwrap();
            for token in 0..batch.total_q() {
                prop_assert_eq!(pieces(&plan, token), pieces(&new, token));
            }
        }
    }

    /// Requests in another order: every request still has the pieces of its keys, in order; where splits are
    /// fixed, the very same pieces, alone as in any batch.
    #[test]
    fn fixed_splits_do_not_depend_on_the_batch(
        spec in spec(),
        batch in batch(),
        chunks in 1u32..8,
        request in any::<prop::sample::Index>(),
        device in device(),
        pod in pod(),
    ) {
        if batch.requests() == 0 {
            return Ok(()); // an assumption would end the long run: too many cases are rejected
        }
        let split = SplitMode::Fixed { tokens: chunks * 192 };
        let options = PlanOptions::default().with_split(split).with_pod(pod);
        let plan = Planner::new().plan(&spec, &batch, &device, &options).unwrap();
        let request = request.index(batch.requests());
        let alone = only(&batch, request);
        let plan_alone = Planner::new().plan(&spec, &alone, &device, &options).unwrap();
        prop_assert_eq!(plan.merge_mode, plan_alone.merge_mode);
        let first = batch.qo_indptr[request];
        for token in 0..batch.q_len(request) {
            prop_assert_eq!(pieces(&plan, first + token), pieces(&plan_alone, token));
        }
    }
}

/// Chunks that begin where tiles of the whole prompt do, of as many tokens as take the same kernel, and of as many rows as
/// are cut at the same keys.
#[test]
fn with_fixed_splits_chunks_have_the_pieces_of_the_whole_prompt() {
    let of = |plan: &Plan, token| {
        let mut pieces = pieces(plan, token);
        pieces.retain(|&(kernel, ..)| kernel == Kernel::Prefill);
        assert!(!pieces.is_empty(), "{plan}");
        pieces
    };
    for (name, q_heads, kv_heads, dim, window, tokens, before, ends, cut) in [
        // 512 tokens of 32 heads are 16,384 rows.
        ("h200", 32, 8, 128, None, 512, 0, [512, 1024, 2000], 32_768),
        (
            "h200",
            32,
            8,
            128,
            None,
            512,
            40_000,
            [640, 1280, 1999],
            32_768,
        ),
        (
            "h200",
            64,
            8,
            64,
            None,
            4096,
            70_000,
            [256, 512, 700],
            32_768,
        ),
        (
            "h200",
            32,
            8,
            128,
            None,
            48_000,
            90_000,
            [256, 640, 1000],
            48_000,
        ),
        (
            "h200",
            16,
            16,
            256,
            None,
            1024,
            70_000,
            [512, 1024, 1536],
            32_768,
        ),
        (
            "h200",
            32,
            8,
            128,
            Some(9000),
            1024,
            70_000,
            [512, 1024, 1536],
            32_768,
        ),
        // Of 4 heads as many are 2,048.
        ("h200", 4, 1, 128, None, 1024, 9000, [256, 512, 600], 1024),
        (
            "a100",
            32,
            8,
            128,
            None,
            512,
            40_000,
            [512, 1024, 2000],
            32_768,
        ),
        (
            "cpu",
            32,
            8,
            128,
            None,
            512,
            40_000,
            [512, 1024, 2000],
            32_768,
        ),
    ] {
        let device = DeviceDescription::named(name).unwrap();
        let mut spec = Spec::new(q_heads, kv_heads, dim);
        spec.variant.window_left = window;
        let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens });
        let plan = |begin: u32, end: u32| {
            let (keys, page) = (before + end, 16);
            let mut table = PageTable::new(page, keys.div_ceil(page));
            table.push(&(0..keys.div_ceil(page)).collect::<Vec<_>>(), keys);
            let batch = Batch::new(vec![0, end - begin], table);
            let plan = Planner::new()
                .plan(&spec, &batch, &device, &options)
                .unwrap();
            assert_eq!(plan.verify(&batch), Ok(()));
            plan
        };
        let whole = plan(0, ends[2]);
        let mut begin = 0;
        for end in ends {
            let chunk = plan(begin, end);
            for token in begin..end {
                let of_whole = of(&whole, token);
                assert_eq!(of(&chunk, token - begin), of_whole, "{name}: {token}");
                let is_cut =
                    |&(.., key): &(Kernel, Tile, u32, u32, u32, u32)| key.is_multiple_of(cut);
                assert!(
                    of_whole[..of_whole.len() - 1].iter().all(is_cut),
                    "{of_whole:?}"
                );
            }
            begin = end;
        }
    }
}

/// A request of a batch by itself.
fn only(batch: &Batch, request: usize) -> Batch {
    let table = &batch.parts[0].table;
    let mut own = PageTable::new(table.page_size, table.pool_pages);
    own.push(table.pages(request), table.kv_len(request));
    Batch::new(vec![0, batch.q_len(request)], own)
}

/// Kernel, tile, packed heads, rows and keys of a query token's items, in merging order.
fn pieces(plan: &Plan, token: u32) -> Vec<(Kernel, Tile, u32, u32, u32, u32)> {
    let mut pieces = Vec::new();
    for group in &plan.groups {
        for item in plan.items_of(group) {
            let has = if item.is_gathered() {
                plan.rows_of(item).iter().any(|row| row.token == token)
            } else {
                (item.rows_begin..item.rows_begin + item.rows).contains(&token)
            };
            if has {
                let TileGroup {
                    kernel, tile, pack, ..
                } = *group;
                pieces.push((kernel, tile, pack, item.rows, item.kv_begin, item.kv_end));
            }
        }
    }
    pieces.sort_unstable_by_key(|&(kernel, tile, pack, rows, begin, end)| {
        (begin, end, kernel, tile.m, tile.n, pack, rows)
    });
    pieces
}

#[test]
fn a_plan_without_queries_is_busy_for_no_time() {
    let mut table = PageTable::new(16, 1);
    table.push(&[0], 9);
    let device = DeviceDescription::named("h200").unwrap();
    let batch = Batch::new(vec![0, 0], table);
    let plan = Planner::new().plan(
        &Spec::new(8, 2, 128),
        &batch,
        &device,
        &PlanOptions::default(),
    );
    let busy = plan.unwrap().schedule(&device).busy();
    assert_eq!(format!("{busy:.0}"), "0");
}

#[test]
fn who_merges_is_chosen_by_tiles_and_merges() {
    use tandem_attn::plan::MergeMode;
    let device = DeviceDescription::named("h200").unwrap();
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
        let options = PlanOptions::default().with_split(split);
        let batch = Batch::new(qo_indptr, table);
        Planner::new()
            .plan(&spec, &batch, &device, &options)
            .unwrap()
    };
    let fixed = SplitMode::Fixed { tokens: 512 };
    for (queries, len, split, merges, mode) in [
        (vec![1], 65536, SplitMode::Makespan, true, MergeMode::Fused),
        (
            vec![1; 256],
            1024,
            SplitMode::Makespan,
            false,
            MergeMode::Kernel,
        ),
        (vec![1; 256], 1024, fixed, true, MergeMode::Kernel),
        (vec![1], 65536, fixed, true, MergeMode::Kernel),
        (
            vec![1, 300],
            65536,
            SplitMode::Makespan,
            true,
            MergeMode::Kernel,
        ),
    ] {
        let plan = plan(&queries, len, split);
        assert_eq!(!plan.merges.is_empty(), merges, "{queries:?} × {len}");
        assert_eq!(plan.merge_mode, mode, "{queries:?} × {len}, {split:?}");
    }
}

/// A merge has the rows of a KV head's query heads. If these are many, CTAs that merge last are late.
#[test]
fn who_merges_depends_on_the_rows_of_a_merge() {
    use tandem_attn::plan::MergeMode;
    let device = DeviceDescription::named("h200").unwrap();
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
        let mut table = PageTable::new(16, 256);
        table.push(&(0..256).collect::<Vec<_>>(), 4096);
        let spec = Spec::new(q_heads, kv_heads, head_dim);
        let batch = Batch::new(vec![0, 1], table);
        let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
        let plan = plan.unwrap();
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
    let device = DeviceDescription::named("h200").unwrap();
    let joint = |batch: &Batch| {
        let plan = Planner::new().plan(&spec, batch, &device, &PlanOptions::default());
        let plan = plan.unwrap();
        plan.verify(batch).unwrap();
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
        let device = DeviceDescription::named(name).unwrap();
        let options = PlanOptions::default().with_split(SplitMode::Off);
        let plan = Planner::new()
            .plan(&spec, &batch, &device, &options)
            .unwrap();
        assert_eq!(plan.verify(&batch), Ok(()), "{name}");
        let alone = plan.merges.iter().filter(|merge| merge.slots == 1).count();
        let mixed = plan.items.iter().any(|item| {
            !item.is_gathered()
                && item.part == 0
                && item.rows_begin < 100
                && item.rows_begin + item.rows > 100
        });
        assert!(!mixed || alone > 0, "{name}: {plan}");
    }
    let device = DeviceDescription::named("h200").unwrap();
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &PlanOptions::default())
        .unwrap();
    assert!(plan.merges.iter().any(|merge| merge.slots == 1), "{plan}");
}

/// Four queries of which the first ends before the last piece begins. Once keys behind the part move it on, it reads that.
#[test]
fn a_plan_does_not_grow_into_keys_that_a_row_has_not_seen() {
    let batch = |behind: u32| {
        let mut first = Part::new(vec![0, 4], PageTable::new(16, 20));
        first.table.push(&(0..13).collect::<Vec<_>>(), 194);
        first.keys_after = vec![behind];
        let mut second = Part::new(vec![0, 3, 4], PageTable::new(16, 20));
        second.table.push(&[], 0);
        second.table.push(&[13], behind);
        Batch::composed(vec![0, 4], vec![first, second])
    };
    let device = DeviceDescription::named("h200").unwrap();
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 192 });
    let plan = Planner::new().plan(&Spec::new(8, 2, 128), &batch(1), &device, &options);
    let plan = plan.unwrap();
    assert_eq!(plan.verify(&batch(1)), Ok(()));
    assert_eq!(plan.clone().grow(&batch(3)), None);
}

/// Fewer keys behind those of a part: its queries stand further left, where a window shows what it had passed.
#[test]
fn a_plan_does_not_follow_queries_that_move_back() {
    let batch = |after: u32| {
        let mut first = Part::new(vec![0, 1], PageTable::new(16, 20));
        first.table.push(&(0..10).collect::<Vec<_>>(), 160);
        first.keys_after = vec![after];
        let mut second = Part::new(vec![0, 1], PageTable::new(16, 20));
        second.table.push(&[10], 3);
        Batch::composed(vec![0, 1], vec![first, second])
    };
    let mut spec = Spec::new(8, 2, 128);
    spec.variant.window_left = Some(100);
    let device = DeviceDescription::named("h200").unwrap();
    let options = PlanOptions::default();
    let plan = Planner::new()
        .plan(&spec, &batch(3), &device, &options)
        .unwrap();
    assert_eq!(plan.clone().grow(&batch(3)), Some(Update::Kept));
    assert_eq!(plan.clone().grow(&batch(2)), None);
}

/// A key goes from the end of a part to one behind it: queries stand where they stood, and the part ends earlier.
#[test]
fn a_plan_does_not_follow_a_table_that_lost_keys() {
    let batch = |keys: u32, behind: u32| {
        let mut first = Part::new(vec![0, 1], PageTable::new(16, 20));
        first.table.push(&(0..10).collect::<Vec<_>>(), keys);
        first.keys_after = vec![behind];
        let mut second = Part::new(vec![0, 1], PageTable::new(16, 20));
        second.table.push(&[10], behind);
        Batch::composed(vec![0, 1], vec![first, second])
    };
    let device = DeviceDescription::named("h200").unwrap();
    let options = PlanOptions::default();
    let plan = Planner::new().plan(&Spec::new(8, 2, 128), &batch(158, 3), &device, &options);
    let plan = plan.unwrap();
    assert_eq!(plan.verify(&batch(158, 3)), Ok(()));
    let mut grown = plan.clone();
    assert_eq!(grown.grow(&batch(159, 3)), Some(Update::Patched));
    assert_eq!(grown.verify(&batch(159, 3)), Ok(()));
    assert_eq!(plan.clone().grow(&batch(157, 4)), None);
}

/// New keys are of the request alone, even where another has the same pages: its own queries see them one after another.
#[test]
fn new_keys_stay_out_of_shared_parts() {
    let mut table = PageTable::new(4, 8);
    for _ in 0..2 {
        table.push(&[0, 1, 2], 12);
    }
    let shared = Batch::new(vec![0, 2, 4], table).share_prefixes();
    let [common, own] = &shared.parts[..] else {
        panic!("{shared:?}");
    };
    assert_eq!(common.table.indices, [0, 1]);
    assert_eq!(own.table.indices, [2, 2]);
}

/// A plan grows only for the device and the options for which it was made, whoever made it.
#[test]
fn an_update_for_another_device_or_other_options_plans_anew() {
    let batch = |keys: u32| {
        let mut table = PageTable::new(16, 1000);
        table.push(&(0..1000).collect::<Vec<_>>(), keys);
        Batch::new(vec![0, 1], table)
    };
    let [h200, h100] = ["h200", "h100"].map(|name| DeviceDescription::named(name).unwrap());
    let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 512 });
    let bound = Bound {
        slots: 1,
        ..Bound::of(
            &Planner::new()
                .plan(&Spec::new(8, 2, 128), &batch(15_990), &h200, &fixed)
                .unwrap(),
        )
    };
    let (spec, auto) = (Spec::new(8, 2, 128), PlanOptions::default());
    let plan = Planner::new().plan(&spec, &batch(15_990), &h200, &auto);
    let plan = plan.unwrap();
    let updated = |device, options| {
        let mut plan = plan.clone();
        let done = Planner::new().update(&spec, &batch(15_991), device, options, &mut plan);
        (done, plan)
    };
    assert_eq!(updated(&h200, &auto).0, Ok(Update::Patched));
    for (device, options) in [(&h100, &auto), (&h200, &fixed)] {
        let new = Planner::new().plan(&spec, &batch(15_991), device, options);
        assert_eq!(
            updated(device, options),
            (Ok(Update::Planned), new.unwrap())
        );
    }
    let (done, within) = updated(&h200, &auto.with_bound(bound));
    assert_eq!(done, Ok(Update::Planned));
    assert!(within.slots <= 1 && plan.slots > 1);

    // What a file does not say is not taken for granted.
    let text = serde_json::to_string(&plan).unwrap();
    let mut read: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(read, plan);
    let done = Planner::new().update(&spec, &batch(15_991), &h200, &auto, &mut read);
    assert_eq!(done, Ok(Update::Planned));
}

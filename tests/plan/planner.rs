//! Properties of plans, over random batches.
//!
//! `TANDEM_CASES=1000000 cargo test --release --test plan -- planner::` is the long run.

use proptest::prelude::*;
use tandem_attn::{
    plan::{
        BatchLimits, Bound, DeviceDescription, Join, PackRule, PlanOptions, Planner, Rules,
        SplitMode, Update, WorkspaceLayout, pod::PodMode,
    },
    problem::{Batch, PageTable, Part, Spec},
};

use crate::{
    pieces::{only, pieces},
    problems::{batch_of, cases, request},
};

/// Batches whose tables share prefixes, of more and longer requests than [`batch`](crate::problems::batch) has.
fn batch() -> impl Strategy<Value = Batch> {
    let own = prop_oneof![8 => 0u32..40, 2 => 0u32..600, 1 => 0u32..6000];
    let queries = prop_oneof![1 => Just(0u32), 8 => Just(1), 3 => 1u32..9, 2 => 1u32..300];
    batch_of(prop::collection::vec(request(own, queries), 0..24))
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
            prop_assert_eq!(plan.grows_by.is_some(), spec.variant.window_left.is_some());
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

/// The largest batches that checks accept: sums of units and costs must not overflow.
#[test]
fn the_largest_batches_are_planned() {
    let mut device = DeviceDescription::named("cpu").unwrap();
    let one = |page_size: u32, pages: u32, queries| {
        let mut table = PageTable::new(page_size, pages);
        table.push(&(0..pages).collect::<Vec<_>>(), pages * page_size);
        Batch::new(vec![0, queries], table)
    };
    // 600,000 items of 8,191 heads.
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 1 });
    let (spec, batch) = (Spec::new(8191, 8191, 16), one(1, 600_000, 1));
    let plan = Planner::new().plan(&spec, &batch, &device, &options);
    let plan = plan.unwrap();
    assert_eq!(plan.items.len(), 600_000);
    assert_eq!(plan.units_of(&plan.groups[0]), u32::MAX);
    // Few tokens in a tile of many rows.
    device.sms = 1;
    let (spec, batch) = (Spec::new(1 << 18, 1 << 18, 1024), one(8, 1 << 20, 9));
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    assert!(!plan.unwrap().items.is_empty());
}

/// Sizes of tiles that no kernel has.
#[test]
fn descriptions_with_tiles_beyond_all_bounds_are_refused() {
    let batch = Batch::new(vec![0, 1], {
        let mut table = PageTable::new(16, 1);
        table.push(&[0], 9);
        table
    });
    for (change, said) in [
        (
            (|device| device.decode.keys = Some(u32::MAX)) as fn(&mut DeviceDescription),
            "decode.keys is 4294967295: give 1 to 65536",
        ),
        (
            |device| device.prefill.keys = Some(u32::MAX),
            "prefill.keys",
        ),
        (
            |device| device.decode.rows = vec![1, u32::MAX],
            "decode.rows",
        ),
        (
            |device| device.prefill.by_q_len.last_mut().unwrap().rows = u32::MAX,
            "prefill.by_q_len",
        ),
    ] {
        let mut device = DeviceDescription::named("cpu").unwrap();
        change(&mut device);
        let (spec, options) = (Spec::new(8, 2, 64), PlanOptions::default());
        let error = Planner::new().plan(&spec, &batch, &device, &options);
        let error = error.expect_err(said).to_string();
        assert!(error.contains(said), "{said}: {error}");
    }
}

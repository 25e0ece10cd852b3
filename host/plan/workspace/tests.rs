//! Arrays of a workspace are aligned and disjoint.

use proptest::prelude::*;

use super::*;
use crate::{
    kv::PagesByHead,
    plan::Planner,
    problem::{Batch, Dtype, KvLayout, PageTable, Part, ProblemError},
};

fn sections(layout: &WorkspaceLayout) -> [&Range<u64>; 24] {
    [
        &layout.records,
        &layout.items,
        &layout.rows,
        &layout.merges,
        &layout.left_merges,
        &layout.merge_slots,
        &layout.page_ids,
        &layout.ancestors,
        &layout.masks,
        &layout.conversions,
        &layout.converted_ids,
        &layout.partial_out,
        &layout.partial_lse,
        &layout.arrivals,
        &layout.tickets,
        &layout.counters,
        &layout.padded[0],
        &layout.padded[1],
        &layout.rounded,
        &layout.converted[0],
        &layout.converted[1],
        &layout.converted_done,
        &layout.conversion_control,
        &layout.turns,
    ]
}

#[test]
fn sections_are_aligned_and_disjoint() {
    let bound = Bound {
        items: 3,
        rows: 1,
        page_ids: 1000,
        merges: 7,
        slots: 9,
        ancestors: 5,
        mask_words: 13,
        padded_tokens: 0,
        converted_pages: 2,
    };
    let layout = WorkspaceLayout::new(&Spec::new(32, 8, 128), &bound);
    let sections = sections(&layout);
    assert!(
        sections
            .iter()
            .all(|section| section.start.is_multiple_of(256))
    );
    assert!(sections.windows(2).all(|pair| pair[0].end <= pair[1].start));
    assert_eq!(layout.items.end - layout.items.start, 120);
    assert_eq!(
        layout.partial_out.end - layout.partial_out.start,
        9 * 32 * 128 * 4
    );
    assert_eq!(
        (layout.upload_bytes, layout.bytes),
        (layout.converted_ids.end, layout.turns.end)
    );
}

#[test]
fn a_plan_is_written_where_the_layout_says() {
    let spec = Spec::new(8, 2, 64);
    let device = DeviceDescription::named("h200").unwrap();
    let mut table = PageTable::new(16, 10_000);
    table.push(&(0..5000).collect::<Vec<_>>(), 80_000);
    let batch = Batch::new(vec![0, 1], table);
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &PlanOptions::default())
        .unwrap();
    assert!(plan.slots > 1, "a long request alone is cut");
    let mut bound = Bound::of(&plan);
    let layout = WorkspaceLayout::new(&spec, &bound);
    let mut upload = vec![0xAA; layout.upload_bytes as usize];
    layout.write(&plan, &mut upload).unwrap();
    let at = |range: &Range<u64>| upload[range.start as usize..range.end as usize].to_vec();
    assert_eq!(
        at(&layout.page_ids),
        bytemuck::cast_slice::<_, u8>(&plan.page_ids)
    );
    assert_eq!(
        at(&layout.items),
        bytemuck::cast_slice::<_, u8>(&plan.items)
    );

    bound.slots -= 1;
    let narrow = WorkspaceLayout::new(&spec, &bound);
    let needed = u64::from(plan.slots);
    let error = PlanError::Bound {
        what: "partial states",
        needed,
        bound: needed - 1,
    };
    assert_eq!(narrow.write(&plan, &mut upload), Err(error.clone()));
    assert_eq!(bound.check(&Bound::of(&plan)), Err(error));
}

/// The errors of limits contain their values. Page sizes that no table has were once accepted.
#[test]
fn limits_that_no_batch_has_are_refused() {
    let (spec, options) = (Spec::new(32, 8, 128), PlanOptions::default());
    let device = DeviceDescription::named("h200").unwrap();
    let refused = |limits| Bound::new(&spec, &device, &options, &limits).unwrap_err();
    for got in [0, 4097, u32::MAX] {
        let error = refused(BatchLimits::decodes(4, 1000, got));
        let PlanError::Problem(ProblemError::PageSize { got: said, .. }) = error else {
            panic!("{error}");
        };
        assert_eq!(said, got);
    }
    let limits = BatchLimits::decodes(4, 1000, 16).with_states_per_token(u32::MAX);
    let text = refused(limits).to_string();
    assert!(
        text.contains("are needed, past 4294967295") && text.contains("BatchLimits"),
        "{text}"
    );
}

/// The error named only the numbers that follow from the arguments of the limits.
#[test]
fn a_batch_of_more_requests_than_the_limits_have_names_what_to_raise() {
    let (spec, options) = (Spec::new(8, 2, 64), PlanOptions::default());
    let device = DeviceDescription::named("h200").unwrap();
    let limits = BatchLimits::decodes(4, 128, 16).with_query_tokens(64);
    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
    let mut table = PageTable::new(16, 100);
    (0..9).for_each(|first| table.push(&(8 * first..8 * first + 8).collect::<Vec<_>>(), 128));
    let batch = Batch::new((0..=9).collect(), table);
    let options = options.with_bound(bound);
    let error = Planner::new()
        .plan(&spec, &batch, &device, &options)
        .unwrap_err();
    let text = error.to_string();
    for part in [
        "72 page ids",
        "allows 32",
        "BatchLimits::decodes",
        "requests",
        "kv_len",
        "with_page_ids",
    ] {
        assert!(text.contains(part), "{text}");
    }
}

/// A request has a last page in each part, and each may not be full.
#[test]
fn prompts_in_two_parts_have_room_for_two_last_pages() {
    let (requests, tokens) = (10, 16);
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let device = DeviceDescription::named("h200").unwrap();
    let indptr: Vec<u32> = (0..=requests).map(|request| request * tokens).collect();
    let part = |after| {
        let mut table = PageTable::new(16, requests);
        (0..requests).for_each(|page| table.push(&[page], 16));
        Part::new(indptr.clone(), table).with_keys_after(vec![after; requests as usize])
    };
    let batch = Batch::composed(indptr.clone(), vec![part(16), part(0)]);
    let limits = BatchLimits::decodes(requests, 32, 16)
        .with_query_tokens(batch.total_q())
        .with_parts(2)
        .with_prefill_keys(32 * requests);
    let options = PlanOptions::default();
    let bound = Bound::new(&spec, &device, &options, &limits).unwrap();
    let options = options.with_bound(bound);
    let plan = Planner::new()
        .plan(&spec, &batch, &device, &options)
        .unwrap();
    assert_eq!(Bound::of(&plan).converted_pages, 2 * requests);
}

/// Limits of which the largest batch has more pieces than a plan may have were accepted, and the batch was refused with advice that
/// does not help.
#[test]
fn limits_of_more_pieces_than_a_plan_has_are_refused() {
    let spec = Spec::new(8, 2, 128);
    let device = DeviceDescription::named("h200").unwrap();
    let fixed = |tokens| PlanOptions::default().with_split(SplitMode::Fixed { tokens });
    let limits = BatchLimits::decodes(800, 100_000, 16);
    let error = Bound::new(&spec, &device, &fixed(16), &limits).unwrap_err();
    let expected = PlanError::TooManyPieces {
        got: 800 * 6250,
        limit: 1 << 22,
    };
    assert_eq!(error, expected);
    let text = error.to_string();
    for part in ["5000000", "4194304", "larger fixed split"] {
        assert!(text.contains(part), "{text}");
    }
    // A larger split has fewer pieces, and so has a batch of fewer pages.
    Bound::new(&spec, &device, &fixed(32), &limits).unwrap();
    let few_pages = limits.with_page_ids(50_000);
    Bound::new(&spec, &device, &fixed(16), &few_pages).unwrap();
    // Without limits the planner says the same.
    let mut table = PageTable::new(16, 800 * 6250);
    for request in 0..800 {
        let pages = 6250 * request..6250 * (request + 1);
        table.push(&pages.collect::<Vec<_>>(), 100_000);
    }
    let batch = Batch::new((0..=800).collect(), table);
    let planned = Planner::new().plan(&spec, &batch, &device, &fixed(16));
    assert_eq!(planned.err(), Some(expected));
}

/// The requests of a batch by head, as new tokens and keys.
fn by_head(kv_heads: u32, group: u32, requests: &[(u32, u32)]) -> PagesByHead {
    let spec = Spec::new(kv_heads * group, kv_heads, 128);
    let strides = KvLayout::Hnd.strides(16, kv_heads, 128);
    let mut lists = PagesByHead::new(&spec, strides, 1 << 20).unwrap();
    let mut next = 0;
    for &(tokens, keys) in requests {
        let pages: Vec<u32> = (next..next + keys.div_ceil(16)).collect();
        next += pages.len() as u32;
        lists.push_whole(tokens, &pages, keys).unwrap();
    }
    lists
}

/// Plans with the bound that follows from the limits.
fn plan_within(
    lists: &PagesByHead,
    limits: BatchLimits,
    options: PlanOptions,
) -> Result<Plan, PlanError> {
    let device = DeviceDescription::named("h200").unwrap();
    let bound = Bound::new(lists.spec(), &device, &options, &limits)?;
    let options = options.with_bound(bound);
    let plan = Planner::new().plan(lists.spec(), &lists.batch(), &device, &options)?;
    bound.check(&Bound::of(&plan))?;
    Ok(plan)
}

/// A list of a request with several new tokens has the pages of all of them.
#[test]
fn batches_of_several_new_tokens_fit_limits_by_kv_head() {
    let lists = by_head(8, 4, &[(2, 8000); 64]);
    let limits = BatchLimits::decodes(64, 8192, 16).with_query_tokens(64 + 1024);
    plan_within(&lists, limits.by_kv_head(8), PlanOptions::default()).unwrap();
    // Few requests with all page ids, and 8 tokens each.
    let lists = by_head(4, 2, &[(8, 1600); 2]);
    let limits = BatchLimits::decodes(100, 1600, 16).with_page_ids(200);
    plan_within(&lists, limits.by_kv_head(4), PlanOptions::default()).unwrap();
    // Each list has row blocks of its own.
    let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 256 });
    let lists = by_head(8, 4, &[(8, 1000); 50]);
    let limits = BatchLimits::decodes(50, 1000, 16).with_query_tokens(400);
    plan_within(&lists, limits.by_kv_head(8), fixed).unwrap();
    // Lists of more than 8 tokens, with as many requests as tokens.
    let mut lists = by_head(8, 1, &[]);
    let pages: Vec<u32> = (0..63).collect();
    for _ in 0..300 {
        lists.push(40, &[(&pages[..], 1000); 8]).unwrap();
    }
    let limits = BatchLimits::decodes(300 * 40, 1000, 16).by_kv_head(8);
    plan_within(&lists, limits, PlanOptions::default()).unwrap();
}

proptest! {
    #[test]
    fn batches_within_limits_by_kv_head_are_planned(
        kv_heads in prop_oneof![Just(1u32), Just(2), Just(8)],
        group in prop_oneof![Just(1u32), Just(4), Just(16)],
        requests in prop::collection::vec(
            (prop_oneof![3 => 1..9u32, 1 => 9..300u32], 0..2000u32), 1..24,
        ),
        split in prop_oneof![
            Just(SplitMode::Makespan),
            (1..9u32).prop_map(|pages| SplitMode::Fixed { tokens: 64 * pages }),
        ],
    ) {
        let requests: Vec<_> = requests.iter().map(|&(tokens, own)| (tokens, tokens + own)).collect();
        let most = requests.iter().map(|&(_, keys)| keys).max().unwrap_or(0);
        let tokens: u32 = requests.iter().map(|&(tokens, _)| tokens).sum();
        let page_ids: u32 = requests.iter().map(|&(_, keys)| keys.div_ceil(16)).sum();
        let limits = BatchLimits::decodes(requests.len() as u32, most, 16)
            .with_query_tokens(tokens)
            .with_page_ids(page_ids);
        let lists = by_head(kv_heads, group, &requests);
        let options = PlanOptions::default().with_split(split);
        let plan = plan_within(&lists, limits.by_kv_head(kv_heads), options);
        prop_assert!(plan.is_ok(), "{}", plan.unwrap_err());
    }
}

#[test]
fn a_device_that_cannot_be_has_no_bound() {
    let mut device = DeviceDescription::named("h200").unwrap();
    device.sms = 0;
    let limits = BatchLimits::decodes(4, 1000, 16);
    let options = PlanOptions::default();
    let error = Bound::new(&Spec::new(32, 8, 128), &device, &options, &limits).unwrap_err();
    assert!(matches!(error, PlanError::Device { .. }), "{error}");
}

//! What batches of several parts, shared prefixes and masks compute.

use proptest::prelude::*;

use super::super::*;
use crate::{
    exec::Cpu,
    problem::{Batch, Dtype, KvLayout, PageTable, Part, ProblemError, Spec},
    reference::{self, Output},
    step::Rope,
    tensor::{HeadTensors, ShapeError},
    variant::FromLaunch as _,
    variants::{ALIBI, Alibi, SIGMOID, Slopes},
};
fn spec() -> Spec {
    Spec::new(4, 2, 16).with_dtype(Dtype::F32)
}

/// Numbers without a pattern, in [-1, 1).
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn assert_close(got: &Output, right: &Output) {
    let pairs = got
        .out
        .iter()
        .chain(&got.lse)
        .zip(right.out.iter().chain(&right.lse));
    for (index, (got, right)) in pairs.enumerate() {
        assert!(
            got == right || (got - right).abs() < 1e-9,
            "{got} instead of {right} at {index}"
        );
    }
}

#[test]
fn all_layouts_show_the_same_rows() {
    let spec = spec();
    let (page_size, pages) = (4, 3);
    let mut table = PageTable::new(page_size, pages);
    table.push(&[2, 0], 7);
    let row = (spec.kv_heads * spec.head_dim_qk) as usize;
    let (k, v) = (noise(5 * row, 1), noise(5 * row, 2));
    let len = pages as usize * page_size as usize * row;
    let check = |view: KvView<'_, f32>| {
        view.check(&spec, 0, page_size, pages).unwrap();
        for (token, (page, offset)) in [(2, 2), (2, 3), (0, 0), (0, 1), (0, 2)]
            .into_iter()
            .enumerate()
        {
            for head in 0..spec.kv_heads {
                let at = token * row + (head * spec.head_dim_qk) as usize;
                assert_eq!(view.key(page, offset, head, 16), &k[at..at + 16]);
                assert_eq!(view.value(page, offset, head, 16), &v[at..at + 16]);
            }
        }
    };
    for layout in [KvLayout::Nhd, KvLayout::Hnd] {
        let (mut k_pool, mut v_pool) = (vec![f32::NAN; len], vec![f32::NAN; len]);
        let mut pool = KvViewMut::new(&spec, layout, page_size, &mut k_pool, &mut v_pool);
        let slots = table.slots(0, 2..7).unwrap();
        Cpu::append_paged_kv(&spec, pages, &slots, &k, &v, &mut pool).unwrap();
        check(pool.view());
        assert_eq!(pool.view().by_token().is_some(), layout == KvLayout::Nhd);
        let (mut k_single, mut v_single) = (vec![0.0; len], vec![0.0; len]);
        let single = KvViewMut::new(&spec, layout, 1, &mut k_single, &mut v_single);
        let of_tokens = single.view().by_token();
        assert!(of_tokens.is_some(), "pages of one token are tokens already");
        pool.copy_page(&spec, 2, 1).unwrap();
        assert_eq!(pool.view().key(1, 3, 1, 16), pool.view().key(2, 3, 1, 16));
        for (from, to, got) in [(3, 0, 3), (0, 9, 9)] {
            let error = pool.copy_page(&spec, from, to).unwrap_err();
            assert_eq!(error, ShapeError::NoPage { got, pages });
        }

        let mut paired = vec![f32::NAN; 2 * len];
        let page = len / pages as usize;
        for (both, (k, v)) in paired
            .chunks_mut(2 * page)
            .zip(k_pool.chunks(page).zip(v_pool.chunks(page)))
        {
            both[..page].copy_from_slice(k);
            both[page..].copy_from_slice(v);
        }
        check(KvView::paired(&spec, layout, page_size, &paired).unwrap());
        let (got, page) = (paired.len() - 1, 2 * page);
        assert_eq!(
            KvView::paired(&spec, layout, page_size, &paired[1..]).unwrap_err(),
            ShapeError::PartOfPage { got, page }
        );
        let uneven = spec.with_head_dim_v(32);
        assert!(matches!(
            KvView::paired(&uneven, layout, page_size, &paired),
            Err(ShapeError::Unpaired { .. })
        ));
    }
}

/// A pool of 40 pages of 4 tokens.
struct Memory(Vec<f32>, Vec<f32>);

impl Memory {
    fn new() -> Self {
        Self(noise(40 * 4 * 2 * 16, 3), noise(40 * 4 * 2 * 16, 4))
    }

    fn view(&self) -> KvView<'_, f32> {
        KvView::new(&spec(), KvLayout::Nhd, 4, &self.0, &self.1)
    }

    fn attend(&self, spec: &Spec, batch: &Batch) -> Output {
        spec.check().unwrap();
        batch.check(spec).unwrap();
        let q = noise(batch.total_q() as usize * 4 * 16, 5);
        let view = |part: &Part| {
            if part.table.page_size == 4 {
                Some(self.view())
            } else {
                self.view().by_token()
            }
        };
        let kv: Vec<_> = batch.parts.iter().map(|part| view(part).unwrap()).collect();
        if spec.variant.hooks.is_some() {
            let slopes = [0.5_f32, 0.25, 0.125, 1.0];
            let address = slopes.as_ptr() as u64;
            // SAFETY: the slopes of these heads, which outlive it.
            let alibi = unsafe { Alibi::from_launch(spec.variant_params(), &Slopes { address }) };
            let heads = HeadTensors::default();
            return reference::attention_with(&alibi, spec, batch, &q, &kv, &heads).unwrap();
        }
        reference::attention(spec, batch, &q, &kv).unwrap()
    }
}

/// Requests as a walk down a tree of pages: neighbours share the given pages.
fn nested_batch(requests: &[(usize, u32, u32)]) -> Batch {
    let mut table = PageTable::new(4, 40);
    let (mut qo_indptr, mut pages, mut next) = (vec![0], Vec::new(), 0);
    for &(kept, new_tokens, q_len) in requests {
        pages.truncate(kept);
        let kv_len = pages.len() as u32 * 4 + new_tokens;
        while pages.len() < kv_len.div_ceil(4) as usize {
            pages.push(next % 40);
            next += 1;
        }
        table.push(&pages, kv_len);
        qo_indptr.push(qo_indptr[qo_indptr.len() - 1] + q_len.min(kv_len));
    }
    Batch::new(qo_indptr, table)
}

proptest! {
    #[test]
    fn sharing_prefixes_changes_no_result(
        requests in prop::collection::vec((0..5usize, 0..9u32, 0..4u32), 1..8), causal: bool,
        window in prop::option::of(0..12u32),
    ) {
        let batch = nested_batch(&requests);
        let shared = kv_shared(&batch);
        let memory = Memory::new();
        let mut spec = if causal { spec() } else { spec().non_causal() };
        spec.variant.window_left = window;
        // With a window, groups of which several requests have queries are refused.
        if let Err(ProblemError::MaskedSharedBlock { .. }) = shared.check(&spec) {
            spec.variant.window_left = None;
        }
        assert_close(&memory.attend(&spec, &shared), &memory.attend(&spec, &batch));
    }
}

fn kv_shared(batch: &Batch) -> Batch {
    let shared = batch.share_prefixes();
    for request in 0..batch.requests() {
        assert_eq!(shared.kv_len(request), batch.kv_len(request));
    }
    shared
}

/// A row block of several requests has no distances: between each of its queries and its keys are as many keys as the
/// query's request has of its own.
#[test]
fn what_distances_count_for_is_not_shared() {
    let mut table = PageTable::new(4, 40);
    table.push(&[0, 10], 5);
    table.push(&[0, 11, 12], 12);
    let batch = Batch::new(vec![0, 1, 2], table);
    let refused = |spec: &Spec, batch: &Batch| {
        batch.check(spec).unwrap();
        let shared = batch.share_prefixes();
        matches!(
            shared.check(spec),
            Err(ProblemError::MaskedSharedBlock { part: 0, .. })
        )
    };
    assert!(!refused(&spec(), &batch));
    assert!(!refused(&spec().with_hooks(&SIGMOID), &batch));
    assert!(refused(&spec().with_hooks(&ALIBI), &batch));
    let masked = batch.clone().with_ancestors(vec![0b1101, !2]);
    assert_eq!(masked.share_prefixes().ancestors, masked.ancestors);
    assert!(refused(&spec(), &masked));
}

/// If one request of a sharing group has queries, the shared row block has distances: those of this request.
#[test]
fn waiting_requests_leave_distances_right() {
    let mut table = PageTable::new(4, 40);
    table.push(&[0, 1, 2, 10], 14);
    table.push(&[0, 1, 2, 11, 12, 13], 23);
    table.push(&[0, 1, 5], 12);
    let memory = Memory::new();
    let specs = [
        spec(),
        spec().with_window_left(15),
        spec().non_causal().with_window_left(15),
        spec().with_rotary(Rope::new(16, 10.0)),
        spec().with_hooks(&ALIBI),
    ];
    for qo_indptr in [[0, 2, 2, 2], [0, 0, 3, 3], [0, 0, 0, 1]] {
        let mut batch = Batch::new(qo_indptr.to_vec(), table.clone());
        for spec in &specs {
            let shared = batch.share_prefixes();
            assert!(shared.parts.len() > 2, "two levels");
            assert_close(&memory.attend(spec, &shared), &memory.attend(spec, &batch));
        }
        let words = (0..batch.total_q()).map(|token| !(0b1010 << token));
        let tree = batch.clone().with_ancestors(words.collect());
        let got = memory.attend(&specs[0], &tree.share_prefixes());
        assert_close(&got, &memory.attend(&specs[0], &tree));
        for request in 0..3 {
            if batch.q_len(request) > 0 {
                let sees = |query: u32, key: u32| !(query + key).is_multiple_of(5);
                batch.push_mask(sees).unwrap();
            }
        }
        let got = memory.attend(&specs[0], &batch.share_prefixes());
        assert_close(&got, &memory.attend(&specs[0], &batch));
    }
}

#[test]
fn prefixes_are_shared_level_by_level() {
    let mut table = PageTable::new(4, 40);
    table.push(&[0, 1, 2, 10], 14);
    table.push(&[0, 1, 2, 11], 15);
    table.push(&[0, 5, 12], 9);
    table.push(&[20, 21], 8);
    table.push(&[20, 22], 5);
    let shared = Batch::new(vec![0, 1, 2, 3, 4, 5], table).share_prefixes();
    let [first, second, own] = &shared.parts[..] else {
        panic!("{shared:?}")
    };
    assert_eq!(
        (first.q_indptr.as_slice(), &first.table.indices[..]),
        (&[0, 3, 5][..], &[0, 20][..])
    );
    assert_eq!(
        (second.q_indptr.as_slice(), &second.table.indices[..]),
        (&[0, 2][..], &[1, 2][..])
    );
    assert_eq!(own.table.indices, [10, 11, 5, 12, 21, 22]);
}

#[test]
fn a_draft_tree_sees_context_and_ancestors() {
    let memory = Memory::new();
    // 0 and 1 follow the context, 2 and 3 follow 0, 4 follows 3.
    let parents = [None, None, Some(0), Some(0), Some(3)];
    let slots = [50, 51, 52, 55, 90];
    let tree = DraftTree {
        context: &[3, 7],
        context_len: 6,
        parents: &parents,
        slots: &slots,
    };
    for spec in [
        spec(),
        spec().non_causal(),
        spec().with_window_left(3),
        spec().with_soft_cap(5.0),
        spec().with_rotary(Rope::new(16, 10.0)),
        spec().with_hooks(&ALIBI),
    ] {
        let got = memory.attend(&spec, &DraftTree::batch(&spec, 4, 40, &[tree, tree]));
        // The same as token-level rows, in which each path is written out after the context.
        let paths: [&[u32]; 5] = [&[50], &[51], &[50, 52], &[50, 55], &[50, 55, 90]];
        let row = |path: &&[u32]| {
            mask::slots(&[3, 7], 4, 6)
                .chain(path.iter().copied())
                .collect::<Vec<_>>()
        };
        let rows = paths.iter().chain(&paths).map(row);
        let written_out = Batch::composed(vec![0, 5, 10], vec![Part::token_level(0, 160, rows)]);
        assert_close(&got, &memory.attend(&spec, &written_out));
    }
}

#[test]
fn a_token_level_mask_is_the_causal_one() {
    let memory = Memory::new();
    let mut table = PageTable::new(4, 40);
    table.push(&[9, 4, 30], 10);
    let causal = Batch::new(vec![0, 3], table);
    let rows = (8..=10).map(|visible| mask::slots(&[9, 4, 30], 4, visible));
    let masked = Batch::composed(vec![0, 3], vec![Part::token_level(0, 160, rows)]);
    assert_close(
        &memory.attend(&spec().non_causal(), &masked),
        &memory.attend(&spec(), &causal),
    );
}

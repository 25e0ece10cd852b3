use kernels_gpu::variant::{Derived as _, Standard};
use std::ops::Range;

use proptest::prelude::*;

use super::*;

mod pages;

/// Two requests on pages of 4: 3 new tokens of 6, and 1 of 9.
fn batch() -> Batch {
    let mut table = PageTable::new(4, 10);
    table.push(&[5, 2], 6);
    table.push(&[0, 9, 4], 9);
    Batch::new(vec![0, 3, 4], table)
}

fn error(change: impl FnOnce(&mut Batch)) -> ProblemError {
    let mut batch = batch();
    change(&mut batch);
    batch
        .check(&Spec::new(4, 2, 64))
        .expect_err("the change breaks the batch")
}

fn spec_error(change: impl FnOnce(&mut Spec)) -> ProblemError {
    let mut spec = Spec::new(4, 2, 64);
    change(&mut spec);
    spec.check().expect_err("the change breaks the spec")
}

#[test]
fn a_right_batch_passes() {
    let spec = Spec::new(4, 2, 64);
    spec.check().unwrap();
    batch().check(&spec).unwrap();
    batch().check_append().unwrap();
}

#[test]
fn lengths_and_positions() {
    let batch = batch();
    assert_eq!((batch.requests(), batch.total_q()), (2, 4));
    assert_eq!((batch.q_len(0), batch.kv_len(0)), (3, 6));
    assert_eq!((batch.q_len(1), batch.kv_len(1)), (1, 9));
    assert_eq!(batch.parts[0].first_position(0), 3);
    assert_eq!(batch.parts[0].first_position(1), 8);
    let behind = batch.parts[0].clone().with_keys_after(vec![0, 5]);
    assert_eq!(behind.first_position(1), 13);
}

#[test]
fn a_cache_without_pages_has_the_largest_that_it_allows() {
    let table = |tokens, runs: &[Range<u32>]| PageTable::contiguous(tokens, runs).unwrap();
    let ragged = table(100, &[0..33, 33..33, 33..100]);
    assert_eq!((ragged.page_size, ragged.pool_pages), (1, 100));
    assert_eq!(
        (ragged.kv_len(0), ragged.kv_len(1), ragged.kv_len(2)),
        (33, 0, 67)
    );
    assert_eq!(ragged.pages(2)[..2], [33, 34]);
    // Empty row blocks may begin anywhere.
    assert_eq!(table(1024, &[0..5, 7..7, 512..1000]).page_size, 128);
    assert_eq!(table(1000, std::slice::from_ref(&(0..999))).page_size, 8);
    assert_eq!(table(0, std::slice::from_ref(&(0..0))).row_blocks(), 1);
    let spec = Spec::new(8, 2, 64);
    let batch = Batch::new(vec![0, 33, 33, 40], ragged);
    assert_eq!(batch.check(&spec), Ok(()));
    let past = PageTable::contiguous(100, &[0..20, 30..101]).unwrap_err();
    let right = ProblemError::RunPastEnd {
        run: 1,
        got: 101,
        tokens: 100,
    };
    assert_eq!(past, right);
}

#[test]
fn kv_len_sums_the_parts_of_the_last_query() {
    let mut prefix = PageTable::new(4, 10);
    prefix.push(&[7], 4);
    let shared = Part::new(vec![0, 4], prefix).with_keys_after(vec![9]);
    let suffix = batch().parts.remove(0);
    let batch = Batch::composed(vec![0, 3, 4], vec![shared, suffix]);
    batch.check(&Spec::new(4, 2, 64)).unwrap();
    assert_eq!((batch.kv_len(0), batch.kv_len(1)), (10, 13));
}

#[test]
fn empty_things_are_allowed() {
    let spec = Spec::new(4, 2, 64);
    let mut table = PageTable::new(16, 3);
    table.push(&[], 0); // neither queries nor keys
    table.push(&[], 0); // a query that sees nothing
    table.push(&[2], 16); // keys that nobody asks for
    let batch = Batch::new(vec![0, 0, 1, 1], table);
    batch.check(&spec).unwrap();
    assert_eq!(
        (batch.kv_len(0), batch.kv_len(1), batch.kv_len(2)),
        (0, 0, 0)
    );
    Batch::new(vec![0], PageTable::new(16, 0))
        .check(&spec)
        .unwrap();
}

#[test]
fn everything_wrong_with_a_spec_is_named() {
    use ProblemError as E;
    assert_eq!(
        spec_error(|s| s.kv_heads = 3),
        E::GroupSize {
            q_heads: 4,
            kv_heads: 3
        }
    );
    assert_eq!(
        spec_error(|s| s.kv_heads = 0),
        E::GroupSize {
            q_heads: 4,
            kv_heads: 0
        }
    );
    assert_eq!(
        spec_error(|s| s.q_heads = 0),
        E::GroupSize {
            q_heads: 0,
            kv_heads: 2
        }
    );
    assert_eq!(
        spec_error(|s| s.head_dim_qk = 72),
        E::HeadDim {
            name: "head_dim_qk",
            got: 72
        }
    );
    assert_eq!(
        spec_error(|s| s.head_dim_v = 0),
        E::HeadDim {
            name: "head_dim_v",
            got: 0
        }
    );
    assert_eq!(
        spec_error(|s| s.head_dim_v = 2048),
        E::HeadDim {
            name: "head_dim_v",
            got: 2048
        }
    );
    assert_eq!(
        spec_error(|s| s.out_dtype = Dtype::F8E4M3),
        E::OutputDtype { got: Dtype::F8E4M3 }
    );
    assert_eq!(spec_error(|s| s.scale = -1.0), E::Scale { got: -1.0 });
    assert!(matches!(
        spec_error(|s| s.scale = f32::NAN),
        E::Scale { .. }
    ));
    for got in [0.0, -1.0, 10_001.0, 1e8, f32::INFINITY] {
        let error = spec_error(|s| s.variant.soft_cap = Some(got));
        assert_eq!(error, E::SoftCap { got });
        assert!(error.to_string().contains("at most 10000"), "{error}");
    }
    assert_eq!(Spec::new(8, 2, 128).with_soft_cap(1e4).check(), Ok(()));
    assert_eq!(
        spec_error(|s| s.variant.window_left = Some(u32::MAX)),
        E::Window { got: u32::MAX }
    );
    assert!(matches!(
        spec_error(|s| s.q_heads = 1 << 31),
        E::TooLarge { .. }
    ));
}

#[test]
fn everything_wrong_with_a_batch_is_named() {
    use ProblemError as E;
    assert_eq!(error(|b| b.parts.clear()), E::NoParts);
    assert_eq!(
        error(|b| b.qo_indptr.clear()),
        E::IndptrEmpty { name: "qo_indptr" }
    );
    assert_eq!(
        error(|b| b.qo_indptr[0] = 1),
        E::IndptrStart {
            name: "qo_indptr",
            got: 1
        }
    );
    assert_eq!(
        error(|b| b.qo_indptr[1] = 7),
        E::IndptrFalls {
            name: "qo_indptr",
            index: 2,
            previous: 7,
            got: 4
        }
    );
    for got in [5, 9] {
        assert_eq!(
            error(|b| b.parts[0].q_indptr[2] = got),
            E::PartPastQueries {
                part: 0,
                got,
                total_q: 4
            }
        );
    }
    assert_eq!(
        error(|b| b.parts[0].q_indptr.push(4)),
        E::RowBlocks {
            part: 0,
            got: 3,
            expected: 2
        }
    );
    assert_eq!(
        error(|b| b.parts[0].keys_after = vec![1]),
        E::Length {
            name: "keys_after",
            part: 0,
            got: 1,
            expected: 2
        }
    );
    assert_eq!(
        error(|b| b.parts[0].table.page_size = 0),
        E::PageSize { part: 0, got: 0 }
    );
    assert_eq!(
        error(|b| b.parts[0].table.page_size = 4097),
        E::PageSize { part: 0, got: 4097 }
    );
    assert_eq!(
        error(|b| b.parts[0].table.indices[3] = 10),
        E::PageOutOfPool {
            part: 0,
            index: 3,
            got: 10,
            pool_pages: 10
        }
    );
    assert_eq!(
        error(|b| b.parts[0].table.last_page_len[1] = 5),
        E::LastPageLen {
            part: 0,
            row_block: 1,
            got: 5,
            pages: 3,
            page_size: 4
        }
    );
    assert_eq!(
        error(|b| b.parts[0].table.last_page_len[0] = 0),
        E::LastPageLen {
            part: 0,
            row_block: 0,
            got: 0,
            pages: 2,
            page_size: 4
        }
    );
    assert_eq!(
        error(|b| b.parts[0].table.indptr[1] = 0),
        E::LastPageLen {
            part: 0,
            row_block: 0,
            got: 2,
            pages: 0,
            page_size: 4
        }
    );
    assert_eq!(
        error(|b| b.parts[0].table.indptr[2] = 4),
        E::IndptrEnd {
            name: "table.indptr",
            got: 4,
            of: "page ids",
            expected: 5
        }
    );
    assert_eq!(
        error(|b| b.parts[0].table.last_page_len.truncate(1)),
        E::Length {
            name: "table.last_page_len",
            part: 0,
            got: 1,
            expected: 2
        }
    );
    assert_eq!(
        error(|b| b.parts[0].keys_after = vec![0, u32::MAX]),
        E::TooLarge {
            what: "keys of a row block and after it",
            got: 9 + u64::from(u32::MAX),
            limit: MAX_POSITION.into(),
            advice: "give the request fewer keys"
        }
    );
    assert_eq!(
        error(|b| {
            b.qo_indptr = vec![0, 7, 8];
            b.parts[0].q_indptr = vec![0, 7, 8];
        }),
        E::MoreQueriesThanKeys {
            row_block: 0,
            q_len: 7,
            kv_len: 6
        }
    );
    assert_eq!(
        error(|b| {
            b.qo_indptr = vec![0, 1 << 30];
            b.parts[0].q_indptr = vec![0, 0, 0];
        }),
        E::TooLarge {
            what: "query tokens × query heads",
            got: 1 << 32,
            limit: i32::MAX as u64,
            advice: "split the batch"
        }
    );
}

#[test]
fn more_work_than_costs_can_count_is_refused() {
    let pages: Vec<u32> = (0..1 << 24).collect();
    let mut table = PageTable::new(128, 1 << 24);
    table.push(&pages[..(1 << 24) - 9], (1 << 31) - 1152);
    let batch = Batch::new(vec![0, 1 << 14], table);
    let error = batch.check(&Spec::new(32, 8, 128)).unwrap_err();
    assert_eq!(
        error,
        ProblemError::TooLarge {
            what: "operations on all queries and keys",
            got: (((1 << 31) - 1152) << 14) * 2 * 256 * 32,
            limit: 1 << 58,
            advice: "split the batch"
        }
    );
}

#[test]
fn a_block_of_several_requests_hides_nothing() {
    let shared = |keys_after| {
        let mut prefix = PageTable::new(4, 10);
        prefix.push(&[7], 4);
        Batch::composed(
            vec![0, 3, 4],
            vec![Part::new(vec![0, 4], prefix).with_keys_after(vec![keys_after])],
        )
    };
    let spec = Spec::new(4, 2, 64);
    shared(4).check(&spec).unwrap();
    shared(0).check(&spec.non_causal()).unwrap();
    let masked = |keys_after| ProblemError::MaskedSharedBlock {
        part: 0,
        row_block: 0,
        q_len: 4,
        keys_after,
    };
    assert_eq!(shared(3).check(&spec), Err(masked(3)));
    assert_eq!(shared(4).check(&spec.with_window_left(100)), Err(masked(4)));
}

#[test]
fn a_page_that_is_written_stands_once() {
    let append = |pages: [&[u32]; 2]| {
        let mut table = PageTable::new(4, 10);
        table.push(pages[0], 6);
        table.push(pages[1], 9);
        Batch::new(vec![0, 1, 3], table).check_append()
    };
    append([&[5, 2], &[5, 9, 4]]).unwrap(); // the shared page 5 is only read
    let shared = |row_block, page| {
        Err(ProblemError::WritesSharedPage {
            part: 0,
            row_block,
            page,
        })
    };
    assert_eq!(append([&[5, 2], &[2, 9, 4]]), shared(0, 2));
    assert_eq!(append([&[5, 2], &[0, 5, 4]]), shared(1, 5));
    assert_eq!(append([&[2, 2], &[0, 9, 4]]), shared(0, 2));
}

#[test]
fn query_tokens_choose_at_least_one_key_each() {
    let refused = |k, tokens| Batch::of_top_k(tokens, k).unwrap_err();
    let none = ProblemError::Indices { got: 0, k: 0 };
    assert_eq!([refused(0, 1), refused(0, u32::MAX)], [none; 2]);
    assert!(matches!(
        refused(1, u32::MAX),
        ProblemError::TooLarge { .. }
    ));
}

#[test]
fn errors_say_values() {
    let message = error(|b| b.parts[0].table.indices[3] = 10).to_string();
    assert_eq!(
        message,
        "page id 10 at indices[3] of part 0 is outside the pool of 10 pages: correct the id, or give the table the pages of its \
         pool"
    );
}

#[test]
fn strides_of_both_layouts_are_dense() {
    let nhd = KvLayout::Nhd.strides(16, 8, 128);
    assert_eq!(
        (nhd.page, nhd.token, nhd.head, nhd.page_size),
        (16 * 8 * 128, 8 * 128, 128, 16)
    );
    let hnd = KvLayout::Hnd.strides(16, 8, 128);
    assert_eq!(
        (hnd.page, hnd.token, hnd.head, hnd.page_size),
        (16 * 8 * 128, 128, 16 * 128, 16)
    );
}

#[test]
fn bytes_and_flops() {
    let spec = Spec::new(32, 8, 128);
    assert_eq!(spec.kv_bytes_per_token(), 2 * 8 * 128 * 2);
    assert_eq!(
        spec.with_kv_dtype(Dtype::F8E4M3).kv_bytes_per_token(),
        2 * 8 * 128
    );
    assert_eq!(spec.partial_bytes_per_token(), 32 * (128 + 1) * 4);
    assert_eq!(spec.flops_per_pair(), 4 * 128 * 32);
}

proptest! {
    #[test]
    fn visible_is_what_the_mask_says(
        causal: bool, window in prop::option::of(0u32..40), position in -5i32..60, kv_len in 0u32..50,
    ) {
        let variant = Variant { causal, window_left: window, ..Variant::FULL };
        let range = variant.visible(position, kv_len);
        let params = Spec { variant, ..Spec::new(1, 1, 16) }.variant_params();
        let (first, last) = Standard::<false>(params).visible_keys(position);
        for key in 0..kv_len {
            let key_position = i64::from(key);
            let before_end = !causal || key_position <= i64::from(position);
            let in_window = window.is_none_or(|w| key_position >= i64::from(position) - i64::from(w));
            prop_assert_eq!(range.contains(&key), before_end && in_window, "key {}", key);
            prop_assert_eq!((first..=last).contains(&(key as i32)), before_end && in_window, "key {}", key);
        }
        prop_assert!(range.start <= range.end && range.end <= kv_len);
    }

    /// Whatever the arrays contain, the check returns and never panics.
    #[test]
    fn checking_never_panics(
        qo in prop::collection::vec(0u32..20, 0..5), q in prop::collection::vec(0u32..20, 0..5),
        indptr in prop::collection::vec(0u32..9, 0..5), indices in prop::collection::vec(0u32..8, 0..9),
        last in prop::collection::vec(0u32..6, 0..5), after in prop::collection::vec(0u32..20, 0..3),
        page_size in 0u32..5, heads in 0u32..4,
    ) {
        let table = PageTable { page_size, pool_pages: 7, indptr, indices, last_page_len: last };
        let parts = vec![Part::new(q, table).with_keys_after(after).with_heads(heads)];
        let batch = Batch::composed(qo, parts);
        if batch.check(&Spec::new(2, 1, 16)).is_ok() {
            let _ = batch.check_append();
            for request in 0..batch.requests() {
                prop_assert!(batch.kv_len(request) <= 8 * 4);
            }
        }
    }
}

#[test]
fn ancestors_are_a_word_for_each_query_of_a_causal_batch() {
    let spec = Spec::new(4, 2, 64);
    let mut table = PageTable::new(16, 4);
    table.push(&[2], 9);
    let batch = Batch::new(vec![0, 3], table);
    let with = |words| batch.clone().with_ancestors(words);
    assert_eq!(with(vec![1; 3]).check(&spec), Ok(()));
    assert_eq!(
        with(vec![1; 2]).check(&spec),
        Err(ProblemError::Ancestors {
            got: 2,
            expected: 3
        })
    );
    assert_eq!(
        with(vec![1; 3]).check(&spec.non_causal()),
        Err(ProblemError::AncestorsNotCausal)
    );
}

/// What each token of a request sees of six keys, of which the last ones are the tokens' own.
fn seen(masks: &Masks, tokens: u32) -> Vec<Vec<u32>> {
    let of = |token: u32| {
        let position = 6 - (tokens - token) as i32;
        let keys = (0..6).filter(|&key| masks.sees(token, position, key as i32));
        keys.collect()
    };
    (0..tokens).map(of).collect()
}

#[test]
fn masks_mean_the_same_however_they_are_pushed() {
    let rows: [&[u32]; 3] = [&[0, 2, 5], &[], &[1, 3, 4]];
    let sees = |query: u32, key: u32| rows[query as usize].contains(&key);
    let flags: Vec<bool> = (0..18).map(|pair| sees(pair / 6, pair % 6)).collect();
    let mut bytes = [0_u8; 3];
    for (pair, &flag) in flags.iter().enumerate() {
        bytes[pair / 8] |= u8::from(flag) << (pair % 8);
    }
    // Bit 0 is the last key.
    let words = rows.map(|row| row.iter().map(|key| 1 << (5 - key)).sum::<u64>());
    let pushed = |push: &dyn Fn(&mut Masks)| {
        let mut masks = Masks::default();
        push(&mut masks);
        assert_eq!(seen(&masks, 3), rows.map(<[u32]>::to_vec));
        masks
    };
    let by_pairs = pushed(&|masks| masks.push(3, 6, sees));
    assert_eq!((by_pairs.tokens(), by_pairs.words()), (3, 3));
    assert_eq!(
        pushed(&|masks| masks.push_flags(3, &flags).unwrap()),
        by_pairs
    );
    assert_eq!(
        pushed(&|masks| masks.push_packed(3, 6, &bytes).unwrap()),
        by_pairs
    );
    assert_eq!(
        pushed(&|masks| masks.push_words(3, &words).unwrap()),
        by_pairs
    );
}

#[test]
fn tokens_that_see_the_same_keys_share_their_words() {
    let mut masks = Masks::default();
    masks.push(64, 130, |query, key| key < 66 || (query < 32) == (key < 98));
    assert_eq!((masks.tokens(), masks.words()), (64, 2 * 3));
    masks.push_open(9);
    assert_eq!((masks.tokens(), masks.words()), (73, 2 * 3));
}

/// Trees of up to 64 tokens have the same masks as ancestors.
#[test]
fn trees_may_be_masks() {
    let parents: Vec<_> = (0..64_u32)
        .map(|token| (token % 3 > 0).then_some(token / 2))
        .collect();
    let mut masks = Masks::default();
    masks.push_tree(&parents);
    for (token, word) in (0..).zip(Batch::ancestors_of(&parents)) {
        let position = 100 + token as i32;
        for key in 0..=position {
            let distance = (position - key) as u32;
            let is_seen = word.checked_shr(distance).is_none_or(|word| word & 1 != 0);
            assert_eq!(masks.sees(token, position, key), is_seen, "{token}: {key}");
        }
    }
    masks.push_tree(&vec![None; 200]);
    assert_eq!(masks.words(), 64 + 200 * 4);
}

#[test]
fn masks_that_are_not_those_of_the_batch_are_refused() {
    let spec = Spec::new(4, 2, 64);
    let mut table = PageTable::new(16, 4);
    table.push(&[2], 9);
    table.push(&[0], 5);
    let batch = Batch::new(vec![0, 3, 5], table);
    let check = |push: &dyn Fn(&mut Masks)| {
        let mut masks = Masks::default();
        push(&mut masks);
        batch.clone().with_masks(masks).check(&spec)
    };
    let any = |query: u32, key: u32| query != key;
    assert_eq!(
        check(&|masks| (masks.push(3, 9, any), masks.push_open(2)).1),
        Ok(())
    );
    assert_eq!(
        check(&|masks| masks.push(3, 9, any)),
        Err(ProblemError::Masks {
            what: "query tokens",
            got: 3,
            expected: 5
        })
    );
    // The numbers of query tokens of the two requests are exchanged.
    assert_eq!(
        check(&|masks| (masks.push(2, 9, any), masks.push(3, 5, any)).1),
        Err(ProblemError::MaskOfToken { token: 2 })
    );
    let mut masks = Masks::default();
    let wrong = |what, got, expected| {
        Err(ProblemError::Masks {
            what,
            got,
            expected,
        })
    };
    assert_eq!(masks.push_flags(3, &[true; 10]), wrong("flags", 10, 9));
    assert_eq!(masks.push_words(0, &[1]), wrong("words", 1, 0));
    assert_eq!(masks.push_packed(3, 9, &[0; 3]), wrong("bytes", 3, 4));
    assert!(masks.is_empty());
    masks.push_open(5);
    let both = batch.with_ancestors(vec![1; 5]).with_masks(masks);
    assert_eq!(both.check(&spec), Err(ProblemError::MasksAndAncestors));
}

/// A batch knows the tokens and keys of the next request; the one without query tokens has no mask.
#[test]
fn a_batch_takes_the_mask_of_the_next_request() {
    let mut table = PageTable::new(16, 4);
    [3, 2, 9, 1]
        .into_iter()
        .zip(0..)
        .for_each(|(keys, page)| table.push(&[page], keys));
    let mut batch = Batch::new(vec![0, 2, 2, 5, 6], table);
    let mut asked = Vec::new();
    batch
        .push_mask(|query, key| {
            asked.push((query, key));
            true
        })
        .unwrap();
    assert_eq!((asked.len(), asked.iter().max()), (2 * 3, Some(&(1, 2))));
    let wrong = |what, got, expected| {
        Err(ProblemError::Masks {
            what,
            got,
            expected,
        })
    };
    assert_eq!(batch.push_mask_flags(&[true; 24]), wrong("flags", 24, 27));
    assert_eq!(batch.push_mask_packed(&[0; 3]), wrong("bytes", 3, 4));
    assert_eq!(batch.push_mask_tree(&[None; 2]), wrong("parents", 2, 3));
    batch.push_mask_words(&[1, 2, 3]).unwrap();
    assert_eq!(
        batch.check(&Spec::new(4, 2, 64)),
        wrong("query tokens", 5, 6)
    );
    batch.push_mask_open().unwrap();
    assert_eq!(batch.push_mask_open(), wrong("requests", 5, 4));
    assert_eq!(
        (batch.check(&Spec::new(4, 2, 64)), batch.mask_words()),
        (Ok(()), 1 + 3)
    );
}

/// Masks are pushed before the batch is checked: what is wrong with it is an error there, too.
#[test]
fn masks_of_wrong_batches_are_refused() {
    let table = || {
        let mut table = PageTable::new(16, 1);
        table.push(&[0], 9);
        table
    };
    let mut late = Batch::new(vec![5, 6], table());
    let start = ProblemError::IndptrStart {
        name: "qo_indptr",
        got: 5,
    };
    assert_eq!(late.push_mask_open(), Err(start));
    let mut none = Batch::composed(vec![0, 1], vec![Part::default()]);
    assert!(matches!(
        none.push_mask_open(),
        Err(ProblemError::IndptrEmpty { .. })
    ));
    let no_blocks = Part::new(vec![0, 1], PageTable::new(16, 1));
    let mut short = Batch::composed(vec![0, 1], vec![no_blocks]);
    assert!(matches!(
        short.push_mask_open(),
        Err(ProblemError::RowBlocks { .. })
    ));
}

/// Kernels compute in powers of two: the scale times log2(e) overflows before the scale itself.
#[test]
fn scales_that_overflow_in_kernels_are_refused() {
    let got = 3e38;
    let spec = Spec::new(1, 1, 16).with_scale(got);
    assert!(spec.variant_params().scale_log2.is_infinite());
    assert_eq!(spec.check(), Err(ProblemError::Scale { got }));
    assert_eq!(spec.with_scale(2e38).check(), Ok(()));
}

#[test]
fn errors_tell_page_ids_of_64_bits_as_they_are() {
    let mut table = PageTable::new(16, 10);
    let error = table.try_push([3, u64::MAX - 1], 20).unwrap_err();
    let text = error.to_string();
    assert!(text.contains("18446744073709551614"), "{text}");
}

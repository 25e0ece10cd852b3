//! Page tables from whatever a server keeps its block tables in.

use super::*;

/// A table of pages of 16 tokens with one row block of 20 keys in it.
fn table() -> PageTable {
    let mut table = PageTable::new(16, 1000);
    table.push(&[7, 3], 20);
    table
}

#[test]
fn block_tables_may_be_of_any_integer_and_longer_than_needed() {
    let mut all = table();
    all.try_push(vec![7_usize, 3], 20).unwrap();
    all.try_push([7_i64, 3, 9, -1], 20).unwrap();
    all.try_push([7_u64, 3, 4_000_000_000_000], 20).unwrap();
    all.try_push([7, 3].iter().chain(&[1; 100]), 20).unwrap();
    all.push(&[7, 3, 5, 6], 20);
    for row_block in 0..all.row_blocks() {
        assert_eq!(
            (all.pages(row_block), all.kv_len(row_block)),
            (&[7, 3][..], 20)
        );
    }
    // A request without keys needs no pages.
    all.try_push([-1_i64; 4], 0).unwrap();
    assert_eq!((all.pages(6), all.kv_len(6)), (&[][..], 0));
    let batch = Batch::new((0..8).collect(), all);
    assert_eq!(batch.check(&Spec::new(4, 2, 64)), Ok(()));
}

#[test]
fn what_is_wrong_with_a_block_table_is_an_error_and_the_table_stays() {
    let fails = |page_size: u32, pages: &[i64], kv_len: u32| {
        let mut table = PageTable {
            page_size,
            ..table()
        };
        let before = table.clone();
        let error = table.try_push(pages, kv_len).unwrap_err();
        assert_eq!(table, before);
        error
    };
    let short = ProblemError::TooFewPages {
        row_block: 1,
        kv_len: 33,
        got: 2,
        needed: 3,
        page_size: 16,
    };
    assert_eq!(fails(16, &[1, 2], 33), short);
    let id = |index, got| ProblemError::PageId {
        row_block: 1,
        index,
        got,
    };
    assert_eq!(fails(16, &[1, -1, 2], 33), id(1, -1));
    assert_eq!(fails(16, &[1 << 32], 1), id(0, 1 << 32));
    let size = |got| ProblemError::PageSize { part: 0, got };
    assert_eq!(fails(0, &[1], 1), size(0));
    assert_eq!(fails(4097, &[1], 1), size(4097));
    assert_eq!(PageTable::try_new(0, 5), Err(size(0)));
    assert_eq!(PageTable::try_new(4096, 5), Ok(PageTable::new(4096, 5)));
    let long = fails(16, &[1], u32::MAX);
    assert!(matches!(long, ProblemError::TooLarge { .. }), "{long:?}");
    let mut table = table();
    let huge = table.try_push([usize::MAX], 1);
    assert_eq!(huge, Err(id(0, usize::MAX as i128)));
}

#[test]
#[should_panic(expected = "row block 1 has 20 keys on 1 pages of 16 tokens: give at least 2 pages")]
fn pushing_what_is_known_to_be_right_says_what_was_not() {
    table().push(&[1], 20);
}

#[test]
fn slots_are_where_the_positions_lie() {
    let table = table();
    assert_eq!(table.slots(0, 0..0), Ok(vec![]));
    assert_eq!(table.slots(0, 15..20), Ok(vec![127, 48, 49, 50, 51]));
    let past = ProblemError::PositionPastKeys {
        row_block: 0,
        got: 20,
        kv_len: 20,
    };
    assert_eq!(table.slots(0, 19..21), Err(past));
    let mut far = PageTable::new(16, u32::MAX);
    far.push(&[(1 << 28) - 1], 16);
    let last = u64::from(u32::MAX);
    let no_slot = ProblemError::TooLarge {
        what: "a slot",
        got: last,
        limit: last - 1,
        advice: "use a smaller pool",
    };
    assert_eq!(far.slots(0, 14..15), Ok(vec![u32::MAX - 1]));
    assert_eq!(far.slots(0, 15..16), Err(no_slot));
}

proptest! {
    /// Whatever follows the pages in use, and whatever the integer type: the table is the same.
    #[test]
    fn the_pages_in_use_are_all_that_counts(
        rows in prop::collection::vec((prop::collection::vec(0..500_u32, 0..9), 0..17_u32, 0..4_usize), 0..6),
        page_size in 1..17_u32,
    ) {
        let (mut exact, mut longer) = (PageTable::new(page_size, 500), PageTable::new(page_size, 500));
        for (pages, last, padding) in rows {
            let before = (pages.len() as u32).saturating_sub(1) * page_size;
            let kv_len = if pages.is_empty() { 0 } else { before + 1 + last % page_size };
            exact.push(&pages, kv_len);
            let padded = pages.iter().map(|&id| i64::from(id)).chain(std::iter::repeat_n(-1, padding));
            longer.try_push(padded, kv_len).unwrap();
            let row_block = exact.row_blocks() - 1;
            let slots = exact.slots(row_block, 0..kv_len).unwrap();
            let right = (0..kv_len).map(|at| pages[(at / page_size) as usize] * page_size + at % page_size);
            prop_assert_eq!(slots, right.collect::<Vec<_>>());
        }
        prop_assert_eq!(&exact, &longer);
        let csr = PageTable::from_csr(page_size, 500, exact.indptr.clone(), exact.indices.clone(), exact.last_page_len.clone());
        prop_assert_eq!(csr, longer);
    }
}

//! Pools, sequences, tables and caches that do not belong together.

use super::super::*;
use crate::problem::{PageTable, ProblemError};

/// A sequence of this number of tokens on pages of 16, and its pool.
fn sequence(tokens: u32) -> (PagePool, Sequence) {
    let mut pool = PagePool::new(8, 16);
    let mut sequence = Sequence::default();
    assert_eq!(sequence.append(&mut pool, tokens), Ok(None));
    (pool, sequence)
}

/// A table with larger pages once took the first of the sequence's pages as pages of its own size: other keys were read.
#[test]
fn a_table_of_another_page_size_is_refused() {
    let (mut pool, mut sequence) = sequence(40);
    for page_size in [1, 8, 32, 128] {
        let mut table = PageTable::new(page_size, 8);
        let refused = sequence.try_push_to(&mut table).unwrap_err();
        assert_eq!(
            refused,
            ProblemError::SequencePages {
                got: 16,
                expected: page_size
            }
        );
        assert_eq!(table, PageTable::new(page_size, 8));
        let text = refused.to_string();
        assert!(text.contains("pages of 16 tokens"), "{text}");
    }
    let mut table = PageTable::new(16, 8);
    sequence.try_push_to(&mut table).unwrap();
    assert_eq!((table.kv_len(0), table.pages(0)), (40, &[0, 1, 2][..]));
    // Without pages there is nothing to mistake.
    sequence.truncate(&mut pool, 0);
    let mut table = PageTable::new(8, 8);
    sequence.try_push_to(&mut table).unwrap();
    assert_eq!(table.kv_len(0), 0);
}

#[test]
#[should_panic(expected = "pages of 16 tokens")]
fn pushing_to_such_a_table_panics() {
    let (_, sequence) = sequence(40);
    sequence.push_to(&mut PageTable::new(32, 8));
}

#[test]
#[should_panic(expected = "pages of 16 tokens and the pool of 4")]
fn a_sequence_stays_on_pages_of_one_size() {
    let (_, mut sequence) = sequence(40);
    let _ = sequence.append(&mut PagePool::new(8, 4), 1);
}

#[test]
fn sequences_remember_the_page_size_of_their_pool() {
    let mut pool = PagePool::new(8, 16);
    let mut cache = PrefixCache::new(16);
    let tokens: Vec<u32> = (0..32).collect();
    let mut first = Sequence::default();
    assert_eq!(first.append(&mut pool, 32), Ok(None));
    cache.insert(&mut pool, &tokens, &mut first);
    for sequence in [cache.acquire(&mut pool, &tokens), first.fork(&mut pool)] {
        let mut table = PageTable::new(32, 8);
        assert!(sequence.try_push_to(&mut table).is_err());
        sequence.release(&mut pool);
    }
    let none = cache.acquire(&mut pool, &[]);
    assert_eq!(none, Sequence::default());
    first.release(&mut pool);
}

#[test]
fn pages_that_a_pool_does_not_have_are_named() {
    let said = |call: fn(&mut PagePool)| {
        let mut pool = PagePool::new(4, 16);
        let call = std::panic::AssertUnwindSafe(|| call(&mut pool));
        let panic = std::panic::catch_unwind(call).unwrap_err();
        assert_eq!(pool.free_pages(), 4);
        panic.downcast_ref::<String>().unwrap().clone()
    };
    let none = "there is no page 9: the pool has 4 pages";
    assert_eq!(
        said(|pool| {
            let _ = pool.refs(9);
        }),
        none
    );
    assert_eq!(said(|pool| pool.retain(9)), none);
    assert_eq!(
        said(|pool| {
            let _ = pool.release(9);
        }),
        none
    );
    assert_eq!(
        said(|pool| {
            let _ = pool.make_unique(9);
        }),
        none
    );
    assert!(
        said(|pool| {
            let _ = pool.make_unique(2);
        })
        .contains("page 2 is free")
    );
}

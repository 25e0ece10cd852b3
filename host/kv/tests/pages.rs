//! The pool, sequences and the prefix cache.

use std::collections::HashMap;

use proptest::prelude::*;

use super::super::*;
#[test]
fn an_empty_pool_says_what_to_do() {
    let mut pool = PagePool::new(1, 16);
    pool.alloc().unwrap();
    let error = pool.alloc().unwrap_err();
    assert_eq!(
        error,
        OutOfPages {
            wanted: 1,
            free: 0,
            total: 1
        }
    );
    assert!(
        error
            .to_string()
            .contains("1 pages are wanted and 0 of 1 are free")
    );
}

/// In an earlier version the sum of both wrapped, and the sequence was cut to the rest.
#[test]
fn more_tokens_than_32_bits_count_are_no_pages_at_all() {
    let mut pool = PagePool::new(4, 16);
    let mut sequence = Sequence::default();
    assert_eq!(sequence.append(&mut pool, 10), Ok(None));
    for tokens in [u32::MAX, u32::MAX - 5, u32::MAX - 9] {
        let refused = sequence.append(&mut pool, tokens).unwrap_err();
        assert_eq!((refused.free, refused.total), (3, 4));
        assert_eq!(refused.wanted, u32::MAX);
        assert_eq!((sequence.len(), sequence.pages()), (10, &[0][..]));
    }
    sequence.release(&mut pool);
}

/// With a pool of larger pages, pages that are still needed were released.
#[test]
#[should_panic(expected = "pages of 4 tokens and the pool of 16")]
fn truncating_with_another_pool_is_caught() {
    let [mut pool, mut other] = [4, 16].map(|page_size| PagePool::new(8, page_size));
    let mut sequence = Sequence::default();
    assert_eq!(sequence.append(&mut pool, 20), Ok(None));
    sequence.truncate(&mut other, 18);
}

#[test]
#[should_panic(expected = "page 0 is free already")]
fn a_double_free_is_caught() {
    let mut pool = PagePool::new(1, 16);
    let page = pool.alloc().unwrap();
    pool.release(page);
    pool.release(page);
}

#[test]
fn a_failed_append_changes_nothing() {
    let mut pool = PagePool::new(3, 4);
    let mut sequence = Sequence::default();
    assert_eq!(sequence.append(&mut pool, 6), Ok(None));
    let fork = sequence.fork(&mut pool);
    // One page for the copy of the shared one and one for the tokens past it.
    assert_eq!(sequence.pages_for(&pool, 3), 2);
    assert_eq!(
        sequence.append(&mut pool, 3),
        Err(OutOfPages {
            wanted: 2,
            free: 1,
            total: 3
        })
    );
    assert_eq!((sequence.len(), sequence.pages()), (6, fork.pages()));
    assert_eq!((pool.refs(0), pool.refs(1), pool.free_pages()), (2, 2, 1));
    sequence.release(&mut pool);
    fork.release(&mut pool);
    assert_eq!(pool.free_pages(), 3);
}

#[test]
fn truncation_gives_pages_back() {
    let mut pool = PagePool::new(4, 4);
    let mut sequence = Sequence::default();
    let _ = sequence.append(&mut pool, 13).unwrap();
    sequence.truncate(&mut pool, 5);
    assert_eq!(
        (sequence.len(), sequence.pages().len(), pool.free_pages()),
        (5, 2, 2)
    );
    sequence.truncate(&mut pool, 100);
    assert_eq!(sequence.len(), 5);
    sequence.truncate(&mut pool, 0);
    assert!(sequence.is_empty() && pool.free_pages() == 4);
}

#[test]
fn prefixes_split_and_share() {
    let mut pool = PagePool::new(32, 2);
    let mut cache = PrefixCache::new(2);
    let mut run = |tokens: &[u32]| {
        let mut sequence = Sequence::default();
        let _ = sequence.append(&mut pool, tokens.len() as u32).unwrap();
        let new = cache.insert(&mut pool, tokens, &mut sequence);
        (sequence, new)
    };
    let (a, new_a) = run(&[1, 2, 3, 4, 5, 6]);
    let (b, new_b) = run(&[1, 2, 3, 4, 7, 8]); // shares two pages, splits the edge
    let (c, new_c) = run(&[1, 2, 3, 9]); // a page is shared whole or not at all
    let (d, new_d) = run(&[1, 2, 3, 4, 5]); // the last token does not fill a page
    assert_eq!((new_a, new_b, new_c, new_d), (3, 1, 1, 0));
    assert_eq!(a.pages()[..2], b.pages()[..2]);
    assert_eq!(a.pages()[..1], c.pages()[..1]);
    assert_eq!(a.pages()[..2], d.pages()[..2]);
    assert_eq!(cache.pages(), 5);
    assert_eq!(cache.matches(&[1, 2, 3, 4, 5, 6, 7, 8]), 6);
    assert_eq!(cache.matches(&[1, 2, 3]), 2);
    assert_eq!(cache.matches(&[2, 1]), 0);
    for sequence in [a, b, c, d] {
        sequence.release(&mut pool);
    }
    assert_eq!(pool.free_pages(), 32 - 5);
}

#[test]
fn the_least_recently_used_goes_first_and_pins_stay() {
    let mut pool = PagePool::new(16, 1);
    let mut cache = PrefixCache::new(1);
    for tokens in [[1, 2, 3], [1, 2, 4], [5, 6, 7]] {
        let mut sequence = Sequence::default();
        let _ = sequence.append(&mut pool, 3).unwrap();
        cache.insert(&mut pool, &tokens, &mut sequence);
        sequence.release(&mut pool);
    }
    let pin = cache.pin(&mut pool, &[5, 6]);
    assert_eq!(pin.len(), 2);
    cache.acquire(&mut pool, &[1, 2, 3]).release(&mut pool); // now [1, 2, 4] is the oldest
    assert_eq!(cache.evict(&mut pool, 1), 1);
    assert_eq!(
        (
            cache.matches(&[1, 2, 4]),
            cache.matches(&[1, 2, 3]),
            cache.matches(&[5, 6, 7])
        ),
        (2, 3, 3)
    );
    assert_eq!(cache.evict(&mut pool, 1), 1);
    assert_eq!(
        (cache.matches(&[1, 2, 3]), cache.matches(&[5, 6, 7])),
        (3, 2)
    );
    assert_eq!(cache.evict(&mut pool, 100), 3, "all but the pinned ones");
    assert_eq!((cache.pages(), cache.matches(&[5, 6])), (2, 2));
    cache.unpin(&mut pool, pin);
    assert_eq!(cache.evict(&mut pool, 100), 2);
    assert_eq!(pool.free_pages(), 16);
}

/// Operations of a serving loop.
#[derive(Clone, Debug)]
enum Step {
    /// Starts a request on the cached pages, with the rest of its prompt appended.
    Start {
        family: u32,
        len: u32,
    },
    Append {
        request: usize,
        tokens: u32,
    },
    Fork {
        request: usize,
    },
    Truncate {
        request: usize,
        len: u32,
    },
    /// Caches a request's prefix.
    Insert {
        request: usize,
    },
    Finish {
        request: usize,
    },
    Pin {
        family: u32,
        len: u32,
    },
    Unpin,
    Evict {
        pages: u32,
    },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let request = 0..8usize;
    let step = prop_oneof![
        3 => (0..4u32, 0..40u32).prop_map(|(family, len)| Step::Start { family, len }),
        3 => (request.clone(), 0..12u32).prop_map(|(request, tokens)| Step::Append { request, tokens }),
        1 => request.clone().prop_map(|request| Step::Fork { request }),
        1 => (request.clone(), 0..40u32).prop_map(|(request, len)| Step::Truncate { request, len }),
        3 => request.clone().prop_map(|request| Step::Insert { request }),
        2 => request.prop_map(|request| Step::Finish { request }),
        1 => (0..4u32, 0..40u32).prop_map(|(family, len)| Step::Pin { family, len }),
        1 => Just(Step::Unpin),
        2 => (0..20u32).prop_map(|pages| Step::Evict { pages }),
    ];
    prop::collection::vec(step, 0..80)
}

/// A server whose "keys" are the tokens themselves, so that a wrong page shows.
struct Server {
    pool: PagePool,
    cache: PrefixCache,
    memory: Vec<Option<u32>>,
    requests: Vec<(Sequence, Vec<u32>)>,
    pins: Vec<Pin>,
    next_token: u32,
}

impl Server {
    fn new(pages: u32, page_size: u32) -> Self {
        Self {
            pool: PagePool::new(pages, page_size),
            cache: PrefixCache::new(page_size),
            memory: vec![None; (pages * page_size) as usize],
            requests: Vec::new(),
            pins: Vec::new(),
            next_token: 1000,
        }
    }

    /// Prompts of a family start alike; every other one branches off half-way.
    fn prompt(family: u32, len: u32) -> Vec<u32> {
        (0..len)
            .map(|i| {
                family * 100
                    + i
                    + if i > len / 2 && len % 2 == 1 {
                        50 * len
                    } else {
                        0
                    }
            })
            .collect()
    }

    fn append(&mut self, request: usize, new: &[u32]) {
        let (sequence, tokens) = &mut self.requests[request];
        let Ok(copy) = sequence.append(&mut self.pool, new.len() as u32) else {
            return;
        };
        let page_size = self.pool.page_size() as usize;
        if let Some(PageCopy { from, to }) = copy {
            let from = from as usize * page_size;
            self.memory
                .copy_within(from..from + page_size, to as usize * page_size);
        }
        for &token in new {
            let page = sequence.pages()[tokens.len() / page_size];
            assert_eq!(
                self.pool.refs(page),
                1,
                "a page that is written is held once"
            );
            self.memory[page as usize * page_size + tokens.len() % page_size] = Some(token);
            tokens.push(token);
        }
    }

    fn step(&mut self, step: &Step) {
        let Self {
            pool,
            cache,
            requests,
            pins,
            ..
        } = self;
        let pick = |request: usize| (!requests.is_empty()).then(|| request % requests.len());
        match *step {
            Step::Start { family, len } => {
                let prompt = Self::prompt(family, len);
                let matched = cache.matches(&prompt);
                let sequence = cache.acquire(pool, &prompt);
                assert_eq!(sequence.len() as usize, matched);
                let cached = sequence.len() as usize;
                requests.push((sequence, prompt[..cached].to_vec()));
                self.append(self.requests.len() - 1, &prompt[cached..]);
            }
            Step::Append { request, tokens } => {
                if let Some(request) = pick(request) {
                    let new: Vec<u32> = (0..tokens).map(|i| self.next_token + i).collect();
                    self.next_token += tokens;
                    self.append(request, &new);
                }
            }
            Step::Fork { request } => {
                if let Some(request) = pick(request) {
                    let fork = requests[request].0.fork(pool);
                    let tokens = requests[request].1.clone();
                    requests.push((fork, tokens));
                }
            }
            Step::Truncate { request, len } => {
                if let Some(request) = pick(request) {
                    let (sequence, tokens) = &mut requests[request];
                    sequence.truncate(pool, len);
                    tokens.truncate(len as usize);
                }
            }
            Step::Insert { request } => {
                if let Some(request) = pick(request) {
                    let (sequence, tokens) = &mut requests[request];
                    let full = tokens.len() / pool.page_size() as usize * pool.page_size() as usize;
                    cache.insert(pool, tokens, sequence);
                    assert_eq!(cache.matches(tokens), full);
                    let again = cache.acquire(pool, tokens);
                    assert_eq!(again.pages(), &sequence.pages()[..again.pages().len()]);
                    again.release(pool);
                }
            }
            Step::Finish { request } => {
                if let Some(request) = pick(request) {
                    requests.swap_remove(request).0.release(pool);
                }
            }
            Step::Pin { family, len } => pins.push(cache.pin(pool, &Self::prompt(family, len))),
            Step::Unpin => {
                if let Some(pin) = pins.pop() {
                    cache.unpin(pool, pin);
                }
            }
            Step::Evict { pages } => {
                let (free, cached) = (pool.free_pages(), cache.pages());
                let freed = cache.evict(pool, pages);
                assert!(freed <= pages);
                assert_eq!(
                    (pool.free_pages(), cache.pages()),
                    (free + freed, cached - freed)
                );
            }
        }
    }

    fn check(&self) {
        let page_size = self.pool.page_size() as usize;
        let mut held: HashMap<u32, u32> = HashMap::new();
        for (sequence, tokens) in &self.requests {
            assert_eq!(sequence.len() as usize, tokens.len());
            assert_eq!(sequence.pages().len(), tokens.len().div_ceil(page_size));
            sequence
                .pages()
                .iter()
                .for_each(|&page| *held.entry(page).or_default() += 1);
            let slots = mask::slots(sequence.pages(), page_size as u32, sequence.len());
            let read: Vec<_> = slots.map(|slot| self.memory[slot as usize]).collect();
            let right: Vec<_> = tokens.iter().copied().map(Some).collect();
            assert_eq!(read, right, "the pages hold what the tokens say");
        }
        for pin in &self.pins {
            pin.pages()
                .iter()
                .for_each(|&page| *held.entry(page).or_default() += 1);
        }
        let mut cached = 0;
        for page in 0..self.pool.pages() {
            let others = self.pool.refs(page) - held.get(&page).copied().unwrap_or(0);
            assert!(
                others <= 1,
                "page {page} has {others} references that nobody holds"
            );
            cached += others;
        }
        assert_eq!(
            cached,
            self.cache.pages(),
            "the cache holds each of its pages once"
        );
        let free = (0..self.pool.pages())
            .filter(|&page| self.pool.refs(page) == 0)
            .count();
        assert_eq!(free, self.pool.free_pages() as usize);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 2000 }))]

    #[test]
    fn no_page_is_leaked_or_given_twice(steps in steps(), pages in 1..60u32, page_size in 1..5u32) {
        let mut server = Server::new(pages, page_size);
        for step in &steps {
            server.step(step);
            server.check();
        }
        let Server { mut pool, mut cache, requests, pins, .. } = server;
        requests.into_iter().for_each(|(sequence, _)| sequence.release(&mut pool));
        pins.into_iter().for_each(|pin| cache.unpin(&mut pool, pin));
        cache.evict(&mut pool, u32::MAX);
        prop_assert_eq!((cache.pages(), pool.free_pages()), (0, pages));
    }
}

/// A serving loop returns the error of the crate.
#[test]
fn too_few_pages_are_an_error_of_the_crate() {
    fn first(pool: &mut PagePool) -> Result<u32, crate::Error> {
        Ok(pool.alloc()?)
    }
    let mut pool = PagePool::new(1, 4);
    assert_eq!(first(&mut pool), Ok(0));
    let text = first(&mut pool).unwrap_err().to_string();
    assert!(text.contains("0 of 1 are free"), "{text}");
}

//! One batch on several GPUs: pure functions from a batch to a batch for each rank.
//!
//! A [`Sharding`] says how heads, keys or queries are distributed over ranks. [`Sharding::shares`] gives each rank its
//! [`Share`]: a [`Spec`] and a [`Batch`] that are planned and run like any other, on the rank's own page pools. Ranks
//! with different keys of the same heads and queries are a [group](Share::group). Their outputs and LSEs are
//! merged to those of the whole batch.
//!
//! ```
//! use tandem_attn::{problem::{Batch, PageTable, Spec}, shard::{Keys, Sharding}};
//!
//! // A decode of 100 keys on 7 pages, which alternate between two GPUs.
//! let mut table = PageTable::new(16, 64);
//! table.push(&[4, 9, 2, 7, 1, 8, 3], 100);
//! let (spec, batch) = (Spec::new(32, 8, 128), Batch::new(vec![0, 1], table));
//! let sharding = Sharding::one().over_keys(2, Keys::RoundRobin { pages: 1 });
//! let shares = sharding.shares(&spec, &batch)?;
//! assert_eq!(shares[0].batch.parts[0].table.pages(0), [4, 2, 1, 3]);
//! assert_eq!(shares[1].batch.parts[0].kv_len(0), 48);
//! sharding.verify(&spec, &batch, &shares)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # What can be distributed
//!
//! | distributed | a rank computes | ranks exchange | best for |
//! |---|---|---|---|
//! | heads | all queries, all keys, some heads | nothing | all batches, if there are enough KV heads |
//! | keys | all queries, some keys | outputs and LSEs | decodes with long contexts |
//! | queries | some queries, all keys | nothing | prefills whose keys every rank has |
//!
//! If a rank has one run of a request's keys, it knows their positions, so windows and masks as bits work. If it has
//! several runs ([`Keys::RoundRobin`], [`Keys::Folded`]), the causal mask is still exact, by row blocks that end where runs
//! end; windows and masks as bits are refused with [`ShardError::Positions`].

mod error;
mod forecast;
mod keys;
mod queries;
mod rank_error;
mod verify;

use std::ops::Range;

use serde::{Deserialize, Serialize};

pub use error::ShardError;
pub use rank_error::RankError;
unstable! {
    use error::ShardDefect;
    use forecast::{Forecast, Link, MERGED_WHOLE};
}

use crate::problem::{Batch, ProblemError, Spec};

/// The most ranks of a sharding.
pub const MAX_RANKS: u32 = 72;

/// Which rank has which pages of a table's row block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Keys {
    /// A number of pages to each rank in turn. The rank of a page depends only on its index in the table, so tables can grow,
    /// and each page of a shared prefix is on one rank.
    RoundRobin {
        /// Pages per turn. Prefills are cut where turns end, so use turns of hundreds of keys for them.
        pages: u32,
    },
    /// One run of consecutive pages to each rank.
    Contiguous,
    /// Two runs to each rank; the first rank has the first and the last run. With a causal mask, prefills then have the same work
    /// on each rank.
    Folded,
}

/// How a batch is distributed over ranks. The number of a rank is `heads index × keys + keys index`, and likewise with queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sharding {
    /// Ranks that share the heads (tensor parallelism).
    pub heads: u32,
    /// Ranks that share the keys (context parallelism).
    pub keys: u32,
    /// How the keys are distributed.
    pub deal: Keys,
    /// Ranks that share the queries.
    pub queries: u32,
}

/// The part of a batch that one rank computes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Share {
    /// The number of the rank.
    pub rank: u32,
    /// Its heads. If there are sinks, only the first rank of a group has them.
    pub spec: Spec,
    /// Its queries and keys. Page ids are taken from the whole batch, and are ids of the rank's own pools.
    pub batch: Batch,
    /// Its query heads, as numbered in the whole batch.
    pub q_heads: Range<u32>,
    /// Its KV heads, which are those of its pools.
    pub kv_heads: Range<u32>,
    /// Its query tokens, as runs of tokens of the whole batch.
    pub tokens: Vec<Range<u32>>,
    /// The ranks whose results are merged, in merging order; the rank itself is among them.
    pub group: Range<u32>,
}

impl Sharding {
    /// A single rank with the whole batch.
    #[must_use]
    pub const fn one() -> Self {
        Self {
            heads: 1,
            keys: 1,
            deal: Keys::RoundRobin { pages: 1 },
            queries: 1,
        }
    }

    /// With the heads over this number of ranks. If there are more ranks than KV heads, several ranks have the same KV head, with
    /// different query heads.
    #[must_use]
    pub const fn over_heads(mut self, ranks: u32) -> Self {
        self.heads = ranks;
        self
    }

    /// With the keys over this number of ranks.
    #[must_use]
    pub const fn over_keys(mut self, ranks: u32, deal: Keys) -> Self {
        self.keys = ranks;
        self.deal = deal;
        self
    }

    /// With the queries over this number of ranks, each of which has all keys. Of a long prompt each rank gets an early and a late
    /// run, so that with a causal mask all have the same work. Short requests are not cut, and stay with their neighbours.
    #[must_use]
    pub const fn over_queries(mut self, ranks: u32) -> Self {
        self.queries = ranks;
        self
    }

    /// Number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.heads
            .saturating_mul(self.keys)
            .saturating_mul(self.queries)
    }

    /// Distributes a batch: a share for each rank.
    ///
    /// # Errors
    /// The specification, the batch or the number of ranks is wrong, or the mask is not supported; see [`ShardError`].
    pub fn shares(&self, spec: &Spec, batch: &Batch) -> Result<Vec<Share>, ShardError> {
        spec.check()?;
        batch.check(spec)?;
        if batch.parts.iter().any(|part| part.heads > 1) {
            let what = "prompts beside them that are distributed over ranks";
            return Err(ProblemError::ByHead { what }.into());
        }
        if spec.variant.sink_tokens > 1 && self.queries > 1 {
            let what = "sinks beside queries that are distributed over ranks";
            return Err(ProblemError::ByHead { what }.into());
        }
        self.check(spec)?;
        let queries = queries::RankTokens::new(spec, batch, self.queries)?;
        (0..self.ranks())
            .map(|rank| {
                let inner = self.keys * self.queries;
                let (heads, within) = (rank / inner, rank % inner);
                let (keys, at) = (within / self.queries, within % self.queries);
                let mut share = self.heads_of(spec, heads);
                if keys > 0 {
                    (share.spec.variant.sinks, share.spec.variant.sink_tokens) = (false, 1);
                }
                let own = match self.keys {
                    1 => queries.of(batch, at)?,
                    ranks => (
                        keys::batch_of(spec, batch, self.deal, ranks, keys)?,
                        Vec::new(),
                    ),
                };
                (share.batch, share.tokens) = own;
                if self.queries == 1 {
                    share.tokens = std::iter::once(0..batch.total_q()).collect();
                }
                share.rank = rank;
                share.group = match self.keys {
                    1 => rank..rank + 1,
                    ranks => heads * ranks..(heads + 1) * ranks,
                };
                share.batch.check(&share.spec)?;
                Ok(share)
            })
            .collect()
    }

    /// The rank that has a page of a row block with `pages` pages, among the ranks that share the keys. This rank appends to the
    /// page.
    ///
    /// # Panics
    /// If the row block has no such page, or for a sharding with no ranks or turns of no pages, which [`shares`](Self::shares) refuses.
    #[must_use]
    pub fn owner(&self, page: u32, pages: u32) -> u32 {
        assert!(self.keys > 0, "keys are distributed over no ranks");
        assert!(
            self.deal != Keys::RoundRobin { pages: 0 },
            "turns have no pages"
        );
        let runs = keys::runs(self.deal, self.keys, pages);
        runs.into_iter()
            .find(|(run, _)| run.contains(&page))
            .expect("the row block has the page")
            .1
    }

    fn check(&self, spec: &Spec) -> Result<(), ShardError> {
        let counts = [
            ("heads", self.heads),
            ("keys", self.keys),
            ("queries", self.queries),
            ("all", self.ranks()),
        ];
        for (what, got) in counts {
            if got == 0 || got > MAX_RANKS {
                return Err(ShardError::Ranks { what, got });
            }
        }
        if let Keys::RoundRobin { pages: 0 } = self.deal {
            return Err(ShardError::NoTurn);
        }
        if self.keys > 1 && self.queries > 1 {
            return Err(ShardError::KeysAndQueries {
                keys: self.keys,
                queries: self.queries,
            });
        }
        if self.keys > 1 && spec.variant.adds_up {
            return Err(ShardError::NoSoftmax { keys: self.keys });
        }
        let (q_heads, kv_heads, ranks) = (spec.q_heads, spec.kv_heads, self.heads);
        let shared = ranks.is_multiple_of(kv_heads) && q_heads.is_multiple_of(ranks);
        if !kv_heads.is_multiple_of(ranks) && !shared {
            return Err(ShardError::Heads {
                q_heads,
                kv_heads,
                ranks,
            });
        }
        Ok(())
    }

    /// A share with the heads of a rank, and no batch yet.
    fn heads_of(&self, spec: &Spec, index: u32) -> Share {
        let mut own = *spec;
        own.q_heads = spec.q_heads / self.heads;
        own.kv_heads = (spec.kv_heads / self.heads).max(1);
        let first = index * own.q_heads;
        let first_kv = first / spec.group();
        Share {
            rank: 0,
            spec: own,
            batch: Batch::default(),
            q_heads: first..first + own.q_heads,
            kv_heads: first_kv..first_kv + own.kv_heads,
            tokens: Vec::new(),
            group: 0..1,
        }
    }
}

impl Share {
    /// Its query tokens, as numbered in the whole batch, in its own order.
    pub fn whole_tokens(&self) -> impl Iterator<Item = u32> + '_ {
        self.tokens.iter().cloned().flatten()
    }
}

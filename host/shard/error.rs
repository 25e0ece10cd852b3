//! Why a batch cannot be distributed, and what is wrong with shares.

use thiserror::Error;

use super::MAX_RANKS;
use crate::problem::ProblemError;

/// Why a batch could not be distributed over ranks.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ShardError {
    /// The specification or the batch is wrong.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// No rank, or too many.
    #[error(
        "{got} ranks for {what}: use 1 to {MAX_RANKS} for heads, keys and queries each, and for all together"
    )]
    Ranks {
        /// What is distributed over them.
        what: &'static str,
        /// The number given.
        got: u32,
    },
    /// Turns without pages.
    #[error("Keys::RoundRobin has turns of 0 pages: use at least 1 page")]
    NoTurn,
    /// Heads that cannot be divided over this number of ranks.
    #[error(
        "{q_heads} query heads over {kv_heads} KV heads cannot be divided over {ranks} ranks: use a divisor of the \
         KV heads, or a multiple of the KV heads that divides the query heads"
    )]
    Heads {
        /// Query heads.
        q_heads: u32,
        /// KV heads.
        kv_heads: u32,
        /// Ranks that were to share them.
        ranks: u32,
    },
    /// Keys and queries at once.
    #[error(
        "keys over {keys} ranks and queries over {queries} exclude each other: distribute only one of them; heads \
         can be combined with either"
    )]
    KeysAndQueries {
        /// Ranks for the keys.
        keys: u32,
        /// Ranks for the queries.
        queries: u32,
    },
    /// Keys over ranks, for hooks whose weights are not a softmax.
    #[error(
        "keys cannot be distributed over {keys} ranks when weights are added without a softmax (`adds_up`), because \
         there are no LSEs to merge by: distribute heads or queries instead"
    )]
    NoSoftmax {
        /// Ranks for the keys.
        keys: u32,
    },
    /// A mask that needs positions, for a rank whose keys are not consecutive.
    #[error(
        "{what} needs consecutive keys, but a rank would have {runs} separate runs of keys of row block {row_block} \
         of part {part}: use Keys::Contiguous, or distribute heads or queries instead of keys"
    )]
    Positions {
        /// The mask.
        what: &'static str,
        /// The part of the batch.
        part: usize,
        /// The row block.
        row_block: usize,
        /// Runs of neighbouring keys.
        runs: usize,
    },
    /// Queries of one request on several ranks, with a window, a variant, a rotary embedding or masks as bits and no causal mask.
    #[error(
        "row block {row_block} of part {part} would be cut before its last query, whose position a window, a \
         variant, a rotary embedding or masks as bits need without a causal mask: distribute heads or keys instead of queries"
    )]
    WindowOfQueries {
        /// The part of the batch.
        part: usize,
        /// The row block.
        row_block: usize,
    },
    /// Turns so short that tables would fill the memory.
    #[error(
        "row block {row_block} of part {part} has {queries} queries and would be cut into {cuts} row blocks of \
         {pages} pages each: use longer turns in Keys::RoundRobin, or use Keys::Folded"
    )]
    ShortTurns {
        /// The part of the batch.
        part: usize,
        /// The row block.
        row_block: usize,
        /// Its queries.
        queries: u32,
        /// Row blocks of a rank.
        cuts: usize,
        /// Pages of a rank.
        pages: usize,
    },
}

/// Why shares do not compute the batch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ShardDefect {
    /// Too few shares, or too many.
    #[error("{got} shares for {expected} ranks")]
    Shares {
        /// Shares given.
        got: usize,
        /// Ranks of the sharding.
        expected: u32,
    },
    /// A share that names what is not in the whole batch, or an empty group.
    #[error(
        "{what} of rank {rank} are {begin}..{end}: give a range within 0..{limit}, and a group that has the rank"
    )]
    Range {
        /// The rank.
        rank: u32,
        /// What the range counts.
        what: &'static str,
        /// Where it begins.
        begin: u32,
        /// One past its last.
        end: u32,
        /// One past the last that there is.
        limit: u32,
    },
    /// A share whose own batch is wrong.
    #[error("the batch of rank {rank} is wrong: {reason}")]
    Batch {
        /// The rank.
        rank: u32,
        /// What is wrong.
        reason: String,
    },
    /// A query head of a token that is not computed by exactly one group.
    #[error(
        "query head {head} of token {token} is computed by {got} groups of ranks instead of one"
    )]
    Computed {
        /// The token of the whole batch.
        token: u32,
        /// The query head.
        head: u32,
        /// Groups that have it.
        got: u32,
    },
    /// A token that sees other keys than in the whole batch.
    #[error("token {token} does not see the keys of the whole batch on ranks {first} to {last}")]
    Seen {
        /// The token of the whole batch.
        token: u32,
        /// First rank of the group.
        first: u32,
        /// Last one.
        last: u32,
    },
    /// Sinks that are not counted exactly once.
    #[error(
        "{got} ranks of the group that begins with rank {first} count the sinks, but {expected} should"
    )]
    Sinks {
        /// First rank of the group.
        first: u32,
        /// Ranks that count them.
        got: usize,
        /// Ranks that should.
        expected: usize,
    },
}

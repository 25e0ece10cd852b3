//! What a user can get wrong in a [`Spec`](super::Spec) or a [`Batch`](super::Batch).

use thiserror::Error;

use super::{Dtype, MAX_HEAD_DIM, MAX_PAGE_SIZE, MAX_POSITION};

/// A description that cannot be computed. Every message carries the values and says what to do.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ProblemError {
    /// `kv_heads` does not divide `q_heads`, or one of them is zero.
    #[error(
        "{q_heads} query heads cannot share {kv_heads} KV heads: both must be at least 1 and the KV heads \
         must divide the query heads"
    )]
    GroupSize {
        /// Query heads given.
        q_heads: u32,
        /// KV heads given.
        kv_heads: u32,
    },
    /// A head dimension that no backend takes.
    #[error(
        "{name} is {got}: give a multiple of 16 up to {MAX_HEAD_DIM}, so that every row starts on a 16-byte \
         boundary (where the model has another size, pad the heads with zeros and keep the scale: Spec::with_scale)"
    )]
    HeadDim {
        /// The field.
        name: &'static str,
        /// Its value.
        got: u32,
    },
    /// Latent attention whose values cannot be a part of its keys.
    #[error(
        "latent attention has {kv_heads} KV heads with keys of {head_dim_qk} and values of {head_dim_v} elements: \
         use one KV head, and values no longer than the keys, because they are the first elements of the keys"
    )]
    Latent {
        /// KV heads given.
        kv_heads: u32,
        /// Elements of a key.
        head_dim_qk: u32,
        /// Elements of a value.
        head_dim_v: u32,
    },
    /// An output type that is too narrow.
    #[error("the output cannot be {got:?}: use F16, BF16 or F32 and convert afterwards")]
    OutputDtype {
        /// The type given.
        got: Dtype,
    },
    /// A number of ancestor masks that is not the number of query tokens.
    #[error(
        "ancestors has {got} entries for {expected} query tokens: give one for each, or none at all"
    )]
    Ancestors {
        /// Entries given.
        got: usize,
        /// Query tokens.
        expected: usize,
    },
    /// Ancestors without a causal mask.
    #[error(
        "the batch has ancestor masks, but the specification is not causal: make the variant causal, because the \
         masks count keys back from the query, or remove the ancestors"
    )]
    AncestorsNotCausal,
    /// Ancestors together with masks.
    #[error(
        "the batch has both ancestors and masks: give one of them; a tree of any size (Batch::push_mask_tree) or masks of one word for \
         each token (Batch::push_mask_words) replace ancestors"
    )]
    MasksAndAncestors,
    /// Masks that do not fit their request or the batch.
    #[error(
        "masks have {got} {what}, where {expected} are expected: push the mask of each request, in the order of qo_indptr"
    )]
    Masks {
        /// What was counted.
        what: &'static str,
        /// How many there are.
        got: usize,
        /// How many there must be.
        expected: usize,
    },
    /// A mask that does not continue that of the token before, or whose words are not there.
    #[error(
        "the mask of query token {token} is not that of the next token of its request: push masks request by request, with the \
         numbers of query tokens that qo_indptr gives"
    )]
    MaskOfToken {
        /// The query token.
        token: u32,
    },
    /// A softmax scale that is not a positive number, or whose product with log2(e) is not finite in f32.
    #[error(
        "the softmax scale is {got}: give a positive number, usually 1/√head_dim_qk (times log2 e it must be finite in f32)"
    )]
    Scale {
        /// The scale given.
        got: f32,
    },
    /// A soft cap that is not a positive number, or above [`Variant::MOST_SOFT_CAP`](crate::problem::Variant::MOST_SOFT_CAP).
    #[error(
        "the soft cap is {got}: give a positive number of at most {}, since it multiplies the rounding of tanh, or leave it out",
        crate::problem::Variant::MOST_SOFT_CAP
    )]
    SoftCap {
        /// The cap given.
        got: f32,
    },
    /// A soft cap together with a variant that has its own logits.
    #[error(
        "the variant {hooks:?} computes its own logits, so soft_cap cannot be set: remove it, or cap in the variant"
    )]
    HooksAndCap {
        /// The variant.
        hooks: kernels_gpu::HooksName,
    },
    /// Weights that are not a softmax, together with something that only a softmax has, or without hooks that compute
    /// them.
    #[error(
        "the weights are added without a softmax (`adds_up`), but the specification has {what}: remove sinks, which \
         need a softmax, and give hooks that compute the weights (`Spec::with_hooks`)"
    )]
    NoSoftmax {
        /// What does not fit such weights.
        what: &'static str,
    },
    /// An invalid rotary embedding.
    #[error(transparent)]
    Rotary(crate::step::StepError),
    /// A rotary embedding in attention with latent keys.
    #[error(
        "with latent keys, the rotary embedding would also rotate the values: rotate the elements after the values \
         before appending, and remove `rotary` from the Spec"
    )]
    LatentRotary,
    /// A window wider than any table.
    #[error(
        "the window of {got} keys is wider than {MAX_POSITION}, the longest table: use a smaller window, or None \
         for no window"
    )]
    Window {
        /// The width given.
        got: u32,
    },
    /// A batch without parts.
    #[error("the batch has no parts: give at least one table, even where all requests are empty")]
    NoParts,
    /// An index pointer without its first entry.
    #[error("{name} is empty: give one entry more than there are rows, so at least one")]
    IndptrEmpty {
        /// The array.
        name: &'static str,
    },
    /// An index pointer that does not start where its array starts.
    #[error("{name}[0] is {got}: it must be 0, where the first row starts")]
    IndptrStart {
        /// The array.
        name: &'static str,
        /// Its first entry.
        got: u32,
    },
    /// An index pointer that goes down.
    #[error("{name}[{index}] is {got}, below the {previous} before it: entries must not decrease")]
    IndptrFalls {
        /// The array.
        name: &'static str,
        /// The position of the fall.
        index: usize,
        /// The entry before it.
        previous: u32,
        /// The entry there.
        got: u32,
    },
    /// An index pointer that does not end at the length of its array.
    #[error("{name} ends at {got}, but there are {expected} {of}: they must be equal")]
    IndptrEnd {
        /// The array.
        name: &'static str,
        /// Its last entry.
        got: usize,
        /// What it counts.
        of: &'static str,
        /// How many of them there are.
        expected: usize,
    },
    /// An index pointer of queries for another number of row blocks than the table has. For [`Batch::new`](super::Batch::new)
    /// it is `qo_indptr`, and each request is a row block.
    #[error(
        "the queries of part {part} are cut into {got} row blocks (requests), but its table has {expected}: push each request \
         to the table once, also one without new tokens, and give one entry more than requests in qo_indptr (q_indptr of the \
         part)"
    )]
    RowBlocks {
        /// The part.
        part: usize,
        /// Row blocks of the index pointer: its length less one.
        got: usize,
        /// Row blocks of the table.
        expected: usize,
    },
    /// An array of the wrong length.
    #[error(
        "{name} of part {part} has {got} entries, but there are {expected} row blocks: give one entry for each"
    )]
    Length {
        /// The array.
        name: &'static str,
        /// The part.
        part: usize,
        /// Its length.
        got: usize,
        /// The length it must have.
        expected: usize,
    },
    /// Row blocks that reach past the queries.
    #[error(
        "part {part} covers query tokens up to {got}, but the batch has only {total_q}: end its row blocks there, or give the batch \
         these tokens"
    )]
    PartPastQueries {
        /// The part.
        part: usize,
        /// One past the last query token of its row blocks.
        got: u32,
        /// Query tokens in the batch.
        total_q: u32,
    },
    /// A part with heads that are tokens of the batch.
    #[error(
        "part {part}: {heads} neighbouring tokens of the batch are one of the part, of {total_q} query tokens: give a divisor of \
         their number"
    )]
    PartHeads {
        /// The part.
        part: usize,
        /// Its `heads`.
        heads: u32,
        /// Query tokens in the batch.
        total_q: u32,
    },
    /// Parts of different numbers of heads.
    #[error(
        "part {part} has {got} heads, another {other}: give all parts either 1 or the same number"
    )]
    PartsOfHeads {
        /// The part.
        part: usize,
        /// Its `heads`.
        got: u32,
        /// Those of a part before it.
        other: u32,
    },
    /// A number of indices that is not a multiple of the keys of a query token.
    #[error(
        "{got} indices cannot be divided among query tokens of {k} keys: give {k} for each, at least 1, with −1 for no key"
    )]
    Indices {
        /// Indices given.
        got: usize,
        /// Keys of a query token.
        k: u32,
    },
    /// A page size outside 1 to 4096.
    #[error("the page size of part {part} is {got}: give 1 to {MAX_PAGE_SIZE} tokens")]
    PageSize {
        /// The part.
        part: usize,
        /// The page size given.
        got: u32,
    },
    /// A page id past the pool.
    #[error(
        "page id {got} at indices[{index}] of part {part} is outside the pool of {pool_pages} pages: correct the \
         id, or give the table the pages of its pool"
    )]
    PageOutOfPool {
        /// The part.
        part: usize,
        /// Where in `indices`.
        index: usize,
        /// The page id.
        got: u32,
        /// Pages in the pool.
        pool_pages: u32,
    },
    /// A last page that holds too much or too little.
    #[error(
        "row block {row_block} of part {part} has {got} tokens in the last of its {pages} pages: give 1 to the page \
         size of {page_size}, or 0 if it has no pages"
    )]
    LastPageLen {
        /// The part.
        part: usize,
        /// The row block.
        row_block: usize,
        /// The length given.
        got: u32,
        /// Pages of the row block.
        pages: u32,
        /// Tokens in a page.
        page_size: u32,
    },
    /// A row block that was given fewer pages than its keys take.
    #[error(
        "row block {row_block} has {kv_len} keys on {got} pages of {page_size} tokens: give at least {needed} \
         pages, or count only the keys that are there"
    )]
    TooFewPages {
        /// The row block.
        row_block: usize,
        /// Its keys.
        kv_len: u32,
        /// Pages given.
        got: usize,
        /// Pages that the keys take.
        needed: u32,
        /// Tokens in a page.
        page_size: u32,
    },
    /// A sequence on pages of another size than those of the table.
    #[error(
        "the sequence has pages of {got} tokens and the table pages of {expected}: make the table with the page size of \
         the pool (kv::PagePool::page_size)"
    )]
    SequencePages {
        /// Tokens in a page of the sequence.
        got: u32,
        /// Tokens in a page of the table.
        expected: u32,
    },
    /// A number that cannot be a page id.
    #[error(
        "page {index} of row block {row_block} is {got}: a page id is a number from 0 to 2³² − 1, and padding may \
         only follow the pages in use"
    )]
    PageId {
        /// The row block.
        row_block: usize,
        /// Which of its pages.
        index: usize,
        /// The number given.
        got: i128,
    },
    /// A run of keys that ends after the end of its memory.
    #[error(
        "run {run} ends at token {got}, but the memory holds {tokens} tokens: give ranges of tokens within it"
    )]
    RunPastEnd {
        /// Which run.
        run: usize,
        /// Where it ends.
        got: u32,
        /// Tokens of the memory.
        tokens: u32,
    },
    /// A position that has no place in a table.
    #[error(
        "position {got} of row block {row_block} is past its {kv_len} keys: push the row block with all its keys"
    )]
    PositionPastKeys {
        /// The row block.
        row_block: usize,
        /// The position.
        got: u32,
        /// Keys of the row block.
        kv_len: u32,
    },
    /// More queries than keys under a causal mask.
    #[error(
        "row block {row_block} has {q_len} queries and only {kv_len} keys under a causal mask: append the keys \
         of the new tokens before attention, or turn the mask off"
    )]
    MoreQueriesThanKeys {
        /// The row block, which is the request.
        row_block: usize,
        /// Its query tokens.
        q_len: u32,
        /// Its keys, including those that other parts hold after them.
        kv_len: u32,
    },
    /// A row block of several requests, with a mask that hides keys from some queries, or with anything that depends on
    /// distances.
    #[error(
        "row block {row_block} of part {part} covers several requests, so masks and distances are undefined: let \
         its {q_len} queries see all its keys (no window, ancestors or masks; under a causal mask keys_after of at least \
         {q_len}, here {keys_after}) and use no distances (no rotary embedding, no hooks but sigmoid weights), or \
         give each request its own row block with the same page ids"
    )]
    MaskedSharedBlock {
        /// The part.
        part: usize,
        /// The row block.
        row_block: usize,
        /// Its query tokens.
        q_len: u32,
        /// Its `keys_after`.
        keys_after: u32,
    },
    /// A number of tokens with sinks of their own where there are none, or above 255.
    #[error(
        "sinks of {got} tokens: leave it at 1, unless the specification has sinks, keys that are not latent, and a batch with \
         up to 255 tokens for a token of the model, as kv::PagesByHead makes them"
    )]
    SinkTokens {
        /// As [`Variant::sink_tokens`](super::Variant::sink_tokens).
        got: u32,
    },
    /// Sinks of other tokens than a part has together.
    #[error(
        "part {part} has {heads} tokens of the batch together, but sinks are those of {sink_tokens} tokens: for page lists by \
         KV head, use the specification of kv::PagesByHead, and give as many sinks as the model has"
    )]
    SinksOfHeads {
        /// The part.
        part: usize,
        /// As [`Part::heads`](super::Part::heads).
        heads: u32,
        /// As [`Variant::sink_tokens`](super::Variant::sink_tokens).
        sink_tokens: u32,
    },
    /// Something that page lists by KV head do not support.
    #[error(
        "page lists by KV head do not support {what}, because they skip keys and compute heads as requests: remove \
         it, or give all heads the same pages"
    )]
    ByHead {
        /// What it is.
        what: &'static str,
    },
    /// A pool that cannot be seen by KV head.
    #[error("a pool with {what} cannot be seen by KV head: {instead}")]
    PoolByHead {
        /// What is in the way.
        what: &'static str,
        /// What to do.
        instead: &'static str,
    },
    /// A pool whose heads cannot be seen as pages.
    #[error(
        "pages are {page} elements apart and heads {head}: for page lists by KV head, the first must be a multiple \
         of the second"
    )]
    UnevenHeads {
        /// From page to page.
        page: u32,
        /// From head to head.
        head: u32,
    },
    /// Not one page list for each KV head.
    #[error("{got} page lists of a request for {expected} KV heads: give one for each")]
    HeadLists {
        /// Lists given.
        got: usize,
        /// KV heads.
        expected: u32,
    },
    /// Something that block masks do not support.
    #[error(
        "block masks do not support {what}, because they skip keys and distances are unknown: remove it, or give \
         the whole mask"
    )]
    Blocks {
        /// What it is.
        what: &'static str,
    },
    /// Blocks of another size.
    #[error("a block mask has blocks of {got} queries: give 64 or 128")]
    BlockRows {
        /// Queries of a block.
        got: u32,
    },
    /// A page size that does not divide the 128 keys of a block.
    #[error(
        "pages have {page_size} tokens, which does not divide the 128 keys of a mask block: use a page size that \
         divides 128"
    )]
    BlockPages {
        /// Tokens of a page.
        page_size: u32,
    },
    /// Not one block mask for each that has one.
    #[error("{got} block masks of a prompt for {expected} heads with masks: give one for each")]
    BlockMasks {
        /// Masks given.
        got: usize,
        /// Heads with masks; 1 where all have the same.
        expected: usize,
    },
    /// A block mask for another prompt.
    #[error(
        "the block mask has {} queries and {} keys, but the prompt has {} and {}: give a mask of the prompt's size",
        .got[0], .got[1], .expected[0], .expected[1]
    )]
    BlockMask {
        /// Queries and keys of the mask.
        got: [u32; 2],
        /// Queries and keys of the prompt.
        expected: [u32; 2],
    },
    /// More new tokens than keys, under a causal mask.
    #[error("{tokens} new tokens but only {keys} keys: count the keys of the new tokens")]
    BlockTokens {
        /// New tokens.
        tokens: u32,
        /// Keys.
        keys: u32,
    },
    /// A page that is not in the pool.
    #[error(
        "page {got} of a list is outside the pool of {pages} pages: correct the list, or give the table the pages of its pool"
    )]
    NoPage {
        /// The page.
        got: u32,
        /// Pages of the pool.
        pages: u32,
    },
    /// A page that would be written, but occurs more than once in the tables.
    #[error(
        "row block {row_block} of part {part} would write to page {page}, but the tables name that page more than \
         once: copy a shared page before appending to it (kv::PagePool::make_unique)"
    )]
    WritesSharedPage {
        /// The part.
        part: usize,
        /// The row block that writes.
        row_block: usize,
        /// The page.
        page: u32,
    },
    /// A quantity that does not fit the 32-bit offsets of a plan.
    #[error("{what} is {got}, past {limit}: {advice}")]
    TooLarge {
        /// The quantity.
        what: &'static str,
        /// Its value.
        got: u64,
        /// The largest that fits.
        limit: u64,
        /// What to do about it.
        advice: &'static str,
    },
}

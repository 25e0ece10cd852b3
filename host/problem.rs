//! What is to be computed: the heads ([`Spec`]) and the requests ([`Batch`]).

use serde::{Deserialize, Serialize};

/// Element types of tensors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE half precision.
    F16,
    /// bfloat16.
    BF16,
    /// IEEE single precision.
    F32,
    /// 8-bit float, 4 exponent bits (no infinity).
    F8E4M3,
    /// 8-bit float, 5 exponent bits.
    F8E5M2,
}

/// How a page of the pool is ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvLayout {
    /// `[pages, page_size, kv_heads, head_dim]`.
    Nhd,
    /// `[pages, kv_heads, page_size, head_dim]`.
    Hnd,
}

/// Mask and logits transform, as data; the device side is `kernels_gpu::variant`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Variant {
    /// A query sees no key after its own position.
    pub causal: bool,
    /// A query sees its own position and this many keys to the left.
    pub window_left: Option<u32>,
    /// Logits become `cap · tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
}

/// The heads of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Spec {
    /// Query heads.
    pub q_heads: u32,
    /// KV heads; divides `q_heads`.
    pub kv_heads: u32,
    /// Head dimension of queries and keys.
    pub head_dim_qk: u32,
    /// Head dimension of values and outputs.
    pub head_dim_v: u32,
    /// Element type of `q`.
    pub q_dtype: Dtype,
    /// Element type of the KV pool.
    pub kv_dtype: Dtype,
    /// Element type of the output.
    pub out_dtype: Dtype,
    /// Softmax scale, usually `1/√head_dim_qk`.
    pub scale: f32,
    /// Mask and logits transform.
    pub variant: Variant,
}

/// Block-sparse rows: for each row block of queries, the pages that hold its keys, in order (CSR).
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PageTable {
    /// Tokens in a page (the column block size): 1 (token-level sparsity, tree masks) to 128.
    pub page_size: u32,
    /// Pages in the pool; every index is below it.
    pub pool_pages: u32,
    /// `[row_blocks + 1]`: row block `r` owns `indices[indptr[r]..indptr[r + 1]]`.
    pub indptr: Vec<u32>,
    /// Page ids.
    pub indices: Vec<u32>,
    /// `[row_blocks]`: tokens in the last page, `1..=page_size`; 0 exactly where there are no pages.
    pub last_page_len: Vec<u32>,
}

/// One block-sparse matrix of a batch (FlashInfer's composable formats: a batch is the ⊕ of its parts).
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Part {
    /// `[row_blocks + 1]` over query tokens: row block `r` is the tokens `q_indptr[r]..q_indptr[r + 1]`.
    pub q_indptr: Vec<u32>,
    /// The keys of each row block.
    pub table: PageTable,
    /// `[row_blocks]`: keys that stand after this table's last one, before the queries end (another part
    /// holds them): query `i` of `n` in a row block of `l` keys stands at position `l + after - n + i`.
    /// Empty: zero for all (the queries are the last tokens of their own table).
    pub keys_after: Vec<u32>,
}

/// The requests of one step: ragged queries against paged keys.
///
/// Most batches have a single part whose row blocks are the requests.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Batch {
    /// `[requests + 1]`: request `r` owns the query tokens `qo_indptr[r]..qo_indptr[r + 1]`.
    pub qo_indptr: Vec<u32>,
    /// At least one part.
    pub parts: Vec<Part>,
}

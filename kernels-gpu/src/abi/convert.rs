//! What a prefill takes that converts 8-bit keys and values to 16 bits while it computes.

use bytemuck::{Pod, Zeroable};

use super::KvStrides;
use crate::common::divisor::Divisor;

/// 64 keys of 8 bits of one table, with their values, and the page of 16-bit ones that they become.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ConvertedPage {
    /// Index into the plan's page ids of the first page of the table.
    pub table: u32,
    /// The first key.
    pub key: u32,
    /// Keys that there are, at least one.
    pub keys: u32,
    /// The page that they become.
    pub page: u32,
}

impl ConvertedPage {
    /// Keys of a full page.
    pub const KEYS: u32 = 64;
}

/// What a prefill converts from 8 bits to 16, see `sm90::prefill::convert`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ConvertParams {
    /// The 8-bit key pool.
    pub k: u64,
    /// The 8-bit value pool.
    pub v: u64,
    /// `[pages, kv_heads, 64, head_dim_qk]`: keys of 16 bits.
    pub to_k: u64,
    /// `[pages, kv_heads, 64, head_dim_v]`: their values; 0 where those are read where they are.
    pub to_v: u64,
    /// `[...]` [`ConvertedPage`]: those of the plan.
    pub list: u64,
    /// The plan's page ids.
    pub page_ids: u64,
    /// `[pages, kv_heads, 2]` u32: for the keys of a page and head and for its values, one more than the last epoch in
    /// which they were converted.
    pub done: u64,
    /// Three u32, 0 at first: pieces that are claimed; the epoch, which a launch ends; and CTAs that have found none left.
    /// Between launches the first and the last are 0.
    pub control: u64,
    /// Strides of the key pool, in vectors of 16 bytes.
    pub k_strides: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_strides: KvStrides,
    /// By tokens in a page of 8-bit keys.
    pub page_size: Divisor,
    /// The launch's first entry of `list`, where no record says it.
    pub first_page: u32,
    /// How many entries are the launch's, or with a record any number but 0.
    pub pages: u32,
    /// What the pool holds: a constant of [`common::cache`](crate::common::cache).
    pub format: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

//! Parameters of a prefill that converts 8-bit keys and values to 16 bits while it computes.

use bytemuck::{Pod, Zeroable};

use super::KvStrides;
use crate::common::divisor::Divisor;

/// Up to 64 8-bit keys of one page table, with their values, and the 16-bit page to which they are converted.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Pod, Zeroable)]
pub struct ConvertedPage {
    /// Index into the plan's page ids of the first page of the table.
    pub table: u32,
    /// The first of the 64 keys.
    pub key: u32,
    /// The first key that a query sees, counted from `key`. Zeros take the place of those before it and after the last, which may be
    /// anything: their weights are 0, but 0 · NaN is NaN.
    pub first: u16,
    /// One past the last, likewise.
    pub end: u16,
    /// The converted page.
    pub page: u32,
}

impl ConvertedPage {
    /// Keys of a full page.
    pub const KEYS: u32 = 64;

    /// The [first](Self::first) and the [end](Self::end) in a word of an entry.
    #[inline(always)]
    #[must_use]
    pub const fn seen(word: u32) -> [u32; 2] {
        [word & 0xffff, word >> 16]
    }
}

/// The conversion from 8 to 16 bits; see `sm90::prefill::convert`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
pub struct ConvertParams {
    /// The 8-bit key pool.
    pub k: u64,
    /// The 8-bit value pool.
    pub v: u64,
    /// `[pages, kv_heads, 64, head_dim_qk]`: converted keys.
    pub to_k: u64,
    /// `[pages, kv_heads, 64, head_dim_v]`: converted values; 0 if values are read from their original pages.
    pub to_v: u64,
    /// `[...]` [`ConvertedPage`] of the plan.
    pub list: u64,
    /// The plan's page ids.
    pub page_ids: u64,
    /// `[pages, kv_heads, 2]` u32: for the keys and for the values of a page and head, the last epoch in which they
    /// were converted, plus 1.
    pub done: u64,
    /// Three u32, initially 0: claimed pieces; the epoch, which every launch increments; CTAs that found no piece left.
    /// The first and the last are 0 between launches.
    pub control: u64,
    /// Strides of the key pool, in vectors of 16 bytes.
    pub k_strides: KvStrides,
    /// Strides of the value pool, likewise.
    pub v_strides: KvStrides,
    /// Divides by the tokens of a page of 8-bit keys.
    pub page_size: Divisor,
    /// The launch's first entry of `list`, if there is no record.
    pub first_page: u32,
    /// The launch's number of entries; with a record, any number except 0. 0: no conversion.
    pub pages: u32,
    /// The pool's 8-bit format: a constant of [`common::cache`](crate::common::cache).
    pub format: u32,
    /// Zero.
    pub reserved: [u32; 2],
}

//! The order of dimensions in a page pool.

use kernels_gpu::abi::KvStrides;
use serde::{Deserialize, Serialize};

/// The order of dimensions in a page pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum KvLayout {
    /// `[pages, page_size, kv_heads, head_dim]`.
    Nhd,
    /// `[pages, kv_heads, page_size, head_dim]`.
    Hnd,
}

impl KvLayout {
    /// Strides of a dense pool; a page of it holds `kv_heads · page_size · head_dim` elements. Strides beyond 32 bits
    /// are `u32::MAX`, which no run takes.
    #[must_use]
    pub const fn strides(self, page_size: u32, kv_heads: u32, head_dim: u32) -> KvStrides {
        let (token, head) = match self {
            Self::Nhd => (kv_heads.saturating_mul(head_dim), head_dim),
            Self::Hnd => (head_dim, page_size.saturating_mul(head_dim)),
        };
        KvStrides {
            page: page_size.saturating_mul(kv_heads).saturating_mul(head_dim),
            token,
            head,
            page_size,
        }
    }
}

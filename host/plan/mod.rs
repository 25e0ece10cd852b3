//! From problem to plan: pure functions, no GPU types.

use std::ops::Range;

use kernels_gpu::abi::{MergeRow, QueryRow, WorkItem};
use serde::{Deserialize, Serialize};

/// Query rows × keys that one CTA works on at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Tile {
    /// Rows: query tokens × packed query heads.
    pub m: u32,
    /// Keys.
    pub n: u32,
}

/// Which kernel runs a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Kernel {
    /// Gathered rows, query heads of a KV head packed: units are items × KV heads.
    Decode,
    /// Contiguous rows, one query head: units are items × query heads.
    Prefill,
    /// Contiguous rows, query heads of a KV head packed: units are items × KV heads.
    PrefillPacked,
}

/// Items that one kernel with one tile works through.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TileGroup {
    /// The kernel.
    pub kernel: Kernel,
    /// Its tile.
    pub tile: Tile,
    /// The items, longest first.
    pub items: Range<u32>,
}

//! Items on their way to a plan: which rows against which keys, not yet cut along the keys.

use super::{Kernel, Tile};

/// A row of a gathered item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DraftRow {
    pub token: u32,
    pub position: i32,
}

/// An item before it is cut along the keys.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draft {
    pub kernel: Kernel,
    pub tile: Tile,
    pub part: u32,
    /// The part's page size.
    pub page_size: u32,
    /// First page of the table in the plan's page ids.
    pub table: u32,
    /// Gathered: first [`DraftRow`]. Contiguous: first query token.
    pub rows_begin: u32,
    pub rows: u32,
    /// Of the first row (contiguous), the smallest among the rows (gathered).
    pub position: i32,
    pub kv_begin: u32,
    pub kv_end: u32,
    pub flags: u32,
}

impl Draft {
    pub const fn kv_len(&self) -> u32 {
        self.kv_end - self.kv_begin
    }

    pub fn is_gathered(&self) -> bool {
        self.kernel == Kernel::Decode
    }
}

/// A run of a draft's keys; becomes a work item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub draft: u32,
    pub kv_begin: u32,
    pub kv_end: u32,
}

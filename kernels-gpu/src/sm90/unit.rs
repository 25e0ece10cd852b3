//! What the warps of a CTA know of a unit, where one warp claims units for all.

#[cfg(target_arch = "nvptx64")]
use cuda_std::shared;

/// What it takes of shared memory: three vectors of four words.
pub const UNIT_BYTES: u32 = 48;

/// What the claiming warp passes on about a unit.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub struct Unit {
    /// Query tokens; none ends the work.
    pub tokens: u32,
    /// The KV head; of latent heads, which have one, the first query head of the tile.
    pub head: u32,
    /// Smallest position among the query tokens.
    pub position: i32,
    /// First page of the table.
    pub table: u32,
    /// Where the first block begins.
    pub first: u32,
    /// The item's keys.
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Blocks of keys, at least one.
    pub blocks: u32,
    /// As [`WorkItem::flags`](crate::abi::WorkItem::flags).
    pub flags: u32,
}

#[cfg(target_arch = "nvptx64")]
impl Unit {
    /// The end of all work.
    pub const NONE: Self = Self {
        tokens: 0,
        head: 0,
        position: 0,
        table: 0,
        first: 0,
        kv_begin: 0,
        kv_end: 0,
        blocks: 0,
        flags: 0,
    };

    /// Writes it to its place.
    ///
    /// # Safety
    /// `at` is the place of a unit in shared memory, and the caller's to write.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: the caller owns the unit's 48 bytes.
        unsafe {
            shared::store_u32x4(
                at,
                [self.tokens, self.head, self.position as u32, self.table],
            );
            shared::store_u32x4(
                at + 16,
                [self.first, self.kv_begin, self.kv_end, self.blocks],
            );
            shared::store_u32(at + 32, self.flags);
        }
    }

    /// Reads it from its place.
    ///
    /// # Safety
    /// `at` is the place of a unit in shared memory, which was stored, and its barrier completed.
    #[inline(always)]
    pub unsafe fn load(at: u32) -> Self {
        // SAFETY: the unit was stored and its barrier completed.
        unsafe {
            let [tokens, head, position, table] = shared::load_u32x4(at);
            let [first, kv_begin, kv_end, blocks] = shared::load_u32x4(at + 16);
            Self {
                tokens,
                head,
                position: position as i32,
                table,
                first,
                kv_begin,
                kv_end,
                blocks,
                flags: shared::load_u32(at + 32),
            }
        }
    }
}

//! The description of a unit that the scheduler warp passes to the other warps of its CTA.

#[cfg(target_arch = "nvptx64")]
use cuda_std::shared;

#[cfg(target_arch = "nvptx64")]
use crate::common::decode::produce::Header;

/// Bytes of a unit in shared memory: three vectors of four words.
pub const UNIT_BYTES: u32 = 48;

/// A unit of work, as the scheduler warp describes it.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub struct Unit {
    /// Query tokens; 0 ends the work.
    pub tokens: u32,
    /// The KV head. With latent heads (MLA), which have only one, the tile's first query head.
    pub head: u32,
    /// Smallest position among the query tokens.
    pub position: i32,
    /// Index into the plan's page ids of the table's first page, that of key 0.
    pub table: u32,
    /// First key of the first block.
    pub first: u32,
    /// The item's keys: the first, and one past the last.
    pub kv_begin: u32,
    pub kv_end: u32,
    /// Blocks of keys, at least one.
    pub blocks: u32,
    /// As [`WorkItem::flags`](crate::abi::WorkItem::flags).
    pub flags: u32,
}

#[cfg(target_arch = "nvptx64")]
impl Unit {
    /// No more work.
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

    /// The unit of a header whose blocks of `keys` keys begin at key `first`.
    #[inline(always)]
    pub fn new(header: &Header, head: u32, first: u32, keys: u32) -> Self {
        let item = &header.item;
        Self {
            tokens: item.rows,
            head,
            position: item.position,
            table: item.table,
            first,
            kv_begin: item.kv_begin,
            kv_end: item.kv_end,
            // A unit without keys walks one block that is masked entirely.
            blocks: ((item.kv_end - first + keys - 1) / keys).max(1),
            flags: item.flags,
        }
    }

    /// Writes the unit to shared memory.
    ///
    /// # Safety
    /// `at` is the shared address of a unit's [`UNIT_BYTES`] bytes, and only the caller accesses them.
    #[inline(always)]
    pub unsafe fn store(&self, at: u32) {
        // SAFETY: only the caller accesses the unit's 48 bytes.
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

    /// Reads a unit from shared memory.
    ///
    /// # Safety
    /// `at` is the shared address of a unit that was stored, and its barrier completed since.
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

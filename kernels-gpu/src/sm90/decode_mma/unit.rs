//! What producers tell consumers in shared memory: the unit of a slot, and the chunk of a stage.

use cuda_std::shared;

use super::layout::KEYS;
use crate::{abi::DecodeParams, common::variant::Variant};

/// A unit: an item and a KV head.
#[derive(Clone, Copy, Debug)]
pub struct Unit {
    /// The KV head.
    pub head: u32,
    /// Query tokens; 0 if there are no more units.
    pub tokens: u32,
    /// First key position.
    pub begin: u32,
    /// One past the last.
    pub end: u32,
    /// Chunks, at least one unless there are no more units.
    pub chunks: u32,
    /// Chunks of all previous units of the CTA.
    pub sequence: u32,
    /// Smallest position among the query tokens.
    pub position: i32,
    /// First page of the table.
    pub table: u32,
    /// As [`WorkItem::flags`](crate::abi::WorkItem::flags).
    pub flags: u32,
}

impl Unit {
    /// The end of the list.
    pub const NONE: Self = Self {
        head: 0,
        tokens: 0,
        begin: 0,
        end: 0,
        chunks: 0,
        sequence: 0,
        position: 0,
        table: 0,
        flags: 0,
    };

    /// Where the first chunk begins.
    #[inline(always)]
    #[must_use]
    pub const fn first_key(&self) -> u32 {
        self.begin & !(KEYS - 1)
    }
}

impl Unit {
    /// Writes the unit to its slot.
    ///
    /// # Safety
    /// `address` comes from [`Layout::unit`](super::layout::Layout::unit).
    #[inline(always)]
    pub unsafe fn store(self, address: u32) {
        // SAFETY: within the unit's 64 bytes.
        unsafe {
            shared::store_u32x4(address, [self.head, self.tokens, self.begin, self.end]);
            let position = self.position as u32;
            shared::store_u32x4(
                address + 16,
                [self.chunks, self.sequence, position, self.table],
            );
            shared::store_u32x4(address + 32, [self.flags, 0, 0, 0]);
        }
    }

    /// Reads [`sequence`](Self::sequence) alone.
    ///
    /// # Safety
    /// `address` comes from [`Layout::unit`](super::layout::Layout::unit).
    #[inline(always)]
    pub unsafe fn load_sequence(address: u32) -> u32 {
        // SAFETY: one of the unit's words.
        unsafe { shared::load_u32(address + 20) }
    }

    /// Reads the unit from its slot.
    ///
    /// # Safety
    /// `address` comes from [`Layout::unit`](super::layout::Layout::unit).
    #[inline(always)]
    pub unsafe fn load(address: u32) -> Self {
        // SAFETY: within the unit's 64 bytes.
        unsafe {
            let [head, tokens, begin, end] = shared::load_u32x4(address);
            let [chunks, sequence, position, table] = shared::load_u32x4(address + 16);
            let flags = shared::load_u32(address + 32);
            Self {
                head,
                tokens,
                begin,
                end,
                chunks,
                sequence,
                position: position as i32,
                table,
                flags,
            }
        }
    }
}

/// The chunk that a stage holds.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor {
    /// The unit's slot.
    pub slot: u32,
    /// Parity of the slot's phase.
    pub parity: u32,
    /// Index of the chunk in its unit.
    pub chunk: u32,
    /// Position of the first key.
    pub first: u32,
    /// Whether some row does not see all keys of the chunk.
    pub masked: bool,
    /// Whether there are no more chunks for the warp.
    pub exit: bool,
}

impl Descriptor {
    /// The end of a consumer warp's work.
    pub const EXIT: Self = Self {
        slot: 0,
        parity: 0,
        chunk: 0,
        first: 0,
        masked: false,
        exit: true,
    };

    /// Writes the descriptor to its stage.
    ///
    /// # Safety
    /// `address` comes from [`Layout::descriptor`](super::layout::Layout::descriptor).
    #[inline(always)]
    pub unsafe fn store(self, address: u32) {
        let bits =
            self.slot | self.parity << 8 | (self.masked as u32) << 9 | (self.exit as u32) << 10;
        // SAFETY: 16 bytes.
        unsafe { shared::store_u32x4(address, [bits, self.chunk, self.first, 0]) }
    }

    /// Reads the descriptor from its stage.
    ///
    /// # Safety
    /// `address` comes from [`Layout::descriptor`](super::layout::Layout::descriptor).
    #[inline(always)]
    pub unsafe fn load(address: u32) -> Self {
        // SAFETY: 16 bytes.
        let [bits, chunk, first, _] = unsafe { shared::load_u32x4(address) };
        Self {
            slot: bits & 0xFF,
            parity: bits >> 8 & 1,
            chunk,
            first,
            masked: bits >> 9 & 1 != 0,
            exit: bits >> 10 & 1 != 0,
        }
    }
}

/// The keys of a unit that all of its rows see: chunks that lie within need no mask.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    begin: u32,
    end: u32,
}

impl Seen {
    /// `position` is the smallest of the unit's query tokens. With a window the range counts as empty: all chunks are
    /// masked.
    #[inline(always)]
    pub fn new<V: Variant>(
        p: &DecodeParams,
        variant: &V,
        position: i32,
        begin: u32,
        end: u32,
    ) -> Self {
        let windowed = p.attention.variant.window_left != i32::MAX;
        let (_, high) = variant.visible_keys(position);
        let high = p.attention.seen_by_all(high, position);
        let end = if windowed {
            0
        } else {
            high.saturating_add(1).clamp(0, end as i32) as u32
        };
        Self { begin, end }
    }

    /// Whether the chunk at position `first` has keys that some row does not see.
    #[inline(always)]
    pub const fn mask(self, first: u32) -> bool {
        first < self.begin || first + KEYS > self.end
    }
}

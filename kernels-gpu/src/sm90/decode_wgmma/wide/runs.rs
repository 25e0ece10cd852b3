//! The keys of a unit: runs, each of one page table and visible to some of the rows.

use cuda_std::{misc, ptr, shared, warp};

use super::{
    masks::Mode,
    shared::{Shared, Unit},
};
use crate::{
    abi::{DecodeParams, WorkItem},
    common::decode::produce::Header,
};

const WARP: u32 = warp::FULL_MASK;

/// Keys of a piece where keys are loaded one by one: as many as have one mask.
pub(super) const TOKENS: u32 = 8;

/// A run of keys of one page table. It covers whole pieces of the unit's keys.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// Index into the plan's page ids of the table's first page, that of key 0.
    table: u32,
    /// Position of the first key of its first piece.
    first_key: u32,
    kv_begin: u32,
    kv_end: u32,
    /// Its pieces, numbered over the unit: the first, and one past the last.
    first_piece: u32,
    past_piece: u32,
    /// Rows of the tile that see it: the first, and, from bit 16 on, one past the last.
    rows: u32,
    /// As [`WorkItem::flags`].
    pub flags: u32,
}

/// Flag: a row may see only some of the run's keys.
const POSITIONAL: u32 = 1 << 31;

impl Run {
    #[inline(always)]
    unsafe fn store(&self, at: u32) {
        // SAFETY: only the caller accesses the run's 32 bytes.
        unsafe {
            shared::store_u32x4(at, [self.table, self.first_key, self.kv_begin, self.kv_end]);
            shared::store_u32x4(
                at + 16,
                [self.first_piece, self.past_piece, self.rows, self.flags],
            );
        }
    }

    /// # Safety
    /// The unit is written and has the run.
    #[inline(always)]
    pub unsafe fn load(at: u32) -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let [table, first_key, kv_begin, kv_end] = shared::load_u32x4(at);
            let [first_piece, past_piece, rows, flags] = shared::load_u32x4(at + 16);
            Self {
                table,
                first_key,
                kv_begin,
                kv_end,
                first_piece,
                past_piece,
                rows,
                flags,
            }
        }
    }
}

/// Writes a unit's runs to its slot, one per lane, and returns the unit's description.
///
/// # Safety
/// A whole warp, which owns the slot; `unit` is one of the launch's, and `header` belongs to it.
#[inline(always)]
pub(super) unsafe fn list_runs(
    p: &DecodeParams,
    items: u64,
    s: Shared,
    slot: u32,
    unit: u32,
    header: &Header,
) -> Unit {
    let lane = warp::lane_id();
    let item = &header.item;
    let (joint, group) = (item.is_joint(), p.attention.group);
    let runs = if joint { item.merge } else { 1 };
    let tokens = if p.loads_rows() {
        TOKENS
    } else {
        p.piece_tokens
    };
    let shift = tokens.trailing_zeros();
    let (index, _) = p.kv_heads.div_rem(unit);
    let first = items + u64::from(index + item.slot) * size_of::<WorkItem>() as u64;
    // Opaque: otherwise values derived from the parameters are kept in predicate registers, of which there are too few.
    let window = misc::opaque(p.attention.variant.window_left as u32) as i32;
    let causal = misc::opaque(p.attention.variant.causal);
    let last = if causal == 0 { i32::MAX } else { item.position };
    let last = p.attention.seen_by_all(last, item.position);
    let sees_all = window == i32::MAX && item.kv_end as i32 <= last.saturating_add(1);
    let (mut listed, mut pieces) = (0, 0);
    // SAFETY: a whole warp; the plan's items are valid.
    unsafe {
        while listed < runs {
            let index = listed + lane;
            let mut run = Run {
                table: item.table,
                first_key: 0,
                kv_begin: item.kv_begin,
                kv_end: item.kv_end,
                first_piece: 0,
                past_piece: 0,
                rows: s.shape.rows() << 16,
                flags: item.flags | if sees_all || joint { 0 } else { POSITIONAL },
            };
            if joint && index < runs {
                let at = (first + u64::from(index) * size_of::<WorkItem>() as u64) as *const u32;
                let [rows_begin, rows] = ptr::load_nc_u32x2(at);
                [run.table, run.kv_begin] = ptr::load_nc_u32x2(at.add(2));
                [run.kv_end, _] = ptr::load_nc_u32x2(at.add(4));
                [run.flags, _] = ptr::load_nc_u32x2(at.add(8));
                if rows < item.rows {
                    let begin = (rows_begin - item.rows_begin) * group;
                    run.rows = begin | (begin + rows * group) << 16;
                }
            }
            run.first_key = run.kv_begin >> shift << shift;
            let own = if index < runs {
                (run.kv_end - run.first_key + tokens - 1) >> shift
            } else {
                0
            };
            // Prefix sum over lanes: the pieces of all runs up to this one.
            let mut upto = own;
            let mut stride = 1;
            while stride < 32 {
                let before = warp::warp_shuffle_up(WARP, upto, stride, 32);
                upto += if lane >= stride { before } else { 0 };
                stride *= 2;
            }
            run.past_piece = pieces + upto;
            run.first_piece = run.past_piece - own;
            if index < runs {
                run.store(s.run(slot, index));
            }
            pieces += warp::warp_shuffle_idx(WARP, upto, 31, 32);
            listed += 32;
        }
        warp::sync_warp(WARP);
    }
    let keys = s.shape.keys;
    Unit {
        tokens: item.rows,
        head: header.head,
        position: item.position,
        runs,
        // A unit without keys walks one block that is masked entirely.
        blocks: (((pieces << shift) + keys - 1) / keys).max(1),
    }
}

/// A lane's position among the runs of a unit.
pub(super) struct Walk {
    pub run: Run,
    pub index: u32,
}

/// The keys of a piece that belong to the run.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    /// Position of the piece's first key.
    pub at: u32,
    /// The run's keys, counted from `at`: the first, and one past the last. Empty where the unit has no such piece.
    pub first: u32,
    pub past: u32,
}

impl Piece {
    pub const NONE: Self = Self {
        at: 0,
        first: 0,
        past: 0,
    };
}

impl Walk {
    /// # Safety
    /// The unit is written.
    #[inline(always)]
    pub unsafe fn start(s: Shared, slot: u32) -> Self {
        // SAFETY: every unit has at least one run.
        unsafe { Self::resume(s, slot, 0) }
    }

    /// At the beginning of a run.
    ///
    /// # Safety
    /// The unit is written and has the run.
    #[inline(always)]
    pub unsafe fn resume(s: Shared, slot: u32, index: u32) -> Self {
        Self {
            // SAFETY: the caller's promise.
            run: unsafe { Run::load(s.run(slot, index)) },
            index,
        }
    }

    /// Advances to a piece of the unit.
    ///
    /// # Safety
    /// As [`start`](Self::start).
    #[inline(always)]
    pub unsafe fn seek(
        &mut self,
        s: Shared,
        slot: u32,
        unit: &Unit,
        piece: u32,
        tokens: u32,
    ) -> Piece {
        while piece >= self.run.past_piece && self.index + 1 < unit.runs {
            self.index += 1;
            // SAFETY: the unit has the run.
            self.run = unsafe { Run::load(s.run(slot, self.index)) };
        }
        let Run {
            first_key,
            kv_begin,
            kv_end,
            first_piece,
            past_piece,
            ..
        } = self.run;
        let at = first_key + (piece - first_piece) * tokens;
        if piece >= past_piece {
            return Piece {
                at,
                first: 0,
                past: 0,
            };
        }
        Piece {
            at,
            first: kv_begin.saturating_sub(at),
            past: (kv_end - at).min(tokens),
        }
    }

    /// The page id of a piece.
    ///
    /// # Safety
    /// The run has the piece.
    #[inline(always)]
    pub unsafe fn page(&self, p: &DecodeParams, page: u32) -> u32 {
        let entry = p.attention.page_ids + u64::from(self.run.table + page) * 4;
        // SAFETY: the table has a page for each key of the run.
        unsafe { ptr::load_nc_u32(entry as *const u32) }
    }

    /// The rows that see a piece, as [`Run::rows`].
    #[inline(always)]
    fn rows(&self, piece: Piece) -> u32 {
        if piece.past > 0 { self.run.rows } else { 0 }
    }

    /// How a piece is masked. `least` is the last key that all rows of the unit see.
    #[inline(always)]
    pub fn mode(
        &self,
        piece: Piece,
        tokens: u32,
        all_rows: u32,
        least: i32,
        windowed: bool,
    ) -> Mode {
        let Piece { at, first, past } = piece;
        Mode {
            masked: self.rows(piece) != all_rows << 16 || first > 0 || past < tokens,
            positional: self.run.flags & POSITIONAL != 0
                && (windowed || (at + past) as i32 > least.saturating_add(1)),
        }
    }

    /// Stores the mask words of a piece's groups of 8 keys at `target`.
    ///
    /// # Safety
    /// Only the caller accesses the words.
    #[inline(always)]
    pub unsafe fn mask(&self, piece: Piece, tokens: u32, target: u32) {
        let Piece { at, first, past } = piece;
        let rows = self.rows(piece);
        let mut group = 0;
        while group < tokens / 8 {
            let of = |key: u32| key.saturating_sub(8 * group).min(8);
            let bits = rows & 0xFF | rows >> 16 << 8 | of(first) << 16 | of(past) << 20;
            // SAFETY: the caller's promise.
            unsafe { shared::store_u32x2(target + group * 8, [bits, at + 8 * group]) };
            group += 1;
        }
    }
}

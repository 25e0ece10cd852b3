//! Two units that are pieces of the same rows: the one that ends last merges both from its registers.
//!
//! Only kernels with [`merges_pieces`](crate::registry::KernelInfo::merges_pieces) do that, which stand in where a launch has
//! such units. The host says which these are, by the word [`PieceOf`] in place of their rows' merges. Both have the same rows in
//! the same order and whole groups of 16 rows, and the second's slots follow the first's.
//!
//! Warps do it on their own: a warp's rows and columns are those of the same warp in the other unit. What they share in tiles of 64 rows
//! (`few_rows/pieces.rs` has those of 16):
//!
//! | | written by | read by |
//! |---|---|---|
//! | counter, one per merge, tile and warp (`arrivals`): low half | both, plus one when the warp has its products | its old value says which warp is last |
//! | high half | the first, plus one when its state is written | the last, which waits for it, and sets the counter to zero |
//! | the first's state (`partial_out`, its own slots), normalised, in the order of registers | the first | the last |
//! | its LSEs (`partial_lse`, slots of the first piece for consumer 0, of the second for consumer 1) | the first | the last |
//!
//! The two consumers have places of their own for LSEs because they may not agree on which unit is last.
//!
//! **Order.** The first stores, meets its own lanes, and adds to the high half with release; the last reads that with acquire, and
//! meets its lanes. The last sets the counter to zero when both have counted themselves, so it is zero again before the launch ends. A launch
//! that runs beside this one has merges, and so counters, of its own.
//!
//! **No deadlock.** A warp counts itself before it meets the other consumer (`finish`), so all warps of a CTA have counted
//! themselves for a unit before any of them counts itself for the next. A warp that waits, waits for one that counted itself earlier.
//! What holds that one up, directly or not, are only warps of its own CTA that still wait in an earlier unit, and those have counted
//! themselves earlier still. So the one that counted itself first of all that wait waits for a warp that nothing holds up. Both run:
//! a unit is claimed by a CTA that has an SM.
//!
//! **Bits.** Which unit is last depends on timing. Both states are normalised in the same way before one of them is stored, and every sum
//! has two terms, rounded each, that may change places.

use cuda_std::{
    atomic::{self, Acquire, Gpu, Relaxed, Release},
    math::{lg2, rcp},
    misc, ptr, warp,
};

use super::{
    config::VALUE_DIM,
    products::O,
    shared::{Unit, Units},
};
use crate::{
    abi::{LatentParams, NO_MERGE, PieceOf, WorkItem},
    common::math::exp2,
};

const WARP: u32 = warp::FULL_MASK;
/// Bytes of a head's state.
pub(super) const OF_HEAD: u64 = VALUE_DIM as u64 * 4;
/// Bytes of a warp's share of a state: 16 rows, half of the columns.
const SHARE: u64 = 16 * OF_HEAD / 2;
/// What the high half of a counter counts in.
const WRITTEN: u32 = 1 << 16;
/// Outputs of a lane that are stored together, and bytes that a warp stores together.
pub(super) const VECTOR: usize = 4;
pub(super) const STRIDE: u64 = 512;

/// The share of a unit that a warp has.
#[derive(Clone, Copy)]
pub(super) struct Share {
    /// The warp among [`PieceOf::COUNTERS`].
    pub warp: u32,
    /// Where its share of a state begins, in bytes.
    pub at: u64,
    /// The first row of the warp, and its consumer.
    pub first_row: u32,
    pub consumer: u32,
}

impl Share {
    /// Half of the columns of 16 rows.
    #[inline(always)]
    pub fn of_rows(consumer: u32, first_row: u32) -> Self {
        Self {
            warp: consumer * 4 + first_row / 16,
            at: u64::from(first_row / 16 * 2 + consumer) * SHARE,
            first_row,
            consumer,
        }
    }
}

/// A warp's share of a unit that may be a piece.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    is_piece: u32,
    counter: u64,
    /// In lane 0: the counter before this unit.
    before: u32,
    /// Where this unit's state begins for this lane, and where the other's does.
    pub own: u64,
    pub other: u64,
    /// Where the first unit writes the LSE of the warp's first row.
    lse: u64,
}

impl Piece {
    /// Counts the warp as one that has its products, if the unit is a piece and has rows of this warp.
    ///
    /// # Safety
    /// A whole warp comes here once for a unit, whose rows are written.
    #[inline(always)]
    pub unsafe fn claim<U: Units>(
        p: &LatentParams,
        s: U,
        slot: u32,
        unit: &Unit,
        share: Share,
    ) -> Self {
        let (a, lane) = (&p.attention, warp::lane_id());
        let Share {
            warp,
            first_row,
            consumer: c,
            ..
        } = share;
        // SAFETY: a unit has at least one row.
        let row = unsafe { s.load_row(slot, 0) };
        let is_piece = unit.flags & WorkItem::GATHERED != 0
            && row.merge != NO_MERGE
            && first_row < unit.tokens * p.heads.get();
        let PieceOf { merge, piece } = PieceOf::of_word(row.merge);
        let (tile, _) = p.heads.div_rem(unit.head);
        let of_tile = u64::from(merge) * u64::from(p.tiles.get()) + u64::from(tile);
        let counter = a.arrivals + (of_tile * u64::from(PieceOf::COUNTERS) + u64::from(warp)) * 4;
        let mut before = 0;
        if is_piece && lane == 0 {
            // SAFETY: the counter is this warp's and that of the same warp in the other unit. If that one's state is written, what
            // follows may read it.
            before = unsafe { atomic::fetch_add::<Acquire, Gpu, u32>(counter as *mut u32, 1) };
        }
        let first_slot = row.slot.wrapping_sub(piece * unit.tokens);
        // Rows of a unit follow each other in a state: it has all heads, or one token.
        let head_of = |piece: u32| {
            let slot = first_slot.wrapping_add(piece * unit.tokens);
            u64::from(slot) * u64::from(a.q_heads) + u64::from(unit.head)
        };
        let at = share.at + u64::from(lane * 16);
        let state = |piece: u32| a.partial_out + head_of(piece) * OF_HEAD + at;
        Self {
            // Opaque: otherwise what follows is compiled twice.
            is_piece: misc::opaque(is_piece.into()),
            counter,
            before,
            own: state(piece),
            other: state(piece ^ 1),
            lse: a.partial_lse + (head_of(c) + u64::from(first_row)) * 4,
        }
    }

    /// Whether the unit is a piece.
    #[inline(always)]
    pub fn is_piece(&self) -> bool {
        self.is_piece != 0
    }

    /// Whether the other unit's warp came before. If so, waits until its state is written.
    ///
    /// # Safety
    /// A whole warp.
    #[inline(always)]
    pub unsafe fn is_last(&self) -> bool {
        let counter = self.counter as *mut u32;
        // SAFETY: the counter of the claim.
        unsafe {
            let mut counted = warp::warp_shuffle_idx(WARP, self.before, 0, 32);
            if counted % WRITTEN == 0 {
                return false;
            }
            while counted < WRITTEN {
                counted = atomic::load::<Acquire, Gpu, u32>(counter);
            }
            warp::sync_warp(WARP);
            if warp::lane_id() == 0 {
                atomic::store::<Relaxed, Gpu, u32>(counter, 0);
            }
        }
        true
    }

    /// Says that the state is written.
    ///
    /// # Safety
    /// A whole warp, which has written it.
    #[inline(always)]
    pub unsafe fn written(&self) {
        // SAFETY: as in `is_last`.
        unsafe {
            warp::sync_warp(WARP);
            if warp::lane_id() == 0 {
                atomic::reduce_add::<Release, Gpu, u32>(self.counter as *mut u32, WRITTEN);
            }
        }
    }

    /// Where the LSE of row `lane / 4 + 8 h` of the warp lies.
    #[inline(always)]
    fn lse_at(&self, lane: u32, h: usize) -> u64 {
        self.lse + u64::from(lane / 4 + 8 * h as u32) * 4
    }

    /// Normalises outputs by `inverses`. Then, if the warp is the first, stores them and returns false; if it is the last, merges the
    /// other's into them and into `lses` (base 2).
    ///
    /// # Safety
    /// A whole warp, once for a unit that is a piece.
    #[inline(always)]
    pub unsafe fn settle(
        &self,
        lane: u32,
        o: &mut [f32; O],
        inverses: [f32; 2],
        lses: &mut [f32; 2],
    ) -> bool {
        const VECTORS: usize = O / VECTOR;
        /// Vectors that are loaded together.
        const BATCH: usize = 8;
        /// Such loads in flight.
        const AHEAD: usize = 2;
        let mut i = 0;
        while i < O {
            o[i] *= inverses[i / 2 % 2];
            i += 1;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let empty = lses.map(|lse| lse == f32::NEG_INFINITY);
            // The output of a row without keys may be anything.
            if warp::warp_vote_any(WARP, empty[0] | empty[1]) {
                i = 0;
                while i < O {
                    if empty[i / 2 % 2] {
                        o[i] = 0.0;
                    }
                    i += 1;
                }
            }
            if !self.is_last() {
                i = 0;
                while i < VECTORS {
                    let words = [0, 1, 2, 3].map(|j| o[VECTOR * i + j]);
                    ptr::store_f32x4((self.own + i as u64 * STRIDE) as *mut f32, words);
                    i += 1;
                }
                if lane % 4 == 0 {
                    ptr::store_f32(self.lse_at(lane, 0) as *mut f32, lses[0]);
                    ptr::store_f32(self.lse_at(lane, 1) as *mut f32, lses[1]);
                }
                self.written();
                return false;
            }
            let mut next: [_; AHEAD] = [0, 1].map(|i| load::<BATCH>(self.other, i * BATCH));
            let mut factors = [[0.0; 2]; 2];
            let mut h = 0;
            while h < 2 {
                let other = ptr::load_f32(self.lse_at(lane, h) as *const f32);
                (factors[h], lses[h]) = weigh([lses[h], other]);
                h += 1;
            }
            // All bits. ptxas does not know that, and keeps each turn to itself: otherwise it issues all loads first, and spills.
            let turns = warp::warp_vote_ballot(WARP, true);
            i = 0;
            while i < VECTORS {
                if turns >> (i / BATCH) & 1 != 0 {
                    let now = next[i / BATCH % AHEAD];
                    let mut j = 0;
                    while j < BATCH * VECTOR {
                        let (at, [own, other]) = (VECTOR * i + j, factors[j / 2 % 2]);
                        o[at] = o[at] * own + now[j / VECTOR][j % VECTOR] * other;
                        j += 1;
                    }
                    if i + AHEAD * BATCH < VECTORS {
                        next[i / BATCH % AHEAD] = load::<BATCH>(self.other, i + AHEAD * BATCH);
                    }
                }
                i += BATCH;
            }
        }
        true
    }
}

/// What two normalised states of a row are multiplied by, and the LSE of all keys.
#[inline(always)]
pub(super) fn weigh(lses: [f32; 2]) -> ([f32; 2], f32) {
    let max = if lses[1] > lses[0] { lses[1] } else { lses[0] };
    // −∞ − (−∞) would be NaN.
    let offset = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let weights = lses.map(|lse| exp2(lse - offset));
    let sum = weights[0] + weights[1];
    let norm = if sum == 0.0 { 0.0 } else { rcp(sum) };
    (weights.map(|weight| weight * norm), offset + lg2(sum))
}

/// Loads `N` vectors of a lane, of a state that begins at `from`.
///
/// # Safety
/// The state is written.
#[inline(always)]
unsafe fn load<const N: usize>(from: u64, first: usize) -> [[f32; VECTOR]; N] {
    let mut vectors = [[0.0; VECTOR]; N];
    let mut i = 0;
    while i < N {
        // SAFETY: the caller's promise.
        vectors[i] = unsafe { ptr::load_f32x4((from + (first + i) as u64 * STRIDE) as *const f32) };
        i += 1;
    }
    vectors
}

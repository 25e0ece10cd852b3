//! Units that are pieces of the same rows: the one that ends last merges from its registers.
//!
//! Warps do that on their own: a warp's rows and columns are those of the same warp in the other unit. A counter in memory
//! says first which unit ends last. The other writes its outputs as they are, in the order of its registers, with what
//! normalises them. The last waits for these if they are still being written, and adds up. Which one is last depends on
//! timing, so every sum is of two terms that may change places.

use cuda_std::{
    atomic::{self, Acquire, Gpu, Relaxed, Release},
    math::{lg2, rcp},
    misc, ptr, warp,
};

use super::shared::{Unit, Units};
use crate::{
    abi::{LatentParams, NO_MERGE, PieceOf, PieceWords, WorkItem},
    common::math::exp2,
};

const WARP: u32 = warp::FULL_MASK;

/// Words of a lane's outputs that are stored together.
pub(super) const VECTOR: usize = 4;
/// Bytes that a warp stores together.
pub(super) const STRIDE: u64 = 512;

/// A warp's share of such a unit.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    is_piece: u32,
    of: PieceOf,
    /// As [`PieceWords`].
    words: u64,
    /// Where this unit's state begins, all heads of its tile.
    pub state: u64,
    /// Bytes from a piece's state to that of the next.
    step: u64,
    /// In lane 0: the counter before this unit.
    before: u32,
}

/// A row of a piece: its LSE, and the factor that normalises its output.
#[derive(Clone, Copy)]
pub(super) struct Said {
    pub lse: f32,
    pub inverse: f32,
}

/// Factors of the outputs of both pieces of a row: of the own one, and of the other.
#[derive(Clone, Copy)]
pub(super) struct Factors {
    pub of: [f32; 2],
    /// The LSE of all keys.
    pub lse: f32,
}

impl Pieces {
    /// If the unit is a piece of such rows and has rows of this warp, counts it as ended. `warp` is one of all warps that write
    /// results; `first` its first row.
    ///
    /// # Safety
    /// A whole warp comes here once for a unit, whose rows are written.
    #[inline(always)]
    pub unsafe fn claim<U: Units>(
        p: &LatentParams,
        s: U,
        slot: u32,
        unit: &Unit,
        warp: u32,
        first: u32,
    ) -> Self {
        let a = &p.attention;
        // SAFETY: a unit has at least one row.
        let row = unsafe { s.load_row(slot, 0) };
        let is_piece = a.arrivals != 0
            && unit.flags & WorkItem::GATHERED != 0
            && row.merge != NO_MERGE
            && first < unit.tokens * p.heads.get();
        let of = PieceOf::of_word(row.merge);
        let (tile, _) = p.heads.div_rem(unit.head);
        let index = u64::from(of.merge) * u64::from(p.tiles.get()) + u64::from(tile);
        let words = a.arrivals
            + index * u64::from(PieceWords::OF_TILE)
            + u64::from(warp * PieceWords::BYTES);
        let of_head = u64::from(super::config::VALUE_DIM) * 4;
        let of_slot = u64::from(a.q_heads) * of_head;
        let mut before = 0;
        if is_piece && warp::lane_id() == 0 {
            // SAFETY: the counter is this warp's and that of the same warps in the other units. If their states are written,
            // what follows may read them.
            before = unsafe { atomic::fetch_add::<Acquire, Gpu, u32>(words as *mut u32, 1) };
        }
        Self {
            // Opaque: otherwise what follows is compiled twice.
            is_piece: misc::opaque(is_piece.into()),
            of,
            words,
            state: a.partial_out + u64::from(row.slot) * of_slot + u64::from(unit.head) * of_head,
            step: u64::from(unit.tokens) * of_slot,
            before,
        }
    }

    /// Whether the unit is such a piece.
    #[inline(always)]
    pub fn is_piece(&self) -> bool {
        self.is_piece != 0
    }

    /// Whether all other units have ended, so that this one merges. If so, waits until their states are written.
    ///
    /// # Safety
    /// A whole warp.
    #[inline(always)]
    pub unsafe fn is_last(&self) -> bool {
        let others = self.of.pieces - 1;
        let counter = self.words as *mut u32;
        // SAFETY: the counter of the claim. The units that are waited for have ended, and write without waiting.
        unsafe {
            let mut counted = warp::warp_shuffle_idx(WARP, self.before, 0, 32);
            if counted & 0xffff != others {
                return false;
            }
            while counted >> 16 != others {
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
                atomic::reduce_add::<Release, Gpu, u32>(self.words as *mut u32, 1 << 16);
            }
        }
    }

    #[inline(always)]
    fn said_at(&self, piece: u32, row: u32) -> u64 {
        self.words
            + u64::from(PieceWords::HEADER + (piece * PieceWords::ROWS + row) * PieceWords::ROW)
    }

    /// Writes what normalises a row of the warp.
    ///
    /// # Safety
    /// One lane for each row, before [`written`](Self::written).
    #[inline(always)]
    pub unsafe fn say(&self, row: u32, said: Said) {
        let at = self.said_at(self.of.piece, row);
        // SAFETY: the words are this warp's.
        unsafe {
            ptr::store_u32x2(at as *mut u32, [said.lse.to_bits(), said.inverse.to_bits()]);
        }
    }

    /// What the other piece says of a row.
    ///
    /// # Safety
    /// After [`is_last`](Self::is_last).
    #[inline(always)]
    pub unsafe fn other_says(&self, row: u32) -> Said {
        let at = self.said_at(self.of.piece ^ 1, row);
        // SAFETY: the piece is written.
        let [lse, inverse] = unsafe { ptr::load_u32x2(at as *const u32) };
        Said {
            lse: f32::from_bits(lse),
            inverse: f32::from_bits(inverse),
        }
    }

    /// The state of the other piece.
    #[inline(always)]
    pub fn state_of_other(&self) -> u64 {
        match self.of.piece {
            0 => self.state + self.step,
            _ => self.state - self.step,
        }
    }
}

impl Factors {
    /// The factors of a row.
    #[inline(always)]
    pub fn new(own: Said, other: Said) -> Self {
        let said = [own, other];
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let max = larger(own.lse, other.lse);
        // −∞ − (−∞) would be NaN.
        let offset = if max == f32::NEG_INFINITY { 0.0 } else { max };
        let weights = said.map(|said| exp2(said.lse - offset));
        let sum = weights[0] + weights[1];
        let norm = if sum == 0.0 { 0.0 } else { rcp(sum) };
        let mut of = [0.0; 2];
        let mut i = 0;
        while i < 2 {
            of[i] = weights[i] * said[i].inverse * norm;
            i += 1;
        }
        Self {
            of,
            lse: offset + lg2(sum),
        }
    }
}

/// Loads `N` vectors of a lane, of a state that begins at `from`.
///
/// # Safety
/// The state is written.
#[inline(always)]
pub(super) unsafe fn load<const N: usize>(
    from: u64,
    first: usize,
    stride: u64,
) -> [[f32; VECTOR]; N] {
    let mut vectors = [[0.0; VECTOR]; N];
    let mut i = 0;
    while i < N {
        // SAFETY: the caller's promise.
        vectors[i] = unsafe { ptr::load_f32x4((from + (first + i) as u64 * stride) as *const f32) };
        i += 1;
    }
    vectors
}

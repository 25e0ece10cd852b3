//! The conversion loop of the store warp, and the end of the epoch.

use cuda_std::{
    atomic::{self, Gpu, Relaxed},
    prelude::*,
};

use super::{
    super::{f8::lay_out, shared::Shared},
    WARP, claim,
    piece::Piece,
    pieces,
};
use crate::{abi::PrefillParams, common::half::Half};

/// The state of the store warp's conversions.
pub(in crate::sm90::prefill) struct Converter {
    /// Pieces of the launch; 0 once all are claimed and this warp has converted its own.
    pieces: u32,
    /// The piece to convert next.
    piece: Piece,
    /// The claim after that; valid in lane 0.
    claim: u32,
}

impl Converter {
    /// Claims the first pieces.
    ///
    /// # Safety
    /// A whole warp comes here, one of each CTA; the parameters describe memory as [`ConvertParams`] says.
    #[inline(always)]
    pub(in crate::sm90::prefill) unsafe fn begin(p: &PrefillParams, s: Shared) -> Self {
        let mut converter = Self {
            pieces: 0,
            piece: Piece::NONE,
            claim: 0,
        };
        if !s.shape.converts() || p.convert.pages == 0 {
            return converter;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let [_, pages] = p.convert.of_this_plan(p.attention.record);
            converter.pieces = pieces(p, pages);
            converter.claim = claim(&p.convert);
            converter.piece = converter.next(p, s);
        }
        converter
    }

    /// Whether no piece is left to convert.
    #[inline(always)]
    pub(in crate::sm90::prefill) fn is_done(&self) -> bool {
        self.pieces == 0
    }

    /// Returns the claimed piece and claims another. If none was left, this CTA stops claiming; the last CTA to find
    /// none resets the counters and starts a new epoch.
    #[inline(always)]
    unsafe fn next(&mut self, p: &PrefillParams, s: Shared) -> Piece {
        let control = p.convert.control;
        // SAFETY: the caller's promise. A whole warp.
        unsafe {
            let claimed = warp::warp_shuffle_idx(WARP, self.claim, 0, 32);
            if claimed < self.pieces {
                self.claim = claim(&p.convert);
                let [first, _] = p.convert.of_this_plan(p.attention.record);
                return Piece::find(p, first, claimed);
            }
            if warp::lane_id() == 0 {
                let ended = atomic::fetch_add::<Relaxed, Gpu, _>((control + 8) as *mut u32, 1);
                if ended == thread::grid_dim_x() - 1 {
                    let epoch = shared::load_u32(s.epoch());
                    atomic::store::<Relaxed, Gpu, _>(control as *mut u32, 0);
                    atomic::store::<Relaxed, Gpu, _>((control + 8) as *mut u32, 0);
                    atomic::store::<Relaxed, Gpu, _>((control + 4) as *mut u32, epoch + 1);
                }
            }
            self.pieces = 0;
            Piece::NONE
        }
    }

    /// Converts a piece, and prefetches the next one to L2.
    ///
    /// # Safety
    /// As [`begin`](Self::begin); there is a piece.
    #[inline(always)]
    pub(in crate::sm90::prefill) unsafe fn step<T: Half, const TOGETHER: usize>(
        &mut self,
        p: &PrefillParams,
        s: Shared,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if s.shape.bytes == 1 {
                let piece = self.piece;
                self.piece = self.next(p, s);
                lay_out(p, s, piece);
                return;
            }
            let mut narrow = [[0; 4]; TOGETHER];
            self.piece.load(p, s, 0, &mut narrow);
            let piece = self.piece;
            self.piece = self.next(p, s);
            piece.convert::<T, TOGETHER>(p, s, narrow);
        }
    }
}

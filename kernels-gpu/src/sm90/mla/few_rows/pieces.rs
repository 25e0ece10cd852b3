//! Two units of 16 rows that are pieces of the same rows, as in [`pieces`](crate::sm90::mla::pieces). Here a warp has 64 columns of all
//! rows. All warps need the LSEs of all rows, and each has an answer of its own to which unit is last. So the first writes them for each
//! warp by itself, where the last would have written its share of a state.

use cuda_std::{math::lg2, ptr, shared};

use crate::sm90::mla::{
    pieces::{OF_HEAD, Piece, STRIDE, Share, VECTOR, weigh},
    swapped::{Outputs, Swapped, TILES},
};

/// Rows of a lane: of each 8 rows two.
pub(super) const LANE_ROWS: usize = 4;

/// The LSEs (base 2) of a lane's rows, as [`normalise`](crate::sm90::mla::swapped::normalise) has them.
///
/// # Safety
/// After `normalise`.
#[inline(always)]
pub(super) unsafe fn lses_of<S: Swapped>(s: S, slot: u32, lane: u32) -> [f32; LANE_ROWS] {
    let mut lses = [0.0; LANE_ROWS];
    let mut i = 0;
    while i < LANE_ROWS {
        let row = 4 * i as u32 + lane % 4 * 2;
        // SAFETY: the sums of all warps and the references are stored.
        let (of_all, references) = unsafe {
            let of = |of: u32, warp: u32| shared::load_f32x2(s.said(slot, of, warp, row));
            let of_all = |of_one: u32| [0, 1, 2, 3].map(|warp| of(of_one, warp));
            let references = shared::load_f32x2(s.reference(slot, row));
            ([of_all(0), of_all(1)], references)
        };
        let mut e = 0;
        while e < 2 {
            let [first, second] = [0, 1].map(|c: usize| {
                let of = of_all[c];
                (of[0][e] + of[1][e]) + (of[2][e] + of[3][e])
            });
            let total = first + second;
            lses[i + e] = match total != 0.0 {
                true => references[e] + lg2(total),
                false => f32::NEG_INFINITY,
            };
            e += 1;
        }
        i += 2;
    }
    lses
}

/// The share of a warp of a consumer: 64 columns of 16 rows.
#[inline(always)]
pub(super) fn share(consumer: u32, warp: u32) -> Share {
    let index = consumer * 4 + warp;
    Share {
        warp: index,
        at: u64::from(index) * (16 * OF_HEAD / 8),
        first_row: 0,
        consumer,
    }
}

/// Normalises outputs by `inverses`. Then, if the warp is the first, stores them and returns false; if it is the last, merges the
/// other's into them, and into `lses` (base 2).
///
/// # Safety
/// A whole warp, once for a unit that is a piece, after [`normalise`](crate::sm90::mla::swapped::normalise).
#[inline(always)]
pub(super) unsafe fn settle<const N: usize>(
    piece: &Piece,
    lane: u32,
    o: &mut Outputs<N>,
    inverses: &[f32; LANE_ROWS],
    lses: &mut [f32; LANE_ROWS],
) -> bool {
    // SAFETY: the caller's promise.
    unsafe {
        let mut tile = 0;
        while tile < TILES {
            let mut i = 0;
            while i < N {
                let row = i / 4 * 2 + i % 2;
                let normal = o[tile][i] * inverses[row];
                // The output of a row without keys may be anything.
                let empty = lses[row] == f32::NEG_INFINITY;
                o[tile][i] = if empty { 0.0 } else { normal };
                i += 1;
            }
            tile += 1;
        }
        let at =
            |state: u64, tile: usize, j: usize| state + (tile * N / VECTOR + j) as u64 * STRIDE;
        if !piece.is_last() {
            tile = 0;
            while tile < TILES {
                let mut j = 0;
                while j < N / VECTOR {
                    let words = [0, 1, 2, 3].map(|i| o[tile][VECTOR * j + i]);
                    ptr::store_f32x4(at(piece.own, tile, j) as *mut f32, words);
                    j += 1;
                }
                tile += 1;
            }
            if lane < 4 {
                ptr::store_f32x4(piece.other as *mut f32, *lses);
            }
            piece.written();
            return false;
        }
        let from = piece.own - u64::from(lane / 4 * 64);
        let others = ptr::load_f32x4(from as *const f32);
        let mut factors = [[0.0; 2]; LANE_ROWS];
        let mut row = 0;
        while row < LANE_ROWS {
            (factors[row], lses[row]) = weigh([lses[row], others[row]]);
            row += 1;
        }
        tile = 0;
        while tile < TILES {
            let mut j = 0;
            while j < N / VECTOR {
                let other = ptr::load_f32x4(at(piece.other, tile, j) as *const f32);
                let mut i = 0;
                while i < VECTOR {
                    let [own, of_other] = factors[j * 2 + i % 2];
                    let sum = &mut o[tile][VECTOR * j + i];
                    *sum = *sum * own + other[i] * of_other;
                    i += 1;
                }
                j += 1;
            }
            tile += 1;
        }
    }
    true
}

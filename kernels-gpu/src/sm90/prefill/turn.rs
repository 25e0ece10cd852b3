//! Queries that are turned by their positions, in shared memory, by the warps that multiply them: beneath the last products
//! of the tile before.

use cuda_std::{fence, misc, prelude::*};

use super::shared::Shared;
use crate::{
    abi::PrefillParams,
    common::{
        half::Half,
        prefill_tile::Tile,
        rotary::{sine_cosine, turn_words, turned_by},
    },
};

/// Rows of a warp.
const ROWS: u32 = 16;

/// Turns the 16 rows of a warp, which nobody else reads, from `first_row` on. A lane has two vectors of 8 elements, so that
/// pairs are its own, of some neighbouring rows: heads of one token share its sines.
///
/// # Safety
/// A whole warp comes here, one that computes; the stage holds its tile, whose queries are there.
#[inline(always)]
pub(super) unsafe fn turn_queries<T: Half>(
    p: &PrefillParams,
    s: Shared,
    stage: u32,
    first_row: u32,
) {
    let rotary = &p.rotary;
    let lanes = s.shape.head_dim / 16;
    // Opaque, here and below: or what follows from it takes registers in the main loop, and the loop is unrolled.
    let lane = misc::opaque(warp::lane_id());
    let (vector, rows) = (lane % lanes, ROWS * lanes / 32);
    // Pairs from the same one on, of both halves of what is turned or neighbours.
    let halves = rotary.interleaved == 0;
    let apart = rotary.pairs / 8;
    let [a, b] = if halves {
        [vector, vector + apart]
    } else {
        [2 * vector, 2 * vector + 1]
    };
    // Each half has whole vectors.
    if vector * 8 < rotary.pairs {
        let turns = rotary.turns + u64::from(vector) * 64;
        // SAFETY: the caller's promise.
        unsafe {
            let position = Tile::load(s.tile(stage)).position;
            let mut row = misc::opaque(first_row) + lane / lanes * rows;
            let mut left = misc::opaque(rows);
            let shared_sines = p.pack.get().is_multiple_of(rows);
            let mut sines = [[0.0; 4]; 4];
            let mut known = false;
            while left > 0 {
                if !known {
                    let position = position.wrapping_add(p.pack.div(row) as i32);
                    sines = sines_of(turns, halves, position);
                    known = shared_sines;
                }
                let at = |vector: u32| {
                    let slab = s.queries(stage) + vector / 8 * s.shape.slab_bytes();
                    slab + row * 128 + (vector ^ row) % 8 * 16
                };
                let [x, y] = [a, b].map(|vector| shared::load_u32x4(at(vector)));
                let turn = |j: usize| turn_words::<T>([x[j], y[j]], sines[j], rotary.picks());
                let [q, r, s, t] = [turn(0), turn(1), turn(2), turn(3)];
                shared::store_u32x4(at(a), [q[0], r[0], s[0], t[0]]);
                shared::store_u32x4(at(b), [q[1], r[1], s[1], t[1]]);
                row += 1;
                left -= 1;
            }
        }
    }
    // The tensor cores read them.
    fence::proxy_async_shared();
    // SAFETY: a whole warp.
    unsafe { warp::sync_warp(warp::FULL_MASK) };
}

/// The sines of eight pairs at a position, two pairs for each word of both vectors: of halves neighbouring pairs, else one of
/// the first vector and one of the second.
///
/// # Safety
/// There are eight pairs at `turns`.
#[inline(always)]
unsafe fn sines_of(turns: u64, halves: bool, position: i32) -> [[f32; 4]; 4] {
    let sine = |pair: u32| {
        // SAFETY: the caller's promise.
        let turn = unsafe { ptr::load_nc_u32x2((turns + u64::from(pair) * 8) as *const u32) };
        sine_cosine(turned_by(turn, position))
    };
    let word = |j: u32| {
        let [first, second] = if halves {
            [2 * j, 2 * j + 1]
        } else {
            [j, j + 4]
        };
        let ([s0, c0], [s1, c1]) = (sine(first), sine(second));
        [s0, c0, s1, c1]
    };
    [word(0), word(1), word(2), word(3)]
}

//! Queries that are turned by their positions, in shared memory, by the warps that multiply them: beneath the last products
//! of the tile before.

use cuda_std::{fence, misc, prelude::*};

use super::shared::Shared;
use crate::{
    abi::{PrefillParams, QueryRotaryParams},
    common::{
        half::Half,
        prefill_tile::Tile,
        rotary::{sine_cosine, turn_words, turned_by},
    },
};

/// Rows of a warp.
const ROWS: u32 = 16;

/// Neighbouring rows of a lane whose words are under way together; of one token they share sines.
const TOGETHER: u32 = 4;

/// Whether queries are turned. Then each lane says for itself that its output is there, for racecheck does not follow what it
/// stored before through one lane's word for a warp. Other runs keep one word of a warp: fewer arrivals at a tile's end.
#[inline(always)]
pub(super) fn turns_queries<const EXTRAS: bool>(p: &PrefillParams, s: Shared) -> bool {
    EXTRAS && s.shape.bytes == 2 && misc::opaque_u64(p.rotary.turns) != 0
}

/// Turns the 16 rows of a warp, which nobody else reads, from `first_row` on. A lane has two words of two elements, so that
/// pairs are its own, and sines take four registers.
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
    // Opaque, here and below: or what follows from it takes registers in the main loop, or in the producer warps, and
    // the loop is unrolled.
    let rotary = QueryRotaryParams {
        turns: misc::opaque_u64(p.rotary.turns),
        pairs: misc::opaque(p.rotary.pairs),
        interleaved: misc::opaque(p.rotary.interleaved),
    };
    // Of a row; the others have the next rows.
    let lanes = s.shape.head_dim / 4;
    let lane = misc::opaque(warp::lane_id());
    let column = lane % lanes;
    // Pairs 2c and 2c + 1, of halves of what is turned or neighbours.
    let [a, b] = if rotary.interleaved == 0 {
        [column, column + rotary.pairs / 2]
    } else {
        [2 * column, 2 * column + 1]
    };
    if column * 2 < rotary.pairs {
        // SAFETY: the caller's promise. There are turns up to a multiple of 8 pairs.
        unsafe {
            let turns = ptr::load_nc_u32x4((rotary.turns + u64::from(column) * 16) as *const u32);
            let position = Tile::load(s.tile(stage)).position;
            let shared_sines = p.pack.get().is_multiple_of(TOGETHER);
            let mut row = misc::opaque(first_row) + lane / lanes * TOGETHER;
            let mut left = misc::opaque(ROWS * lanes / 32 / TOGETHER);
            let of_word = |word: u32| {
                let slab = s.queries(stage) + word / 32 * s.shape.slab_bytes();
                (slab + word % 4 * 4, word / 4 % 8)
            };
            let words = [of_word(a), of_word(b)];
            while left > 0 {
                let at = |i: u32| {
                    let row = row + i;
                    words.map(|(word, vector)| word + row * 128 + (vector ^ row) % 8 * 16)
                };
                let mut two = [[0; 2]; TOGETHER as usize];
                let mut i = 0;
                while i < TOGETHER {
                    two[i as usize] = at(i).map(|at| shared::load_u32(at));
                    i += 1;
                }
                let mut sines = [0.0; 4];
                let mut i = 0;
                while i < TOGETHER {
                    if i == 0 || !shared_sines {
                        let position = position.wrapping_add(p.pack.div(row + i) as i32);
                        let [t0, t1, t2, t3] = turns;
                        let [s0, c0] = sine_cosine(turned_by([t0, t1], position));
                        let [s1, c1] = sine_cosine(turned_by([t2, t3], position));
                        sines = [s0, c0, s1, c1];
                    }
                    let turned = turn_words::<T>(two[i as usize], sines, rotary.picks());
                    let [first, second] = at(i);
                    shared::store_u32(first, turned[0]);
                    shared::store_u32(second, turned[1]);
                    i += 1;
                }
                row += 32 / lanes * TOGETHER;
                left -= 1;
            }
        }
    }
    // The tensor cores read them.
    fence::proxy_async_shared();
    // SAFETY: a whole warp.
    unsafe { warp::sync_warp(warp::FULL_MASK) };
}

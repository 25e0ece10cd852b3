//! Rotary embeddings of queries, applied in place in shared memory. Each consumer warp rotates its own rows while the
//! last P·V of the previous tile runs.

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

/// Rows per warp.
const ROWS: u32 = 16;

/// Neighbouring rows that a lane loads together. Rows of one token share their sines.
const TOGETHER: u32 = 4;

/// Whether queries are rotated. If so, every lane arrives at `output_full`: racecheck cannot see that one lane's
/// arrival also orders the other lanes' stores of rotated queries. Otherwise one lane per warp arrives, which is
/// cheaper.
#[inline(always)]
pub(super) fn turns_queries<const EXTRAS: bool>(p: &PrefillParams, s: Shared) -> bool {
    EXTRAS && s.shape.bytes == 2 && misc::opaque_u64(p.rotary.turns) != 0
}

/// Rotates the 16 rows from `first_row` on, which only this warp reads. A lane takes two words of two elements: both
/// members of its pairs are then its own, and sines take four registers.
///
/// # Safety
/// A whole consumer warp comes here; the stage holds its tile, whose queries have arrived.
#[inline(always)]
pub(super) unsafe fn turn_queries<T: Half>(
    p: &PrefillParams,
    s: Shared,
    stage: u32,
    first_row: u32,
) {
    // Opaque, here and below: otherwise derived values occupy registers in the main loop or in the producer warps, and
    // the loop is unrolled.
    let rotary = QueryRotaryParams {
        turns: misc::opaque_u64(p.rotary.turns),
        pairs: misc::opaque(p.rotary.pairs),
        interleaved: misc::opaque(p.rotary.interleaved),
    };
    // Lanes per row; the other lanes take further rows.
    let lanes = s.shape.head_dim / 4;
    let lane = misc::opaque(warp::lane_id());
    let column = lane % lanes;
    // The words that hold pairs 2c and 2c + 1: pairs are formed of the two halves, or of neighbouring elements.
    let [a, b] = if rotary.interleaved == 0 {
        [column, column + rotary.pairs / 2]
    } else {
        [2 * column, 2 * column + 1]
    };
    if column * 2 < rotary.pairs {
        // SAFETY: the caller's promise. The table of turns is padded to a multiple of 8 pairs.
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
    // wgmma reads them through the async proxy.
    fence::proxy_async_shared();
    // SAFETY: a whole warp.
    unsafe { warp::sync_warp(warp::FULL_MASK) };
}

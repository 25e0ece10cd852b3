//! Sines and cosines of rotary embeddings: of a thread's pairs, or shared by the threads of a block.

use core::f32::consts::TAU;

use cuda_std::{math, prelude::*, shared};

use super::THREADS;
use crate::{abi::QkvParams, common::rotary::turned};

/// Sine and cosine of a thread's 8 pairs.
pub(super) type Sines = [[f32; 2]; 8];

/// Sine and cosine of a lane's pairs at a position.
///
/// # Safety
/// The lane has 8 pairs, and the table has their angles.
#[inline(always)]
pub(super) unsafe fn sines_of(p: &QkvParams, lane: u32, position: u32) -> Sines {
    let turns = (p.turns + u64::from(lane) * 64) as *const u32;
    let mut sines = [[0.0; 2]; 8];
    let mut i = 0;
    while i < 4 {
        // SAFETY: the caller's promise.
        let words = unsafe { ptr::load_nc_u32x4(turns.add(4 * i)) };
        sines[2 * i] = sine_cosine(p, [words[0], words[1]], position);
        sines[2 * i + 1] = sine_cosine(p, [words[2], words[3]], position);
        i += 1;
    }
    sines
}

/// Sine and cosine of a pair at a position, times their magnitude.
#[inline(always)]
fn sine_cosine(p: &QkvParams, turn: [u32; 2], position: u32) -> [f32; 2] {
    // Between −π and π. The conversion rounds to 24 bits.
    let angle = turned(turn, position) as i32 as f32 * (TAU / 4_294_967_296.0);
    [
        math::sin(angle) * p.magnitude,
        math::cos(angle) * p.magnitude,
    ]
}

/// Computes the sines of the block's tokens in shared memory, each once: of the groups of a token that the block has,
/// each computes a part of the pairs of its lanes. Returns the address of those of the thread's lane, for
/// [`shared_sines`].
///
/// # Safety
/// The block's memory has [`sine_bytes`](super::sine_bytes).
#[inline(always)]
pub(super) unsafe fn share_sines(p: &QkvParams, lane: u32, [token, group]: [u32; 2]) -> u32 {
    let groups = THREADS >> p.lanes_log;
    let in_block = thread::thread_idx_x() >> p.lanes_log;
    let first_token = p.groups.div(thread::block_idx_x() * groups);
    // The index among the groups of the token that the block has, and their number.
    let rank = if group < in_block { group } else { in_block };
    let [after, until] = [p.groups.get() - group, groups - in_block];
    let count = rank + if after < until { after } else { until };
    let of_token = (token - first_token) * p.turned * 64;
    let row = shared::dynamic_shared_address() + of_token + lane * 16;
    // SAFETY: the token exists, and the lane has 8 pairs. Each pair is written by one thread.
    unsafe {
        let mut pair = rank;
        if token < p.tokens && lane < p.turned && pair < 8 {
            let position = ptr::load_u32((p.positions + u64::from(token) * 4) as *const u32);
            while pair < 8 {
                let turn = p.turns + u64::from(lane * 8 + pair) * 8;
                let turn = ptr::load_nc_u32x2(turn as *const u32);
                let to = row + pair / 2 * p.turned * 16 + pair % 2 * 8;
                shared::store_f32x2(to, sine_cosine(p, turn, position));
                pair += count;
            }
        }
    }
    row
}

/// The sines of a lane, from where [`share_sines`] put them: neighbouring lanes load neighbouring vectors.
///
/// # Safety
/// The token exists, and the lane is rotated. A barrier of the block separates this from `share_sines`.
#[inline(always)]
pub(super) unsafe fn shared_sines(p: &QkvParams, row: u32) -> Sines {
    let (mut sines, mut i) = ([[0.0; 2]; 8], 0);
    while i < 4 {
        // SAFETY: the caller's promise.
        let [a, b, c, d] = unsafe { shared::load_f32x4(row + i as u32 * p.turned * 16) };
        [sines[2 * i], sines[2 * i + 1]] = [[a, b], [c, d]];
        i += 1;
    }
    sines
}

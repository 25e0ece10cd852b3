//! The heads of a thread, and what is computed on them: biases, norms and rotations.

use cuda_std::{math::fma, prelude::*};

use super::sines::Sines;
use crate::{
    abi::QkvParams,
    common::half::Half,
    step::{Vector, unpack},
};

/// The addresses of a thread's two vectors of a head.
type Two = [u64; 2];

/// The heads of a thread: a query head or two neighbouring ones, or a key head and the value head of the same index, or
/// one of the two.
pub(super) struct Heads<const HEADS: usize> {
    pub are_queries: bool,
    /// If it is not a query.
    pub first_is_key: bool,
    /// The first, and the distance to the second.
    pub first: u32,
    pub apart: u32,
}

impl<const HEADS: usize> Heads<HEADS> {
    #[inline(always)]
    pub fn of(p: &QkvParams, group: u32) -> Self {
        let of_queries = p.q_heads.div_ceil(HEADS as u32);
        let are_queries = group < of_queries;
        let after = group.wrapping_sub(of_queries);
        let first_is_key = HEADS == 2 || after < p.kv_heads;
        Self {
            are_queries,
            first_is_key,
            first: if are_queries {
                group * HEADS as u32
            } else {
                p.q_heads + after
            },
            apart: if are_queries { 1 } else { p.kv_heads },
        }
    }

    /// The index of the KV head, computed again: a register less until then.
    #[inline(always)]
    pub fn of_kv(&self, p: &QkvParams) -> u32 {
        let first = misc::opaque(self.first);
        first - p.q_heads - if self.first_is_key { 0 } else { p.kv_heads }
    }

    /// Whether a head is normalised and rotated.
    #[inline(always)]
    fn is_turned(&self, head: usize) -> bool {
        self.are_queries || (head == 0 && self.first_is_key)
    }
}

/// Several numbers of each lane, joined over groups of `1 << log` lanes. The steps are unrolled: their distances are
/// constants of the shuffles.
///
/// # Safety
/// All lanes of the warp come here.
#[inline(always)]
pub(super) unsafe fn of_lanes<const N: usize>(
    mut x: [f32; N],
    log: u32,
    join: impl Fn(f32, f32) -> f32,
) -> [f32; N] {
    let mut step = 5;
    while step > 0 {
        step -= 1;
        if log > step {
            let mut i = 0;
            while i < N {
                // SAFETY: the caller's promise.
                let other = unsafe { warp::warp_shuffle_xor(warp::FULL_MASK, x[i], 1 << step, 32) };
                x[i] = join(x[i], other);
                i += 1;
            }
        }
    }
    x
}

/// Loads two vectors from read-only memory.
///
/// # Safety
/// The vectors exist.
#[inline(always)]
pub(super) unsafe fn load(two: Two) -> [[u32; 4]; 2] {
    // SAFETY: the caller's promise.
    two.map(|at| unsafe { ptr::load_nc_u32x4(at as *const u32) })
}

#[inline(always)]
pub(super) fn add<T: Half>(x: &mut [Vector; 2], bias: [[u32; 4]; 2]) {
    let bias = [unpack::<T>(bias[0]), unpack::<T>(bias[1])];
    let mut j = 0;
    while j < 8 {
        x[0][j] += bias[0][j];
        x[1][j] += bias[1][j];
        j += 1;
    }
}

/// Multiplies queries and keys by their factors and by the weights.
#[inline(always)]
pub(super) fn scale<T: Half, const HEADS: usize>(
    x: &mut [[Vector; 2]; HEADS],
    heads: &Heads<HEADS>,
    mut inverse: [f32; HEADS],
    offset: f32,
    weights: [[u32; 4]; 2],
) {
    let weights = weights.map(unpack::<T>);
    let (mut offsets, mut i) = ([0.0; HEADS], 0);
    while i < HEADS {
        // Values are multiplied by 1: fewer instructions than a branch, as heads share the unpacked weights.
        (inverse[i], offsets[i]) = match heads.is_turned(i) {
            true => (inverse[i], offset * inverse[i]),
            false => (0.0, 1.0),
        };
        i += 1;
    }
    let mut j = 0;
    while j < 8 {
        i = 0;
        while i < HEADS {
            x[i][0][j] *= fma(weights[0][j], inverse[i], offsets[i]);
            x[i][1][j] *= fma(weights[1][j], inverse[i], offsets[i]);
            i += 1;
        }
        j += 1;
    }
}

#[inline(always)]
pub(super) fn turn_each<const HEADS: usize>(
    x: &mut [[Vector; 2]; HEADS],
    heads: &Heads<HEADS>,
    sines: &Sines,
    interleaved: bool,
) {
    let mut i = 0;
    while i < HEADS {
        if heads.is_turned(i) {
            turn(&mut x[i], sines, interleaved);
        }
        i += 1;
    }
}

#[inline(always)]
fn turn(x: &mut [Vector; 2], sines: &Sines, interleaved: bool) {
    let mut i = 0;
    if interleaved {
        while i < 8 {
            let (vector, j) = (i / 4, 2 * (i % 4));
            let [sine, cosine] = sines[i];
            let (first, second) = (x[vector][j], x[vector][j + 1]);
            x[vector][j] = fma(first, cosine, -(second * sine));
            x[vector][j + 1] = fma(second, cosine, first * sine);
            i += 1;
        }
    } else {
        while i < 8 {
            let [sine, cosine] = sines[i];
            let (first, second) = (x[0][i], x[1][i]);
            x[0][i] = fma(first, cosine, -(second * sine));
            x[1][i] = fma(second, cosine, first * sine);
            i += 1;
        }
    }
}

//! The device code: adds biases, normalises heads, applies rotary embeddings and writes the results. And the entries.

use cuda_std::{
    math::{self, fma},
    prelude::*,
};

#[cfg(feature = "quantise")]
use super::page::E4m3;
#[cfg(feature = "step")]
use super::page::Same;
use super::{
    page::{Page, Place},
    threads,
};
use crate::{
    abi::QkvParams,
    common::{
        half::{self, Half},
        rotary::{sine_cosine, turned},
    },
    step::{Vector, at, pack, squares, sum_of_lanes, unpack},
};

/// Sine and cosine of a thread's 8 pairs.
type Sines = [[f32; 2]; 8];

/// One block of a kernel: each thread processes its part of `HEADS` heads.
///
/// # Safety
/// The parameters describe memory as [`QkvParams`] says, for threads with `HEADS` heads.
#[inline(always)]
unsafe fn qkv<T: Half, P: Page, const HEADS: usize>(p: &QkvParams) {
    let index = thread::block_idx_x() * threads(HEADS as u32) + thread::thread_idx_x();
    let lane = index & ((1 << p.lanes_log) - 1);
    let (token, group) = p.groups.div_rem(index >> p.lanes_log);
    let exists = token < p.tokens && lane < p.lanes;
    let is_turned = lane < p.turned;
    let [a, b] = if is_turned && p.interleaved == 0 {
        [lane, lane + p.turned]
    } else {
        [2 * lane, 2 * lane + 1]
    };
    let vectors = 2 * p.lanes;
    let heads = p.q_heads + 2 * p.kv_heads;
    let first_value = p.q_heads + p.kv_heads;
    let from = u64::from(token) * u64::from(p.source_token);
    let has_head = |i: usize| exists && group + i as u32 * p.groups.get() < heads;

    let mut words = [[[0; 4]; 2]; HEADS];
    let (mut slot, mut position) = (u32::MAX, 0);
    let mut i = 0;
    // SAFETY: heads that exist are in the tensors; weights and biases are read only if given.
    unsafe {
        while i < HEADS {
            let head = group + i as u32 * p.groups.get();
            if has_head(i) {
                let head_at = from + u64::from(head * vectors);
                words[i] = [
                    ptr::load_u32x4(at(p.source, head_at + u64::from(a)) as *const u32),
                    ptr::load_u32x4(at(p.source, head_at + u64::from(b)) as *const u32),
                ];
            }
            i += 1;
        }
        if exists {
            slot = ptr::load_nc_u32((p.slots + u64::from(token) * 4) as *const u32);
            if p.turns != 0 {
                position = ptr::load_nc_u32((p.positions + u64::from(token) * 4) as *const u32);
            }
        }
    }
    let mut sines = [[0.0, 1.0]; 8];
    if p.turns != 0 && exists && is_turned && group < first_value {
        // SAFETY: the lane has 8 pairs.
        sines = unsafe { sines_of(p, lane, position) };
    }

    let exists_in_pool = exists && slot < p.pool_slots;
    let (page, offset) = p.page_size.div_rem(if exists_in_pool { slot } else { 0 });
    i = 0;
    while i < HEADS {
        let head = group + i as u32 * p.groups.get();
        let mut x = [unpack::<T>(words[i][0]), unpack::<T>(words[i][1])];
        // Weights and biases are the same for all tokens and hit in L1. Loading them only here saves registers above.
        if p.bias != 0 && has_head(i) {
            // SAFETY: the bias has this head.
            add::<T>(&mut x, unsafe { two(p.bias, head * vectors, [a, b]) });
        }
        if p.q_weight != 0 {
            // SAFETY: all lanes come here, since all have the same number of heads.
            let sum = unsafe { sum_of_lanes(squares(&x[0]) + squares(&x[1]), 1 << p.lanes_log) };
            if head < first_value && has_head(i) {
                let inverse = math::rsqrt(sum * p.inverse_dim + p.eps);
                let weights = if head < p.q_heads {
                    p.q_weight
                } else {
                    p.k_weight
                };
                // SAFETY: there are weights for a head.
                let weights = unsafe { two(weights, 0, [a, b]) };
                scale::<T>(&mut x, inverse, p.offset, weights);
            }
        }
        if p.turns != 0 && is_turned && head < first_value {
            turn(&mut x, &sines, p.interleaved != 0);
        }
        let head_of_kv = if head < first_value {
            head.wrapping_sub(p.q_heads)
        } else {
            head - first_value
        };
        let is_key = head < first_value;
        let place = Place {
            page,
            offset,
            head: head_of_kv,
            token,
            is_key,
            exists: has_head(i) && exists_in_pool && head >= p.q_heads,
            first: lane == 0,
        };
        // SAFETY: all lanes come here. Only this thread writes these vectors of the output and of the pool, as no two
        // tokens share a slot.
        unsafe {
            if has_head(i) && head < p.q_heads {
                let to =
                    u64::from(token) * u64::from(p.q_token) + u64::from(head) * u64::from(p.q_head);
                ptr::store_u32x4(at(p.q, to + u64::from(a)) as *mut u32, pack::<T>(x[0]));
                ptr::store_u32x4(at(p.q, to + u64::from(b)) as *mut u32, pack::<T>(x[1]));
            }
            P::append::<T>(p, &place, [a, b], &x);
        }
        i += 1;
    }
}

/// Sine and cosine of a lane's pairs at a position.
///
/// # Safety
/// The lane has 8 pairs, and the table has their angles.
#[inline(always)]
unsafe fn sines_of(p: &QkvParams, lane: u32, position: u32) -> Sines {
    let turns = (p.turns + u64::from(lane) * 64) as *const u32;
    let mut sines = [[0.0; 2]; 8];
    let mut i = 0;
    while i < 4 {
        // SAFETY: the caller's promise.
        let words = unsafe { ptr::load_nc_u32x4(turns.add(4 * i)) };
        let mut j = 0;
        while j < 2 {
            let [low, high] = [words[2 * j], words[2 * j + 1]];
            let [sine, cosine] = sine_cosine(turned([low, high], position));
            sines[2 * i + j] = [sine * p.magnitude, cosine * p.magnitude];
            j += 1;
        }
        i += 1;
    }
    sines
}

/// Loads two vectors from read-only memory, at offsets `a` and `b` from `from`.
///
/// # Safety
/// The vectors exist.
#[inline(always)]
unsafe fn two(base: u64, from: u32, [a, b]: [u32; 2]) -> [[u32; 4]; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            ptr::load_nc_u32x4(at(base, (from + a).into()) as *const u32),
            ptr::load_nc_u32x4(at(base, (from + b).into()) as *const u32),
        ]
    }
}

#[inline(always)]
fn add<T: Half>(x: &mut [Vector; 2], bias: [[u32; 4]; 2]) {
    let bias = [unpack::<T>(bias[0]), unpack::<T>(bias[1])];
    let mut j = 0;
    while j < 8 {
        x[0][j] += bias[0][j];
        x[1][j] += bias[1][j];
        j += 1;
    }
}

#[inline(always)]
fn scale<T: Half>(x: &mut [Vector; 2], inverse: f32, offset: f32, weights: [[u32; 4]; 2]) {
    let weights = [unpack::<T>(weights[0]), unpack::<T>(weights[1])];
    let offset = offset * inverse;
    let mut j = 0;
    while j < 8 {
        x[0][j] *= fma(weights[0][j], inverse, offset);
        x[1][j] *= fma(weights[1][j], inverse, offset);
        j += 1;
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

#[cfg(feature = "step")]
macro_rules! entries {
    ($half:ident $element:literal { $($heads:literal, $blocks:expr;)* }) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// As [`qkv`].
        #[kernel(name = ["qkv_step_", $heads, "_", $element], max_threads = threads($heads), min_blocks = $blocks)]
        pub unsafe fn entry(params: QkvParams) {
            // SAFETY: the launch's promise.
            unsafe { qkv::<half::$half, Same, $heads>(&params) }
        }
    }; )* };
}

#[cfg(feature = "step")]
table!(items entries);

#[cfg(feature = "quantise")]
macro_rules! quantising_entries {
    ($half:ident $element:literal { $($heads:literal, $blocks:expr;)* }) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// As [`qkv`].
        #[kernel(
            name = ["qkv_step_", $heads, "_", $element, "_e4m3"],
            max_threads = threads($heads),
            min_blocks = $blocks
        )]
        pub unsafe fn entry(params: QkvParams) {
            // SAFETY: the launch's promise.
            unsafe { qkv::<half::$half, E4m3, $heads>(&params) }
        }
    }; )* };
}

#[cfg(feature = "quantise")]
table!(items quantising_entries);

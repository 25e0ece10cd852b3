//! The layout of 8-bit pieces, 64 keys of one KV head or their values, as wgmma reads them.
//!
//! A piece's image is its exact content in shared memory, 64 · head dimension bytes, so one bulk copy loads it.
//! - **Keys**: rows of 128 bytes with the 128-byte swizzle, in groups of 8 keys. Within a group the slabs of 128
//!   columns follow each other. At head dimension 64: rows of 64 bytes with the 64-byte swizzle.
//! - **Values**: transposed, one row per column of V, with one byte for each of 64 keys and the 64-byte swizzle. Within
//!   every 16 keys the order is that of a thread's weights: byte `4 t + b` is key `8 (b / 2) + 2 t + b % 2`. So the
//!   Q·Kᵀ accumulator of a thread, once packed, is the A fragment of P·V without a shuffle.

use cuda_std::{
    math::{div_u32, permute_bytes},
    prelude::*,
    wgmma::Swizzle,
};

use super::super::{
    convert::{NOWHERE, Piece},
    shared::Shared,
};
use crate::abi::{ConvertedPage, PrefillParams};

const WARP: u32 = warp::FULL_MASK;

/// Bytes of an image.
#[inline(always)]
pub(super) const fn image_bytes(dim: u32) -> u32 {
    ConvertedPage::KEYS * dim
}

/// Lays out a piece and sets its flag.
///
/// # Safety
/// A whole warp comes here, and it has claimed the piece.
#[inline(always)]
pub(in super::super) unsafe fn lay_out(p: &PrefillParams, s: Shared, piece: Piece) {
    let c = &p.convert;
    let dim = s.shape.head_dim;
    let values = piece.flag % 2 == 1;
    let (from, to) = if values { (c.v, c.to_v) } else { (c.k, c.to_k) };
    let to = to + u64::from(piece.flag / 2) * u64::from(image_bytes(dim));
    // SAFETY: the caller's promise; only this launch writes the image.
    unsafe {
        if values {
            put_values(dim, piece.places, from, to);
        } else {
            put_keys(dim, piece.places, from, to);
        }
        piece.is_there(p, s);
    }
}

/// Loads of 16 bytes that a lane has in flight.
const TOGETHER: usize = 4;

#[inline(always)]
unsafe fn put_keys(dim: u32, places: [u32; 2], from: u64, to: u64) {
    let lane = warp::lane_id();
    let per_key = dim / 16;
    // Opaque: unrolled, the loop needs more registers than there are.
    let rounds = misc::opaque(dim / 8);
    let mut round = 0;
    while round < rounds {
        let mut vectors = [[0; 4]; TOGETHER];
        let mut i = 0;
        // SAFETY: whole warps; what exists is in the pool, and the image is the warp's.
        unsafe {
            while i < TOGETHER {
                let key = (round + i as u32) * (32 / per_key) + lane / per_key;
                let place = place_of(places, key);
                if place != NOWHERE {
                    let at = from + u64::from(place + lane % per_key) * 16;
                    vectors[i] = ptr::load_stream_u32x4(at as *const u32);
                }
                i += 1;
            }
            i = 0;
            while i < TOGETHER {
                let key = (round + i as u32) * (32 / per_key) + lane / per_key;
                let at = to + u64::from(place_of_key(dim, key, lane % per_key));
                ptr::store_u32x4(at as *mut u32, vectors[i]);
                i += 1;
            }
        }
        round += TOGETHER as u32;
    }
}

/// Offset of 16 bytes of a key in an image.
#[inline(always)]
fn place_of_key(dim: u32, key: u32, vector: u32) -> u32 {
    let group = key / 8 * (8 * dim) + vector / 8 * 1024;
    group + key % 8 * 128 + ((vector % 8) ^ (key % 8)) * 16
}

/// Lays out values: a lane transposes blocks of four columns by 16 keys.
#[inline(always)]
unsafe fn put_values(dim: u32, places: [u32; 2], from: u64, to: u64) {
    let lane = warp::lane_id();
    let per_key = dim / 4;
    // Opaque, as in `put_keys`.
    let rounds = misc::opaque(dim / 32);
    let mut round = 0;
    while round < rounds {
        let at = round * 32 + lane;
        let group = div_u32(at, per_key);
        let columns = at - group * per_key;
        let mut words = [0; 16];
        let mut key = 0;
        // SAFETY: whole warps; what exists is in the pool, and the image is the warp's.
        unsafe {
            while key < 16 {
                let place = place_of(places, group * 16 + key as u32);
                if place != NOWHERE {
                    let at = from + u64::from(place) * 16 + u64::from(columns * 4);
                    words[key] = ptr::load_stream_u32(at as *const u32);
                }
                key += 1;
            }
            let mut turned = [[0; 4]; 4];
            let mut t = 0;
            while t < 4 {
                let keys = [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9].map(|key| words[key]);
                let bytes = turn(keys);
                let mut column = 0;
                while column < 4 {
                    turned[column][t] = bytes[column];
                    column += 1;
                }
                t += 1;
            }
            let mut column = 0;
            while column < 4 {
                let row = columns * 4 + column as u32;
                let at = to + u64::from(Swizzle::B64.apply(row * 64 + group * 16));
                ptr::store_u32x4(at as *mut u32, turned[column]);
                column += 1;
            }
        }
        round += 1;
    }
}

/// The pool offset of a key. Each lane holds those of two keys of the piece.
///
/// # Safety
/// A whole warp comes here.
#[inline(always)]
unsafe fn place_of(places: [u32; 2], key: u32) -> u32 {
    // SAFETY: the caller's promise.
    let [low, high] =
        unsafe { places.map(|places| warp::warp_shuffle_idx(WARP, places, key % 32, 32)) };
    if key < 32 { low } else { high }
}

/// Transposes 4 × 4 bytes: word `i` of the result holds byte `i` of each word.
#[inline(always)]
fn turn([a, b, c, d]: [u32; 4]) -> [u32; 4] {
    let low = [permute_bytes(a, b, 0x5140), permute_bytes(c, d, 0x5140)];
    let high = [permute_bytes(a, b, 0x7362), permute_bytes(c, d, 0x7362)];
    [
        permute_bytes(low[0], low[1], 0x5410),
        permute_bytes(low[0], low[1], 0x7632),
        permute_bytes(high[0], high[1], 0x5410),
        permute_bytes(high[0], high[1], 0x7632),
    ]
}

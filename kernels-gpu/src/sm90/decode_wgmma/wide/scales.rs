//! Scales of each token: how they come to shared memory, and how logits and weights take them.
//!
//! A block has, for each pair of neighbouring keys, a vector of their two scales and the logarithms of the scales of their
//! values; and, for each key, the inverse of the latter. The loader of keys copies scales. The converting warps then
//! replace those of values by logarithms and inverses, once for all rows.

use cuda_std::{
    async_copy,
    math::{fma, lg2, rcp},
    shared, thread, warp,
};

use super::{runs::Piece, shared::Shared};
use crate::{abi::DecodeParams, common::cache::scale_of_value};

const WARP: u32 = warp::FULL_MASK;

/// The scale of a key. The logarithm of its value's is 8 bytes further.
const fn of_key(scales: u32, key: u32) -> u32 {
    scales + key / 2 * 16 + key % 2 * 4
}

/// The scale of a key's value, and later its inverse.
const fn of_value(s: Shared, scales: u32, key: u32) -> u32 {
    scales + s.shape.keys * 8 + key * 4
}

/// Copies the scales of a block's keys and values to `scales`. Lanes from `first` on have its pieces, their pages, and their
/// first tokens in these. Keys outside of the item get scales of 1.
///
/// # Safety
/// A whole warp; only the caller accesses the target.
#[inline(always)]
pub(super) unsafe fn load(
    p: &DecodeParams,
    s: Shared,
    scales: u32,
    piece: Piece,
    [page, in_page]: [u32; 2],
    first: u32,
    head: u32,
) {
    let shift = p.piece_tokens.trailing_zeros();
    // Each at most 128: a page has no more tokens.
    let bounds = in_page | piece.first << 8 | piece.past << 16;
    let mut i = 0;
    // SAFETY: the caller's promise; the pool has scales for each token of the item.
    unsafe {
        while i < s.shape.keys / 32 {
            let key = i * 32 + warp::lane_id();
            let (from, in_piece) = (first + (key >> shift), key & (p.piece_tokens - 1));
            let [page, bounds] = [page, bounds].map(|x| warp::warp_shuffle_idx(WARP, x, from, 32));
            let belongs = in_piece >= bounds >> 8 & 0xFF && in_piece < bounds >> 16;
            let of = belongs.then(|| [page, (bounds & 0xFF) + in_piece, head]);
            load_one(p, s, scales, key, of);
            i += 1;
        }
    }
}

/// Copies the scales of a block's key and its value, whose page, token and head are given. A key outside of the item gets
/// scales of 1.
///
/// # Safety
/// Only the caller accesses the target; the pool has scales for the token.
#[inline(always)]
pub(super) unsafe fn load_one(
    p: &DecodeParams,
    s: Shared,
    scales: u32,
    key: u32,
    of: Option<[u32; 3]>,
) {
    let [k_to, v_to] = [of_key(scales, key), of_value(s, scales, key)];
    // SAFETY: the caller's promise.
    unsafe {
        if let Some([page, token, head]) = of {
            let [k, v] = p.attention.scales.places(page, token, head);
            async_copy::copy_ca::<4>(k_to, k as *const u8);
            async_copy::copy_ca::<4>(v_to, v as *const u8);
        } else {
            shared::store_f32(k_to, 1.0);
            shared::store_f32(v_to, 1.0);
        }
    }
}

/// Replaces the scales of values by their logarithms and inverses.
///
/// # Safety
/// The warps that convert keys come here; the block's scales have arrived, and nothing else accesses them.
#[inline(always)]
pub(super) unsafe fn convert(s: Shared, scales: u32) {
    let key = thread::thread_idx_x() % 128;
    if key < s.shape.keys {
        let at = of_value(s, scales, key);
        // SAFETY: the caller's promise; each thread has its own key.
        unsafe {
            let scale = scale_of_value(shared::load_f32(at));
            shared::store_f32(of_key(scales, key) + 8, lg2(scale));
            shared::store_f32(at, rcp(scale));
        }
    }
}

/// Turns a block's products into base-2 logits plus the logarithms of the scales of values: references are then such that
/// weights times scales are in the range of f16.
///
/// # Safety
/// The block was converted.
#[inline(always)]
pub(super) unsafe fn apply<const S: usize>(logits: &mut [f32; S], scales: u32, of_rows: [f32; 2]) {
    let mut group = 0;
    while group < S / 4 {
        // SAFETY: the caller's promise.
        let [k, v] = unsafe {
            let [a, b, c, d] =
                shared::load_u32x4(of_key(scales, column(group))).map(f32::from_bits);
            [[a, b], [c, d]]
        };
        let mut i = 0;
        while i < 4 {
            let logit = &mut logits[4 * group + i];
            *logit = fma(*logit, of_rows[i / 2] * k[i % 2], v[i % 2]);
            i += 1;
        }
        group += 1;
    }
}

/// The inverses of the scales of the values of this thread's two keys in a group of 8.
///
/// # Safety
/// As [`apply`].
#[inline(always)]
pub(super) unsafe fn inverses(s: Shared, scales: u32, group: usize) -> [f32; 2] {
    // SAFETY: the caller's promise.
    unsafe { shared::load_f32x2(of_value(s, scales, column(group))) }
}

/// Multiplies a block's products by their rows' factors.
#[inline(always)]
pub(super) fn multiply_rows<const S: usize>(logits: &mut [f32; S], of_rows: [f32; 2]) {
    let mut i = 0;
    while i < S {
        logits[i] *= of_rows[i / 2 % 2];
        i += 1;
    }
}

/// The first of this thread's two columns of each group of 8.
#[inline(always)]
fn column(group: usize) -> u32 {
    8 * group as u32 + warp::lane_id() % 4 * 2
}

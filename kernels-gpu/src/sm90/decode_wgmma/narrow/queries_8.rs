//! Queries of 8-bit keys: in f16, in the order in which `products_8` reads a key's elements.

use cuda_std::{mma, shared, warp};

use super::shared::Shared;
use crate::{
    abi::DecodeParams,
    common::{
        cache::{fit_f16, fitted, larger},
        decode::produce::Header,
        half::Half,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Converts a unit's queries in place, four lanes for each of 8 rows, and stores the factors of the rows. Queries in
/// bf16 are multiplied by the power of two that brings a row's largest into the range of f16. Rows that the unit does
/// not have become zeros.
///
/// A step of the product takes 16 columns; lane t of a row has four of them, from element 32·t on. Each lane takes the
/// elements that the same lane of a key reads, and `stmatrix` joins the words of four lanes.
///
/// # Safety
/// A whole warp comes here, which has gathered the slot's queries and written its rows; nobody else accesses them.
#[inline(always)]
pub(super) unsafe fn bring<T: Half>(p: &DecodeParams, s: Shared, slot: u32, header: &Header) {
    let lane = warp::lane_id();
    let (row, part) = (lane / 4, lane % 4);
    let (token, _) = p.group.div_rem(row);
    let exists = token < header.item.rows;
    let slab = |slab: u32| s.queries(slot) + slab * s.shape.slab_bytes();
    // 16 bytes of a swizzled row, and the row's address for `stmatrix`: four matrices of 8 rows in adjacent chunks.
    let own = |i: u32| slab(part / 2) + row * 128 + ((part % 2 * 4 + i) ^ row) * 16;
    let target = |i: u32| {
        let row = lane % 8;
        slab(i / 2) + row * 128 + ((i % 2 * 4 + lane / 8) ^ row) * 16
    };
    // SAFETY: the caller's promise.
    unsafe {
        let words = [0, 1, 2, 3].map(|i| shared::load_u32x4(own(i)));
        let mut largest = 0;
        let mut fit = 1.0;
        let mut inverse = 1.0;
        if T::WIDE {
            let mut i = 0;
            while i < 16 {
                largest = larger(largest, words[i / 4][i % 4]);
                i += 1;
            }
            largest = largest.max(warp::warp_shuffle_xor(WARP, largest, 1, 32));
            largest = largest.max(warp::warp_shuffle_xor(WARP, largest, 2, 32));
            [fit, inverse] = fit_f16(largest);
        }
        let of = |pair: u32| match (exists, T::WIDE) {
            (false, _) => 0,
            (true, true) => fitted(pair, fit),
            (true, false) => pair,
        };
        warp::sync_warp(WARP);
        let mut i = 0;
        while i < 4 {
            mma::stmatrix_x4(target(i as u32), words[i].map(of));
            i += 1;
        }
        if part == 0 {
            let token = s.load_row(slot, token.min(header.item.rows - 1)).token;
            let [k, v] = match s.shape.by_token {
                true => [1.0; 2],
                false => p.attention.scales.of(token, header.head),
            };
            shared::store_f32(s.factors(slot, 0, row), inverse * k);
            shared::store_f32(s.factors(slot, 1, row), v);
        }
    }
}

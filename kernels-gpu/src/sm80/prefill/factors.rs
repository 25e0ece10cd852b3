//! The factors of a tile's rows, in general kernels: rows can be of several requests, which have scales of their own.

use cuda_std::prelude::*;

use super::{load, tile::Shared};
use crate::{
    abi::GatherPrefillParams,
    common::{cache::factor_of_products, prefill_tile::Tile, variant::Variant},
};

/// Writes the factors of the rows' products with keys: their scales of 8-bit keys and, where logits are not transformed,
/// the scale of the softmax.
///
/// # Safety
/// All threads of the CTA come here before a barrier, after the last reads of the previous tile's factors.
#[inline(always)]
pub(super) unsafe fn store_factors<V: Variant>(
    p: &GatherPrefillParams,
    s: Shared,
    tile: &Tile,
    scale: f32,
) {
    let row = thread::thread_idx_x();
    if row < s.shape.rows() {
        // Rows past the end take the last row's scales.
        let (token, _) = tile.place(&p.pack, row.min(tile.rows.saturating_sub(1)));
        // SAFETY: a token of the launch; one thread writes each factor.
        unsafe {
            let [of_keys, _] = p.attention.scales.of(tile.token + token, tile.kv_head);
            let factor = match V::TRANSFORMS_LOGITS {
                true => of_keys,
                false => of_keys * scale,
            };
            shared::store_u32(s.factor(row), factor_of_products(factor).to_bits());
        }
    }
}

/// The factors of the lane's rows.
///
/// # Safety
/// They were stored, and a barrier completed since.
#[inline(always)]
pub(super) unsafe fn load_factors<const HALVES: usize>(s: Shared) -> [[f32; 2]; HALVES] {
    let (lane, warp) = load::here();
    let at = s.factors(warp, lane);
    // SAFETY: the caller's promise.
    unsafe {
        if HALVES == 2 {
            let of = shared::load_u32x4(at).map(f32::from_bits);
            core::array::from_fn(|half| [of[2 * half], of[2 * half + 1]])
        } else {
            [shared::load_u32x2(at).map(f32::from_bits); HALVES]
        }
    }
}

/// The scales of the softmax for the lane's rows.
///
/// # Safety
/// As [`load_factors`], in general kernels.
#[inline(always)]
pub(super) unsafe fn scales_of_rows<V: Variant, const HALVES: usize, const GENERAL: bool>(
    s: Shared,
    scale: f32,
) -> [[f32; 2]; HALVES] {
    if GENERAL && !V::TRANSFORMS_LOGITS {
        // SAFETY: the caller's promise.
        unsafe { load_factors(s) }
    } else {
        [[scale; 2]; HALVES]
    }
}

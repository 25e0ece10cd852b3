//! The products of a consumer: Q·Kᵀ of its own blocks, and P·V of all of them with its half of the values.

use cuda_std::{
    misc, mma, warp,
    wgmma::{self, Descriptor, Swizzle},
};

use super::{
    super::{
        mma::{Slabs, load_fragments, weights_values},
        uniform,
    },
    config::{HEAD_DIM, HELD_SLABS, QUERY_SLABS, SLAB_BYTES, SLABS, VALUE_DIM},
    load::QueryPlace as _,
    shared::{Shared, Unit, Units, WEIGHTS_CHUNK},
};
use crate::{abi::LatentParams, common::half::Half};

/// Outputs of a thread: those of 64 rows and half of the columns.
pub(super) const O: usize = VALUE_DIM as usize / 4;

/// Steps of 16 columns whose queries are in registers, the last ones. Q·Kᵀ is bound by what it reads of shared memory:
/// 2 KB of queries beside 1.5 KB of keys for each step.
pub(super) const HELD: usize = HELD_SLABS as usize * 4;

/// The queries of those steps, of a warp's rows.
pub(super) type Held = [u32; 4 * HELD];

/// Loads the queries that stay in registers, from shared memory.
///
/// # Safety
/// A whole warp comes here; the queries are there.
#[inline(always)]
pub(super) unsafe fn hold<const KEYS: u32, const STAGES: u32>(
    s: Shared<KEYS, STAGES>,
    warp: u32,
) -> Held {
    // Opaque: or the addresses are kept in registers from unit to unit.
    let (lane, mut held) = (misc::opaque(warp::lane_id()), [0; 4 * HELD]);
    let row = warp * 16 + lane % 16;
    let mut i = 0;
    while i < HELD {
        let slab = QUERY_SLABS - HELD_SLABS + i as u32 / 4;
        let chunk = 2 * (i as u32 % 4) + lane / 16;
        let at = s.queries() + slab * SLAB_BYTES + row * 128 + (chunk ^ row % 8) * 16;
        // SAFETY: the slabs' rows are swizzled.
        let fragments = unsafe { mma::ldmatrix_x4(at) };
        let mut j = 0;
        while j < 4 {
            held[4 * i + j] = fragments[j];
            j += 1;
        }
        i += 1;
    }
    held
}

/// The same from memory, where shared memory has no place for them.
///
/// # Safety
/// A whole warp comes here; the unit's rows are listed.
#[inline(always)]
pub(super) unsafe fn hold_from_memory<const KEYS: u32, const STAGES: u32>(
    p: &LatentParams,
    s: Shared<KEYS, STAGES>,
    slot: u32,
    warp: u32,
) -> Held {
    // SAFETY: the unit's barrier completed.
    let unit = unsafe { Unit::load(s.unit(slot)) };
    let row_of = |row: u32| {
        let (token, in_tile) = p.heads.div_rem(warp * 16 + row);
        let head = unit.head + in_tile;
        // SAFETY: the row is listed.
        let of = unsafe { s.load_row(slot, token.min(unit.tokens - 1)).token };
        let element = u64::from(of) * u64::from(p.attention.q_token_stride)
            + u64::from(head * HEAD_DIM + (QUERY_SLABS - HELD_SLABS) * 64);
        let exists = token < unit.tokens && head < p.attention.q_heads;
        (p.attention.q + element * 2, exists)
    };
    // SAFETY: a query has as many columns, and vectors of 16 bytes are aligned, as tensor maps ask for.
    unsafe { load_fragments(row_of) }
}

/// Adds the product with a half of the keys' columns to the logits, or begins with it; issued.
#[inline(always)]
pub(super) unsafe fn multiply<
    T: Half,
    const ADD: bool,
    const KEYS: u32,
    const STAGES: u32,
    const S: usize,
>(
    s: Shared<KEYS, STAGES>,
    held: &Held,
    logits: &mut [f32; S],
    stage: u32,
    half: u32,
) where
    [f32; S]: wgmma::Accumulator,
{
    let slabs = SLABS[half as usize];
    // SAFETY: whole warps; both operands are there; the accumulator is waited for.
    unsafe {
        // Anew for every block: or the descriptors of all steps are computed before the loop and spilled.
        let queries = uniform(s.queries() + half * SLABS[0] * SLAB_BYTES);
        let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
        let keys = uniform(s.half(stage, half));
        let k = Descriptor::new(keys, 16, slabs * 1024, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < slabs * 4 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            let (q, k) = (
                q.advance(slab * SLAB_BYTES + inner),
                k.advance(slab * 1024 + inner),
            );
            let from_registers = (step + HELD as u32).checked_sub(SLABS[1] * 4);
            if let (true, Some(i)) = (ADD, from_registers) {
                let i = 4 * i as usize;
                let q = [held[i], held[i + 1], held[i + 2], held[i + 3]];
                wgmma::mma_rs::<T, true, false, _>(logits, q, k);
            } else if ADD || step > 0 {
                wgmma::mma_ss::<T, true, false, false, _>(logits, q, k);
            } else {
                wgmma::mma_ss::<T, false, false, false, _>(logits, q, k);
            }
            step += 1;
        }
    }
}

/// O += P·V of weights in shared memory and a half of a block's values, issued.
#[inline(always)]
pub(super) unsafe fn add_handed<T: Half, const KEYS: u32, const STAGES: u32>(
    s: Shared<KEYS, STAGES>,
    o: &mut [f32; O],
    stage: u32,
    half: u32,
) {
    let group = SLABS[half as usize] * 1024;
    // SAFETY: whole warps; both operands are there; the accumulator is waited for.
    unsafe {
        let weights = uniform(s.weights(stage));
        let weights = Descriptor::new(weights, WEIGHTS_CHUNK, 128, Swizzle::None);
        let values = uniform(s.half(stage, half));
        let values = Descriptor::new(values, 1024, group, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < KEYS / 16 {
            let (weights, values) = (
                weights.advance(step * 2 * WEIGHTS_CHUNK),
                values.advance(step * 2 * group),
            );
            wgmma::mma_ss::<T, true, false, true, _>(o, weights, values);
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// The same of weights in registers, where there are the keys.
#[inline(always)]
pub(super) unsafe fn add_own<T: Half, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    slabs: u32,
) {
    // SAFETY: whole warps; the values are there; accumulator and weights are waited for.
    unsafe {
        weights_values::<T, O, P>(o, weights, values, Slabs::of_eight_rows(slabs * 64));
    }
}

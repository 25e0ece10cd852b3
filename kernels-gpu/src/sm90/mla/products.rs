//! The products of a consumer: Q·Kᵀ of its own blocks, and P·V of all blocks with its half of the values.

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
    shared::{QueryPlace as _, Shared, Unit, Units, WEIGHTS_CHUNK},
};
use crate::{abi::LatentParams, common::half::Half};

/// Outputs of a thread: its share of 64 rows × half of the columns.
pub(super) const O: usize = VALUE_DIM as usize / 4;

/// The last steps of 16 columns, whose queries are in registers. Q·Kᵀ is bound by shared-memory reads: 2 KB of queries
/// next to 1.5 KB of keys per step (with 48 keys).
pub(super) const HELD: usize = HELD_SLABS as usize * 4;

/// A fragments of the queries of those steps.
pub(super) type Held = [u32; 4 * HELD];

/// Loads the queries that stay in registers from shared memory.
///
/// # Safety
/// A whole warp comes here; the queries have arrived.
#[inline(always)]
pub(super) unsafe fn hold<const KEYS: u32, const STAGES: u32>(
    s: Shared<KEYS, STAGES>,
    warp: u32,
) -> Held {
    // Opaque: otherwise the addresses stay in registers from unit to unit.
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

/// The same from global memory, where shared memory has no room for them.
///
/// # Safety
/// A whole warp comes here; the unit's rows are written.
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
        // SAFETY: the unit's rows are written.
        let of = unsafe { s.load_row(slot, token.min(unit.tokens - 1)).token };
        let element = u64::from(of) * u64::from(p.attention.q_token_stride)
            + u64::from(head * HEAD_DIM + (QUERY_SLABS - HELD_SLABS) * 64);
        let exists = token < unit.tokens && head < p.attention.q_heads;
        (p.attention.q + element * 2, exists)
    };
    // SAFETY: a query has these columns; queries are aligned to 16 bytes, as tensor maps require.
    unsafe { load_fragments(row_of) }
}

/// Issues the product with one half of the keys' columns. With `ADD` it adds to the logits, otherwise it overwrites
/// them.
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
    // SAFETY: whole warps; both operands have arrived; the accumulator is waited for.
    unsafe {
        // Recomputed for every block: otherwise the descriptors of all steps are computed before the loop and spilled.
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

/// Slabs of half of the columns.
#[inline(always)]
pub(super) fn slabs(half: u32) -> u32 {
    const { assert!(SLABS[1] == SLABS[0] + 1) };
    SLABS[0] + half
}

/// Issues O += P·V, with the other consumer's weights from shared memory and half of a block's values.
#[inline(always)]
pub(super) unsafe fn add_handed<T: Half, const KEYS: u32, const STAGES: u32>(
    s: Shared<KEYS, STAGES>,
    o: &mut [f32; O],
    stage: u32,
    half: u32,
) {
    let group = slabs(half) * 1024;
    // SAFETY: whole warps; both operands have arrived; the accumulator is waited for.
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

/// Issues O += P·V, with this consumer's own weights from registers.
#[inline(always)]
pub(super) unsafe fn add_own<T: Half, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    slabs: u32,
) {
    // SAFETY: whole warps; the values have arrived; accumulator and weights are waited for.
    unsafe {
        weights_values::<T, O, P>(o, weights, values, Slabs::of_eight_rows(slabs * 64));
    }
}

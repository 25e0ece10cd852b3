//! The two products with 8-bit keys and values: the operand A of `wgmma` comes from registers. A lane reads its part of
//! a fragment from shared memory and converts it to f16 while the tensor cores multiply the fragments before.
//!
//! - **Keys.** A product does not depend on the order of its columns if both operands have the same. Lane t of four
//!   reads elements 32·t … of a key, 16 at a time. Four of them make a step of 16 columns: the first two stand for the
//!   fragment's columns 2·t and 2·t + 1, the others for those 8 further. `queries_8` orders queries alike.
//! - **Values.** A transposing `ldmatrix` on pairs of elements gives lane (g, t) the elements 2·g and 2·g + 1 of values
//!   2·t and 2·t + 1. A permutation sorts them by element: row g of the fragment is element 2·g, row g + 8 the other.

use cuda_std::{
    convert, mma, shared,
    wgmma::{self, Accumulator, Descriptor, F16, Swizzle},
};

use super::products::Tile;
use crate::{common::cache::transpose_bytes, sm90::uniform};

/// Bytes of a key, or of its value.
const ROW: u32 = 128;

/// Steps of 16 columns or keys that are multiplied together.
const STEPS: usize = 4;

/// Sets of fragments.
const SETS: usize = 2;

/// Groups of products that may be under way when a further set of fragments is filled.
pub(super) const UNDER_WAY: u64 = SETS as u64 - 1;

/// Fragments of some steps.
type Fragments = [u32; 4 * STEPS];

/// Fragments in registers: while one set is filled, the others are multiplied.
pub(super) struct Turns([Fragments; SETS]);

impl Turns {
    pub const NONE: Self = Self([[0; 4 * STEPS]; SETS]);

    /// The set of a turn, after waiting for the product that reads it.
    ///
    /// # Safety
    /// A whole warpgroup comes here, with one group committed per turn.
    #[inline(always)]
    unsafe fn take(&mut self, number: usize) -> &mut Fragments {
        let of = &mut self.0[number % SETS];
        // SAFETY: the caller's promise.
        unsafe { wgmma::wait_group::<UNDER_WAY>() };
        wgmma::fence_operand(of);
        of
    }

    /// Keeps the compiler from moving writes of the fragments before this point.
    #[inline(always)]
    pub fn keep(&mut self) {
        let mut set = 0;
        while set < SETS {
            wgmma::fence_operand(&mut self.0[set]);
            set += 1;
        }
    }
}

/// Offset of a lane's first elements in a block of keys: of key lane / 4 among the warp's 16.
#[inline(always)]
pub(super) const fn keys_of(warp: u32, lane: u32) -> u32 {
    let key = lane / 4;
    (warp * 16 + key) * ROW + ((lane % 4 * 2) ^ key) * 16
}

/// Offset of the row that a lane addresses in a block of values, at the warp's 16 elements of the first slab.
#[inline(always)]
pub(super) const fn values_of(warp: u32, lane: u32) -> u32 {
    lane * ROW + (warp ^ lane % 8) * 16
}

/// Issues Sᵀ = K·Qᵀ of a block, 64 keys per accumulator. `keys` is the lane's address in the block.
///
/// # Safety
/// Whole warpgroups come here; both operands have arrived, and the accumulator is waited for before it is read. All
/// lanes have read the keys on return.
#[inline(always)]
pub(super) unsafe fn keys_queries<const KEYS: usize, const N: usize>(
    turns: &mut Turns,
    logits: &mut [Tile<N>; KEYS],
    keys: u32,
    queries: u32,
) where
    Tile<N>: Accumulator,
{
    // 16 bytes of two keys are four steps. The second 16 bytes of a lane are in the other half of 32, wherever the
    // swizzle puts these.
    let load = |four: usize| {
        let (tile, half) = (four / 2, four % 2);
        let at = if half == 0 { keys } else { keys ^ 16 } + tile as u32 * (64 * ROW);
        // SAFETY: the caller's promise.
        [0, 8].map(|down| unsafe { shared::load_u32x4(at + down * ROW) })
    };
    // SAFETY: the caller's promise.
    unsafe {
        let queries = Descriptor::new(uniform(queries), 16, 1024, Swizzle::B128);
        let mut words = load(0);
        let mut turn = 0;
        while turn < 8 * KEYS / STEPS {
            let of = turns.take(turn);
            let mut i = 0;
            while i < STEPS {
                let step = turn * STEPS + i;
                let [upper, lower] = words.map(|words| words[step % 4]);
                let four = [upper, lower, upper >> 16, lower >> 16];
                let mut j = 0;
                while j < 4 {
                    of[4 * i + j] = convert::e4m3x2_to_f16x2(four[j] as u16);
                    j += 1;
                }
                // Loads are issued ahead of their use.
                if step % 4 == 3 && step + 1 < 8 * KEYS {
                    words = load(step / 4 + 1);
                }
                i += 1;
            }
            let of = *of;
            wgmma::fence();
            i = 0;
            while i < STEPS {
                let step = turn * STEPS + i;
                let (tile, in_row) = (step / 8, (step % 8) as u32);
                let query = queries.advance(in_row / 4 * 1024 + in_row % 4 * 32);
                let keys = [0, 1, 2, 3].map(|j| of[4 * i + j]);
                if in_row == 0 {
                    wgmma::mma_rs::<F16, false, false, _>(&mut logits[tile], keys, query);
                } else {
                    wgmma::mma_rs::<F16, true, false, _>(&mut logits[tile], keys, query);
                }
                i += 1;
            }
            wgmma::commit_group();
            turn += 1;
        }
    }
}

/// Issues Oᵀ += Vᵀ·Pᵀ of a block, 64 elements of the head per accumulator. `values` is the lane's address in the block.
///
/// # Safety
/// As [`keys_queries`]'s.
#[inline(always)]
pub(super) unsafe fn values_weights<const KEYS: usize, const SLABS: usize, const N: usize>(
    turns: &mut Turns,
    o: &mut [Tile<N>; SLABS],
    values: u32,
    weights: u32,
) where
    Tile<N>: Accumulator,
{
    // 32 keys of one slab are two steps. The second slab's elements are in the other half of a row, wherever the swizzle
    // puts these.
    let load = |two: usize| {
        let (slab, keys) = (two % SLABS, two / SLABS);
        let at = if slab == 0 { values } else { values ^ 64 };
        // SAFETY: the caller's promise.
        unsafe { mma::ldmatrix_x4_trans(at + keys as u32 * (32 * ROW)) }
    };
    // SAFETY: the caller's promise.
    unsafe {
        // No swizzle: core matrices of 8 keys × 8 rows, contiguous along the keys.
        let weights = Descriptor::new(weights, 128, 128, Swizzle::None);
        let mut words = load(0);
        let mut turn = 0;
        while turn < 4 * SLABS * KEYS / STEPS {
            let of = turns.take(turn);
            let mut i = 0;
            while i < STEPS {
                let two = (turn * STEPS + i) / 2;
                let mut j = 0;
                while j < 4 {
                    let pairs = transpose_bytes(words[j]);
                    of[4 * i + 2 * j] = convert::e4m3x2_to_f16x2(pairs as u16);
                    of[4 * i + 2 * j + 1] = convert::e4m3x2_to_f16x2((pairs >> 16) as u16);
                    j += 1;
                }
                if two + 1 < 2 * SLABS * KEYS {
                    words = load(two + 1);
                }
                i += 2;
            }
            let of = *of;
            wgmma::fence();
            i = 0;
            while i < STEPS {
                let step = turn * STEPS + i;
                let (slab, keys) = (step / 2 % SLABS, step / 2 / SLABS);
                let weights = weights.advance((2 * keys + step % 2) as u32 * 256);
                let values = [0, 1, 2, 3].map(|j| of[4 * i + j]);
                wgmma::mma_rs::<F16, true, true, _>(&mut o[slab], values, weights);
                i += 1;
            }
            wgmma::commit_group();
            turn += 1;
        }
    }
}

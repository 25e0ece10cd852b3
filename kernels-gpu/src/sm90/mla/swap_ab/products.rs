//! The products: A fragments of keys and values are converted in registers while the tensor cores multiply the previous
//! ones.

use cuda_std::{
    misc, mma, shared, warp,
    wgmma::{self, Bf16, Descriptor, F16, Swizzle},
};

use super::{
    convert::{Power, of_keys, of_values, scale_at},
    shared::Shared,
};
use crate::sm90::{
    mla::{
        config::{QUERY_SLABS, SLAB_BYTES, VALUE_DIM},
        keys_656::{BLOCK, GROUPS, ROW_BYTES, ROW_ROPE},
        swapped::{self, TILES},
    },
    uniform,
};

/// A thread's two keys × 16 rows: element `4 j + 2 h + e` is key `h` and row `8 j + 2 (lane % 4) + e`.
pub(super) type Logits = [f32; 32];
/// Tiles of 64 columns. In each, a thread has two neighbouring columns (`h`) of 16 rows, indexed as [`Logits`].
pub(super) type Outputs = swapped::Outputs<32>;

/// Fragments of two steps of 16 columns or keys, which are multiplied together.
type Fragments = [u32; 8];

/// Double-buffered fragments: one set is multiplied while the other is converted. A third set changed nothing, and sets
/// of four steps do not fit in registers.
type Turns = [Fragments; 2];

/// Joins two fragments.
#[inline(always)]
fn both(first: [u32; 4], second: [u32; 4]) -> Fragments {
    let mut both = [0; 8];
    let mut i = 0;
    while i < 4 {
        (both[i], both[4 + i]) = (first[i], second[i]);
        i += 1;
    }
    both
}

/// One of the two fragments of a set.
#[inline(always)]
fn fragment(of: &Fragments, step: usize) -> [u32; 4] {
    [0, 1, 2, 3].map(|i| of[4 * step + i])
}

/// The next set of fragments to fill, after waiting for the product that reads it.
///
/// # Safety
/// A whole warpgroup comes here, with one product committed per turn.
#[inline(always)]
unsafe fn turn(turns: &mut Turns, number: usize) -> &mut Fragments {
    let of = &mut turns[number % 2];
    if number >= 2 {
        // SAFETY: the caller's promise.
        unsafe { wgmma::wait_group::<1>() };
        wgmma::fence_operand(of);
    }
    of
}

/// Waits for all products.
///
/// # Safety
/// A whole warpgroup comes here.
#[inline(always)]
unsafe fn wait(turns: &mut Turns) {
    // SAFETY: the caller's promise.
    unsafe { wgmma::wait_group::<0>() };
    wgmma::fence_operand(&mut turns[0]);
    wgmma::fence_operand(&mut turns[1]);
}

/// Multiplies the first 512 columns of a lane's two keys, at `row` and 8 keys further.
///
/// # Safety
/// A whole warpgroup comes here; keys and queries have arrived.
#[inline(always)]
pub(super) unsafe fn multiply<const STAGES: u32>(
    s: Shared<STAGES>,
    row: u32,
    powers: [Power; 2],
    logits: &mut Logits,
) {
    const SLABS: usize = VALUE_DIM as usize / 64;
    let key = row + misc::opaque(warp::lane_id()) % 4 * 32;
    // Of each 128 columns (two slabs) a lane reads 32, in two loads of 16 bytes.
    let load = |slab: usize| {
        let at = key + slab as u32 / 2 * 128 + slab as u32 % 2 * 16;
        // SAFETY: the caller's promise.
        [0, 8].map(|down| unsafe { shared::load_u32x4(at + down * ROW_BYTES) })
    };
    let scales_of = |group: u32| {
        [0, 1].map(|h| {
            let row = row + 8 * h as u32 * ROW_BYTES;
            // SAFETY: the caller's promise.
            unsafe { powers[h].scale(row, group) }
        })
    };
    let mut turns: Turns = [[0; 8]; 2];
    // Loads are issued ahead of their use.
    let (mut scales, mut words) = (scales_of(0), load(0));
    let mut next_scales = scales;
    // SAFETY: the caller's promise.
    unsafe {
        let queries = uniform(s.slab(0));
        let queries = Descriptor::new(queries, 16, 1024, Swizzle::B128);
        let mut number = 0;
        while number < 2 * SLABS {
            let (slab, half) = (number / 2, number % 2);
            if number % 4 == 0 {
                scales = next_scales;
            }
            let of = turn(&mut turns, number);
            let four = [0, 1].map(|i| {
                let word = 2 * half + i;
                of_keys([words[0][word], words[1][word]], scales)
            });
            *of = both(four[0], four[1]);
            if half == 1 && slab + 1 < SLABS {
                words = load(slab + 1);
            }
            if number % 4 == 2 && slab + 1 < SLABS {
                next_scales = scales_of(slab as u32 / 2 + 1);
            }
            wgmma::fence();
            let mut step = 0;
            while step < 2 {
                let inner = (2 * half + step) as u32 * 32;
                let query = queries.advance(slab as u32 * SLAB_BYTES + inner);
                if number > 0 || step > 0 {
                    wgmma::mma_rs::<F16, true, false, _>(logits, fragment(of, step), query);
                } else {
                    wgmma::mma_rs::<F16, false, false, _>(logits, fragment(of, step), query);
                }
                step += 1;
            }
            wgmma::commit_group();
            number += 1;
        }
        wait(&mut turns);
        wgmma::fence_operand(logits);
    }
}

/// The RoPE columns of two keys: fragments of four steps.
pub(super) type Rope = [Fragments; 2];

/// Loads them for the key at `row` and the one 8 further.
///
/// # Safety
/// The keys have arrived.
#[inline(always)]
pub(super) unsafe fn load_rope(row: u32) -> Rope {
    let at = row + ROW_ROPE + misc::opaque(warp::lane_id()) % 4 * 32;
    [0, 16].map(|half| {
        // SAFETY: the caller's promise.
        let [upper, lower] =
            [0, 8].map(|down| unsafe { shared::load_u32x4(at + half + down * ROW_BYTES) });
        both(
            [upper[0], lower[0], upper[1], lower[1]],
            [upper[2], lower[2], upper[3], lower[3]],
        )
    })
}

/// Issues their product, added to the logits.
///
/// # Safety
/// A whole warpgroup comes here; the queries have arrived, and the logits are waited for.
#[inline(always)]
pub(super) unsafe fn add_rope<const STAGES: u32>(
    s: Shared<STAGES>,
    rope: &Rope,
    logits: &mut Logits,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let queries = uniform(s.slab(QUERY_SLABS - 1));
        let queries = Descriptor::new(queries, 16, 1024, Swizzle::B128);
        wgmma::fence();
        let mut step = 0;
        while step < 4 {
            let query = queries.advance(step as u32 * 32);
            let keys = fragment(&rope[step / 2], step % 2);
            wgmma::mma_rs::<Bf16, true, false, _>(logits, keys, query);
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Oᵀ += Vᵀ·Pᵀ of a block, for a consumer's half of the columns. `values` is the lane's row address of the first
/// matrix; `read` is called when all keys of one of the block's places have been read.
///
/// # Safety
/// A whole warpgroup comes here; keys, scales and weights have arrived.
#[inline(always)]
pub(super) unsafe fn add(
    o: &mut Outputs,
    values: u32,
    scales: u32,
    weights: u32,
    read: impl Fn(u32),
) {
    const NUMBERS: usize = 2 * TILES;
    // All tiles of the first 32 keys, then of the others. Two tiles share the scales of a group.
    let place = |number: usize| (number % TILES, number / TILES);
    let load = |number: usize| {
        let (tile, half) = place(number);
        let at = values + tile as u32 * 64 + half as u32 * (32 * ROW_BYTES);
        // SAFETY: the caller's promise.
        unsafe { mma::ldmatrix_x4_trans(at) }
    };
    let scales_of = |number: usize| {
        let (tile, half) = place(number);
        let at = scales + tile as u32 / 2 * (BLOCK * 2) + half as u32 * 16;
        // SAFETY: the caller's promise.
        unsafe { shared::load_u32x4(at) }
    };
    let mut turns: Turns = [[0; 8]; 2];
    // Loads are issued one turn ahead.
    let mut words = [load(0), load(1)];
    let mut pairs = scales_of(0);
    // SAFETY: the caller's promise.
    unsafe {
        let weights = Descriptor::new(uniform(weights), 16, 1024, Swizzle::B128);
        let mut number = 0;
        while number < NUMBERS {
            let (tile, half) = place(number);
            let of = turn(&mut turns, number);
            let four = words[number % 2];
            *of = both(
                of_values([four[0], four[1]], [pairs[0], pairs[1]]),
                of_values([four[2], four[3]], [pairs[2], pairs[3]]),
            );
            if number % TILES == TILES - 1 {
                read(half as u32);
            }
            if number + 2 < NUMBERS {
                words[number % 2] = load(number + 2);
                if number % 2 == 1 {
                    pairs = scales_of(number + 1);
                }
            }
            wgmma::fence();
            let mut step = 0;
            while step < 2 {
                let weights = weights.advance((2 * half + step) as u32 * 2048);
                wgmma::mma_rs::<F16, true, true, _>(&mut o[tile], fragment(of, step), weights);
                step += 1;
            }
            wgmma::commit_group();
            number += 1;
        }
        wait(&mut turns);
        let mut tile = 0;
        while tile < TILES {
            wgmma::fence_operand(&mut o[tile]);
            tile += 1;
        }
    }
}

const _: () = assert!(GROUPS == 4 && scale_at(1, 0) == BLOCK * 2);

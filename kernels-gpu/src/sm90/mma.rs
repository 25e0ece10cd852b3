//! The two wgmma products of attention on 64 rows, loads of A fragments from memory, and stores of outputs to it.

use cuda_std::{
    misc, ptr, warp,
    wgmma::{self, Descriptor, Swizzle},
};

use crate::common::half::Half;

/// The layout of a block of keys or values in shared memory: slabs of 64 columns, that is rows of 128 bytes with the
/// 128-byte swizzle, in contiguous groups of 8 rows.
#[derive(Clone, Copy)]
pub struct Slabs {
    /// Bytes between consecutive groups of 8 rows.
    pub eight: u32,
    /// Bytes between consecutive slabs.
    pub slab: u32,
}

impl Slabs {
    /// The slabs of each group of 8 rows are contiguous.
    #[inline(always)]
    #[must_use]
    pub const fn of_eight_rows(head_dim: u32) -> Self {
        Self {
            eight: 16 * head_dim,
            slab: 1024,
        }
    }

    /// Each slab holds all `rows` of the block contiguously.
    #[inline(always)]
    #[must_use]
    pub const fn of_all_rows(rows: u32) -> Self {
        Self {
            eight: 1024,
            slab: 128 * rows,
        }
    }
}

/// Issues S = Q·Kᵀ of 64 rows and a block. A slab of 64 columns of the queries has `slab_bytes`.
///
/// # Safety
/// - Both operands are in shared memory, laid out as below; the accumulator is waited for before it is read.
#[inline(always)]
pub unsafe fn queries_keys<T: Half, const S: usize>(
    s: &mut [f32; S],
    queries: u32,
    keys: u32,
    head_dim: u32,
    slab_bytes: u32,
    slabs: Slabs,
) where
    [f32; S]: wgmma::Accumulator,
{
    // SAFETY: the caller's promise.
    unsafe {
        wgmma::fence();
        add_queries_keys::<T, false, S>(s, queries, keys, head_dim, slab_bytes, slabs);
    }
}

/// [`queries_keys`] and a bias that is linear in the key: S = slope · column + Q·Kᵀ. `slopes` is what [`slopes`] returns;
/// `columns` is the address of a number for each key, as `prefill::Shared::columns` describes it.
///
/// # Safety
/// As [`queries_keys`]; the slopes do not change before the product was waited for.
#[inline(always)]
pub unsafe fn queries_keys_with_bias<T: Half, const S: usize>(
    s: &mut [f32; S],
    (slopes, columns): ([u32; 4], u32),
    queries: u32,
    keys: u32,
    head_dim: u32,
    slab_bytes: u32,
    slabs: Slabs,
) where
    [f32; S]: wgmma::Accumulator,
{
    let columns = Descriptor::new(columns, 128, 128, Swizzle::None);
    // SAFETY: the caller's promise.
    unsafe {
        wgmma::fence();
        wgmma::mma_rs::<wgmma::Bf16, false, false, _>(s, slopes, columns);
        add_queries_keys::<T, true, S>(s, queries, keys, head_dim, slab_bytes, slabs);
    }
}

/// The slopes of a lane's two rows as an A fragment, whose rows are a slope in three parts and otherwise 0. Together the parts
/// have all bits of an f32, and each is exact in bf16, in f16 kernels, too. So each part's product with a small integer is exact, and
/// their sum is rounded as the sum of any product.
#[inline(always)]
pub fn slopes(of_rows: [f32; 2]) -> [u32; 4] {
    const UPPER: u32 = 0xffff_0000;
    let upper = |x: f32| f32::from_bits(x.to_bits() & UPPER);
    let word = |slope: f32| {
        let first = upper(slope);
        let rest = slope - first;
        let second = upper(rest);
        let third = rest - second;
        match warp::lane_id() % 4 {
            0 => first.to_bits() >> 16 | second.to_bits(),
            1 => third.to_bits() >> 16,
            _ => 0,
        }
    };
    [word(of_rows[0]), word(of_rows[1]), 0, 0]
}

/// The products of [`queries_keys`], added to what is in the accumulator if `ADD`.
///
/// # Safety
/// As there, after a fence.
#[inline(always)]
unsafe fn add_queries_keys<T: Half, const ADD: bool, const S: usize>(
    s: &mut [f32; S],
    queries: u32,
    keys: u32,
    head_dim: u32,
    slab_bytes: u32,
    slabs: Slabs,
) where
    [f32; S]: wgmma::Accumulator,
{
    // Both operands are K-major in slabs of 64 columns. A slab of queries holds all rows of the tile.
    let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
    let k = Descriptor::new(keys, 16, slabs.eight, Swizzle::B128);
    // SAFETY: the barriers of both operands completed; the accumulator is waited for.
    unsafe {
        wgmma::mma_ss::<T, ADD, false, false, _>(s, q, k);
        let mut step = 1;
        while step < head_dim / 16 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            wgmma::mma_ss::<T, true, false, false, _>(
                s,
                q.advance(slab * slab_bytes + inner),
                k.advance(slab * slabs.slab + inner),
            );
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Issues O += P·V of 64 rows and a block. The accumulator's length determines how many columns of the slabs are read.
///
/// # Safety
/// - The values are in shared memory; accumulator and weights are not accessed before the product was waited for.
#[inline(always)]
pub unsafe fn weights_values<T: Half, const O: usize, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    slabs: Slabs,
) where
    [f32; O]: wgmma::Accumulator,
{
    let v = Descriptor::new(values, slabs.slab, slabs.eight, Swizzle::B128);
    // SAFETY: the barrier of the values completed; accumulator and weights are accessed only after the product was
    // waited for.
    unsafe {
        wgmma::fence();
        let mut step = 0;
        while step < P / 4 {
            let a = [
                weights[4 * step],
                weights[4 * step + 1],
                weights[4 * step + 2],
                weights[4 * step + 3],
            ];
            wgmma::mma_rs::<T, true, true, _>(o, a, v.advance(step as u32 * 2 * slabs.eight));
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// [`weights_values`] by instructions of 64 columns each: with those of all columns ptxas refuses kernels that begin with
/// fewer registers than 30 more than the accumulator has.
///
/// # Safety
/// As [`weights_values`].
#[inline(always)]
pub unsafe fn weights_values_by_slabs<T: Half, const O: usize, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    slabs: Slabs,
) {
    /// The outputs of a thread for 64 columns.
    const OF_SLAB: usize = 32;
    let v = Descriptor::new(values, slabs.slab, slabs.eight, Swizzle::B128);
    let o = o.as_mut_ptr();
    // SAFETY: as in `weights_values`; a slab's outputs are contiguous.
    unsafe {
        wgmma::fence();
        let mut step = 0;
        while step < P / 4 {
            let a = [
                weights[4 * step],
                weights[4 * step + 1],
                weights[4 * step + 2],
                weights[4 * step + 3],
            ];
            let mut slab = 0;
            while slab < O / OF_SLAB {
                let o = &mut *o.add(slab * OF_SLAB).cast::<[f32; OF_SLAB]>();
                let at = step as u32 * 2 * slabs.eight + slab as u32 * slabs.slab;
                wgmma::mma_rs::<T, true, true, _>(o, a, v.advance(at));
                slab += 1;
            }
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Loads a warp's 16 rows from memory as A fragments of 16 × 16: `N` / 4 steps of 16 columns. `row` gives the address
/// of a row's first column and whether the row exists; rows that do not exist become zero.
///
/// # Safety
/// All lanes of the warp come here; rows that exist have this many columns, at an address that is a multiple of 16
/// bytes.
#[inline(always)]
pub unsafe fn load_fragments<const N: usize>(row: impl Fn(u32) -> (u64, bool)) -> [u32; N] {
    // Opaque: otherwise the addresses stay in registers from unit to unit.
    let (lane, mut held) = (misc::opaque(warp::lane_id()), [0; N]);
    let mut h = 0;
    while h < 2 {
        let (from, exists) = row(lane / 4 + 8 * h as u32);
        let from = from + u64::from(lane % 4 * 16);
        // Two steps at a time: each of a row's four lanes loads 16 bytes and needs one word of each lane's.
        let mut i = 0;
        while i < N / 8 {
            let mut words = [0; 4];
            if exists {
                // SAFETY: the caller's promise.
                words = unsafe { ptr::load_u32x4((from + 64 * i as u64) as *const u32) };
            }
            let mut j = 0;
            while j < 4 {
                held[8 * i + 4 * (j / 2) + 2 * (j % 2) + h] = words[j];
                j += 1;
            }
            i += 1;
        }
        h += 1;
    }
    // Transpose only now: all loads are in flight before the first result is used.
    let mut i = 0;
    while i < N / 8 {
        h = 0;
        while h < 2 {
            let at = |j: usize| 8 * i + 4 * (j / 2) + 2 * (j % 2) + h;
            let mut words = [0, 1, 2, 3].map(|j| held[at(j)]);
            // SAFETY: a whole warp.
            unsafe {
                swap(&mut words, [(0, 1), (2, 3)], lane & 1 != 0, 1);
                swap(&mut words, [(0, 2), (1, 3)], lane & 2 != 0, 2);
            }
            let mut j = 0;
            while j < 4 {
                held[at(j)] = words[j];
                j += 1;
            }
            h += 1;
        }
        i += 1;
    }
    held
}

/// One step of a transpose between two lanes `distance` apart. For each pair of words the `upper` lane keeps the second
/// and exchanges the first for the other lane's second.
///
/// # Safety
/// All lanes of the warp come here.
#[inline(always)]
pub unsafe fn swap(words: &mut [u32; 4], pairs: [(usize, usize); 2], upper: bool, distance: u32) {
    let mut i = 0;
    while i < 2 {
        let (first, second) = pairs[i];
        let mine = if upper { words[first] } else { words[second] };
        // SAFETY: the caller's whole warp.
        let other = unsafe { warp::warp_shuffle_xor(warp::FULL_MASK, mine, distance, 32) };
        if upper {
            words[first] = other;
        } else {
            words[second] = other;
        }
        i += 1;
    }
}

/// Stores one of the two rows of which a thread has `O` outputs, as 16 bits. The four lanes of a row exchange words until each
/// has 16 contiguous bytes. `out` is the address of the row's column 8 · (lane % 4); `pair` gives the two outputs from an
/// index of the accumulator on, where the row is the first of the two.
///
/// # Safety
/// All lanes of the warp come here. Where a lane `writes`, the row is there, aligned to 16 bytes.
#[inline(always)]
pub unsafe fn store_halves<const O: usize>(
    lane: u32,
    out: u64,
    writes: bool,
    pair: impl Fn(usize) -> u32,
) {
    let mut j = 0;
    while j < O / 16 {
        let mut words = [0, 4, 8, 12].map(|i| pair(16 * j + i));
        // SAFETY: the caller's promises.
        unsafe {
            swap(&mut words, [(0, 1), (2, 3)], lane & 1 != 0, 1);
            swap(&mut words, [(0, 2), (1, 3)], lane & 2 != 0, 2);
            if writes {
                ptr::store_u32x4((out + 64 * j as u64) as *mut u32, words);
            }
        }
        j += 1;
    }
}

/// Stores one of the two rows of which a thread has `O` outputs, in f32. Two lanes of a row exchange pairs, so that each has
/// four columns of every other 8: even lanes of the first 8, odd lanes of the next. `out` is the address of
/// [this column](first_float); `output` gives the output at an index of the accumulator, where the row is the first of the two.
///
/// # Safety
/// All lanes of the warp come here. Where a lane `writes`, the row is there, aligned to 16 bytes.
#[inline(always)]
pub unsafe fn store_floats<const O: usize>(
    lane: u32,
    out: u64,
    writes: bool,
    output: impl Fn(usize) -> f32,
) {
    let mut j = 0;
    while j < O / 8 {
        let mut words = [0, 1, 4, 5].map(|i| output(8 * j + i).to_bits());
        // SAFETY: the caller's promises.
        unsafe {
            swap(&mut words, [(0, 2), (1, 3)], lane & 1 != 0, 1);
            if writes {
                ptr::store_u32x4((out + 64 * j as u64) as *mut u32, words);
            }
        }
        j += 1;
    }
}

/// The first column that a lane stores with [`store_floats`].
#[inline(always)]
pub fn first_float(lane: u32) -> u32 {
    lane % 2 * 8 + lane % 4 / 2 * 4
}

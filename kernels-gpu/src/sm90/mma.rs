//! The two products of attention on 64 rows, issued to the tensor cores, and fragments of what comes out.

use cuda_std::{
    warp,
    wgmma::{self, Descriptor, Swizzle},
};

use crate::common::half::Half;

/// S = Q·Kᵀ of 64 rows and a block, issued. A slab of 64 columns of the queries is `slab_bytes`.
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
) where
    [f32; S]: wgmma::Accumulator,
{
    let row_bytes = head_dim * 2;
    // Both K-major in slabs of 64 columns: the slabs of a whole tile of queries follow each other,
    // those of 8 keys do.
    let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
    let k = Descriptor::new(keys, 16, 8 * row_bytes, Swizzle::B128);
    // SAFETY: the barriers of both operands completed; the accumulator is waited for.
    unsafe {
        wgmma::fence();
        wgmma::mma_ss::<T, false, false, false, _>(s, q, k);
        let mut step = 1;
        while step < head_dim / 16 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            wgmma::mma_ss::<T, true, false, false, _>(
                s,
                q.advance(slab * slab_bytes + inner),
                k.advance(slab * 1024 + inner),
            );
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// O += P·V of 64 rows and a block, issued.
///
/// # Safety
/// - The values are in shared memory; accumulator and weights are not touched before they are waited for.
#[inline(always)]
pub unsafe fn weights_values<T: Half, const O: usize, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: u32,
    head_dim: u32,
) where
    [f32; O]: wgmma::Accumulator,
{
    let row_bytes = head_dim * 2;
    let v = Descriptor::new(values, 1024, 8 * row_bytes, Swizzle::B128);
    // SAFETY: the barrier of the values completed; the accumulator is waited for before it and the
    // weights are touched again.
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
            wgmma::mma_rs::<T, true, true, _>(o, a, v.advance(step as u32 * 16 * row_bytes));
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Gives the other lane the word of each pair that is not this one's: of two lanes, `upper` keeps the second.
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

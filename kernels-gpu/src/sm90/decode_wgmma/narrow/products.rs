//! The two products, transposed: keys and elements of the head on the 64-wide M side of `wgmma`.

use cuda_std::wgmma::{self, Accumulator, Descriptor, Swizzle};

use super::config::Config;

/// The accumulator of 64 keys (or elements of the head) × rows: a thread has two of the former, and two of each 8 rows,
/// its columns.
pub(super) type Tile<const N: usize> = [f32; N];

/// The index of an element of a [`Tile`]: of the first or second key, and of a column.
#[inline(always)]
pub(super) const fn at(half: usize, column: usize) -> usize {
    column / 2 * 4 + half * 2 + column % 2
}

/// The row that a column of a lane is.
#[inline(always)]
pub(super) const fn row_of(lane: u32, column: usize) -> u32 {
    column as u32 / 2 * 8 + lane % 4 * 2 + column as u32 % 2
}

/// Issues Sᵀ = K·Qᵀ of a block, 64 keys per accumulator.
///
/// # Safety
/// Whole warpgroups come here; both operands have arrived, and the accumulator is waited for before it is read.
#[inline(always)]
pub(super) unsafe fn keys_queries<C: Config, const KEYS: usize, const N: usize>(
    logits: &mut [Tile<N>; KEYS],
    keys: u32,
    queries: u32,
) where
    Tile<N>: Accumulator,
{
    let shape = const { C::SHAPE };
    // Both operands are K-major in slabs of 64 columns. Slabs of keys are contiguous per 8 keys; a slab of queries
    // holds all rows.
    let k = Descriptor::new(keys, 16, 8 * shape.head_dim * 2, Swizzle::B128);
    let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
    // SAFETY: the barriers of both operands completed; the accumulator is waited for.
    unsafe {
        wgmma::fence();
        let mut tile = 0;
        while tile < KEYS {
            let k = k.advance(tile as u32 * 64 * shape.head_dim * 2);
            wgmma::mma_ss::<C::Half, false, false, false, _>(&mut logits[tile], k, q);
            let mut step = 1;
            while step < shape.head_dim / 16 {
                let (slab, inner) = (step / 4, step % 4 * 32);
                wgmma::mma_ss::<C::Half, true, false, false, _>(
                    &mut logits[tile],
                    k.advance(slab * 1024 + inner),
                    q.advance(slab * shape.rows * 128 + inner),
                );
                step += 1;
            }
            tile += 1;
        }
        wgmma::commit_group();
    }
}

/// Issues Oᵀ += Vᵀ·Pᵀ of a block, 64 elements of the head per accumulator.
///
/// # Safety
/// As [`keys_queries`]'s.
#[inline(always)]
pub(super) unsafe fn values_weights<C: Config, const SLABS: usize, const N: usize>(
    o: &mut [Tile<N>; SLABS],
    values: u32,
    weights: u32,
) where
    Tile<N>: Accumulator,
{
    let shape = const { C::SHAPE };
    let group = 8 * shape.head_dim * 2;
    let v = Descriptor::new(values, 1024, group, Swizzle::B128);
    // No swizzle: core matrices of 8 keys × 8 rows, contiguous along the keys; all keys of 8 rows, then those of the next.
    let p = Descriptor::new(weights, 128, shape.keys * 16, Swizzle::None);
    // SAFETY: values and weights are stored; the accumulators are waited for.
    unsafe {
        wgmma::fence();
        let mut step = 0;
        while step < shape.keys / 16 {
            let mut slab = 0;
            while slab < SLABS {
                wgmma::mma_ss::<C::Half, true, true, true, _>(
                    &mut o[slab],
                    v.advance(step * 2 * group + slab as u32 * 1024),
                    p.advance(step * 256),
                );
                slab += 1;
            }
            step += 1;
        }
        wgmma::commit_group();
    }
}

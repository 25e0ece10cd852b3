//! The two 8-bit products of a consumer warpgroup's 64 rows.

use cuda_std::wgmma::{self, Descriptor, Swizzle};

use super::pages::image_bytes;
use crate::abi::ConvertedPage;

/// Issues S = Q·Kᵀ of 64 rows and half a block. A slab of 128 columns of the queries has `slab_bytes`.
///
/// # Safety
/// - Both operands are in shared memory, as [`queries`](super::queries) and [`pages`](super::pages) have them; the
///   accumulator is waited for before it is read.
#[inline(always)]
pub(super) unsafe fn queries_keys<const S: usize>(
    s: &mut [f32; S],
    queries: u32,
    keys: u32,
    dim: u32,
    slab_bytes: u32,
) where
    [f32; S]: wgmma::Accumulator,
{
    let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
    let k = Descriptor::new(keys, 16, 8 * dim, Swizzle::B128);
    // SAFETY: the caller's promise.
    unsafe {
        wgmma::fence();
        wgmma::mma_ss_e4m3::<false, _>(s, q, k);
        let mut step = 1;
        while step < dim / 32 {
            let (slab, inner) = (step / 4, step % 4 * 32);
            wgmma::mma_ss_e4m3::<true, _>(
                s,
                q.advance(slab * slab_bytes + inner),
                k.advance(slab * 1024 + inner),
            );
            step += 1;
        }
        wgmma::commit_group();
    }
}

/// Issues P·V of 64 rows and a block, for the columns of values from `column` on. `values` are those of the block's halves.
///
/// # Safety
/// - The values are in shared memory, as [`pages`](super::pages) has them; accumulator and weights are not touched
///   before they are waited for.
#[inline(always)]
pub(super) unsafe fn weights_values<const O: usize, const P: usize>(
    o: &mut [f32; O],
    weights: &[u32; P],
    values: [u32; 2],
    dim: u32,
    column: u32,
) where
    [f32; O]: wgmma::Accumulator,
{
    let v =
        values.map(|at| Descriptor::new(at + column * ConvertedPage::KEYS, 16, 512, Swizzle::B64));
    // SAFETY: the caller's promise.
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
            let (half, step_of_half) = (step / (P / 8), step % (P / 8));
            let image = step_of_half as u32 / 2 * image_bytes(dim);
            let b = v[half].advance(image + step as u32 % 2 * 32);
            if step == 0 {
                wgmma::mma_rs_e4m3::<false, _>(o, a, b);
            } else {
                wgmma::mma_rs_e4m3::<true, _>(o, a, b);
            }
            step += 1;
        }
        wgmma::commit_group();
    }
}

//! The two products, transposed: keys and elements of the head on the 64-wide side of `wgmma`.

use cuda_std::wgmma::{self, Descriptor, Swizzle};

use super::config::Config;

/// The accumulator of 64 keys, or elements of the head, by 8 rows: a thread has two of each.
pub(super) type Tile = [f32; 4];

/// Sᵀ = K·Qᵀ of a block, issued: 64 keys for each accumulator.
///
/// # Safety
/// Whole warpgroups come here; both operands are there, and the accumulator is waited for before it is read.
#[inline(always)]
pub(super) unsafe fn keys_queries<C: Config, const KEYS: usize>(
    logits: &mut [Tile; KEYS],
    keys: u32,
    queries: u32,
) {
    let shape = const { C::SHAPE };
    // Both K-major in slabs of 64 columns: those of 8 keys follow each other, those of all queries do.
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

/// Oᵀ += Vᵀ·Pᵀ of a block, issued: 64 elements of the head for each accumulator.
///
/// # Safety
/// As [`keys_queries`]'s.
#[inline(always)]
pub(super) unsafe fn values_weights<C: Config, const SLABS: usize>(
    o: &mut [Tile; SLABS],
    values: u32,
    weights: u32,
) {
    let shape = const { C::SHAPE };
    let group = 8 * shape.head_dim * 2;
    let v = Descriptor::new(values, 1024, group, Swizzle::B128);
    // Not swizzled: core matrices of 8 keys × 8 rows, one after the other along the keys.
    let p = Descriptor::new(weights, 128, 128, Swizzle::None);
    // SAFETY: values and weights are there; the accumulators are waited for.
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

//! The products. Keys and values are the A operand, queries and weights B, all in shared memory.

use cuda_std::{
    fence, mbarrier,
    wgmma::{self, Accumulator, Descriptor, Swizzle},
};

use super::{
    config::{GROUP_BYTES, KEYS, PART_SLABS, PARTS},
    shared::Shared,
};
use crate::{
    common::half::Half,
    sm90::{
        mla::{
            shared::{Parts as _, QueryPlace as _},
            swapped::{Outputs, TILES},
        },
        uniform,
    },
};

/// Issues Sᵀ = K·Qᵀ of a block, part after part as they arrive.
///
/// # Safety
/// A whole warpgroup comes here; the queries have arrived, and the logits are waited for.
#[inline(always)]
pub(super) unsafe fn multiply<
    T: Half,
    const ROWS: u32,
    const STAGES: u32,
    const N: usize,
    const BY_ROWS: bool,
>(
    s: Shared<ROWS, STAGES>,
    number: u32,
    logits: &mut [f32; N],
) where
    [f32; N]: Accumulator,
{
    // SAFETY: the caller's promise; each part has arrived.
    unsafe {
        let queries = Descriptor::new(uniform(s.queries()), 16, 1024, Swizzle::B128);
        let mut part = 0;
        while part < PARTS {
            let (stage, parity) = s.stage(number, part);
            mbarrier::wait(s.full(stage), parity);
            if BY_ROWS {
                fence::proxy_async_shared();
            }
            let keys = Descriptor::new(uniform(s.keys(stage)), 16, GROUP_BYTES, Swizzle::B128);
            wgmma::fence();
            let mut step = 0;
            while step < PART_SLABS * 4 {
                let (slab, inner) = (step / 4, step % 4 * 32);
                let key = keys.advance(slab * 1024 + inner);
                let query = queries.advance((part * PART_SLABS + slab) * (ROWS * 128) + inner);
                if part > 0 || step > 0 {
                    wgmma::mma_ss::<T, true, false, false, _>(logits, key, query);
                } else {
                    wgmma::mma_ss::<T, false, false, false, _>(logits, key, query);
                }
                step += 1;
            }
            part += 1;
        }
        wgmma::commit_group();
    }
}

/// Issues Oᵀ += Vᵀ·Pᵀ of a block, for a consumer's half of the columns.
///
/// # Safety
/// A whole warpgroup comes here; keys and weights have arrived, and the outputs are waited for.
#[inline(always)]
pub(super) unsafe fn add<T: Half, const ROWS: u32, const STAGES: u32, const N: usize>(
    s: Shared<ROWS, STAGES>,
    number: u32,
    consumer: u32,
    o: &mut Outputs<N>,
) where
    [f32; N]: Accumulator,
{
    // SAFETY: the caller's promise.
    unsafe {
        let weights = Descriptor::new(uniform(s.weights(number)), 16, 1024, Swizzle::B128);
        wgmma::fence();
        let mut tile = 0;
        while tile < TILES {
            // Selected, not computed: otherwise the compiler divides in 16 bits.
            let slabs = [tile as u32, tile as u32 + TILES as u32];
            let select = |of: [u32; 2]| if consumer == 0 { of[0] } else { of[1] };
            let (stage, _) = s.stage(number, select(slabs.map(|slab| slab / PART_SLABS)));
            let values = s.keys(stage) + select(slabs.map(|slab| slab % PART_SLABS * 1024));
            let values = Descriptor::new(uniform(values), 1024, GROUP_BYTES, Swizzle::B128);
            let mut step = 0;
            while step < KEYS / 16 {
                let of_step = values.advance(step * 2 * GROUP_BYTES);
                let weights = weights.advance(step * 32);
                wgmma::mma_ss::<T, true, true, false, _>(&mut o[tile], of_step, weights);
                step += 1;
            }
            tile += 1;
        }
        wgmma::commit_group();
    }
}

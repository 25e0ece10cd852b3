//! The roles of the warps, as in the 16-bit kernel.

use cuda_std::{barrier, prelude::*, setmaxnreg, tma::TensorMap};

use super::{
    super::{super::uniform, Shape, convert, epilogue::write, scheduler::schedule, shared::Shared},
    load::load,
    mainloop::consume,
};
use crate::{
    abi::PrefillParams,
    common::{half::Half, variant::Variant},
};

/// The kernel of a shape. The const parameters must match it: registers of the producer warpgroup and of the consumers,
/// stages of keys and of values, and a thread's number of logits of half a block (`S`), weight words (`P`), outputs (`O`),
/// outputs of each product (`A`, `B`, `C`) and 16-byte vectors of a query row (`Q`).
///
/// # Safety
/// All threads of a CTA of the shape come here; the parameters describe memory as [`PrefillParams`] says, `maps` is the
/// address of its first. Keys and values are converted pages.
#[inline(always)]
pub(super) unsafe fn run<
    T: Half,
    V: Variant,
    const PRODUCES: u32,
    const COMPUTES: u32,
    const STAGES: u32,
    const VALUE_STAGES: u32,
    const S: usize,
    const P: usize,
    const O: usize,
    const A: usize,
    const B: usize,
    const C: usize,
    const Q: usize,
>(
    p: &PrefillParams,
    maps: *const TensorMap,
    variant: &V,
    shape: Shape,
) where
    [f32; S]: cuda_std::wgmma::Accumulator,
    [f32; A]: cuda_std::wgmma::Accumulator,
    [f32; B]: cuda_std::wgmma::Accumulator,
    [f32; C]: cuda_std::wgmma::Accumulator,
{
    let base = shared::dynamic_shared_address();
    let s = Shared { base, shape };
    let thread = thread::thread_idx_x();
    // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
    unsafe {
        if thread == 0 {
            s.init(false, false);
            convert::init(p, s);
        }
        barrier::bar_sync(0, shape.threads());
        if thread < 128 {
            setmaxnreg::decrease::<PRODUCES>();
            match thread / 32 {
                0 => load::<false, STAGES>(p, s),
                1 => load::<true, VALUE_STAGES>(p, s),
                2 if thread == 64 => schedule::<V, true>(p, maps, variant, s),
                3 => write::<T, 4>(p, maps.add(3), s),
                _ => {}
            }
        } else {
            setmaxnreg::increase::<COMPUTES>();
            let warp = uniform(thread / 32 - 4);
            convert::first::<T, 4>(p, s, warp);
            consume::<T, V, STAGES, VALUE_STAGES, S, P, O, A, B, C, Q>(p, variant, s);
        }
    }
}

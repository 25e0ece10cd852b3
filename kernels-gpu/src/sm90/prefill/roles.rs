//! Which warp does what.

use cuda_std::{barrier, prelude::*, setmaxnreg, tma::TensorMap};

use super::{
    Shape, epilogue::write, load::load, load_narrow, load_rows::gather, mainloop::consume,
    scheduler::schedule, shared::Shared,
};
use crate::{
    abi::PrefillParams,
    common::{
        cache::{BITS16, Cache},
        variant::Variant,
    },
};

/// The kernel of a shape, which the constants repeat: registers of the warpgroup that feeds and of those that compute,
/// stages of keys and of values, and a thread's logits, weights and outputs.
///
/// # Safety
/// All threads of a CTA of the shape come here; the parameters describe memory as [`PrefillParams`] says, `maps` is the
/// address of its first.
#[inline(always)]
pub unsafe fn run<
    C: Cache,
    V: Variant,
    const EXTRAS: bool,
    const FEEDS: u32,
    const COMPUTES: u32,
    const STAGES: u32,
    const VALUE_STAGES: u32,
    const S: usize,
    const P: usize,
    const O: usize,
>(
    p: &PrefillParams,
    maps: *const TensorMap,
    variant: &V,
    shape: Shape,
) where
    [f32; S]: cuda_std::wgmma::Accumulator,
    [f32; O]: cuda_std::wgmma::Accumulator,
{
    let base = shared::dynamic_shared_address();
    let s = Shared { base, shape };
    let thread = thread::thread_idx_x();
    let narrow = shape.cache != BITS16;
    let gathered = narrow || p.box_tokens == 1;
    // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
    unsafe {
        if thread == 0 {
            s.init(gathered);
        }
        barrier::bar_sync(0, shape.threads());
        if thread < 128 {
            setmaxnreg::decrease::<FEEDS>();
            match thread / 32 {
                0 if narrow => load_narrow::gather::<C, false, STAGES>(p, s),
                1 if narrow => load_narrow::gather::<C, true, VALUE_STAGES>(p, s),
                0 if gathered => gather::<false, STAGES>(p, s),
                1 if gathered => gather::<true, VALUE_STAGES>(p, s),
                0 => load::<false, STAGES>(p, maps.add(1), s),
                1 => load::<true, VALUE_STAGES>(p, maps.add(2), s),
                2 if thread == 64 => schedule(p, maps, variant, s),
                3 => write(p, maps.add(3), s),
                _ => {}
            }
        } else {
            setmaxnreg::increase::<COMPUTES>();
            consume::<C, V, EXTRAS, STAGES, VALUE_STAGES, S, P, O>(p, variant, s);
        }
    }
}

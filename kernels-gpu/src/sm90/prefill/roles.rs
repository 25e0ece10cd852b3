//! The roles of the warps: loaders, scheduler, store warp and consumers.

use cuda_std::{barrier, prelude::*, setmaxnreg, tma::TensorMap};

use super::{
    super::uniform, Shape, convert, epilogue::write, load::load, load_rows::gather,
    mainloop::consume, scheduler::schedule, shared::Shared, turn::turns_queries,
};
use crate::{
    abi::PrefillParams,
    common::{half::Half, variant::Variant},
};

/// The kernel of a shape. The const parameters must match it: registers of the producer warpgroup and of the consumers,
/// stages of keys and of values, and a thread's number of logits (`S`), weight words (`P`) and outputs (`O`).
///
/// # Safety
/// All threads of a CTA of the shape come here; the parameters describe memory as [`PrefillParams`] says, `maps` is the
/// address of its first.
#[inline(always)]
pub unsafe fn run<
    T: Half,
    V: Variant,
    const EXTRAS: bool,
    const SCALED: bool,
    const PRODUCES: u32,
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
    // Neither soft caps nor hooks are planned with rotary embeddings.
    let turns = EXTRAS && shape.turns() && V::SOFTMAX && !V::TRANSFORMS_LOGITS && !V::MASKS;
    let gathered = p.box_tokens == 1;
    // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
    unsafe {
        if thread == 0 {
            s.init(gathered, turns_queries::<EXTRAS>(p, s));
            convert::init(p, s);
        }
        if V::LINEAR && !SCALED && shape.multiplies_bias() && thread < shape.keys + 8 {
            s.fill_columns(thread);
        }
        barrier::bar_sync(0, shape.threads());
        if thread < 128 {
            setmaxnreg::decrease::<PRODUCES>();
            match thread / 32 {
                0 if gathered => gather::<false, STAGES>(p, s),
                1 if gathered => gather::<true, VALUE_STAGES>(p, s),
                0 => load::<false, STAGES>(p, maps.add(1), s, turns),
                1 => load::<true, VALUE_STAGES>(p, maps.add(2), s, turns),
                2 if thread == 64 => schedule::<V, EXTRAS>(p, maps, variant, s),
                3 if PRODUCES < 40 => write::<T, 2>(p, maps.add(3), s),
                3 => write::<T, 4>(p, maps.add(3), s),
                _ => {}
            }
        } else {
            setmaxnreg::increase::<COMPUTES>();
            let warp = uniform(thread / 32 - 4);
            convert::first::<T, 8>(p, s, warp);
            consume::<T, V, EXTRAS, SCALED, STAGES, VALUE_STAGES, S, P, O>(p, variant, s, turns);
        }
    }
}

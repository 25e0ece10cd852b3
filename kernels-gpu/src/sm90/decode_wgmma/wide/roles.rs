//! The roles of the warps: loaders of queries, loaders of keys and values, consumers.

use cuda_std::{barrier, griddep, setmaxnreg, shared, thread, tma::TensorMap, wgmma};

use super::{
    super::super::follow,
    Shape, by_rows,
    convert::convert,
    load::{gather, load},
    mainloop, mainloop_8,
    shared::{Shared, help_gather},
};
use crate::{
    abi::DecodeParams,
    common::{cache::Cache, decode::produce::Header, variant::Variant},
};

/// The kernel of a shape. The const parameters must match it: registers of a producer and of a consumer thread, stages,
/// head dimension, elements of a row that a lane writes, and a thread's logits (`S`), weight words (`P`) and outputs
/// (`O`).
///
/// # Safety
/// All threads of a CTA of the shape come here; the parameters describe memory as [`DecodeParams`] says, `maps` is the
/// address of its first.
#[inline(always)]
pub unsafe fn run<
    C: Cache,
    V: Variant,
    const PRODUCES: u32,
    const CONVERTS: u32,
    const COMPUTES: u32,
    const STAGES: u32,
    const DIM: u32,
    const PER_LANE: usize,
    const S: usize,
    const P: usize,
    const O: usize,
>(
    p: &DecodeParams,
    maps: *const TensorMap,
    variant: &V,
    shape: Shape,
) where
    [f32; S]: wgmma::Accumulator,
    [f32; O]: wgmma::Accumulator,
{
    let base = shared::dynamic_shared_address();
    let s = Shared { base, shape };
    let thread = thread::thread_idx_x();
    // SAFETY: the caller's promise; roles are assigned to whole warps and warpgroups.
    unsafe {
        let first = match thread / 32 {
            2 => Header::first(&p.attention, p.kv_heads),
            _ => Header::EMPTY,
        };
        s.init(p.loads_rows());
        barrier::bar_sync(0, shape.threads());
        follow(p.early);
        // Dependent launch: another tile group of the step may start on SMs that this grid leaves.
        griddep::launch_dependents();
        if thread < 128 {
            if PRODUCES < 128 {
                setmaxnreg::decrease::<PRODUCES>();
            }
            match thread / 32 {
                0 if p.loads_rows() => by_rows::load::<_, false, STAGES>(p, variant, s),
                1 if p.loads_rows() => by_rows::load::<_, true, STAGES>(p, variant, s),
                0 => load::<_, false, STAGES>(p, variant, maps, s),
                1 => load::<_, true, STAGES>(p, variant, maps.add(1), s),
                2 => gather(p, variant, s, first),
                _ => help_gather(p, s),
            }
        } else if C::SCALED && thread >= shape.threads() - 128 {
            if CONVERTS < 128 {
                setmaxnreg::decrease::<CONVERTS>();
            }
            convert::<C, STAGES, DIM>(s);
        } else {
            if PRODUCES < 128 {
                setmaxnreg::increase::<COMPUTES>();
            }
            if C::SCALED {
                mainloop_8::consume::<C, V, DIM, PER_LANE, S, P, O>(p, variant, s);
            } else {
                mainloop::consume::<C::Product, V, STAGES, DIM, PER_LANE, S, P, O>(p, variant, s);
            }
            // A grid that waits for the end of this one also relies on the end of the grid before it.
            griddep::wait();
        }
    }
}

//! The kernels that a hybrid batch takes: in one kernel, on SMs of their own, or side by side on an SM.

use kernels_gpu::registry::{Arch, KernelId, Op};

use super::{
    choice::{Choice, decodes, prefill_kernel},
    serving::{alone, serving},
};
use crate::{
    plan::{
        data::Tile,
        model::{DeviceDescription, PodConfig},
    },
    problem::Spec,
};

/// The prefill and the decodes of the kernel that has both.
pub(super) fn ticket_kernels(
    device: &DeviceDescription,
    spec: &Spec,
) -> Option<(KernelId, Vec<Choice>)> {
    serving(device, spec, Op::Pod).next()?;
    let ampere = |op| serving(device, spec, op).find(|id| id.info().arch == Arch::Sm80);
    Some((ampere(Op::Prefill)?, vec![Choice::of(ampere(Op::Decode)?)]))
}

/// The kernels that run alone, on SMs of their own: for heads and keys whose decodes do not fit beside a prefill.
pub(super) fn kernels_apart(
    device: &DeviceDescription,
    spec: &Spec,
    config: &PodConfig,
) -> Option<(KernelId, Vec<Choice>)> {
    let prefill = prefill_kernel(&alone(device, spec, Op::Prefill), config.prefill.m)?;
    let decodes = decodes(device, spec, false);
    let share = |op| serving(device, spec, op).any(|id| id.info().co_resident);
    let shares = share(Op::Prefill) && share(Op::Decode);
    // With rotary embeddings, a launch in front of the prefills rotates their keys, and decodes would wait for it.
    // With fixed splits, 8-bit keys keep the kernels that they have alone, which do not fit an SM together.
    let may =
        (!shares || spec.kv_dtype.bytes() == 1) && spec.rotary.is_none() && !decodes.is_empty();
    may.then_some((prefill, decodes))
}

/// The prefill with its tile, and the decode with its tile that fits beside it and has the most stages.
pub(super) fn co_resident_kernels(
    device: &DeviceDescription,
    spec: &Spec,
    [prefill, decode]: [Tile; 2],
) -> Option<(KernelId, Vec<Choice>)> {
    let sm = device.sm();
    let of_tile = |op, tile| {
        let of_tile = move |id: &KernelId| id.info().co_resident && Choice::of(*id).tile == tile;
        serving(device, spec, op).filter(of_tile)
    };
    let prefill = of_tile(Op::Prefill, prefill).next()?;
    let fits = |id: &KernelId| id.info().fits_beside(prefill.info(), &sm);
    let decode = of_tile(Op::Decode, decode).filter(fits);
    let decode = decode.max_by_key(|id| id.info().stages)?;
    Some((prefill, vec![Choice::of(decode)]))
}

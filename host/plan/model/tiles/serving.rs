//! Which rows of the registry a device can run, and which of them were compiled for some heads.

use kernels_gpu::{
    Hooks, HooksName,
    registry::{Arch, Element, KernelId, KernelInfo, Loads, Op},
    variants::BUILT_IN,
};

use crate::{
    plan::model::DeviceDescription,
    problem::{Compute, Dtype, Padding, Spec},
};

/// Whether a device takes a kernel for these heads. Prefills with Ampere's instructions read padded heads and widened keys where
/// the device has no others.
pub(in crate::plan) fn serves(device: &DeviceDescription, row: &KernelInfo, spec: &Spec) -> bool {
    let general = Padding::of(spec).is_some() || spec.kv_dtype.bytes() == 1;
    let is_ampere = row.op == Op::Prefill && row.arch == Arch::Sm80;
    let older = !Arch::Sm90a.runs_on(device.compute_capability);
    let made = |name| has_hooks(device, name, row);
    (older || !general || !is_ampere)
        && serves_heads(row, spec)
        && spec.variant.hooks.is_none_or(made)
}

/// Whether a kernel was compiled for these heads.
pub(in crate::plan) fn serves_heads(row: &KernelInfo, spec: &Spec) -> bool {
    let dtype = |element| match element {
        Element::Bf16 => Some(Dtype::BF16),
        Element::F16 => Some(Dtype::F16),
        Element::E4m3 => Some(Dtype::F8E4M3),
        Element::E5m2 => Some(Dtype::F8E5M2),
        Element::F32 | Element::Any => None,
    };
    let of_rows = dtype(row.element);
    let on = spec.on_kernels();
    // Prefills of Hopper convert 8-bit keys to the type of their rows. A launch before those of Ampere does.
    let converts = row.op == Op::Prefill && spec.converts();
    let of_ampere = row.op == Op::Prefill && row.arch == Arch::Sm80;
    let cache = match converts {
        true if of_ampere => row.cache.is_none() && spec.compute == Compute::F16,
        true if Padding::of(spec).is_some() => false,
        true => match spec.compute {
            Compute::F16 => row.cache.is_none(),
            Compute::F8 => {
                row.products_of_8_bits && row.cache.and_then(dtype) == Some(spec.kv_dtype)
            }
        },
        false => Some(spec.kv_dtype) == row.cache.map_or(of_rows, dtype),
    };
    // The kernels of hooks are not general.
    let general = Padding::of(spec).is_some() || spec.kv_dtype.bytes() == 1;
    let no_hooks = row.products_of_8_bits || of_ampere && general;
    let hooks = spec.variant.hooks.filter(|_| no_hooks);
    // Decodes rotate queries and keys themselves; Hopper prefills read queries and keys that are already rotated.
    let turns = match (spec.rotary.is_some(), row.op) {
        (true, Op::Prefill) => row.arch == Arch::Sm90a,
        (turned, _) => row.turns == turned,
    };
    // If each token has scales, the executor chooses the kernel by the pool.
    turns
        && !row.by_token
        && hooks.is_none()
        && [on.q_dtype, on.out_dtype].map(Some) == [of_rows; 2]
        && cache
        && row.latent == spec.latent
        && (has_heads(row, &on) || has_heads(row, spec))
        && Padding::of(spec).is_none_or(|padding| pads(row, &padding))
        && row.cap == (spec.variant.soft_cap.is_some() || spec.variant.hooks.is_some())
        && (spec.variant.hooks.is_none() || Hooks::replaceable(row))
}

/// Whether a kernel can pad heads: row by row, or by tensor maps those of 16 bits whose slabs are whole. Prefills that load row by
/// row have a general kernel that does.
fn pads(row: &KernelInfo, padding: &Padding) -> bool {
    match row.loads {
        Loads::PagesOrRows | Loads::Rows if row.op == Op::Decode => true,
        Loads::Pages | Loads::PagesOrRows => row.cache.is_none() && !padding.is_cut(),
        Loads::Rows => row.op == Op::Prefill,
    }
}

pub(super) fn has_heads(row: &KernelInfo, spec: &Spec) -> bool {
    (row.head_dim, row.value_dim) == (spec.head_dim_qk, spec.head_dim_v)
}

/// Whether a kernel of the variant may replace this one. For the library's own variants this is known, and for those that a GPU was
/// opened with.
pub(in crate::plan) fn has_hooks(
    device: &DeviceDescription,
    name: HooksName,
    row: &KernelInfo,
) -> bool {
    let of_name = |hooks: &&Hooks| hooks.name == name;
    match (BUILT_IN.iter().find(of_name), &device.variants) {
        (Some(hooks), _) => hooks.replaces(row),
        (None, Some(known)) => known
            .iter()
            .any(|hooks| hooks.name == name && hooks.replaces(row)),
        (None, None) => Hooks::replaceable(row),
    }
}

/// The kernels of an operation that the device can run.
pub(in crate::plan) fn runnable(
    device: &DeviceDescription,
    op: Op,
) -> impl Iterator<Item = KernelId> + Clone + '_ {
    KernelId::all().filter(move |id| {
        let row = id.info();
        row.op == op
            && !row.stands_in
            && row.arch.runs_on(device.compute_capability)
            && row.shared_bytes <= device.shared_bytes_per_cta
            && !id.is_replaced(device.shared_bytes_per_cta)
    })
}

/// The runnable kernels that were compiled for these heads.
pub(super) fn serving<'a>(
    device: &'a DeviceDescription,
    spec: &'a Spec,
    op: Op,
) -> impl Iterator<Item = KernelId> + Clone + 'a {
    runnable(device, op).filter(|id| serves(device, id.info(), spec))
}

/// The kernels of the newest architecture that has any, because they use its instructions.
fn newest(kernels: impl Iterator<Item = KernelId> + Clone) -> Vec<KernelId> {
    let arch = kernels.clone().map(|id| id.info().arch).max();
    kernels.filter(|id| Some(id.info().arch) == arch).collect()
}

/// The kernels of an operation that run alone.
pub(in crate::plan) fn alone(device: &DeviceDescription, spec: &Spec, op: Op) -> Vec<KernelId> {
    let mut kernels = newest(serving(device, spec, op).filter(|id| !id.info().co_resident));
    // Only kernels of the heads' own dimension, if there are any: padding costs time.
    let own = |id: &KernelId| has_heads(id.info(), spec);
    if kernels.iter().any(own) {
        kernels.retain(own);
    }
    kernels
}

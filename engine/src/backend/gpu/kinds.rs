//! Kinds of attention of a model: their plans and workspaces.

use tandem_attn::{
    exec::gpu::{DeviceRope, Gpu, LaunchSet, Workspace, WorkspaceOptions},
    plan::{BatchLimits, Bound, PlanOptions},
    problem::Spec,
};

use super::GpuOptions;
use crate::{Architecture, Error, backend::attention::Plans};

/// A kind of attention, with plans and workspaces both for launched steps and for steps that a graph replays.
pub(super) struct Kind {
    pub rope: DeviceRope,
    pub launched: (Plans, Workspace),
    pub replayed: (Plans, Workspace),
}

/// Plans and workspaces for each kind of attention of a model.
pub(super) fn kinds(
    gpu: &Gpu,
    a: &Architecture,
    options: &GpuOptions,
    planning: PlanOptions,
) -> Result<Vec<Kind>, Error> {
    let kinds = a.kinds.iter().map(|kind| {
        let spec = options.cache_type.spec(kind.spec);
        Ok(Kind {
            rope: gpu.rope(&kind.rope.table().map_err(tandem_attn::Error::from)?)?,
            launched: plans(gpu, spec, a, options, planning, false)?,
            replayed: plans(gpu, spec, a, options, planning, true)?,
        })
    });
    kinds.collect()
}

/// The largest steps of decodes. Requests are no longer than the model's positions, whatever the caches hold.
pub(super) fn limits(a: &Architecture, options: &GpuOptions) -> BatchLimits {
    let longest = options.cache_tokens.unwrap_or(u32::MAX).min(a.positions);
    BatchLimits::decodes(options.step_requests, longest, options.page_size)
}

/// Keys of the common prefixes of a step for whose conversion graphs have room, if caches have 8 bits: with 8 heads of 128 about
/// 144 MiB. Decodes read further prefixes themselves.
const PREFIX_KEYS: u32 = 32_768;

/// Plans of one kind of attention, and their workspace.
fn plans(
    gpu: &Gpu,
    spec: Spec,
    a: &Architecture,
    options: &GpuOptions,
    planning: PlanOptions,
    replayed: bool,
) -> Result<(Plans, Workspace), tandem_attn::Error> {
    let device = gpu.device();
    let mut limits = limits(a, options);
    let mut of_workspace = WorkspaceOptions::default();
    match replayed {
        true => {
            let launches = LaunchSet::decodes_with(&device, &spec, &planning)?;
            // Decodes convert no keys. Prefills convert prefixes, where they read these for decodes; those of windows they do not.
            let reads_prefixes = launches.has_prefills() && spec.variant.window_left.is_none();
            limits = limits.with_prefill_keys(match reads_prefixes {
                true => PREFIX_KEYS.min(options.cache_tokens.unwrap_or(u32::MAX)),
                false => 0,
            });
            of_workspace.launches = Some(launches);
        }
        false => limits = limits.with_query_tokens(options.step_tokens),
    }
    let planning = planning.with_bound(None);
    let bound = Bound::new(&spec, &device, &planning, &limits)?;
    let workspace = gpu.workspace(&spec, &bound, of_workspace)?;
    Ok((
        Plans::new(spec, device, planning.with_bound(bound)),
        workspace,
    ))
}

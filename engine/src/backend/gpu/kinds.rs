//! Kinds of attention of a model: their plans and workspaces.

use tandem_attn::{
    exec::gpu::{DeviceRope, Gpu, LaunchSet, Workspace, WorkspaceOptions},
    plan::{BatchLimits, Bound, DeviceDescription, PlanOptions},
    problem::Spec,
};

use super::GpuOptions;
use crate::{Architecture, Error, backend::attention::Plans};

/// A kind of attention, with plans and workspaces both for launched steps and for steps that a graph replays.
pub(super) struct Kind {
    rope: DeviceRope,
    launched: (Plans, Workspace),
    /// None if graphs have no kernels for its decodes.
    replayed: Option<(Plans, Workspace)>,
}

impl Kind {
    /// The rotary embedding, and the plans and the workspace of steps that a graph replays, or of others.
    pub(super) const fn of(&mut self, replayed: bool) -> (&DeviceRope, &mut Plans, &mut Workspace) {
        let (plans, workspace) = match &mut self.replayed {
            Some(of_graphs) if replayed => of_graphs,
            _ => &mut self.launched,
        };
        (&self.rope, plans, workspace)
    }

    /// The workspace of steps that a graph replays.
    pub(super) fn of_graphs(&self) -> Option<&Workspace> {
        self.replayed.as_ref().map(|(_, workspace)| workspace)
    }
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
            launched: plans(gpu, spec, a, options, planning, None)?,
            replayed: match of_graphs(&gpu.device(), &spec, &planning)? {
                Some(set) => Some(plans(gpu, spec, a, options, planning, Some(set))?),
                None => None,
            },
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

/// The launches of decodes in a graph. None if a graph cannot have them: on Ampere, prefills run decodes of more than 16 query
/// heads for each KV head, and read no records.
fn of_graphs(
    device: &DeviceDescription,
    spec: &Spec,
    planning: &PlanOptions,
) -> Result<Option<LaunchSet>, tandem_attn::Error> {
    match LaunchSet::decodes_with(device, spec, planning) {
        Ok(set) => Ok(Some(set)),
        Err(tandem_attn::Error::NoInstance { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Plans of one kind of attention, and their workspace: for graphs with these launches, or for steps that are launched.
fn plans(
    gpu: &Gpu,
    spec: Spec,
    a: &Architecture,
    options: &GpuOptions,
    planning: PlanOptions,
    graphs: Option<LaunchSet>,
) -> Result<(Plans, Workspace), tandem_attn::Error> {
    let device = gpu.device();
    let mut limits = limits(a, options);
    let mut of_workspace = WorkspaceOptions::default();
    match graphs {
        Some(launches) => {
            // Decodes convert no keys. Prefills convert prefixes, where they read these for decodes; those of windows they do not.
            let reads_prefixes = launches.has_prefills() && spec.variant.window_left.is_none();
            limits = limits.with_prefill_keys(match reads_prefixes {
                true => PREFIX_KEYS.min(options.cache_tokens.unwrap_or(u32::MAX)),
                false => 0,
            });
            of_workspace.launches = Some(launches);
        }
        None => limits = limits.with_query_tokens(options.step_tokens),
    }
    let planning = planning.with_bound(None);
    let bound = Bound::new(&spec, &device, &planning, &limits)?;
    let workspace = gpu.workspace(&spec, &bound, of_workspace)?;
    Ok((
        Plans::new(spec, device, planning.with_bound(bound)),
        workspace,
    ))
}

#[cfg(test)]
mod tests {
    use tandem_attn::problem::{Batch, PageTable};

    use super::*;

    #[test]
    fn decodes_of_many_heads_have_no_graphs_on_ampere() {
        let launches = |device: &str, heads: u32| {
            let device = DeviceDescription::named(device).unwrap();
            let spec = Spec::new(heads, 1, 128);
            of_graphs(&device, &spec, &PlanOptions::default()).unwrap()
        };
        for heads in [1, 16] {
            assert!(launches("a100", heads).is_some(), "{heads}");
        }
        for heads in [17, 32, 128] {
            assert!(launches("a100", heads).is_none(), "{heads}");
            assert!(launches("h200", heads).is_some(), "{heads}");
        }
        // Launched steps have plans for them.
        let ampere = DeviceDescription::named("a100").unwrap();
        let (spec, planning) = (Spec::new(32, 1, 128), PlanOptions::default());
        let limits = BatchLimits::decodes(4, 200, 16).with_query_tokens(64);
        let bound = Bound::new(&spec, &ampere, &planning, &limits).unwrap();
        let mut plans = Plans::new(spec, ampere.clone(), planning.with_bound(bound));
        let mut table = PageTable::new(16, 64);
        for first in [0, 13, 26, 39] {
            table.push(&(first..first + 13).collect::<Vec<_>>(), 200);
        }
        let plan = plans.plan(&Batch::new((0..=4).collect(), table)).unwrap();
        assert!(LaunchSet::new().and(plan).has_prefills());
        // Other errors stay errors.
        let refused = of_graphs(&ampere, &Spec::new(32, 1, 272), &PlanOptions::default());
        assert!(refused.is_err());
    }
}

//! The planner: makes a plan from a specification and a batch, and reuses its buffers.

use std::sync::Arc;

use kernels_gpu::registry::{KernelId, KernelInfo, Loads};

use super::{
    Origin,
    data::{
        Bound, Kernel, MergeMode, PackRule, Plan, PlanError, PlanOptions, PodMode, PodPlan, Rules,
        SplitMode, Unsupported, check_split, collect_tables,
    },
    draft::{BatchInput, Drafter, PrefillSizes},
    emit::{Emitter, Pieces, merge_mode},
    hybrid,
    model::{DeviceDescription, Model},
    split::{SplitInput, Splitter},
};
use crate::problem::{Batch, Padding, Part, Spec};

/// Makes plans. Keep it from step to step: it reuses its buffers, so that planning allocates nothing in
/// the steady state.
#[derive(Debug, Default)]
pub struct Planner {
    rules: Rules,
    /// The last model for balanced splits, and the last one for fixed splits.
    models: [Option<Model>; 2],
    drafter: Drafter,
    rereads: Vec<f64>,
    sizes: PrefillSizes,
    splitter: Splitter,
    emitter: Emitter,
}

impl Planner {
    /// A new planner with empty buffers.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// A planner that makes some decisions by the given rules.
    #[must_use]
    pub fn with_rules(rules: Rules) -> Self {
        Self {
            rules,
            ..Self::default()
        }
    }

    /// Plans a batch.
    ///
    /// # Errors
    /// [`PlanError`]: the specification or batch is wrong, the device has no kernel for the heads or the tile, or
    /// the batch exceeds the bound.
    pub fn plan(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
    ) -> Result<Plan, PlanError> {
        let mut plan = Plan::empty(*spec);
        self.plan_into(spec, batch, device, options, &mut plan)?;
        Ok(plan)
    }

    /// Plans a batch into an existing plan, whose memory is reused. After an error its content is unspecified.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_into(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
        plan: &mut Plan,
    ) -> Result<(), PlanError> {
        let kept = &mut self.models[usize::from(options.split.is_fixed())];
        let same = |model: &Model| model.is_of(spec, device, options);
        if !kept.as_ref().is_some_and(same) {
            *kept = Some(Model::new(spec, device, options)?);
        }
        // Set again when the plan is complete.
        plan.origin = Origin(None);
        plan.appended.clear();
        batch.check(spec)?;
        if let Some(model) = kept {
            check_heads(model, batch, options)?;
        }
        if batch.has_masks() {
            device.supports_masks(spec)?;
        }
        check_split(options.split, batch)?;
        plan.spec = *spec;
        plan.total_q = batch.total_q();
        collect_tables(batch, plan)?;

        // If a plan exceeds the bound, the next attempts do not pack, then do not cut: both need fewer states and rows.
        // With fixed splits, prefixes are never packed: tiles of few and of many rows run on different kernels, whose
        // results differ in the last bits.
        let apart = PlanOptions {
            packing: PackRule::Off,
            ..*options
        };
        let uncut = PlanOptions {
            split: SplitMode::Off,
            ..apart
        };
        let attempts = match options.split {
            SplitMode::Fixed { .. } => &[apart][..],
            _ => &[*options, apart, uncut],
        };
        let mut fits = Ok(());
        for options in attempts {
            self.stages(batch, options, plan)?;
            check_pages(plan, batch, device)?;
            fits = options
                .bound
                .map_or(Ok(()), |bound| bound.check(&Bound::of(plan)));
            if fits.is_ok() {
                break;
            }
        }
        fits?;
        let model = &self.models[usize::from(options.split.is_fixed())];
        let device = model.as_ref().map(|model| Arc::clone(&model.device));
        plan.origin = Origin(device.map(|device| (device, *options)));
        plan.keep_arrays(batch);
        Ok(())
    }

    /// The stages of planning, after the tables are collected.
    fn stages(
        &mut self,
        batch: &Batch,
        options: &PlanOptions,
        plan: &mut Plan,
    ) -> Result<(), PlanError> {
        let Self {
            rules,
            models,
            drafter,
            rereads,
            sizes,
            splitter,
            emitter,
        } = self;
        let model = &models[usize::from(options.split.is_fixed())];
        let model = model.as_ref().expect("made before planning");
        let input = BatchInput::new(model, batch, plan);

        // Decodes: prefix forest, packing, drafts. Their cost decides how prefills run beside them.
        let is_hybrid = drafter.draft_decodes(&input, options, rules);
        let pod = match is_hybrid {
            true => {
                hybrid::rereads(&input, drafter, options, rules, rereads);
                Some(hybrid::choose(&input, &drafter.drafts, rereads, options))
            }
            false => hybrid::prefixes_beside(&input, drafter, options),
        };
        let config = model.config(pod.as_ref());

        // All drafts, in the tiles of this mode. Then the cuts along the keys, and the launch order.
        let tiles = match &model.wide {
            Some(wide) if pod.is_none() && drafter.has_prefills() => {
                sizes.choose(&input, input.tiles(), wide)
            }
            _ if pod.is_none() => input.tiles(),
            _ => model.tiles_of(pod.as_ref()),
        };
        drafter.draft_all(&input, tiles, config, options, rules);
        let drafts = &mut drafter.drafts;
        let split = SplitInput::new(model, tiles, options, rules, pod.as_ref());
        splitter.split(&split, &mut drafts.items)?;

        // Items, rows and merges.
        let merges_all = model.spec.has_f32_outputs() && !model.device.is_cpu();
        let pieces = Pieces::new(&model.spec, options, merges_all, drafts, splitter);
        emitter.emit(&pieces, plan)?;
        plan.pod = pod.map(|pod| PodPlan {
            tickets: hybrid::tickets(config, rules, splitter.units),
            ..pod
        });
        plan.merge_mode = merge_mode(&model.device, options, plan);
        Ok(())
    }
}

/// Refuses [`MergeMode::Fused`] with outputs in F32 and with kernels that leave merges to others. Those that share SMs leave them
/// in any mode, so a plan may contain them.
pub(crate) fn check_fused(
    spec: &Spec,
    device: &str,
    mut kernels: impl Iterator<Item = KernelId>,
) -> Result<(), Unsupported> {
    if kernels.any(|id| id.info().leaves_merges && !id.info().co_resident) {
        let what = "supports MergeMode::Fused: use MergeMode::Auto or MergeMode::Kernel";
        return Err(match spec.latent {
            true => Unsupported::Latent {
                device: device.into(),
                what: what.replace("supports", "with"),
            },
            false => of_heads(spec, device, what.into()),
        });
    }
    if spec.has_f32_outputs() {
        return Err(Unsupported::FusedF32 {
            device: device.into(),
        });
    }
    Ok(())
}

/// Refuses merges, page sizes and numbers of CTAs that the kernels for these heads do not support. Outputs in F32 come from the merging
/// kernel.
fn check_heads(model: &Model, batch: &Batch, options: &PlanOptions) -> Result<(), PlanError> {
    let Model {
        spec,
        device,
        tiles,
        ..
    } = model;
    let kernels = || tiles.decodes().iter().filter_map(|choice| choice.kernel);
    if options.merge_mode == MergeMode::Fused && !device.is_cpu() {
        check_fused(spec, &device.name, kernels())?;
    }
    if let Some(got) = options.prefill_ctas {
        let fused = model.fused_tiles.iter().zip(&device.pod.configs);
        let fused = || fused.clone().filter(|(tiles, _)| tiles.is_some());
        let apart = fused().any(|(_, config)| !config.by_tickets);
        let by_tickets = match options.pod {
            PodMode::Serial | PodMode::Streams => false,
            PodMode::Auto | PodMode::Fused => !apart,
            PodMode::Tickets => true,
        };
        if by_tickets && fused().any(|(_, config)| config.by_tickets) {
            return Err(Unsupported::PrefillCtas {
                device: device.name.clone(),
                got,
                there: if apart { ", or use PodMode::Fused" } else { "" },
            }
            .into());
        }
    }
    if !tiles.has_prefills() && batch.parts.iter().any(|part| part.heads > 1) {
        let what = "runs prompts beside page lists by KV head: plan them apart";
        return Err(of_heads(spec, &device.name, what.into()).into());
    }
    // Kernels that only load by tensor maps, in groups of 8 tokens; these heads have no other kernel.
    let by_groups = |id: KernelId| {
        let row = id.info();
        row.takes_prompts && row.loads == Loads::Pages && id.by_rows().is_none()
    };
    let of_any_size = |part: &&Part| !part.table.page_size.is_multiple_of(8);
    match batch.parts.iter().find(of_any_size) {
        Some(part) if kernels().any(by_groups) => {
            Err(of_pages(spec, device, part.table.page_size).into())
        }
        _ => Ok(()),
    }
}

/// Refuses page sizes for padded heads. Hopper's prefills of larger head dimensions load padded heads only by tensor maps, in
/// groups of 8 tokens. Prompts of some heads have kernels of their own, so only the plan tells which items are padded.
fn check_pages(plan: &Plan, batch: &Batch, device: &DeviceDescription) -> Result<(), PlanError> {
    let spec = &plan.spec;
    if Padding::of(spec).is_none() {
        return Ok(());
    }
    let prefills = plan.groups.iter();
    for group in prefills.filter(|group| group.kernel == Kernel::Prefill) {
        let reads_any =
            |row: &KernelInfo| row.head_dim == spec.head_dim_qk || row.loads == Loads::Rows;
        if group.id.is_none_or(|id| reads_any(id.info())) {
            continue;
        }
        let items = plan.items_of(group).iter();
        let mut sizes = items.map(|item| batch.parts[item.part as usize].table.page_size);
        if let Some(size) = sizes.find(|size| !size.is_multiple_of(8)) {
            return Err(of_pages(spec, device, size).into());
        }
    }
    Ok(())
}

fn of_pages(spec: &Spec, device: &DeviceDescription, size: u32) -> Unsupported {
    let what = format!("reads pages of {size} tokens: use a page size that is a multiple of 8");
    of_heads(spec, &device.name, what)
}

fn of_heads(spec: &Spec, device: &str, what: String) -> Unsupported {
    Unsupported::Heads {
        device: device.into(),
        head_dim_qk: spec.head_dim_qk,
        head_dim_v: spec.head_dim_v,
        what,
    }
}

//! The launch of a group of prefills, and the launch that converts its keys and values before it.

use std::ops::Range;

use kernels_gpu::registry::{Arch, KernelId, KernelInfo, Op};

use super::making::{Making, on, place};
use crate::{
    Error,
    exec::gpu::{
        DeviceTensor, KvPool, KvScales, PartialStates, PrefillCall,
        launch_key::no_records,
        launch_plan::GroupLaunch,
        prefill::describes_values,
        registry::has_own_heads,
        steps::{Extras, Parameters, Source, Step},
    },
    plan::pod::PodMode,
    problem::{Compute, Spec},
};

impl Making<'_> {
    pub(super) fn prefills(
        &mut self,
        index: usize,
        launch: &GroupLaunch,
        pool: &KvPool,
        arch: Option<Arch>,
    ) -> Result<Option<Step>, Error> {
        let (gpu, workspace, tensors) = (self.gpu, self.workspace, self.tensors);
        let (planned, captured) = (launch.key.kernel, workspace.captured());
        let heads = launch.key.heads;
        let part = launch.key.part as usize;
        workspace.spec.check_sinks_of(part, heads)?;
        let of_part = workspace.spec.times(heads);
        let converts = workspace.spec.converts();
        let extras = Extras {
            kv_heads_together: launch.kv_heads_together,
            scaled: converts && pool.scales != KvScales::One && !by_token(&workspace.spec, pool),
            ..self.extras()
        };
        let kernel = match arch.or(workspace.options.arch) {
            Some(Arch::Sm80) => on(planned, Arch::Sm80)?,
            arch => {
                let kernel = arch.map_or(Ok(planned), |arch| on(planned, arch))?;
                gpu.prefill_kernel(extras.kernel(kernel, &of_part)?)
            }
        };
        let of_ampere = kernel.info().arch == Arch::Sm80;
        let kernel = match of_ampere && (extras.scaled || extras.padding.is_some()) {
            true => general(kernel, workspace.spec.variant.hooks.is_some())?,
            false => kernel,
        };
        let own_heads = has_own_heads(kernel, &workspace.spec);
        if !own_heads {
            // Hopper's pad by tensor maps.
            if !of_ampere && self.may_be_for_other_pages(pool) && extras.padding.is_some() {
                return Ok(None);
            }
            self.pads_by(kernel)?;
        }
        pool.check_scales_of_prefills(&workspace.spec, kernel.info())?;
        let turns = workspace.spec.rotary.is_some();
        if of_ampere && (turns || workspace.spec.compute == Compute::F8) {
            let what = match turns {
                true => "a rotary embedding",
                false => "products of 8 bits",
            };
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: format!("{what} with the instructions of Ampere"),
                there: "the instructions of Hopper",
            });
        }
        // Ampere prefills read a record only in one kernel with the decodes.
        if of_ampere && arch.is_none() && captured {
            return Err(no_records());
        }
        let partials = workspace.partials();
        let (items, record) = place(workspace, index, launch);
        let (converted, mut spec) = (workspace.converted_pool(heads), of_part.on_kernels());
        if converts {
            spec.kv_dtype = converted.dtype;
        }
        let [q, out] = tensors.of_launch(own_heads);
        let q = &q.tokens_together("q", heads)?;
        let out = &out.tokens_together("out", heads)?;
        let lse = tensors.lse.map(|lse| rows_together(lse, heads));
        let partials = PartialStates {
            out: partials.out.tokens_together("partial_out", heads)?,
            lse: rows_together(&partials.lse, heads),
        };
        let mut extras = extras;
        if turns {
            spec.rotary = None;
            extras.values = describes_values(pool, &spec).then_some(*pool);
        }
        // A launch whose kernel was compiled for these heads either writes its outputs between padded ones, or leaves
        // no partial states: the states of a run with padded heads are padded, too.
        let given = tensors.unpadded.filter(|_| own_heads);
        let beside_padded = given.is_some_and(|given| given.out.is_none());
        let leaves_states = given.is_none() || beside_padded;
        if own_heads {
            spec.head_dim_qk = workspace.spec.head_dim_qk;
            spec.head_dim_v = workspace.spec.head_dim_v;
            let padding = extras.padding.take().filter(|_| beside_padded);
            extras.gap = padding.map_or(0, |padding| padding.gap());
        }
        let call = PrefillCall {
            spec: &spec,
            kernel,
            rows: planned.info().rows,
            pack: launch.key.pack,
            items,
            page_ids: match converts {
                true => workspace.converted_ids(),
                false => workspace.page_ids(),
            },
            q,
            pool: if converts { &converted } else { pool },
            out,
            lse: lse.as_ref(),
            partials: leaves_states.then_some(&partials),
            ticket: workspace.ticket(index),
            record,
            extras,
        };
        let mut step = gpu.prepare_prefill(kernel, &call, &mut self.maps)?;
        if let Some(Parameters::Prefill(_, shapes)) = step.as_mut().map(|step| &mut step.parameters)
        {
            shapes.unpadded = own_heads;
        }
        let parameters = step.as_mut().map(|step| &mut step.parameters);
        let by_token = by_token(&workspace.spec, pool);
        let tokens = tensors.q.shape[0] / heads as usize;
        if let (Some(Parameters::PrefillRows(params, source)), true) = (parameters, converts) {
            *source = Source::Widened { by_token };
            if !by_token {
                params.attention.scales = pool.scale_parameters(&of_part, tokens)?;
            }
        }
        let parameters = step.as_mut().map(|step| &mut step.parameters);
        if let (Some(Parameters::Prefill(params, shapes)), true) = (parameters, converts) {
            if turns {
                // The kernel reads copies, which have no scales; neither has the pool, whose numbers have 16 bits.
                pool.scale_parameters(&of_part, tokens)?;
                let values = extras.values.is_none();
                shapes.source = Source::Turned { values };
                if !values {
                    params.convert.list = workspace.conversions().address;
                    params.convert.page_ids = workspace.page_ids().address;
                }
            } else if by_token {
                shapes.source = Source::Widened { by_token };
            } else {
                params.attention.scales = pool.scale_parameters(&of_part, tokens)?;
                if self.widens(launch) {
                    shapes.source = Source::Widened { by_token: false };
                } else {
                    shapes.source = Source::Converted;
                    params.convert =
                        workspace.conversion_of(pool, heads, self.converted(launch))?;
                }
            }
        }
        let resident = workspace.launch_plan.resident.prefill;
        if let (Some(step), 1.., false, false) = (&mut step, resident, captured, of_ampere) {
            step.launch.grid[0] = step.launch.grid[0].min(resident);
        }
        Ok(step)
    }

    /// The pages of keys that a prefill's launch converts.
    fn converted(&self, launch: &GroupLaunch) -> Range<u32> {
        match self.workspace.captured() {
            true => 0..self.workspace.bound.converted_pages / launch.key.heads,
            false => launch.converted.clone(),
        }
    }

    /// Whether a launch before a prefill widens its 8-bit keys because few rows of queries see each of them. Beside decodes, only
    /// where both share SMs: on SMs of their own, prefills and decodes took up to 1.5 times as long after such a launch. A captured
    /// graph has the same launches for all plans.
    fn widens(&self, launch: &GroupLaunch) -> bool {
        let spec = &self.workspace.spec;
        let alone = self.workspace.launch_plan.pod == PodMode::Serial;
        launch.few_rows
            && (alone || launch.key.kernel.info().co_resident)
            && !self.workspace.captured()
            && spec.rotary.is_none()
            && spec.compute == Compute::F16
    }

    /// The launch before a prefill whose keys have a scale for each token, are seen by few rows, or need the rotary embedding;
    /// and before one with Ampere's instructions that reads keys of 8 bits.
    pub(super) fn before(
        &self,
        index: usize,
        launch: &GroupLaunch,
        prefill: &Step,
    ) -> Result<Option<Step>, Error> {
        let (workspace, part) = (self.workspace, launch.key.part as usize);
        let (gpu, pool) = (self.gpu, &self.tensors.pools[part]);
        if launch.key.kernel.info().op != Op::Prefill {
            return Ok(None);
        }
        let (_, record) = place(workspace, index, launch);
        let pages = self.converted(launch);
        let step = if workspace.spec.rotary.is_some() {
            gpu.prepare_turn(workspace, pool, pages, record)?
        } else if by_token(&workspace.spec, pool) || self.widens(launch) || reads_widened(prefill) {
            let (heads, tokens) = (launch.key.heads, self.tensors.q.shape[0]);
            gpu.prepare_widen(workspace, (pool, heads), pages, record, tokens)?
        } else {
            return Ok(None);
        };
        let heads = launch.key.heads;
        Ok(Some(Step {
            part,
            heads,
            ..step
        }))
    }
}

/// A dense `[tokens, heads]` with so many neighbouring tokens as one.
fn rows_together(rows: &DeviceTensor<2>, heads: u32) -> DeviceTensor<2> {
    let ([tokens, of_token], heads) = (rows.shape, heads as usize);
    let [token, head] = rows.strides;
    DeviceTensor {
        shape: [tokens / heads, of_token * heads],
        strides: [token * heads, head],
        ..*rows
    }
}

impl KvPool {
    /// Checks that a prefill's kernel takes its scales, or a launch before it does.
    pub(in crate::exec::gpu) fn check_scales_of_prefills(
        &self,
        spec: &Spec,
        kernel: &KernelInfo,
    ) -> Result<(), Error> {
        match spec.converts() && !by_token(spec, self) {
            true => self.scales.check_kernel(kernel),
            false => Ok(()),
        }
    }
}

/// The kernel with Ampere's instructions that pads heads and applies scales. Variants replace the kernel itself, so theirs does
/// so only if that one does.
fn general(kernel: KernelId, hooks: bool) -> Result<KernelId, Error> {
    let general = kernel.general().filter(|&id| !hooks || id == kernel);
    general.ok_or_else(|| Error::NoInstance {
        kernel: "prefill",
        asked: format!("padded heads, or scales of 8-bit keys, in {kernel}"),
        there: "these in kernels without hooks",
    })
}

/// Whether a prefill with Ampere's instructions reads widened keys.
const fn reads_widened(step: &Step) -> bool {
    matches!(
        step.parameters,
        Parameters::PrefillRows(_, Source::Widened { .. })
    )
}

/// Whether a launch before the prefills multiplies keys by the scales of their tokens.
fn by_token(spec: &Spec, pool: &KvPool) -> bool {
    spec.converts() && spec.compute == Compute::F16 && matches!(pool.scales, KvScales::Token { .. })
}

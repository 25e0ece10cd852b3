//! Makes the launches of a run, group by group, and the merges after them.

use kernels_gpu::{
    abi::{LaunchRecord, WorkItem},
    divisor::Divisor,
    registry::{Arch, KernelId, Loads, Op},
};

use crate::{
    Error,
    exec::gpu::{
        DeviceArray, Gpu, KvPool, RunTensors, Workspace,
        launch_key::LaunchKey,
        launch_plan::GroupLaunch,
        maps::Maps,
        steps::{Extras, Parameters, Step},
    },
    problem::Padding,
};

/// Makes the launches of a run.
pub(super) struct Making<'a> {
    pub(super) gpu: &'a Gpu,
    pub(super) workspace: &'a Workspace,
    pub(super) tensors: &'a RunTensors<'a>,
    pub(super) maps: Maps,
    /// Whether a captured decode uses a kernel with one table per tile instead of a kernel with several.
    pub(super) one_table: bool,
}

impl Making<'_> {
    /// Makes all launches; merging comes last.
    pub(super) fn all(&mut self, steps: &mut Vec<Step>) -> Result<(), Error> {
        let workspace = self.workspace;
        let launch_plan = &workspace.launch_plan;
        let Some(set) = &workspace.options.launches else {
            let pairs = match launch_plan.tickets {
                Some(_) => launch_plan.pairs(),
                None => Vec::new(),
            };
            self.groups(&launch_plan.launches, &pairs, steps)?;
            if launch_plan.merging.left > 0 {
                steps.push(self.merge(launch_plan.merging.left as usize, None)?);
            }
            let unpadded = self.tensors.unpadded.as_ref();
            if let Some(unpadded) = unpadded.filter(|_| steps.iter().all(Step::can_write_unpadded))
            {
                for step in steps {
                    step.write_unpadded(&unpadded.given);
                }
            }
            return Ok(());
        };
        // A graph supports joint tiles if the plan in the workspace has some when the graph is captured.
        let joint = launch_plan.launches.iter().any(|launch| launch.joint);
        let launch = |&key: &LaunchKey| GroupLaunch {
            key,
            first: 0,
            items: workspace.bound.items,
            run: 1,
            long: false,
            // Plans give joint tiles only to these kernels.
            joint: joint && key.kernel.info().multi_table,
            // These leave all merges to the merging kernel.
            pieces: false,
            // The launch reads it from its record.
            kv_heads_together: 0,
            converted: 0..0,
            few_rows: false,
            lengths: 0..0,
        };
        let launched = workspace.launched();
        let launches: Vec<_> = set.keys.iter().map(launch).collect();
        self.groups(&launches, &set.pairs, steps)?;
        if workspace.bound.merges > 0 && launched.has(set.keys.len()) {
            let rows = workspace.left_merges().len;
            steps.push(self.merge(rows, Some(set.keys.len()))?);
        }
        Ok(())
    }

    /// The launches of all groups, without those that are left out. A pair of prefill and decode is one launch, if there is
    /// a kernel for both.
    fn groups(
        &mut self,
        launches: &[GroupLaunch],
        pairs: &[[usize; 2]],
        steps: &mut Vec<Step>,
    ) -> Result<(), Error> {
        let pod = self.gpu.pod(&self.workspace.spec);
        let launched = self.workspace.launched();
        let kept = launches.iter().enumerate();
        for (index, launch) in kept.filter(|&(index, _)| launched.has(index)) {
            let pair = pairs.iter().find(|pair| pair.contains(&index));
            let (Some(pod), Some(&[prefill, decode])) = (pod, pair) else {
                let step = self.group(index, launch, None)?;
                if let Some(step) = &step {
                    steps.extend(self.before(index, launch, step)?);
                }
                steps.extend(step);
                continue;
            };
            if index != prefill {
                continue;
            }
            let ampere = Some(Arch::Sm80);
            let prefill = self.group(prefill, &launches[prefill], ampere)?;
            let decode = self.group(decode, &launches[decode], ampere)?;
            let pair = [prefill, decode].map(|step| step.map(|step| (step.part, step.parameters)));
            if let [
                Some((part, Parameters::PrefillRows(prefill, _))),
                Some((_, Parameters::DecodeRows(decode))),
            ] = pair
            {
                let tickets = self.workspace.launch_plan.tickets;
                let tickets = tickets.filter(|_| !self.workspace.captured());
                let tickets = tickets.map_or([0; 2], Into::into);
                let counters = self.workspace.counters();
                let step = self
                    .gpu
                    .prepare_pod(pod, prefill, decode, tickets, counters)?;
                steps.push(Step { part, ..step });
            }
        }
        Ok(())
    }

    /// A launch of a group: by the kernel that the plan names, or by the kernel of `arch` that does the same. None if
    /// there is nothing to launch.
    fn group(
        &mut self,
        index: usize,
        launch: &GroupLaunch,
        arch: Option<Arch>,
    ) -> Result<Option<Step>, Error> {
        let part = launch.key.part as usize;
        let pool = &self.tensors.pools[part];
        let step = match launch.key.kernel.info().op {
            Op::Decode => Some(self.decodes(index, launch, pool, arch)?),
            _ => self.prefills(index, launch, pool, arch)?,
        };
        let Some(mut step) = step else {
            return Ok(None);
        };
        if let Some(hooks) = self.workspace.spec.variant.hooks {
            step.kernel = self.gpu.hooked(hooks, step.kernel.info)?;
        }
        let heads = launch.key.heads;
        Ok(Some(Step {
            part,
            heads,
            ..step
        }))
    }

    pub(super) fn extras(&self) -> Extras {
        Extras {
            scaled: false,
            sinks: self.tensors.sinks,
            ancestors: self.workspace.ancestors(),
            masks: self.workspace.masks(),
            padding: Padding::of(&self.workspace.spec),
            gap: 0,
            kv_heads_together: 0,
            rotary: self.workspace.rotary(),
            values: None,
        }
    }

    /// Whether a launch whose kernel does not read the pool is left out, because it is for plans on other pages: in a captured
    /// graph, over pages whose size is no multiple of 8. What else a pool may have, planning does not know; that is an error.
    pub(super) fn may_be_for_other_pages(&self, pool: &KvPool) -> bool {
        self.workspace.captured() && !pool.k_strides.page_size.is_multiple_of(8)
    }

    /// Checks that the kernel can pad heads, if they are padded.
    pub(super) fn pads_by(&self, kernel: KernelId) -> Result<(), Error> {
        match Padding::of(&self.workspace.spec) {
            Some(padding)
                if kernel.info().loads == Loads::Rows
                    && kernel.info().op != Op::Decode
                    && !kernel.info().general =>
            {
                Err(Error::NoInstance {
                    kernel: "attention",
                    asked: format!(
                        "head dimension {} in pages that are read row by row",
                        padding.dim
                    ),
                    there: "kernels of Hopper; all but 224 and 240 take pages of a multiple of 8 tokens, with keys and values in one \
                        layout",
                })
            }
            _ => Ok(()),
        }
    }

    /// The launch of the merges that decodes leave: at most `rows`, and in a captured graph as many as the record says.
    fn merge(&self, rows: usize, record: Option<usize>) -> Result<Step, Error> {
        let workspace = self.workspace;
        let mut step = self.gpu.prepare_merge(
            &workspace.partials(),
            DeviceArray::new(workspace.left_merges().address, rows),
            workspace.merge_slots(),
            self.tensors.merged.unwrap_or(self.tensors.out),
            self.tensors.lse,
            self.tensors.sinks,
            record.map(|place| workspace.record(place)),
            // The plans of a captured graph are not known yet.
            record
                .is_none()
                .then_some(workspace.launch_plan.merging.most_slots),
        )?;
        if let Parameters::Merge(params) = &mut step.parameters {
            let variant = &workspace.spec.variant;
            params.add_up = variant.adds_up.into();
            params.sink_count = Divisor::new(variant.sink_tokens * params.q_heads);
        }
        Ok(step)
    }
}

/// The items of a launch and, in a captured graph, the record that says which items are its own.
pub(super) fn place(
    workspace: &Workspace,
    index: usize,
    launch: &GroupLaunch,
) -> (DeviceArray<WorkItem>, Option<DeviceArray<LaunchRecord>>) {
    let offset = u64::from(launch.first) * size_of::<WorkItem>() as u64;
    let items = workspace.items().address + offset;
    let record = workspace.captured().then(|| workspace.record(index));
    (DeviceArray::new(items, launch.items as usize), record)
}

/// The kernel of an architecture that does the same as the planned kernel.
pub(super) fn on(planned: KernelId, arch: Arch) -> Result<KernelId, Error> {
    planned.on(arch).ok_or_else(|| Error::NoInstance {
        kernel: "attention",
        asked: format!("what {planned} computes, on {arch:?}"),
        there: "the kernels in plans for this architecture",
    })
}

//! A whole plan on the GPU.

use std::ops::Range;

use kernels_gpu::{
    abi::{LaunchRecord, WorkItem},
    registry::{Arch, KernelId, Loads, Op},
};

use super::{
    DecodeCall, DecodeTile, DeviceArray, DeviceTensor, Gpu, KvPool, KvScales, PrefillCall, Stream,
    Workspace,
    driver::Current,
    indices::check_indices,
    launch_plan::GroupLaunch,
    launch_set::{LaunchKey, LaunchSet},
    maps::Maps,
    prefill::{Source, describes_values},
    steps::{Extras, Parameters, Run, RunTensors, Step, check_own, check_sinks},
};
use crate::{
    Error,
    problem::{Compute, Padding, Spec},
};

/// Of a launch of the run: its place, its items, and in a captured graph what says which of these are its own.
fn place(
    workspace: &Workspace,
    index: usize,
    launch: &GroupLaunch,
) -> (DeviceArray<WorkItem>, Option<DeviceArray<LaunchRecord>>) {
    let offset = u64::from(launch.first) * size_of::<WorkItem>() as u64;
    let items = workspace.items().address + offset;
    let record = workspace.captured().then(|| workspace.record(index));
    (DeviceArray::new(items, launch.items as usize), record)
}

/// What makes the launches of a run.
struct Making<'a> {
    gpu: &'a Gpu,
    workspace: &'a Workspace,
    tensors: &'a RunTensors<'a>,
    maps: Maps,
    /// A captured decode took a kernel whose tiles have one table, in the place of one whose tiles have several.
    one_table: bool,
}

impl Gpu {
    /// Attention of the plan that was [uploaded](Workspace::upload) last, with the variant of its spec.
    ///
    /// - `q`: `[total_q, q_heads, head_dim_qk]`, any token stride that is a multiple of 8
    /// - `pools`: one for each part of the batch
    /// - `out`: `[total_q, q_heads, head_dim_v]`, likewise
    /// - `lse`: `[total_q, q_heads]` F32, natural log, where it is wanted
    ///
    /// A query that sees no key gives output 0 and LSE −∞. The same plan gives the same bits in every run.
    ///
    /// Nothing is allocated and nothing waited for. The call can be captured in a graph; with a
    /// [launch set](super::WorkspaceOptions::launches) the graph serves whatever plan is in the workspace when
    /// it is launched, and `q`, `out` and `lse` may have more tokens than the plan at hand.
    ///
    /// The same call on the CPU is [`Cpu::run`](crate::Cpu::run). Where the variant of the spec has something for
    /// each head, such as sinks, it is [`Gpu::run_with`].
    ///
    /// # Safety
    /// - All tensors are in this GPU's memory as described, and stay until the work on `stream` is done. What
    ///   is written is not touched by others meanwhile.
    /// - The plan is as a [`Planner`](crate::plan::Planner) made it.
    /// - `stream` is a stream of the device's primary context, or null (the default stream), and comes after
    ///   the upload and after earlier runs of this workspace. A graph is not launched after `self` or the
    ///   workspace is gone.
    ///
    /// # Errors
    /// [`Error::NoPlan`], [`Error::Pools`], [`Error::NoInstance`] where no kernel was compiled for a launch,
    /// or a variant for what is wrong with a tensor; in debug mode [`Error::PageOutside`] and
    /// [`Error::Damaged`]: all before anything is launched. [`Error::Driver`] if a
    /// launch fails.
    pub unsafe fn run(
        &self,
        workspace: &mut Workspace,
        q: &DeviceTensor<3>,
        pools: &[KvPool],
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        stream: Stream,
    ) -> Result<(), Error> {
        let tensors = RunTensors {
            lse,
            ..RunTensors::new(q, pools, out)
        };
        // SAFETY: the caller's promises.
        unsafe { self.run_with(workspace, &tensors, stream) }
    }

    /// [`Gpu::run`] with all that a variant may have. What the spec of the plan does not ask for is refused, and so is
    /// a run without what it does ask for.
    ///
    /// # Safety
    /// As [`Gpu::run`].
    ///
    /// # Errors
    /// As [`Gpu::run`]; [`Error::Shape`] with [`Missing`](crate::tensor::ShapeError::Missing) or
    /// [`Surplus`](crate::tensor::ShapeError::Surplus).
    pub unsafe fn run_with(
        &self,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        stream: Stream,
    ) -> Result<(), Error> {
        if !workspace.loaded {
            return Err(Error::NoPlan);
        }
        // Tensor maps are made in it, too, whatever context the thread has.
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the caller's promises.
        unsafe {
            if let Some(padding) = workspace.pads() {
                return self.run_padded(workspace, &padding, tensors, stream);
            }
            if workspace.spec.rounds_queries() || workspace.spec.has_f32_outputs() {
                return self.run_in_f32(workspace, tensors, stream);
            }
            self.ready(workspace, tensors, stream)?;
            self.launch_run(workspace, stream)
        }
    }

    /// Everything before the launches.
    ///
    /// # Safety
    /// As [`Gpu::run_with`].
    pub(super) unsafe fn ready(
        &self,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        stream: Stream,
    ) -> Result<(), Error> {
        let spec = &workspace.spec;
        workspace.run.is_of(self.number);
        if !workspace.run.follow(spec, tensors, &mut workspace.maps)? {
            check(workspace, tensors)?;
            check_own(self, &workspace.spec, tensors.own)?;
            self.prepare(workspace, tensors)?;
        } else {
            check_own(self, &workspace.spec, tensors.own)?;
        }
        if workspace.options.checks {
            // SAFETY: the caller's promise.
            unsafe { workspace.inspect(tensors, stream) }?;
        }
        Ok(())
    }

    /// Makes all launches of the run.
    fn prepare(&self, workspace: &mut Workspace, tensors: &RunTensors<'_>) -> Result<(), Error> {
        let (mut run, mut maps) = (Run::default(), std::mem::take(&mut workspace.maps));
        std::mem::swap(&mut run, &mut workspace.run);
        run.forget();
        maps.tidy();
        let mut making = Making {
            gpu: self,
            workspace,
            tensors,
            maps,
            one_table: false,
        };
        let made = making.all(&mut run.steps);
        let Making {
            maps, one_table, ..
        } = making;
        workspace.one_table |= one_table;
        if made.is_ok() {
            run.arrange(self, workspace, tensors);
        }
        (workspace.run, workspace.maps) = (run, maps);
        made
    }
}

impl Making<'_> {
    /// Merging last.
    fn all(&mut self, steps: &mut Vec<Step>) -> Result<(), Error> {
        let workspace = self.workspace;
        let launch_plan = &workspace.launch_plan;
        let Some(set) = &workspace.options.launches else {
            let pairs = match launch_plan.tickets {
                Some(_) => launch_plan.pairs(),
                None => Vec::new(),
            };
            self.groups(&launch_plan.launches, &pairs, steps)?;
            if launch_plan.left > 0 {
                steps.push(self.merge(launch_plan.left as usize, None)?);
            }
            return Ok(());
        };
        // Whoever captures a graph with joint tiles in it says so by the plan at hand.
        let joint = launch_plan.launches.iter().any(|launch| launch.joint);
        let launch = |&key: &LaunchKey| GroupLaunch {
            key,
            first: 0,
            items: workspace.bound.items,
            run: 1,
            long: false,
            // Plans give joint tiles to no other kernels.
            joint: joint && key.kernel.info().multi_table,
            // Its record says.
            kv_heads_together: 0,
            converted: 0..0,
        };
        let launches: Vec<_> = set.keys.iter().map(launch).collect();
        self.groups(&launches, &set.pairs, steps)?;
        if workspace.bound.merges > 0 {
            let rows = workspace.left_merges().len;
            steps.push(self.merge(rows, Some(set.keys.len()))?);
        }
        Ok(())
    }

    /// The launches of all groups; those of a pair are one, where there is a kernel for that.
    fn groups(
        &mut self,
        launches: &[GroupLaunch],
        pairs: &[[usize; 2]],
        steps: &mut Vec<Step>,
    ) -> Result<(), Error> {
        let pod = self.gpu.pod(&self.workspace.spec);
        for (index, launch) in launches.iter().enumerate() {
            let pair = pairs.iter().find(|pair| pair.contains(&index));
            let (Some(pod), Some(&[prefill, decode])) = (pod, pair) else {
                let step = self.group(index, launch, None)?;
                if step.is_some() {
                    steps.extend(self.before(index, launch)?);
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
                Some((part, Parameters::PrefillRows(prefill))),
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

    /// A launch of a group: by the kernel that the plan names, or by the one that does the same with the instructions
    /// of an architecture. None where there is nothing to launch.
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
        Ok(Some(Step { part, ..step }))
    }

    fn decodes(
        &mut self,
        index: usize,
        launch: &GroupLaunch,
        pool: &KvPool,
        arch: Option<Arch>,
    ) -> Result<Step, Error> {
        let (gpu, workspace, tensors) = (self.gpu, self.workspace, self.tensors);
        let (spec, planned) = (&workspace.spec.on_kernels(), launch.key.kernel);
        let units = launch.items.saturating_mul(spec.kv_heads);
        let kernel = match arch.or(workspace.options.arch) {
            Some(arch) => on(planned, arch)?,
            None => {
                let kernel = gpu.decode_kernel(planned, spec, pool);
                gpu.of_pairs(kernel, spec, pool, units)
            }
        };
        self.pads_by(kernel)?;
        if launch.joint && !kernel.info().multi_table {
            return Err(Error::NoInstance {
                kernel: "decode",
                asked: "joint tiles over a pool that tensor maps cannot describe".into(),
                there: "with such pools plans of a device description without `decode.joint`",
            });
        }
        self.one_table |=
            workspace.captured() && planned.info().multi_table && !kernel.info().multi_table;
        let co_resident = kernel.info().co_resident;
        // A decode that the plan has share SMs leaves merges to others, also where another kernel does its work.
        let merges = workspace.decode_merges() && !planned.info().co_resident;
        // No CTA claims several units while others have none.
        let units = units / kernel.info().kv_heads;
        let share = (units + gpu.multiprocessors / 2) / gpu.multiprocessors;
        let partials = workspace.partials();
        let (items, record) = place(workspace, index, launch);
        let call = DecodeCall {
            spec,
            tile: DecodeTile {
                kernel,
                rows: planned.info().rows,
                run: launch.run.min(share.max(1)),
                long: launch.long,
            },
            items,
            rows: workspace.rows(),
            page_ids: match tensors.indices {
                Some(indices) => DeviceArray::new(indices.address, indices.len),
                None => workspace.page_ids(),
            },
            merges: workspace.merges(),
            merge_slots: workspace.merge_slots(),
            q: tensors.q,
            pool,
            out: tensors.out,
            lse: tensors.lse,
            partials: &partials,
            arrivals: merges.then(|| workspace.arrivals()),
            ticket: workspace.ticket(index),
            record,
            extras: self.extras(),
        };
        let mut step = gpu.prepare_decode(kernel, &call, &mut self.maps)?;
        if co_resident && !workspace.captured() {
            step.launch.grid[0] = units.min(match workspace.launch_plan.resident.decode {
                // Without prefills two find room on an SM, and have twice the bytes under way.
                0 => 2 * gpu.multiprocessors,
                resident => resident,
            });
        }
        Ok(step)
    }

    fn prefills(
        &mut self,
        index: usize,
        launch: &GroupLaunch,
        pool: &KvPool,
        arch: Option<Arch>,
    ) -> Result<Option<Step>, Error> {
        let (gpu, workspace, tensors) = (self.gpu, self.workspace, self.tensors);
        let (planned, captured) = (launch.key.kernel, workspace.captured());
        let converts = workspace.spec.converts();
        let extras = Extras {
            kv_heads_together: launch.kv_heads_together,
            scaled: converts && pool.scales != KvScales::One && !widens(&workspace.spec, pool),
            ..self.extras()
        };
        let kernel = match arch.or(workspace.options.arch) {
            Some(arch) => on(planned, arch)?,
            None => gpu.prefill_kernel(extras.kernel(planned)?),
        };
        let own_heads = has_own_heads(kernel, &workspace.spec);
        if !own_heads {
            self.pads_by(kernel)?;
        }
        let of_ampere = kernel.info().arch == Arch::Sm80;
        if converts && !widens(&workspace.spec, pool) {
            pool.scales.check_kernel(kernel.info())?;
        }
        let turns = workspace.spec.rotary.is_some();
        if converts && of_ampere {
            let what = match turns {
                true => "queries and keys turned by their positions",
                false => "keys and values of 8 bits",
            };
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: format!("{what}, and the instructions of Ampere"),
                there: "with these those of Hopper",
            });
        }
        // Only in one kernel with the decodes do those of Ampere read a record.
        if of_ampere && arch.is_none() && captured {
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: "a launch set and the instructions of Ampere".into(),
                there: "with a launch set those of Hopper, or prefill and decode in one",
            });
        }
        let partials = workspace.partials();
        let (items, record) = place(workspace, index, launch);
        let (converted, mut spec) = (workspace.converted_pool(), workspace.spec.on_kernels());
        if converts {
            spec.kv_dtype = converted.dtype;
        }
        let [q, out] = tensors.of_launch(own_heads);
        let mut extras = extras;
        if turns {
            spec.rotary = None;
            extras.values = describes_values(pool, &spec).then_some(*pool);
        }
        // With heads of its own dimension a launch writes beside padded ones, or else leaves no states: where there are
        // any, they are padded, too.
        let given = tensors.unpadded.filter(|_| own_heads);
        let beside_padded = given.is_some_and(|given| given.out.is_none());
        let leaves_states = given.is_none() || beside_padded;
        if own_heads {
            spec = workspace.spec;
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
            lse: tensors.lse,
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
        if let (Some(Parameters::Prefill(params, shapes)), true) = (parameters, converts) {
            if turns {
                let values = extras.values.is_none();
                shapes.source = Source::Turned { values };
                if !values {
                    params.convert.list = workspace.conversions().address;
                    params.convert.page_ids = workspace.page_ids().address;
                }
            } else if widens(&workspace.spec, pool) {
                shapes.source = Source::Widened;
            } else {
                shapes.source = Source::Converted;
                let pages = self.converted(launch);
                workspace.convert_for(params, pool, pages, tensors.q.shape[0])?;
            }
        }
        let resident = workspace.launch_plan.resident.prefill;
        if let (Some(step), 1.., false, false) = (&mut step, resident, captured, of_ampere) {
            step.launch.grid[0] = step.launch.grid[0].min(resident);
        }
        Ok(step)
    }

    /// The pages of 8-bit keys that a prefill's launch converts.
    fn converted(&self, launch: &GroupLaunch) -> Range<u32> {
        match self.workspace.captured() {
            true => 0..self.workspace.bound.converted_pages,
            false => launch.converted.clone(),
        }
    }

    /// What comes before a prefill whose keys have scales of their own, or are turned by their positions.
    fn before(&self, index: usize, launch: &GroupLaunch) -> Result<Option<Step>, Error> {
        let (workspace, part) = (self.workspace, launch.key.part as usize);
        let (gpu, pool) = (self.gpu, &self.tensors.pools[part]);
        if launch.key.kernel.info().op != Op::Prefill {
            return Ok(None);
        }
        let (_, record) = place(workspace, index, launch);
        let pages = self.converted(launch);
        let step = if workspace.spec.rotary.is_some() {
            gpu.prepare_turn(workspace, pool, pages, record)?
        } else if widens(&workspace.spec, pool) {
            gpu.prepare_widen(workspace, pool, pages, record, self.tensors.q.shape[0])?
        } else {
            return Ok(None);
        };
        Ok(Some(Step { part, ..step }))
    }

    fn extras(&self) -> Extras {
        Extras {
            scaled: false,
            sinks: self.tensors.sinks,
            ancestors: self.workspace.ancestors(),
            padding: Padding::of(&self.workspace.spec),
            gap: 0,
            kv_heads_together: 0,
            rotary: self.workspace.rotary(),
            values: None,
        }
    }

    /// Whether the heads, if they are padded, are loaded in a way that does.
    fn pads_by(&self, kernel: KernelId) -> Result<(), Error> {
        match Padding::of(&self.workspace.spec) {
            Some(padding) if kernel.info().loads == Loads::Rows => Err(Error::NoInstance {
                kernel: "attention",
                asked: format!(
                    "head dimension {} in pages that are read row by row",
                    padding.dim
                ),
                there: "those that read by tensor maps: pages of a multiple of 8 tokens, keys and values in one layout, on Hopper",
            }),
            _ => Ok(()),
        }
    }

    /// The merges that decode leaves: at most so many, and in a captured graph as many as the record at a place says.
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
            // Of the plans that a captured graph is to serve nothing is known.
            record.is_none().then_some(workspace.launch_plan.most_slots),
        )?;
        if let Parameters::Merge(params) = &mut step.parameters {
            params.add_up = workspace.spec.variant.adds_up.into();
        }
        Ok(step)
    }
}

/// Whether a kernel was compiled for heads that others pad.
pub(super) fn has_own_heads(kernel: KernelId, spec: &Spec) -> bool {
    Padding::of(spec).is_some_and(|padding| kernel.info().head_dim == padding.dim)
}

/// Whether prefills read keys that a launch before them multiplied by the scales of their tokens.
fn widens(spec: &Spec, pool: &KvPool) -> bool {
    spec.converts() && spec.compute == Compute::F16 && matches!(pool.scales, KvScales::Token { .. })
}

/// The kernel that does what a planned one does with the instructions of an architecture.
fn on(planned: KernelId, arch: Arch) -> Result<KernelId, Error> {
    planned.on(arch).ok_or_else(|| Error::NoInstance {
        kernel: "attention",
        asked: format!("what {planned} does, on {arch:?}"),
        there: "those that plans name",
    })
}

/// What no launch checks for itself.
fn check(workspace: &Workspace, tensors: &RunTensors<'_>) -> Result<(), Error> {
    let launch_plan = &workspace.launch_plan;
    let got = tensors.pools.len();
    // A graph has launches for parts that the plan at hand may lack, and for no more than there are pools.
    let set = workspace.options.launches.as_ref().map(LaunchSet::parts);
    let expected = launch_plan.parts.len().max(set.unwrap_or(0));
    if got < expected || got > expected && set.is_none() {
        return Err(Error::Pools { got, expected });
    }
    for (pool, needs) in tensors.pools.iter().zip(&launch_plan.parts) {
        let wrong = |dimension, got: u32, rule: String| Error::Extent {
            tensor: "the KV pool",
            dimension,
            got: got as usize,
            rule,
        };
        for page_size in [pool.k_strides.page_size, pool.v_strides.page_size] {
            if page_size != needs.page_size {
                let rule = format!("{}, as in the plan", needs.page_size);
                return Err(wrong("tokens in a page", page_size, rule));
            }
        }
        if pool.pages < needs.pages && tensors.indices.is_none() {
            let rule = format!("at least {}, for the plan's page ids", needs.pages);
            return Err(wrong("pages", pool.pages, rule));
        }
    }
    let spec = &workspace.spec;
    check_sinks(spec, tensors.sinks)?;
    check_indices(workspace, tensors)?;
    // What is converted was checked as it was given.
    let spec = &spec.on_kernels();
    for (tensor, got, expected) in [
        ("q", tensors.q.dtype, spec.q_dtype),
        ("out", tensors.out.dtype, spec.out_dtype),
    ] {
        if got != expected {
            return Err(Error::DtypesDiffer {
                tensor,
                got,
                other: "the spec's",
                expected,
            });
        }
    }
    let (tokens, total_q) = (tensors.q.shape[0], launch_plan.total_q as usize);
    let captured = workspace.captured();
    if tokens < total_q || (tokens > total_q && !captured) {
        let rule = match captured {
            true => format!("at least {total_q}, as the plan has"),
            false => format!("{total_q}, as the plan has"),
        };
        return Err(Error::Extent {
            tensor: "q",
            dimension: "tokens",
            got: tokens,
            rule,
        });
    }
    Ok(())
}

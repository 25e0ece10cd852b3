//! A whole plan on the GPU.

use kernels_gpu::{
    abi::{LaunchRecord, WorkItem},
    sm90::{prefill, slim},
};

use super::{
    DecodeCall, DecodeTile, DeviceArray, DeviceTensor, Family, Gpu, KvPool, LaunchKey, PrefillCall,
    Stream, Workspace, agenda::GroupLaunch, steps::Step,
};
use crate::{Error, plan::Kernel};

/// What a run computes from and to.
#[derive(Clone, Copy)]
struct Tensors<'a> {
    q: &'a DeviceTensor<3>,
    pools: &'a [KvPool],
    out: &'a DeviceTensor<3>,
    lse: Option<&'a DeviceTensor<2>>,
}

/// A launch of a group in a run.
#[derive(Clone, Copy)]
struct Group<'a> {
    workspace: &'a Workspace,
    tensors: &'a Tensors<'a>,
    /// Of the group's part.
    pool: &'a KvPool,
    launch: &'a GroupLaunch,
    /// Among the launches of the run.
    index: usize,
}

impl Group<'_> {
    fn items(&self) -> DeviceArray<WorkItem> {
        let offset = u64::from(self.launch.first) * size_of::<WorkItem>() as u64;
        let first = self.workspace.items().address + offset;
        DeviceArray::new(first, self.launch.items as usize)
    }

    /// In a captured graph, what says which items are the launch's.
    fn record(&self) -> Option<DeviceArray<LaunchRecord>> {
        let workspace = self.workspace;
        workspace.captured().then(|| workspace.record(self.index))
    }
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
    /// The same call on the CPU is [`Cpu::run`](crate::exec::Cpu::run).
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
        if !workspace.loaded {
            return Err(Error::NoPlan);
        }
        let tensors = Tensors { q, pools, out, lse };
        check(workspace, &tensors)?;
        if workspace.options.checks {
            // SAFETY: the caller's promise.
            unsafe { workspace.inspect(pools, q.shape[0], stream) }?;
        }
        let mut steps = std::mem::take(&mut workspace.steps);
        steps.clear();
        let prepared = self.prepare(workspace, &tensors, &mut steps);
        // SAFETY: the caller's promises.
        let launched =
            prepared.and_then(|()| unsafe { self.launch_steps(workspace, &steps, stream) });
        workspace.steps = steps;
        launched
    }

    /// All launches of the run, merging last.
    fn prepare(
        &self,
        workspace: &Workspace,
        tensors: &Tensors<'_>,
        steps: &mut Vec<Step>,
    ) -> Result<(), Error> {
        let agenda = &workspace.agenda;
        let Some(set) = &workspace.options.launches else {
            let pairs = match agenda.tickets {
                Some(_) => agenda.pairs(),
                None => Vec::new(),
            };
            self.prepare_groups(workspace, tensors, &agenda.launches, &pairs, steps)?;
            if agenda.left > 0 {
                let rows = DeviceArray::new(workspace.left_merges().address, agenda.left as usize);
                steps.push(Step::Merge(self.prepare_merge(
                    &workspace.partials(),
                    rows,
                    workspace.merge_slots(),
                    tensors.out,
                    tensors.lse,
                    None,
                )?));
            }
            return Ok(());
        };
        let launch = |&key| GroupLaunch {
            key,
            first: 0,
            items: workspace.bound.items,
            run: 1,
            long: false,
            // Whoever captures a graph with joint tiles in it says so by the plan at hand.
            joint: agenda.launches.iter().any(|launch| launch.joint),
        };
        let launches: Vec<_> = set.keys.iter().map(launch).collect();
        self.prepare_groups(workspace, tensors, &launches, &set.pairs, steps)?;
        if workspace.bound.merges > 0 {
            steps.push(Step::Merge(self.prepare_merge(
                &workspace.partials(),
                workspace.left_merges(),
                workspace.merge_slots(),
                tensors.out,
                tensors.lse,
                Some(workspace.record(set.keys.len())),
            )?));
        }
        Ok(())
    }

    /// The launches of all groups; those of a pair are one, where there is a kernel for that.
    fn prepare_groups(
        &self,
        workspace: &Workspace,
        tensors: &Tensors<'_>,
        launches: &[GroupLaunch],
        pairs: &[[usize; 2]],
        steps: &mut Vec<Step>,
    ) -> Result<(), Error> {
        let one_kernel = self.has_pod(&workspace.spec, tensors.q.dtype);
        let group = |index: usize, family| {
            self.prepare_group(workspace, tensors, index, &launches[index], family)
        };
        for index in 0..launches.len() {
            let pair = pairs
                .iter()
                .find(|pair| one_kernel && pair.contains(&index));
            let Some(&[prefill, decode]) = pair else {
                steps.extend(group(index, None)?);
                continue;
            };
            if index != prefill {
                continue;
            }
            let sm80 = Some(Family::Sm80);
            if let (Some(Step::PrefillGather(prefill)), Some(Step::DecodeGather(decode))) =
                (group(prefill, sm80)?, group(decode, sm80)?)
            {
                let tickets = workspace.agenda.tickets;
                let tickets = tickets
                    .filter(|_| !workspace.captured())
                    .map_or([0; 2], Into::into);
                let (prefill, decode) = (prefill.parameters, decode.parameters);
                let counters = workspace.counters();
                let (spec, dtype) = (&workspace.spec, tensors.q.dtype);
                let pod = self.prepare_pod(spec, dtype, prefill, decode, tickets, counters);
                steps.extend(pod.map(Step::Pod));
            }
        }
        Ok(())
    }

    /// A launch of a group, by the kernels of a family, or those that suit it best. None where the batch has not its
    /// part.
    fn prepare_group(
        &self,
        workspace: &Workspace,
        tensors: &Tensors<'_>,
        index: usize,
        launch: &GroupLaunch,
        family: Option<Family>,
    ) -> Result<Option<Step>, Error> {
        let Some(pool) = tensors.pools.get(launch.key.part as usize) else {
            return Ok(None);
        };
        let group = Group {
            workspace,
            tensors,
            pool,
            launch,
            index,
        };
        match launch.key.kernel {
            Kernel::Decode => self.prepare_decodes(&group, family).map(Some),
            Kernel::Prefill => self.prepare_prefills(&group, family),
        }
    }

    fn prepare_decodes(&self, group: &Group<'_>, family: Option<Family>) -> Result<Step, Error> {
        let Group {
            workspace,
            tensors,
            pool,
            launch,
            index,
        } = *group;
        let (spec, tile) = (&workspace.spec, launch.key.tile);
        let beside = (tile.m, tile.n) == (slim::SHAPE.rows, slim::SHAPE.keys);
        let merges = workspace.decode_merges() && !beside;
        // No CTA claims several units while others have none.
        let units = launch.items.saturating_mul(spec.kv_heads);
        let share = (units + self.multiprocessors / 2) / self.multiprocessors;
        let partials = workspace.partials();
        let call = DecodeCall {
            spec,
            tile: DecodeTile {
                rows: tile.m,
                run: launch.run.min(share.max(1)),
                long: launch.long,
                beside: beside.then(|| memory_beside(workspace)),
            },
            items: group.items(),
            rows: workspace.rows(),
            page_ids: workspace.page_ids(),
            merges: workspace.merges(),
            merge_slots: workspace.merge_slots(),
            q: tensors.q,
            pool,
            out: tensors.out,
            lse: tensors.lse,
            partials: &partials,
            arrivals: merges.then(|| workspace.arrivals()),
            ticket: workspace.ticket(index),
            record: group.record(),
        };
        let family = family.or(workspace.options.family);
        let family = family.unwrap_or_else(|| self.decode_family(spec, pool));
        if family == Family::Sm80 && launch.joint {
            return Err(Error::NoInstance {
                kernel: "decode",
                asked: "joint tiles over a pool that tensor maps cannot describe".into(),
                there: "with such pools plans of a device description without `decode.joint`",
            });
        }
        let seats = workspace.agenda.seats.decode;
        Ok(match self.prepare_decode(family, &call)? {
            Step::Decode(mut step) if beside => {
                if !workspace.captured() && seats > 0 {
                    step.launch.grid[0] = units.min(seats);
                }
                Step::Beside(step)
            }
            step => step,
        })
    }

    fn prepare_prefills(
        &self,
        group: &Group<'_>,
        family: Option<Family>,
    ) -> Result<Option<Step>, Error> {
        let Group {
            workspace,
            tensors,
            pool,
            launch,
            index,
        } = *group;
        let partials = workspace.partials();
        let call = PrefillCall {
            spec: &workspace.spec,
            tile: launch.key.tile,
            pack: launch.key.pack,
            items: group.items(),
            page_ids: workspace.page_ids(),
            q: tensors.q,
            pool,
            out: tensors.out,
            lse: tensors.lse,
            partials: Some(&partials),
            ticket: workspace.ticket(index),
            record: group.record(),
        };
        let chosen = family.or(workspace.options.family);
        let chosen = chosen.unwrap_or_else(|| self.prefill_family(&call));
        let captured = workspace.captured();
        // Only in one kernel with the decodes do those of Ampere read a record.
        if chosen == Family::Sm80 && family.is_none() && captured {
            return Err(Error::NoInstance {
                kernel: "prefill",
                asked: "a launch set and the instructions of Ampere".into(),
                there: "with a launch set those of Hopper, or prefill and decode in one",
            });
        }
        let mut step = self.prepare_prefill(chosen, &call)?;
        let seats = workspace.agenda.seats.prefill;
        if let (Some(Step::Prefill(step)), 1.., false) = (&mut step, seats, captured) {
            step.launch.grid[0] = step.launch.grid[0].min(seats);
        }
        Ok(step)
    }
}

/// Shared memory of the prefills beside which decodes run: the plan's, or those a captured graph may meet.
fn memory_beside(workspace: &Workspace) -> u32 {
    let is = |shape: &prefill::Shape, &LaunchKey { kernel, tile, .. }: &LaunchKey| {
        kernel == Kernel::Prefill && (tile.m, tile.n) == (shape.rows(), shape.keys)
    };
    let meets = |shape: &&prefill::Shape| match &workspace.options.launches {
        Some(set) => set.keys().iter().any(|key| is(shape, key)),
        None => (workspace.agenda.launches.iter()).any(|launch| is(shape, &launch.key)),
    };
    let shapes = prefill::Shape::ALL.iter().filter(|shape| shape.beside);
    let bytes = shapes.filter(meets).map(prefill::Shape::shared_bytes);
    bytes.max().unwrap_or(0)
}

/// What no launch checks for itself.
fn check(workspace: &Workspace, tensors: &Tensors<'_>) -> Result<(), Error> {
    let agenda = &workspace.agenda;
    if tensors.pools.len() != agenda.parts.len() {
        return Err(Error::Pools {
            got: tensors.pools.len(),
            expected: agenda.parts.len(),
        });
    }
    for (pool, needs) in tensors.pools.iter().zip(&agenda.parts) {
        let page_size = pool.k_strides.page_size;
        let wrong = |dimension, got: u32, rule: String| Error::Extent {
            tensor: "the KV pool",
            dimension,
            got: got as usize,
            rule,
        };
        if page_size != needs.page_size {
            let rule = format!("{}, as in the plan", needs.page_size);
            return Err(wrong("tokens in a page", page_size, rule));
        }
        if pool.pages < needs.pages {
            let rule = format!("at least {}, for the plan's page ids", needs.pages);
            return Err(wrong("pages", pool.pages, rule));
        }
    }
    let spec = &workspace.spec;
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
    let (tokens, total_q) = (tensors.q.shape[0], agenda.total_q as usize);
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

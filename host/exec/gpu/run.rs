//! Running a whole plan on the GPU, and the checks before its launches.

mod conversions;
mod decodes;
mod making;
mod prefills;

use self::making::Making;
use super::{
    DeviceTensor, Gpu, KvPool, Stream, Workspace, captured,
    driver::Current,
    indices::check_indices,
    launch_set::LaunchSet,
    steps::{Run, RunTensors, Step, check_own, check_sinks},
};
use crate::{
    Error,
    checks::{check_same, extent},
    kv::check_heads,
};

impl Gpu {
    /// Computes the attention of the plan that was [uploaded](Workspace::upload) last, with the variant of its spec.
    ///
    /// - `q`: `[total_q, q_heads, head_dim_qk]`; the heads of a token are adjacent, the token stride is any multiple of 8
    /// - `pools`: one for each part of the batch
    /// - `out`: `[total_q, q_heads, head_dim_v]`, likewise
    /// - `lse`: `[total_q, q_heads]` F32, natural log, if it is needed
    ///
    /// A query that sees no key gives output 0 and LSE −∞. The same plan gives the same bits in every run.
    ///
    /// The call does not wait and, outside a capture, allocates nothing. It can be captured in a CUDA graph. With a
    /// [launch set](super::WorkspaceOptions::launches) the graph runs the plan that is in the workspace when
    /// it is launched, and `q`, `out` and `lse` may have more tokens than this plan. Capture them with the most tokens that
    /// any plan of the graph will have: [`Graph::launch`](super::Graph::launch) refuses a plan with more. Rows of `out` behind the
    /// tokens of the plan keep their contents, unless kernels pad the heads (such as 48 or 112): then a launch that does not know the
    /// plan writes all rows of `out`, and those behind the plan's tokens have any numbers.
    ///
    /// The same call on the CPU is [`Cpu::run`](crate::Cpu::run). If the variant of the spec needs data for
    /// each head, such as sinks, use [`Gpu::run_with`].
    ///
    /// # Safety
    /// - All tensors are in this GPU's memory as described, until the work on `stream` is done. Nothing else reads or writes the
    ///   outputs meanwhile.
    /// - The plan is as a [`Planner`](crate::plan::Planner) made it.
    /// - `stream` is a stream of the device's primary context, or null (the default stream). Its work is ordered after
    ///   the upload and after earlier runs of this workspace, and before later runs, also those by `run_and_wait` of the
    ///   feature `cust`, which is safe to call. A graph is not launched after `self` or the workspace was dropped. A graph
    ///   that was not captured by [`OwnedStream::capture`](super::OwnedStream::capture)
    ///   is not launched with a plan of more query tokens than `q`, `out` and `lse` had then, nor with one whose pages
    ///   the pools of then do not have, nor with one that needs launches which
    ///   [`Workspace::launch_only_needed`] left out then, nor, without a launch set, with one whose launches, items or
    ///   merges are not as many as those of the plan of then.
    ///
    /// # Errors
    /// Before anything is launched: [`Error::OtherGpu`] for a workspace of another GPU, [`Error::NoPlan`], [`Error::Pools`],
    /// [`Error::NoInstance`] if no kernel was compiled for a launch, or the variant of the error for what is wrong with a
    /// tensor; in debug mode also [`Error::PageOutside`], [`Error::Damaged`] and [`Error::InCapture`]. [`Error::Driver`] if a launch fails.
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

    /// [`Gpu::run`] with the data of the variant, such as sinks. Exactly the data that the spec of the plan needs must be given.
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
        // A device has one primary context, so that several `Gpu`s of it may share a workspace.
        let (own, of_workspace) = (self.context.device(), workspace.context.device());
        if own != of_workspace {
            return Err(Error::OtherGpu {
                workspace: of_workspace.unsigned_abs(),
                gpu: own.unsigned_abs(),
            });
        }
        workspace.uploaded.check()?;
        // Tensor maps are also made in this context, whatever context the thread has.
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the caller's promises.
        unsafe {
            if let Some(padding) = workspace.pads() {
                self.run_padded(workspace, &padding, tensors, stream)?;
            } else if workspace.spec.rounds_queries() || workspace.spec.has_f32_outputs() {
                self.run_in_f32(workspace, tensors, stream)?;
            } else {
                self.ready(workspace, tensors, stream)?;
                self.launch_run(workspace, stream)?;
            }
        }
        let (launched, of_pairs) = (workspace.launched(), workspace.run.reads_pairs());
        captured::note(&workspace.uploaded, launched, of_pairs, tensors, stream);
        Ok(())
    }

    /// Checks and prepares everything before the launches.
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
            run.arrange(self, &workspace.launch_plan, workspace.captured(), tensors);
        }
        (workspace.run, workspace.maps) = (run, maps);
        made
    }

    /// Launches a run on the caller's stream, or also on a second stream that forks from it and joins it again.
    ///
    /// # Safety
    /// - The memory of the workspace's run is valid, and stays so until the work on the stream is done.
    /// - The stream is one of this context, which is current.
    pub(super) unsafe fn launch_run(
        &self,
        workspace: &Workspace,
        stream: Stream,
    ) -> Result<(), Error> {
        let run = &workspace.run;
        let (before, rest) = run.steps.split_at(run.before);
        let (first, rest) = rest.split_at(run.first);
        let (aside, behind) = rest.split_at(run.aside);
        let own = run.own.as_ptr().cast();
        let launch = |steps: &[Step], stream| {
            let mut steps = steps.iter();
            // SAFETY: the caller's promises; the kernel's variant has as many bytes of its own.
            steps.try_for_each(|step| unsafe { step.make(own, stream) })
        };
        if aside.is_empty() {
            return launch(run.steps.as_slice(), stream);
        }
        launch(before, stream)?;
        let (lane, done) = (workspace.lane.raw(), &workspace.done);
        // SAFETY: the caller's promises.
        unsafe {
            workspace.fork.record(stream)?;
            workspace.fork.hold(lane)?;
        }
        let launched = launch(first, stream).and_then(|()| launch(aside, lane));
        // Also after an error: later work on the caller's stream must wait for the work on the second stream.
        // SAFETY: as above.
        let joined = unsafe { done.record(lane).and_then(|()| done.hold(stream)) };
        launched.and(joined)?;
        launch(behind, stream)
    }
}

/// Checks what no single launch checks.
fn check(workspace: &Workspace, tensors: &RunTensors<'_>) -> Result<(), Error> {
    let launch_plan = &workspace.launch_plan;
    let got = tensors.pools.len();
    // A graph may have launches for parts that this plan lacks, but not for more parts than there are pools.
    let set = workspace.options.launches.as_ref().map(LaunchSet::parts);
    let expected = launch_plan.parts.len().max(set.unwrap_or(0));
    if got < expected || got > expected && set.is_none() {
        return Err(Error::Pools { got, expected });
    }
    let launched = workspace.launched();
    let of_set = workspace.options.launches.iter();
    let of_set = of_set.flat_map(|set| &set.keys).enumerate();
    let of_set = of_set.filter(|&(place, _)| launched.has(place));
    for (part, pool) in tensors.pools[..expected].iter().enumerate() {
        let wrong = |dimension, got: u32, rule: String| {
            extent("the KV pool", dimension, got as usize, rule)
        };
        let planned = launch_plan.launches.iter().map(|launch| &launch.key);
        let mut keys = planned.chain(of_set.clone().map(|(_, key)| key));
        let key = keys.find(|key| key.part as usize == part);
        let needs = launch_plan.parts.get(part);
        if key.is_none() && needs.is_none() {
            continue;
        }
        pool.check_dtype(&workspace.spec)?;
        let spec = workspace.spec.times(key.map_or(1, |key| key.heads));
        check_heads(&spec, pool.k_strides, part)?;
        // Without launches of the part, nothing says how many heads it has.
        if key.is_some() {
            pool.check_heads(&spec)?;
        }
        pool.check_rope(&workspace.spec, part)?;
        // Launches of a part that this plan lacks read its pool for later plans.
        let Some(needs) = needs else {
            pool.tokens_of_page(part)?;
            continue;
        };
        for page_size in [pool.k_strides.page_size, pool.v_strides.page_size] {
            if page_size != needs.page_size {
                let rule = format!("{}, as in the plan", needs.page_size);
                return Err(wrong("tokens in a page", page_size, rule));
            }
        }
        if pool.pages < needs.pages && launch_plan.indices.is_none() {
            let rule = format!("at least {}, for the plan's page ids", needs.pages);
            return Err(wrong("pages", pool.pages, rule));
        }
    }
    let spec = &workspace.spec;
    check_sinks(spec, tensors.sinks)?;
    check_indices(workspace, tensors)?;
    // Tensors that are converted were checked before.
    let spec = &spec.on_kernels();
    check_same("q", tensors.q.dtype, "the spec's", spec.q_dtype)?;
    check_same("out", tensors.out.dtype, "the spec's", spec.out_dtype)?;
    let (tokens, total_q) = (tensors.q.shape[0], launch_plan.total_q as usize);
    let captured = workspace.captured();
    if tokens < total_q || (tokens > total_q && !captured) {
        let rule = match captured {
            true => format!("at least {total_q}, as the plan has"),
            false => format!("{total_q}, as the plan has"),
        };
        return Err(extent("q", "tokens", tokens, rule));
    }
    // Attention checks this, too, but a run may have only merges. Their kernel takes rows by the numbers of the plan.
    let out = tensors.merged.unwrap_or(tensors.out);
    out.check_extent("out", "tokens", 0, tokens, "in q")?;
    tensors.lse.map_or(Ok(()), |lse| {
        lse.check_extent("lse", "tokens", 0, tokens, "in q")
    })
}

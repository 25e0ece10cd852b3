//! The memory of a run: a plan's arrays, partial states and counters, at fixed addresses.

mod arrays;
mod options;
mod upload;

use std::fmt;

pub use self::options::WorkspaceOptions;
use super::{
    DeviceArray, Gpu,
    captured::Uploaded,
    inspect::Known,
    launch_plan::LaunchPlan,
    launch_set::LaunchSubset,
    maps::Maps,
    registry::has_own_heads,
    resources::{DeviceMemory, OwnedEvent, OwnedStream, PinnedMemory, PrimaryContext},
    steps::Run,
};
use crate::{
    Error,
    plan::{Bound, MAX_LAUNCHES, MergeMode, PlanError, WorkspaceLayout, check_fused},
    problem::{Padding, Spec},
};

/// Maximum number of pending copies of plans. A further copy waits for the first of them.
const IN_FLIGHT: usize = 4;

/// The memory, streams and events that one thread needs to run plans. All are allocated when it is made.
///
/// [`upload`](Self::upload) copies a plan to the device once per step, and [`Gpu::run`] runs it once per
/// layer.
pub struct Workspace {
    pub(super) spec: Spec,
    pub(super) bound: Bound,
    pub(super) layout: WorkspaceLayout,
    pub(super) options: WorkspaceOptions,
    pub(super) launch_plan: LaunchPlan,
    /// What its plan needs, also for graphs.
    pub(super) uploaded: Uploaded,
    /// Whether runs leave out the launches of the launch set that the plan does not need.
    only_needed: bool,
    pub(super) run: Run,
    /// Whether a graph was captured without a kernel for joint tiles, although its plan names one.
    pub(super) one_table: bool,
    pub(super) maps: Maps,
    pub(super) fork: OwnedEvent,
    /// A stream beside the caller's, for the decodes that a plan wants to overlap with its prefills.
    pub(super) lane: OwnedStream,
    pub(super) done: OwnedEvent,
    known: Known,
    staging: Vec<Staging>,
    next: usize,
    memory: DeviceMemory,
    // Last, so that everything that lives in it is dropped before.
    pub(super) context: PrimaryContext,
}

/// Host memory from which a plan is copied to the device.
struct Staging {
    memory: PinnedMemory,
    copied: OwnedEvent,
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The driver may still copy from this memory. A device that is lost copies no more.
        let _ = self.copied.wait();
    }
}

/// Each launch of a run has a ticket of its own.
fn check_launches(launches: usize) -> Result<(), Error> {
    if launches > MAX_LAUNCHES as usize {
        return Err(Error::LaunchLimit {
            kernel: "a run".into(),
            what: "launches",
            got: launches as u64,
            limit: MAX_LAUNCHES.into(),
        });
    }
    Ok(())
}

impl Gpu {
    /// Allocates a workspace for plans within a bound ([`Bound::new`] gives one for limits on batches).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`], [`Error::LaunchLimit`] if the launch set is
    /// larger than `MAX_LAUNCHES`.
    pub fn workspace(
        &self,
        spec: &Spec,
        bound: &Bound,
        options: WorkspaceOptions,
    ) -> Result<Workspace, Error> {
        spec.check()?;
        if let Some(set) = &options.launches
            && set.merge_mode == MergeMode::Fused
        {
            let kernels = set.keys.iter().map(|key| key.kernel);
            check_fused(spec, &self.name, kernels).map_err(PlanError::from)?;
        }
        let launches = options.launches.as_ref().map_or(0, |set| set.keys.len());
        check_launches(launches)?;
        let context = PrimaryContext::retain(self.device)?;
        let raw = context.raw();
        let layout = WorkspaceLayout::new(spec, bound);
        let staging = || -> Result<Staging, Error> {
            Ok(Staging {
                memory: PinnedMemory::zeroed(raw, layout.upload_bytes as usize)?,
                copied: OwnedEvent::new(raw)?,
            })
        };
        let staging = (0..IN_FLIGHT)
            .map(|_| staging())
            .collect::<Result<_, _>>()?;
        let memory = DeviceMemory::zeroed(raw, layout.bytes as usize)?;
        if let Some(rope) = spec.rotary {
            let table = rope.table()?;
            let (turns, _) = table.parts();
            memory.write(layout.turns.start, bytemuck::cast_slice(turns))?;
        }
        Ok(Workspace {
            spec: *spec,
            bound: *bound,
            uploaded: Uploaded::new(options.launches.as_ref()),
            options,
            launch_plan: LaunchPlan::default(),
            only_needed: false,
            run: Run::default(),
            one_table: false,
            maps: Maps::default(),
            fork: OwnedEvent::new(raw)?,
            lane: OwnedStream::new(&context)?,
            done: OwnedEvent::new(raw)?,
            known: Known::default(),
            staging,
            next: 0,
            memory,
            layout,
            context,
        })
    }
}

impl Workspace {
    /// Whether decodes merge their states where they can.
    pub(super) fn decode_merges(&self) -> bool {
        match &self.options.launches {
            Some(set) => set.merge_mode == MergeMode::Fused,
            None => self.launch_plan.merging.fused,
        }
    }

    /// Whether its runs are for captured graphs that run several plans, one after the other.
    pub(super) fn captured(&self) -> bool {
        self.options.launches.is_some()
    }

    /// The launches of its launch set that the uploaded plan needs: those with work, and the merging kernel if it has
    /// merges. None of them without a plan or a launch set.
    ///
    /// Each launch of the set is a bit, in their order; the merging kernel is the next. Use this number as the key of
    /// graphs: a graph that was captured with the needed launches of one plan runs all plans that need the same launches,
    /// or fewer. See [`launch_only_needed`](Self::launch_only_needed).
    #[must_use]
    pub fn needed_launches(&self) -> u128 {
        self.uploaded.launches().bits()
    }

    /// Until the next upload, runs make only the launches of the launch set that the uploaded plan needs. A graph that
    /// captures them saves about two microseconds for each of the others, in every layer. It runs other plans, too;
    /// [`Graph::launch`](super::Graph::launch) refuses a plan that needs a launch which was left out. No call checks this for
    /// graphs that were captured by other means than [`OwnedStream::capture`](super::OwnedStream::capture) and
    /// [`Gpu::capture`].
    ///
    /// Graphs that were captured before stay valid. An [upload](Self::upload) ends this: after it, runs make all launches
    /// of the set again. Without a launch set, runs are as before.
    ///
    /// ```no_run
    /// # use std::collections::{HashMap, hash_map::Entry};
    /// # use tandem_attn::{Error, gpu::{Graph, OwnedStream, Stream, Workspace}, plan::Plan};
    /// # fn step(workspace: &mut Workspace, plan: &Plan, stream: &OwnedStream, graphs: &mut HashMap<u128, Graph>,
    /// # layers: impl Fn(&mut Workspace, Stream) -> Result<(), Error>) -> Result<(), Error> {
    /// unsafe { workspace.upload(plan, **stream)? };
    /// let graph = match graphs.entry(workspace.needed_launches()) {
    ///     Entry::Occupied(known) => known.into_mut(),
    ///     Entry::Vacant(place) => {
    ///         workspace.launch_only_needed();
    ///         place.insert(stream.capture(|stream| layers(workspace, stream))?)
    ///     }
    /// };
    /// unsafe { graph.launch(**stream) }
    /// # }
    /// ```
    pub fn launch_only_needed(&mut self) {
        self.only_needed = true;
        self.run.forget();
    }

    /// The launches of the launch set that runs make.
    pub(super) fn launched(&self) -> LaunchSubset {
        match self.only_needed && self.captured() {
            true => self.uploaded.launches(),
            false => LaunchSubset::ALL,
        }
    }

    /// The specification for which it was made.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// The bound of its plans.
    #[must_use]
    pub const fn bound(&self) -> &Bound {
        &self.bound
    }

    /// Its device memory, for inspection. Arrivals, tickets and counters are zero when no run is active. Everything
    /// else is written before it is read.
    #[must_use]
    pub fn memory(&self) -> DeviceArray<u8> {
        DeviceArray::new(self.memory.address(), self.layout.bytes as usize)
    }

    /// The layout of its arrays.
    #[must_use]
    pub const fn layout(&self) -> &WorkspaceLayout {
        &self.layout
    }

    /// How heads are padded. None if all kernels of the current plan, or of the captured graph, were compiled for these
    /// heads.
    pub(super) fn pads(&self) -> Option<Padding> {
        let own = |kernel| has_own_heads(kernel, &self.spec);
        let all_own = match &self.options.launches {
            Some(set) => {
                let launched = self.launched();
                let mut keys = set.keys.iter().enumerate();
                keys.all(|(place, key)| !launched.has(place) || own(key.kernel))
            }
            None => {
                let mut launches = self.launch_plan.launches.iter();
                launches.all(|launch| own(launch.key.kernel))
            }
        };
        Padding::of(&self.spec).filter(|_| !all_own)
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace")
            .field("spec", &self.spec)
            .field("bound", &self.bound)
            .field("options", &self.options)
            .field("bytes", &self.layout.bytes)
            .finish_non_exhaustive()
    }
}

// All its resources belong to a context, not to a thread, and its launches are plain data.
const _: fn() = || {
    const fn sendable<T: Send>() {}
    sendable::<Workspace>();
};

//! The memory of a run: a plan's arrays, partial states and counters, at addresses that never change.

mod upload;

use std::{fmt, ops::Range};

use kernels_gpu::abi::{ConvertedPage, LaunchRecord, MergeRow, QueryRow, RotaryParams, WorkItem};

use super::{
    Arch, DeviceArray, DeviceTensor, Gpu, PartialStates,
    inspect::Known,
    launch_plan::LaunchPlan,
    launch_set::LaunchSet,
    maps::Maps,
    resources::{DeviceMemory, OwnedEvent, OwnedStream, PinnedMemory, PrimaryContext},
    run::has_own_heads,
    steps::Run,
};
use crate::{
    Error,
    plan::{Bound, MAX_LAUNCHES, MergeMode, PlanError, Unsupported, WorkspaceLayout},
    problem::{Dtype, Padding, Spec},
    step::Pairing,
};

/// How a workspace's plans run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceOptions {
    /// Runs all attention with the instructions of an architecture, whatever the plan says; none: as it says, and where
    /// tensor maps cannot describe a pool by the kernels of Ampere that do the same.
    pub arch: Option<Arch>,
    /// For CUDA graphs that serve one plan after the other: every [`Gpu::run`] makes these launches, whatever
    /// the plan, and what each of them has to do is read from the workspace. None: a run makes the launches
    /// that its plan needs, and a graph of it is good for that plan.
    pub launches: Option<LaunchSet>,
    /// Debug mode: every run first waits for the stream, reads the plan back from the device and checks page
    /// ids, lengths and indices, so that damage is reported by request and page instead of as an illegal
    /// access. Such runs cannot be captured.
    pub checks: bool,
}

impl WorkspaceOptions {
    /// With all attention by the instructions of an architecture, or by the kernels that plans name.
    #[must_use]
    pub fn with_arch(mut self, arch: impl Into<Option<Arch>>) -> Self {
        self.arch = arch.into();
        self
    }

    /// With these launches in every run.
    #[must_use]
    pub fn with_launches(mut self, launches: impl Into<Option<LaunchSet>>) -> Self {
        self.launches = launches.into();
        self
    }

    /// With the debug mode on or off.
    #[must_use]
    pub const fn with_checks(mut self, checks: bool) -> Self {
        self.checks = checks;
        self
    }
}

/// Copies of plans under way at most, before a further one waits for the first.
const IN_FLIGHT: usize = 4;

/// What one thread needs to run plans: memory, streams and events, all allocated here.
///
/// A plan is brought to the device by [`upload`](Self::upload) once a step, and run by [`Gpu::run`] once a
/// layer.
pub struct Workspace {
    pub(super) spec: Spec,
    pub(super) bound: Bound,
    pub(super) layout: WorkspaceLayout,
    pub(super) options: WorkspaceOptions,
    pub(super) launch_plan: LaunchPlan,
    pub(super) loaded: bool,
    pub(super) run: Run,
    /// A graph was captured that has no kernel for joint tiles where plans name one.
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
    // Behind everything that lives in it.
    pub(super) context: PrimaryContext,
}

/// A plan on its way to the device.
struct Staging {
    memory: PinnedMemory,
    copied: OwnedEvent,
}

impl Drop for Staging {
    fn drop(&mut self) {
        // The driver may still copy from it. A device that is lost copies no more.
        let _ = self.copied.wait();
    }
}

/// Each launch of a run has a ticket of its own.
fn check_launches(launches: usize) -> Result<(), Error> {
    if launches > MAX_LAUNCHES as usize {
        return Err(Error::LaunchLimit {
            kernel: "a run",
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
    /// [`Error::Driver`] where there is not enough memory, [`Error::LaunchLimit`] where the launch set is
    /// larger than `MAX_LAUNCHES`.
    pub fn workspace(
        &self,
        spec: &Spec,
        bound: &Bound,
        options: WorkspaceOptions,
    ) -> Result<Workspace, Error> {
        spec.check()?;
        let fused = |set: &LaunchSet| set.merge_mode == MergeMode::Fused;
        let fused = options.launches.as_ref().is_some_and(fused);
        if fused && spec.has_f32_outputs() {
            let device = self.name.clone();
            return Err(PlanError::from(Unsupported::FusedF32 { device }).into());
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
            options,
            launch_plan: LaunchPlan::default(),
            loaded: false,
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
    /// Whether the decodes of a launch merge what they can.
    pub(super) fn decode_merges(&self) -> bool {
        match &self.options.launches {
            Some(set) => set.merge_mode == MergeMode::Fused,
            None => self.launch_plan.fused,
        }
    }

    /// Whether its runs are for graphs that serve one plan after the other.
    pub(super) fn captured(&self) -> bool {
        self.options.launches.is_some()
    }

    /// What it was made for.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
    }

    /// What plans of it may need.
    #[must_use]
    pub const fn bound(&self) -> &Bound {
        &self.bound
    }

    /// Its memory on the device, to look at. Arrivals, tickets and counters are zero whenever no run is under way; all
    /// else is written before it is read.
    #[must_use]
    pub fn memory(&self) -> DeviceArray<u8> {
        DeviceArray::new(self.memory.address(), self.layout.bytes as usize)
    }

    /// Where its arrays lie.
    #[must_use]
    pub const fn layout(&self) -> &WorkspaceLayout {
        &self.layout
    }

    fn array<T>(&self, range: &Range<u64>) -> DeviceArray<T> {
        let len = (range.end - range.start) as usize / size_of::<T>();
        DeviceArray::new(self.memory.address() + range.start, len)
    }

    pub(super) fn items(&self) -> DeviceArray<WorkItem> {
        self.array(&self.layout.items)
    }

    pub(super) fn rows(&self) -> DeviceArray<QueryRow> {
        self.array(&self.layout.rows)
    }

    pub(super) fn merges(&self) -> DeviceArray<MergeRow> {
        self.array(&self.layout.merges)
    }

    pub(super) fn left_merges(&self) -> DeviceArray<MergeRow> {
        self.array(&self.layout.left_merges)
    }

    pub(super) fn merge_slots(&self) -> DeviceArray<u32> {
        self.array(&self.layout.merge_slots)
    }

    pub(super) fn page_ids(&self) -> DeviceArray<u32> {
        self.array(&self.layout.page_ids)
    }

    /// What prefills convert.
    pub(super) fn conversions(&self) -> DeviceArray<ConvertedPage> {
        self.array(&self.layout.conversions)
    }

    pub(super) fn converted_ids(&self) -> DeviceArray<u32> {
        self.array(&self.layout.converted_ids)
    }

    /// Addresses of the converted keys, of their values, of their flags and of what CTAs share that work by.
    pub(super) fn converted(&self) -> [u64; 4] {
        let [k, v] = &self.layout.converted;
        [
            k,
            v,
            &self.layout.converted_done,
            &self.layout.conversion_control,
        ]
        .map(|range| self.memory.address() + range.start)
    }

    /// Of the plan at hand; in captured launches of every plan, which then all have some.
    pub(super) fn ancestors(&self) -> Option<DeviceArray<u64>> {
        let some = match self.captured() {
            true => self.bound.ancestors > 0,
            false => self.launch_plan.trees,
        };
        some.then(|| self.array(&self.layout.ancestors))
    }

    /// How decodes turn queries and keys, and what comes before prefills; nothing where nobody does.
    pub(super) fn rotary(&self) -> RotaryParams {
        let Some(rope) = self.spec.rotary else {
            return RotaryParams::default();
        };
        let magnitude = rope.magnitude();
        RotaryParams {
            turns: self.memory.address() + self.layout.turns.start,
            pairs: rope.dim / 2,
            interleaved: (rope.pairing == Pairing::Interleaved).into(),
            gain: (magnitude * magnitude) as f32,
            reserved: [0; 3],
        }
    }

    /// Room for queries of so many tokens in 16 bits, rounded.
    pub(super) fn queries(&self, tokens: usize) -> Result<DeviceTensor<3>, Error> {
        let most = self.bound.padded_tokens as usize;
        if tokens > most {
            return Err(Error::Extent {
                tensor: "q",
                dimension: "tokens",
                got: tokens,
                rule: format!("at most {most}, those of the bound: its queries are rounded"),
            });
        }
        let spec = self.spec.on_kernels();
        let shape = [tokens, spec.q_heads as usize, spec.head_dim_qk as usize];
        let address = self.memory.address() + self.layout.padded[0].start;
        Ok(DeviceTensor::new(address, spec.q_dtype, shape))
    }

    /// An output in 16 bits for kernels that write partial states alone.
    pub(super) fn never_written(&self, tokens: usize) -> DeviceTensor<3> {
        let spec = self.spec.on_kernels();
        let shape = [tokens, spec.q_heads as usize, spec.head_dim_v as usize];
        let address = self.memory.address() + self.layout.partial_out.start;
        DeviceTensor::new(address, spec.out_dtype, shape)
    }

    /// Room for queries and outputs of so many tokens whose heads are padded.
    pub(super) fn padded(
        &self,
        tokens: usize,
        dtype: Dtype,
    ) -> Result<[DeviceTensor<3>; 2], Error> {
        let most = self.bound.padded_tokens as usize;
        if tokens > most {
            return Err(Error::Extent {
                tensor: "q",
                dimension: "tokens",
                got: tokens,
                rule: format!("at most {most}, those of the bound: its heads are padded"),
            });
        }
        let Spec {
            q_heads,
            head_dim_v,
            ..
        } = self.spec.on_kernels();
        let shape = [tokens, q_heads as usize, head_dim_v as usize];
        let tensor = |range: &Range<u64>| {
            DeviceTensor::new(self.memory.address() + range.start, dtype, shape)
        };
        Ok(self.layout.padded.each_ref().map(tensor))
    }

    pub(super) fn arrivals(&self) -> DeviceArray<u32> {
        self.array(&self.layout.arrivals)
    }

    /// The ticket of a launch.
    pub(super) fn ticket(&self, launch: usize) -> DeviceArray<u32> {
        let tickets = self.memory.address() + self.layout.tickets.start;
        DeviceArray::new(tickets + launch as u64 * 4, 1)
    }

    /// What CTAs of a kernel that has prefill and decode in one count with.
    pub(super) fn counters(&self) -> DeviceArray<u32> {
        self.array(&self.layout.counters)
    }

    /// The record of a captured launch.
    pub(super) fn record(&self, launch: usize) -> DeviceArray<LaunchRecord> {
        let records = self.memory.address() + self.layout.records.start;
        DeviceArray::new(records + (launch * size_of::<LaunchRecord>()) as u64, 1)
    }

    /// How heads are padded, unless all launches of the plan at hand, or of the captured graph, are by kernels that were
    /// compiled for them.
    pub(super) fn pads(&self) -> Option<Padding> {
        let own = |kernel| has_own_heads(kernel, &self.spec);
        let all_own = match &self.options.launches {
            Some(set) => set.keys.iter().all(|key| own(key.kernel)),
            None => {
                let mut launches = self.launch_plan.launches.iter();
                launches.all(|launch| own(launch.key.kernel))
            }
        };
        Padding::of(&self.spec).filter(|_| !all_own)
    }

    pub(super) fn partials(&self) -> PartialStates {
        let (slots, heads) = (self.bound.slots as usize, self.spec.q_heads as usize);
        let dim = match (Padding::of(&self.spec), self.pads()) {
            (Some(_), None) => self.spec.head_dim_v,
            _ => self.spec.on_kernels().head_dim_v,
        };
        let shape = [slots, heads, dim as usize];
        let tensor = |range: &Range<u64>| self.memory.address() + range.start;
        PartialStates {
            out: DeviceTensor::new(tensor(&self.layout.partial_out), Dtype::F32, shape),
            lse: DeviceTensor::new(tensor(&self.layout.partial_lse), Dtype::F32, [slots, heads]),
        }
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

// Everything in it belongs to a context, not to a thread; what it launches is plain data.
const _: fn() = || {
    const fn sendable<T: Send>() {}
    sendable::<Workspace>();
};

//! The memory of a run: a plan's arrays, partial states and counters, at addresses that never change.

use std::{fmt, ops::Range};

use bytemuck::{Pod, Zeroable};
use cust::{context::Context, device::Device};
use kernels_gpu::abi::{LaunchRecord, MergeRow, QueryRow, WorkItem};

use super::{
    CUstream, DeviceArray, DeviceTensor, Family, Gpu, KvPool, PartialStates,
    agenda::{Agenda, LaunchSet},
    driver::{Current, cuMemcpyDtoH, cuMemcpyHtoDAsync, cuStreamSynchronize},
    inspect::{Known, inspect},
    resources::{DeviceMemory, Event, PinnedMemory, Stream, retain},
    run::Step,
};
use crate::{
    Error,
    plan::{Bound, MAX_LAUNCHES, MergeMode, Plan, WorkspaceLayout, pod::PodMode},
    problem::{Dtype, Spec},
};

/// How the tile groups of a plan share the GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Streams {
    /// One after the other, on the caller's stream; only decodes that a plan wants to overlap with its
    /// prefills have one of their own.
    #[default]
    One,
    /// Each on a stream of its own, which forks from the caller's and joins it again.
    PerGroup,
}

/// How a workspace's plans run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkspaceOptions {
    /// One stream or several.
    pub streams: Streams,
    /// Runs all attention by the kernels of a family; none: each launch by those that suit it best.
    pub family: Option<Family>,
    /// For CUDA graphs that serve one plan after the other: every [`Gpu::run`] makes these launches, whatever
    /// the plan, and what each of them has to do is read from the workspace. None: a run makes the launches
    /// that its plan needs, and a graph of it is good for that plan.
    pub launches: Option<LaunchSet>,
    /// With [`launches`](Self::launches): who merges, for all plans; [`MergeMode::Auto`] is the kernel.
    pub merge_mode: MergeMode,
    /// Debug mode: every run first waits for the stream, reads the plan back from the device and checks page
    /// ids, lengths and indices, so that damage is reported by request and page instead of as an illegal
    /// access. Such runs cannot be captured.
    pub checks: bool,
}

/// Copies of plans under way at most, before a further one waits for the first.
const IN_FLIGHT: usize = 4;

/// Room between two arrays that is copied along rather than making two copies: what the bus moves in the time
/// that one more copy takes.
const GAP: u64 = 64 << 10;

/// What one thread needs to run plans: memory, streams and events, all allocated here.
///
/// A plan is brought to the device by [`upload`](Self::upload) once a step, and run by [`Gpu::run`] once a
/// layer.
pub struct Workspace {
    pub(super) spec: Spec,
    pub(super) bound: Bound,
    pub(super) layout: WorkspaceLayout,
    pub(super) options: WorkspaceOptions,
    pub(super) agenda: Agenda,
    pub(super) loaded: bool,
    /// The launches of a run, kept for their memory.
    pub(super) steps: Vec<Step>,
    pub(super) fork: Event,
    pub(super) lanes: Vec<Lane>,
    known: Known,
    staging: Vec<Staging>,
    next: usize,
    memory: DeviceMemory,
    // Behind everything that lives in it.
    pub(super) context: Context,
}

/// A stream beside the caller's.
pub(super) struct Lane {
    pub(super) stream: Stream,
    pub(super) done: Event,
}

/// A plan on its way to the device.
struct Staging {
    memory: PinnedMemory,
    copied: Event,
}

impl Gpu {
    /// Allocates a workspace for plans within a bound ([`Bound::new`] gives one for limits on batches).
    ///
    /// # Errors
    /// [`Error::Driver`] where there is not enough memory, [`Error::LaunchLimit`] where the launch set is
    /// larger than [`MAX_LAUNCHES`].
    pub fn workspace(
        &self,
        spec: &Spec,
        bound: &Bound,
        options: WorkspaceOptions,
    ) -> Result<Workspace, Error> {
        spec.check()?;
        let launches = options.launches.as_ref().map_or(0, |set| set.keys.len());
        if launches > MAX_LAUNCHES as usize {
            return Err(Error::LaunchLimit {
                kernel: "a run",
                what: "launches",
                got: launches as u64,
                limit: MAX_LAUNCHES.into(),
            });
        }
        let device = Device::get_device(self.ordinal)
            .map_err(|error| super::failed("cuDeviceGet", error))?;
        let context = retain(device)?;
        let raw = context.as_raw();
        let layout = WorkspaceLayout::new(spec, bound);
        let staging = || -> Result<Staging, Error> {
            Ok(Staging {
                memory: PinnedMemory::zeroed(raw, layout.upload_bytes as usize)?,
                copied: Event::new(raw)?,
            })
        };
        let staging = (0..IN_FLIGHT)
            .map(|_| staging())
            .collect::<Result<_, _>>()?;
        let lanes = match options.streams {
            // For the decodes that a plan wants to overlap with its prefills.
            Streams::One => 1,
            Streams::PerGroup => LANES,
        };
        let lane = |_| -> Result<Lane, Error> {
            Ok(Lane {
                stream: Stream::new(raw)?,
                done: Event::new(raw)?,
            })
        };
        Ok(Workspace {
            spec: *spec,
            bound: *bound,
            options,
            agenda: Agenda::default(),
            loaded: false,
            steps: Vec::new(),
            fork: Event::new(raw)?,
            lanes: (0..lanes).map(lane).collect::<Result<_, _>>()?,
            known: Known::default(),
            staging,
            next: 0,
            memory: DeviceMemory::zeroed(raw, layout.bytes as usize)?,
            layout,
            context,
        })
    }
}

/// Streams beside the caller's; more groups than that take turns.
const LANES: usize = 7;

impl Workspace {
    /// Brings a plan to the device: what [`Gpu::run`] runs from here on, and what graphs that were captured
    /// with a [launch set](WorkspaceOptions::launches) compute when they are launched again.
    ///
    /// The copy is put on `stream`; the plan may be changed or dropped at once. The host waits only if
    /// several earlier copies are still under way.
    ///
    /// # Safety
    /// - `stream` is a stream of the device's primary context, or null, and is not being captured.
    /// - Runs of this workspace that are under way on other streams are waited for by `stream`.
    ///
    /// # Errors
    /// [`Error::OtherSpec`], [`Error::Plan`] where the plan is larger than the bound, [`Error::NotCaptured`];
    /// then nothing was changed on the device and nothing is loaded. [`Error::Driver`].
    pub unsafe fn upload(&mut self, plan: &Plan, stream: CUstream) -> Result<(), Error> {
        self.loaded = false;
        if plan.spec != self.spec {
            return Err(Error::OtherSpec {
                workspace: describe(&self.spec),
                plan: describe(&plan.spec),
            });
        }
        self.bound.check(&Bound::of(plan))?;
        let merge_mode = match self.options.launches {
            Some(_) => self.options.merge_mode,
            None => plan.merge_mode,
        };
        self.agenda.fill(plan, merge_mode);
        let mut records = [LaunchRecord::zeroed(); MAX_LAUNCHES as usize + 1];
        if let Some(set) = &self.options.launches {
            if merge_mode == MergeMode::Fused && self.agenda.mixed {
                return Err(Error::NotCaptured {
                    launch: "that merges states of prefill and decode: choose MergeMode::Kernel"
                        .into(),
                });
            }
            set.records(&self.agenda, &mut records)?;
        }
        let _current = Current::enter(self.context.as_raw())?;
        let Staging { memory, copied } = &mut self.staging[self.next];
        copied.wait()?;
        let bytes = memory.bytes();
        let layout = &self.layout;
        layout.write(plan, bytes)?;
        let captured = self.options.launches.is_some();
        let records = if captured { &records[..] } else { &[] };
        put(records, &layout.records, bytes);
        if let Some(items) = &self.agenda.items {
            put(items, &layout.items, bytes);
        }
        let left = self.agenda.left_rows(plan);
        put(left, &layout.left_merges, bytes);
        let filled = [
            filled(records, &layout.records),
            filled(&plan.items, &layout.items),
            filled(&plan.rows, &layout.rows),
            filled(&plan.merges, &layout.merges),
            filled(left, &layout.left_merges),
            filled(&plan.merge_slots, &layout.merge_slots),
            filled(&plan.page_ids, &layout.page_ids),
        ];
        for range in joined(&filled) {
            let from = bytes[range.start as usize..range.end as usize].as_ptr();
            let to = self.memory.address() + range.start;
            // SAFETY: both lie in what was allocated for this layout; the staging memory is not touched
            // before the event below has passed.
            unsafe {
                cuMemcpyHtoDAsync(to, from.cast(), (range.end - range.start) as usize, stream)
            }
            .check("cuMemcpyHtoDAsync")?;
        }
        // SAFETY: the caller vouches for the stream.
        unsafe { copied.record(stream) }?;
        self.next = (self.next + 1) % IN_FLIGHT;
        if self.options.checks {
            self.known = Known::of(plan);
        }
        self.loaded = true;
        Ok(())
    }

    /// The debug mode: waits for the stream and checks what lies on the device.
    ///
    /// # Safety
    /// The stream is one of the device's primary context, or null, and is not being captured.
    pub(super) unsafe fn inspect(
        &self,
        pools: &[KvPool],
        tokens: usize,
        stream: CUstream,
    ) -> Result<(), Error> {
        let _current = Current::enter(self.context.as_raw())?;
        let mut bytes = vec![0_u8; self.layout.upload_bytes as usize];
        // SAFETY: so many bytes were allocated; the caller vouches for the stream.
        unsafe {
            cuStreamSynchronize(stream).check("cuStreamSynchronize")?;
            cuMemcpyDtoH(
                bytes.as_mut_ptr().cast(),
                self.memory.address(),
                bytes.len(),
            )
            .check("cuMemcpyDtoH")?;
        }
        let pages: Vec<u32> = pools.iter().map(|pool| pool.pages).collect();
        let tokens = u32::try_from(tokens).unwrap_or(u32::MAX);
        inspect(
            &bytes,
            &self.layout,
            &self.agenda,
            &self.known,
            &pages,
            tokens,
        )
    }

    /// Whether prefills and decodes run at the same time: as the plan says, or in a captured graph those that
    /// are made for it.
    pub(super) fn overlaps(&self, groups: &[Step]) -> bool {
        let prefill = |step: &Step| matches!(step, Step::Prefill(_) | Step::PrefillGather(_));
        let decode = |step: &Step| match step {
            Step::Beside(_) => true,
            Step::Decode(_) | Step::DecodeGather(_) => self.options.launches.is_none(),
            _ => false,
        };
        let apart = self.options.launches.is_none() && self.agenda.pod == PodMode::Serial;
        !apart && groups.iter().any(decode) && groups.iter().any(prefill)
    }

    /// Whether the decodes of a launch merge what they can.
    pub(super) fn decode_merges(&self) -> bool {
        match self.options.launches {
            Some(_) => self.options.merge_mode == MergeMode::Fused,
            None => self.agenda.fused,
        }
    }

    /// How many streams beside the caller's these launches take.
    pub(super) fn lanes_for(&self, groups: &[Step]) -> usize {
        if self.overlaps(groups) {
            return 1;
        }
        match self.options.streams {
            Streams::One => 0,
            Streams::PerGroup => self.lanes.len().min(groups.len().saturating_sub(1)),
        }
    }

    /// What it was made for.
    #[must_use]
    pub const fn spec(&self) -> &Spec {
        &self.spec
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

    pub(super) fn partials(&self) -> PartialStates {
        let (slots, heads) = (self.bound.slots as usize, self.spec.q_heads as usize);
        let shape = [slots, heads, self.spec.head_dim_v as usize];
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

// Everything in it belongs to a context, not to a thread; `Step`s are plain data.
const _: fn() = || {
    const fn sendable<T: Send>() {}
    sendable::<Workspace>();
};

fn describe(spec: &Spec) -> String {
    let Spec {
        q_heads,
        kv_heads,
        head_dim_qk,
        head_dim_v,
        ..
    } = spec;
    format!(
        "{q_heads}/{kv_heads} heads of {head_dim_qk}/{head_dim_v}, {:?}, {:?}",
        spec.kv_dtype, spec.variant
    )
}

fn put<T: Pod>(array: &[T], to: &Range<u64>, bytes: &mut [u8]) {
    let array: &[u8] = bytemuck::cast_slice(array);
    bytes[to.start as usize..][..array.len()].copy_from_slice(array);
}

/// The part of a place that an array takes.
fn filled<T>(array: &[T], place: &Range<u64>) -> Range<u64> {
    place.start..place.start + size_of_val(array) as u64
}

/// Ascending ranges, those with little between them as one; empty ones left out.
fn joined(ranges: &[Range<u64>]) -> impl Iterator<Item = Range<u64>> {
    let mut rest = ranges.iter().filter(|range| !range.is_empty()).peekable();
    std::iter::from_fn(move || {
        let mut range = rest.next()?.clone();
        while let Some(next) = rest.next_if(|next| next.start <= range.end + GAP) {
            range.end = next.end;
        }
        Some(range)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_that_lie_close_are_copied_together() {
        let far = 1 << 20;
        let ranges = [0..0, 256..300, 512..900, 1024..1024, far..far + 4];
        let copies: Vec<_> = joined(&ranges).collect();
        assert_eq!(copies, [256..900, far..far + 4]);
        assert_eq!(joined(&[]).count(), 0);
    }
}

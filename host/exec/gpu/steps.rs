//! The launches of a run, in which order and on which streams.

use kernels_gpu::abi::{
    DecodeParams, GatherDecodeParams, GatherPrefillParams, MergeParams, PodParams, PrefillParams,
};

use super::{Gpu, Stream, Streams, Workspace, driver::Current, launch::Prepared};
use crate::{Error, plan::pod::PodMode};

/// A launch that was checked and waits for its turn: a handful, kept for their memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Decode(Prepared<DecodeParams>),
    /// Decodes that leave most of each SM to a prefill.
    Beside(Prepared<DecodeParams>),
    DecodeGather(Prepared<GatherDecodeParams>),
    Prefill(Prepared<PrefillParams>),
    PrefillGather(Prepared<GatherPrefillParams>),
    /// A prefill and a decode in one.
    Pod(Prepared<PodParams>),
    Merge(Prepared<MergeParams>),
}

impl Gpu {
    /// Launches a run: on the caller's stream, or on streams that fork from it and join it again.
    ///
    /// # Safety
    /// The steps are those of this workspace's run; the stream is one of this context.
    pub(super) unsafe fn launch_steps(
        &self,
        workspace: &Workspace,
        steps: &[Step],
        stream: Stream,
    ) -> Result<(), Error> {
        let _current = Current::enter(self.context.raw())?;
        let merging = matches!(steps.last(), Some(Step::Merge(_)));
        let (groups, merge) = steps.split_at(steps.len() - usize::from(merging));
        let overlap = workspace.overlaps(groups);
        let lanes = match overlap {
            true => 1,
            false => workspace.lanes_for(groups),
        };
        if lanes == 0 {
            // SAFETY: the caller's promises.
            return unsafe { self.launch_chain(steps, stream) };
        }
        // Where prefills and decodes overlap, the prefills stay on the caller's stream, and are launched first:
        // their CTAs then find every SM empty, and those of the decodes what they leave.
        let captured = workspace.captured();
        let lane_of = |index: usize, step: &Step| match overlap {
            true => match step {
                Step::Beside(_) => 1,
                Step::Decode(_) | Step::DecodeGather(_) => usize::from(!captured),
                _ => 0,
            },
            // The first group stays on the caller's stream; so do those that count with the same counters.
            false => match step {
                Step::Pod(_) => 0,
                _ => index % (lanes + 1),
            },
        };
        // SAFETY: the caller's promises; lanes begin after the fork and end before the join.
        unsafe {
            workspace.fork.record(stream)?;
            for lane in &workspace.lanes[..lanes] {
                workspace.fork.hold(lane.stream.raw())?;
            }
            for turn in 0..=lanes {
                for (index, step) in groups.iter().enumerate() {
                    if lane_of(index, step) == turn {
                        let lane = match turn {
                            0 => stream,
                            lane => workspace.lanes[lane - 1].stream.raw(),
                        };
                        self.launch_step(step, lane)?;
                    }
                }
            }
            // States of decodes alone are merged behind the decodes: the prefills may go on for longer.
            let with_decodes = overlap && !captured && !workspace.agenda.prefill_merges;
            if let ([Step::Merge(merge)], true) = (merge, with_decodes) {
                let mut merge = *merge;
                merge.launch.overlap = self.overlaps();
                self.launch_step(&Step::Merge(merge), workspace.lanes[0].stream.raw())?;
            }
            for lane in &workspace.lanes[..lanes] {
                lane.done.record(lane.stream.raw())?;
                lane.done.hold(stream)?;
            }
            if !with_decodes {
                for step in merge {
                    self.launch_step(step, stream)?;
                }
            }
        }
        Ok(())
    }

    /// One step after the other. A decode behind a decode takes over SMs as that one leaves them, and a merge
    /// waits for its states on the device.
    ///
    /// # Safety
    /// As [`launch_steps`](Self::launch_steps).
    unsafe fn launch_chain(&self, steps: &[Step], stream: Stream) -> Result<(), Error> {
        let mut behind_decode = false;
        for step in steps {
            let mut step = *step;
            match &mut step {
                Step::Decode(decode) => {
                    decode.launch.overlap = behind_decode && self.overlaps();
                    behind_decode = true;
                }
                Step::Merge(merge) => merge.launch.overlap = behind_decode && self.overlaps(),
                Step::Prefill(_)
                | Step::PrefillGather(_)
                | Step::Beside(_)
                | Step::DecodeGather(_)
                | Step::Pod(_) => behind_decode = false,
            }
            // SAFETY: the caller's promises.
            unsafe { self.launch_step(&step, stream)? };
        }
        Ok(())
    }

    /// Whether the kernels say when others may start, and wait for those before them.
    fn overlaps(&self) -> bool {
        self.arch() == "sm_90a"
    }

    /// A single launch.
    ///
    /// # Safety
    /// As [`launch_steps`](Self::launch_steps).
    pub(super) unsafe fn launch_step(&self, step: &Step, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promises.
        unsafe {
            match step {
                Step::Decode(step) | Step::Beside(step) => self.launch_prepared(step, stream),
                Step::DecodeGather(step) => self.launch_prepared(step, stream),
                Step::Prefill(step) => self.launch_prepared(step, stream),
                Step::PrefillGather(step) => self.launch_prepared(step, stream),
                Step::Pod(step) => self.launch_prepared(step, stream),
                Step::Merge(step) => self.launch_prepared(step, stream),
            }
        }
    }
}

impl Workspace {
    /// Whether prefills and decodes run at the same time: as the plan says, or in a captured graph those that
    /// are made for it.
    fn overlaps(&self, groups: &[Step]) -> bool {
        let prefill = |step: &Step| matches!(step, Step::Prefill(_) | Step::PrefillGather(_));
        let decode = |step: &Step| match step {
            Step::Beside(_) => true,
            Step::Decode(_) | Step::DecodeGather(_) => !self.captured(),
            _ => false,
        };
        let apart = !self.captured() && self.agenda.pod == PodMode::Serial;
        !apart && groups.iter().any(decode) && groups.iter().any(prefill)
    }

    /// How many streams beside the caller's these launches take, one after the other.
    fn lanes_for(&self, groups: &[Step]) -> usize {
        match self.options.streams {
            Streams::One => 0,
            Streams::PerGroup => self.lanes.len().min(groups.len().saturating_sub(1)),
        }
    }
}

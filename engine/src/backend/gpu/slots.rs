//! Steps under way: pinned memory for their copies, and events that time them.

use std::{ffi::c_void, ops::Range};

use cudarc::driver::{
    result::{self, event},
    sys::{CUevent, CUevent_flags},
};
use tandem_attn::{
    exec::gpu::Stream,
    step::{LOG_PROBS, LogProb},
};

use super::cuda;
use crate::{
    Error,
    backend::{MOST_UNDER_WAY, Part, StepTime},
};

/// One slot per step under way, and one for the step before them: the next gap counts from its end.
const SLOTS: usize = MOST_UNDER_WAY + 1;

/// The latest steps. All methods require that the GPU's context is current.
pub(super) struct Slots {
    slots: [Slot; SLOTS],
    /// Number of steps that began and that finished since the backend was made.
    begun: usize,
    finished: usize,
}

/// A step's memory and events.
pub(super) struct Slot {
    /// Inputs, staged for the copy to the device.
    pub inputs: Pinned,
    /// Drawn tokens, copied from the device.
    pub tokens: Pinned,
    pub rows: usize,
    /// What the step does with its logits, staged for the copy to the device.
    pub logits: Pinned,
    /// Log-probabilities, copied from the device.
    pub log_probs: Pinned,
    /// Rows with log-probabilities.
    pub log_prob_rows: usize,
    begins: Event,
    ends: Event,
    /// Recorded when the tokens are on the host.
    copied: Event,
    /// The end of each timed part.
    marks: Vec<(Part, Event)>,
    marked: usize,
    apart: bool,
}

impl Slots {
    pub(super) fn new(inputs: usize, rows: usize) -> Result<Self, Error> {
        let slot = || {
            Ok::<_, Error>(Slot {
                inputs: Pinned::new(inputs)?,
                tokens: Pinned::new(rows)?,
                rows: 0,
                logits: Pinned::new(0)?,
                log_probs: Pinned::new(0)?,
                log_prob_rows: 0,
                begins: Event::new()?,
                ends: Event::new()?,
                copied: Event::new()?,
                marks: Vec::new(),
                marked: 0,
                apart: false,
            })
        };
        Ok(Self {
            slots: [slot()?, slot()?, slot()?],
            begun: 0,
            finished: 0,
        })
    }

    pub(super) const fn under_way(&self) -> usize {
        self.begun - self.finished
    }

    /// The slot of the next step.
    pub(super) fn next(&mut self) -> Result<&mut Slot, Error> {
        if self.under_way() == MOST_UNDER_WAY {
            return Err(Error::TooManySteps);
        }
        Ok(&mut self.slots[self.begun % SLOTS])
    }

    /// Counts the next step as begun.
    pub(super) const fn begin(&mut self) {
        self.begun += 1;
    }

    /// Waits for the oldest step under way and returns its tokens, log-probabilities and times.
    pub(super) fn finish(
        &mut self,
        tokens: &mut Vec<u32>,
        log_probs: &mut Vec<LogProb>,
    ) -> Result<StepTime, Error> {
        if self.under_way() == 0 {
            return Err(Error::NoStep);
        }
        let step = self.finished;
        self.finished += 1;
        let slot = &self.slots[step % SLOTS];
        slot.copied.wait()?;
        tokens.clear();
        tokens.extend_from_slice(&slot.tokens.words()[..slot.rows]);
        log_probs.clear();
        // Each result is two words.
        let results = 2 * slot.log_prob_rows * LOG_PROBS as usize;
        log_probs.extend_from_slice(bytemuck::cast_slice(&slot.log_probs.words()[..results]));
        let gap_s = match step {
            0 => None,
            _ => Some(self.slots[(step - 1) % SLOTS].ends.until(&slot.begins)?),
        };
        let mut parts_s = vec![0.0; if slot.apart { Part::ALL.len() } else { 0 }];
        let mut last = &slot.begins;
        for (part, event) in &slot.marks[..slot.marked] {
            parts_s[*part as usize] += last.until(event)?;
            last = event;
        }
        Ok(StepTime {
            seconds: slot.begins.until(&slot.ends)?,
            gap_s,
            parts_s,
        })
    }
}

// SAFETY of the calls below: the stream belongs to the current context, as `Slots` requires.
impl Slot {
    /// Resets the slot for a step, with or without marks for its parts.
    pub(super) const fn prepare(&mut self, apart: bool) {
        (self.apart, self.marked) = (apart, 0);
    }

    /// Records the begin; call it before the first kernel is enqueued.
    pub(super) fn begins(&self, stream: Stream) -> Result<(), Error> {
        self.begins.record(stream)
    }

    /// Records the end of a part: everything enqueued since the last mark belongs to it.
    pub(super) fn mark(&mut self, part: Part, stream: Stream) -> Result<(), Error> {
        if !self.apart {
            return Ok(());
        }
        if self.marked == self.marks.len() {
            self.marks.push((part, Event::new()?));
        }
        let (of, event) = &mut self.marks[self.marked];
        *of = part;
        self.marked += 1;
        event.record(stream)
    }

    /// Records the end; call it after the last kernel is enqueued.
    pub(super) fn ends(&self, stream: Stream) -> Result<(), Error> {
        self.ends.record(stream)
    }

    /// Records the end of the copy of the tokens; call it after the copy is enqueued.
    pub(super) fn copied(&self, stream: Stream) -> Result<(), Error> {
        self.copied.record(stream)
    }
}

/// Pinned host memory, in words: the GPU copies from and to it asynchronously.
pub(super) struct Pinned {
    address: *mut u32,
    words: usize,
}

// SAFETY: it is allocated once and freed once, and its memory is borrowed only through it.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(words: usize) -> Result<Self, Error> {
        // SAFETY: the memory is written below before anything reads it.
        let address = unsafe { result::malloc_host((4 * words).max(1), 0) };
        let address = address.map_err(|error| cuda("cuMemHostAlloc", &error))?;
        let address = address.cast::<u32>();
        // SAFETY: the allocation has this many words.
        unsafe { address.write_bytes(0, words) };
        Ok(Self { address, words })
    }

    /// Grows to so many words. No copy may be under way.
    pub(super) fn at_least(&mut self, words: usize) -> Result<(), Error> {
        if self.words < words {
            *self = Self::new(words.next_power_of_two()).or_else(|_| Self::new(words))?;
        }
        Ok(())
    }

    pub(super) const fn words(&self) -> &[u32] {
        // SAFETY: this many words were allocated and initialised.
        unsafe { std::slice::from_raw_parts(self.address, self.words) }
    }

    /// No copy may be under way.
    pub(super) const fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and borrowed as a whole.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.words) }
    }

    /// Target of a copy from the device. The caller waits for the copy before it reads the words.
    pub(super) fn target(&mut self, range: Range<usize>) -> &mut [u32] {
        &mut self.words_mut()[range]
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: we allocated it.
        let _ = unsafe { result::free_host(self.address.cast::<c_void>()) };
    }
}

/// A CUDA event: a point in a stream's work, with the time at which it is passed.
struct Event(CUevent);

// SAFETY: it is a handle that any thread may use.
unsafe impl Send for Event {}

impl Event {
    fn new() -> Result<Self, Error> {
        let event = event::create(CUevent_flags::CU_EVENT_DEFAULT);
        Ok(Self(event.map_err(|error| cuda("cuEventCreate", &error))?))
    }

    fn record(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the event is alive, and the stream belongs to its context.
        let recorded = unsafe { event::record(self.0, stream.as_raw().cast()) };
        recorded.map_err(|error| cuda("cuEventRecord", &error))
    }

    fn wait(&self) -> Result<(), Error> {
        // SAFETY: the event is alive.
        let waited = unsafe { event::synchronize(self.0) };
        waited.map_err(|error| cuda("cuEventSynchronize", &error))
    }

    /// Seconds from this event to another. Both have passed.
    fn until(&self, other: &Self) -> Result<f64, Error> {
        // SAFETY: both are alive and recorded on the same stream.
        let milliseconds = unsafe { event::elapsed(self.0, other.0) };
        let milliseconds = milliseconds.map_err(|error| cuda("cuEventElapsedTime", &error))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: we created it.
        let _ = unsafe { event::destroy(self.0) };
    }
}

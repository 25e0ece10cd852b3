//! Steps under way: memory that the GPU copies from and to, and the times at which it got how far.

use std::{ffi::c_void, ops::Range};

use cudarc::driver::{
    result::{self, event},
    sys::{CUevent, CUevent_flags},
};
use tandem_attn::exec::gpu::Stream;

use super::cuda;
use crate::{
    Error,
    backend::{MOST_UNDER_WAY, Part, StepTime},
};

/// As many as may be under way, and the one before them, whose end the gap is counted from.
const SLOTS: usize = MOST_UNDER_WAY + 1;

/// The steps that were begun last. Methods want the GPU's context to be current.
pub(super) struct Slots {
    slots: [Slot; SLOTS],
    /// Steps that were begun and finished since the backend was made.
    begun: usize,
    finished: usize,
}

/// A step.
pub(super) struct Slot {
    /// Its inputs.
    pub inputs: Pinned,
    /// The tokens it draws.
    pub tokens: Pinned,
    pub rows: usize,
    begins: Event,
    ends: Event,
    /// Its tokens are there.
    copied: Event,
    /// The end of each part that was timed.
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

    /// The next step is on its way.
    pub(super) const fn begin(&mut self) {
        self.begun += 1;
    }

    /// Waits for the oldest step under way.
    pub(super) fn finish(&mut self, tokens: &mut Vec<u32>) -> Result<StepTime, Error> {
        if self.under_way() == 0 {
            return Err(Error::NoStep);
        }
        let step = self.finished;
        self.finished += 1;
        let slot = &self.slots[step % SLOTS];
        slot.copied.wait()?;
        tokens.clear();
        tokens.extend_from_slice(&slot.tokens.words()[..slot.rows]);
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

// SAFETY of the calls below: the stream is one of the current context, as `Slots` demands.
impl Slot {
    /// For a step whose parts are marked, or not.
    pub(super) const fn prepare(&mut self, apart: bool) {
        (self.apart, self.marked) = (apart, 0);
    }

    /// The first kernel comes next.
    pub(super) fn begins(&self, stream: Stream) -> Result<(), Error> {
        self.begins.record(stream)
    }

    /// What was put on the stream since the last mark is of this part.
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

    /// The last kernel came before.
    pub(super) fn ends(&self, stream: Stream) -> Result<(), Error> {
        self.ends.record(stream)
    }

    /// The copy of the tokens came before.
    pub(super) fn copied(&self, stream: Stream) -> Result<(), Error> {
        self.copied.record(stream)
    }
}

/// Words of the host that the GPU copies from and to while the host does something else.
pub(super) struct Pinned {
    address: *mut u32,
    words: usize,
}

// SAFETY: it is allocated once and freed once, and what it points to is borrowed as it is itself.
unsafe impl Send for Pinned {}

impl Pinned {
    fn new(words: usize) -> Result<Self, Error> {
        // SAFETY: the memory is written before it is read.
        let address = unsafe { result::malloc_host((4 * words).max(1), 0) };
        let address = address.map_err(|error| cuda("cuMemHostAlloc", &error))?;
        let address = address.cast::<u32>();
        // SAFETY: so many words are there.
        unsafe { address.write_bytes(0, words) };
        Ok(Self { address, words })
    }

    pub(super) const fn words(&self) -> &[u32] {
        // SAFETY: so many were allocated and written.
        unsafe { std::slice::from_raw_parts(self.address, self.words) }
    }

    /// No copy may be under way.
    pub(super) const fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and borrowed as a whole.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.words) }
    }

    /// For a copy from the device that is waited for before anything is read.
    pub(super) fn target(&mut self, range: Range<usize>) -> &mut [u32] {
        &mut self.words_mut()[range]
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated by us.
        let _ = unsafe { result::free_host(self.address.cast::<c_void>()) };
    }
}

/// A point in the work of a stream, and the time at which it is passed.
struct Event(CUevent);

// SAFETY: a handle, which any thread may use.
unsafe impl Send for Event {}

impl Event {
    fn new() -> Result<Self, Error> {
        let event = event::create(CUevent_flags::CU_EVENT_DEFAULT);
        Ok(Self(event.map_err(|error| cuda("cuEventCreate", &error))?))
    }

    fn record(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the event lives, and the stream is one of its context.
        let recorded = unsafe { event::record(self.0, stream.as_raw().cast()) };
        recorded.map_err(|error| cuda("cuEventRecord", &error))
    }

    fn wait(&self) -> Result<(), Error> {
        // SAFETY: the event lives.
        let waited = unsafe { event::synchronize(self.0) };
        waited.map_err(|error| cuda("cuEventSynchronize", &error))
    }

    /// Seconds to another one. Both have passed.
    fn until(&self, other: &Self) -> Result<f64, Error> {
        // SAFETY: both live, and are of one stream.
        let milliseconds = unsafe { event::elapsed(self.0, other.0) };
        let milliseconds = milliseconds.map_err(|error| cuda("cuEventElapsedTime", &error))?;
        Ok(f64::from(milliseconds) / 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { event::destroy(self.0) };
    }
}

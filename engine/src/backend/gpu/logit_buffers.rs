//! Device memory of steps that do more with logits than draw tokens from them. It grows with what is asked; most steps need none.

use cudarc::driver::result::{memcpy_dtoh_async, memcpy_htod_async};
use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceBuffer, Gpu, OwnedStream},
    step::{AdjustRow, AdjustToken, LOG_PROBS, LogProb, LogProbRow},
};

use super::{
    buffers::cuda,
    slots::{Pinned, Slot},
};
use crate::{Architecture, Error, LogitWork};

/// Tokens that rules of a row concern beside those of its text: those with a bias, and ends. Requests to the server
/// have up to 1,088.
const BESIDE: u64 = 2048;

/// Bytes of all that steps of so many rows may ask for.
pub(super) fn most_bytes(a: &Architecture, rows: u32) -> u64 {
    // And one for the newest token.
    let tokens = (a.vocabulary as u64).min(u64::from(a.positions) + BESIDE) + 1;
    let results = LOG_PROBS as usize * size_of::<LogProb>();
    let beside = size_of::<AdjustRow>() + size_of::<LogProbRow>() + results;
    let row = tokens * size_of::<AdjustToken>() as u64 + beside as u64;
    row.saturating_mul(rows.into())
}

/// Words of a value in device memory.
const fn words<T>(count: usize) -> usize {
    count * size_of::<T>() / 4
}

/// Inputs and results of the latest step, in words.
#[derive(Default)]
pub(super) struct LogitBuffers {
    inputs: Option<DeviceBuffer<u32>>,
    results: Option<DeviceBuffer<u32>>,
}

/// The parts of a step.
pub(super) struct OnDevice {
    pub rows: DeviceArray<AdjustRow>,
    pub tokens: DeviceArray<AdjustToken>,
    pub log_probs: DeviceArray<LogProbRow>,
    pub results: DeviceArray<LogProb>,
}

impl LogitBuffers {
    /// Copies what a step does with its logits to the device.
    ///
    /// # Safety
    /// The stream is one of the current context. The slot's memory is not touched until the copy is done.
    pub(super) unsafe fn upload(
        &mut self,
        gpu: &Gpu,
        work: &LogitWork<'_>,
        slot: &mut Slot,
        stream: &OwnedStream,
    ) -> Result<OnDevice, Error> {
        let rows = words::<AdjustRow>(work.adjusted.len());
        let tokens = rows + words::<AdjustToken>(work.tokens.len());
        let all = tokens + words::<LogProbRow>(work.log_probs.len());
        let results = words::<LogProb>(work.log_probs.len() * LOG_PROBS as usize);
        let inputs = at_least(&mut self.inputs, gpu, all, stream)?;
        let out = at_least(&mut self.results, gpu, results, stream)?;
        slot.log_probs.at_least(results)?;
        slot.logits.at_least(all)?;
        let staged = &mut slot.logits.words_mut()[..all];
        staged[..rows].copy_from_slice(bytemuck::cast_slice(work.adjusted));
        staged[rows..tokens].copy_from_slice(bytemuck::cast_slice(work.tokens));
        staged[tokens..].copy_from_slice(bytemuck::cast_slice(work.log_probs));
        // SAFETY: the buffer has at least so many words; the caller keeps the slot.
        unsafe { memcpy_htod_async(inputs, staged, stream.as_raw().cast()) }
            .map_err(|error| cuda("cuMemcpyHtoDAsync", &error))?;
        let at = |word: usize| inputs + 4 * word as u64;
        Ok(OnDevice {
            rows: DeviceArray::new(at(0), work.adjusted.len()),
            tokens: DeviceArray::new(at(rows), work.tokens.len()),
            log_probs: DeviceArray::new(at(tokens), work.log_probs.len()),
            results: DeviceArray::new(out, work.log_probs.len() * LOG_PROBS as usize),
        })
    }

    /// Copies log-probabilities to the host. They are there when the stream is done.
    ///
    /// # Safety
    /// As [`upload`](Self::upload).
    pub(super) unsafe fn fetch(
        &self,
        results: usize,
        to: &mut Pinned,
        stream: &OwnedStream,
    ) -> Result<(), Error> {
        let Some(from) = self.results.as_ref().filter(|_| results > 0) else {
            return Ok(());
        };
        let to = to.target(0..words::<LogProb>(results));
        // SAFETY: `upload` made both as large as that.
        unsafe { memcpy_dtoh_async(to, from.address(), stream.as_raw().cast()) }
            .map_err(|error| cuda("cuMemcpyDtoHAsync", &error))
    }
}

/// The address of a buffer with at least so many words. Steps under way may use the one before.
fn at_least(
    buffer: &mut Option<DeviceBuffer<u32>>,
    gpu: &Gpu,
    words: usize,
    stream: &OwnedStream,
) -> Result<u64, Error> {
    let fits = |buffer: &&mut DeviceBuffer<u32>| buffer.len() >= words;
    if let Some(buffer) = buffer.as_mut().filter(fits) {
        return Ok(buffer.address());
    }
    stream.synchronize()?;
    *buffer = None;
    // Caches leave room for what is asked at most, and not for twice as much.
    let larger = DeviceBuffer::zeroed(gpu, words.next_power_of_two())
        .or_else(|_| DeviceBuffer::zeroed(gpu, words))?;
    Ok(buffer.insert(larger).address())
}

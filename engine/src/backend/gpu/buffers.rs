//! Device memory of a step: inputs and intermediate results.

use cudarc::driver::{
    DriverError,
    result::{memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async},
};
use half::bf16;
use tandem_attn::{
    abi::NO_SLOT,
    exec::gpu::{DeviceArray, DeviceBuffer, Gpu, Stream},
    step::{Draw, Sampling},
};

use super::{GpuOptions, logits, slots::Pinned};
use crate::{Architecture, Error, backend::Work};

/// Buffers for the largest step. Smaller steps use their beginnings, so that addresses in graphs stay valid.
pub(super) struct Buffers {
    pub residual: DeviceBuffer<bf16>,
    pub normed: DeviceBuffer<bf16>,
    pub qkv: DeviceBuffer<bf16>,
    pub attention: DeviceBuffer<bf16>,
    pub gate_up: DeviceBuffer<bf16>,
    pub gated: DeviceBuffer<bf16>,
    pub branch: DeviceBuffer<bf16>,
    /// Rows of [`logits::stride`] elements.
    pub logits: DeviceBuffer<f32>,
    pub sampled: DeviceBuffer<u32>,
    inputs: DeviceBuffer<u32>,
    tokens: usize,
    rows: usize,
}

/// 32-bit words of a [`Draw`].
const DRAW: usize = size_of::<Draw>() / 4;

impl Buffers {
    pub(super) fn new(gpu: &Gpu, a: &Architecture, options: &GpuOptions) -> Result<Self, Error> {
        let (tokens, rows) = (options.step_tokens as usize, options.step_requests as usize);
        let of_tokens = |width: usize| DeviceBuffer::zeroed(gpu, tokens * width);
        let words = 3 * tokens + rows * (1 + DRAW);
        Ok(Self {
            residual: of_tokens(a.hidden)?,
            normed: of_tokens(a.hidden)?,
            qkv: of_tokens(a.qkv_width())?,
            attention: of_tokens(a.q_width())?,
            gate_up: of_tokens(2 * a.intermediate)?,
            gated: of_tokens(a.intermediate)?,
            branch: of_tokens(a.hidden)?,
            logits: DeviceBuffer::zeroed(gpu, rows * logits::stride(a.vocabulary))?,
            sampled: DeviceBuffer::zeroed(gpu, rows)?,
            inputs: DeviceBuffer::zeroed(gpu, words)?,
            tokens,
            rows,
        })
    }

    /// Number of words of the inputs of a step.
    pub(super) const fn input_words(&self) -> usize {
        self.inputs.len()
    }

    /// Copies the inputs of a step to the device, and fills in the token ids that the previous step draws. Padding
    /// tokens and rows, up to `padded`, have no reader: they write to no page and draw greedily from whatever logits
    /// they find.
    ///
    /// # Safety
    /// `stream` is a stream of the current context, is not being captured, and comes after the previous step. `staged`
    /// is not touched until the copy is done.
    pub(super) unsafe fn upload(
        &self,
        work: &Work<'_>,
        padded: usize,
        staged: &mut Pinned,
        stream: Stream,
    ) -> Result<(), Error> {
        let inputs = work.inputs;
        let padding = Sampling::GREEDY.draw(0).map_err(tandem_attn::Error::from)?;
        let (ids, rest) = staged.words_mut().split_at_mut(self.tokens);
        let (slots, rest) = rest.split_at_mut(self.tokens);
        let (positions, rest) = rest.split_at_mut(self.tokens);
        let (draws, rows) = rest.split_at_mut(self.rows * DRAW);
        let fill = |to: &mut [u32], from: &[u32], otherwise: u32| {
            let (used, unused) = to.split_at_mut(from.len());
            used.copy_from_slice(from);
            let padded = padded.saturating_sub(from.len()).min(unused.len());
            unused[..padded].fill(otherwise);
        };
        fill(ids, &inputs.tokens, 0);
        fill(slots, &inputs.slots, NO_SLOT);
        fill(positions, &inputs.positions, 0);
        fill(rows, work.rows, 0);
        for (index, to) in draws
            .chunks_exact_mut(DRAW)
            .enumerate()
            .take(padded.max(work.rows.len()))
        {
            let draw = work.draws.get(index).unwrap_or(&padding);
            to.copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(draw)));
        }
        // SAFETY: both sides have the same number of words; the caller keeps `staged`.
        unsafe {
            memcpy_htod_async(
                self.inputs.address(),
                staged.words(),
                stream.as_raw().cast(),
            )
        }
        .map_err(|error| cuda("cuMemcpyHtoDAsync", &error))?;
        // Requests keep their order from step to step, so most tokens go in one copy.
        let follows = |a: &(u32, u32), b: &(u32, u32)| (a.0 + 1, a.1 + 1) == *b;
        for run in work.drawn.chunk_by(follows) {
            let (token, row) = run[0];
            // SAFETY: there are no more than the buffers have tokens and rows; the previous step wrote the rows.
            unsafe {
                memcpy_dtod_async(
                    self.ids(self.tokens).address + 4 * u64::from(token),
                    self.sampled.address() + 4 * u64::from(row),
                    4 * run.len(),
                    stream.as_raw().cast(),
                )
            }
            .map_err(|error| cuda("cuMemcpyDtoDAsync", &error))?;
        }
        Ok(())
    }

    /// Copies the drawn tokens to the host. They are there when the stream is done.
    ///
    /// # Safety
    /// `stream` is a stream of the current context, and `tokens` stays in place until the copy is done.
    pub(super) unsafe fn fetch(&self, tokens: &mut [u32], stream: Stream) -> Result<(), Error> {
        // SAFETY: there are no more tokens than rows in the buffer.
        unsafe { memcpy_dtoh_async(tokens, self.sampled.address(), stream.as_raw().cast()) }
            .map_err(|error| cuda("cuMemcpyDtoHAsync", &error))
    }

    fn words<T>(&self, at: usize, len: usize) -> DeviceArray<T> {
        DeviceArray::new(self.inputs.address() + 4 * at as u64, len)
    }

    pub(super) fn ids(&self, tokens: usize) -> DeviceArray<u32> {
        self.words(0, tokens)
    }

    pub(super) fn slots(&self, tokens: usize) -> DeviceArray<u32> {
        self.words(self.tokens, tokens)
    }

    pub(super) fn positions(&self, tokens: usize) -> DeviceArray<u32> {
        self.words(2 * self.tokens, tokens)
    }

    pub(super) fn draws(&self, rows: usize) -> DeviceArray<Draw> {
        self.words(3 * self.tokens, rows)
    }

    pub(super) fn rows(&self, rows: usize) -> DeviceArray<u32> {
        self.words(3 * self.tokens + self.rows * DRAW, rows)
    }
}

pub(super) fn cuda(call: &'static str, error: &DriverError) -> Error {
    Error::Cuda {
        call,
        status: error.to_string(),
    }
}

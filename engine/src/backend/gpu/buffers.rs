//! Device memory of a step: inputs and intermediate results.

use std::ops::Range;

use cudarc::driver::{
    DriverError,
    result::{memcpy_dtod_async, memcpy_dtoh_async, memcpy_htod_async},
};
use half::bf16;
use tandem_attn::{
    abi::NO_SLOT,
    exec::gpu::{DeviceArray, DeviceBuffer, DeviceTensor, Gpu, Stream},
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
    layout: Layout,
}

/// 32-bit words of a [`Draw`].
const DRAW: usize = size_of::<Draw>() / 4;

/// Where the inputs of a step lie in their buffer, in 32-bit words, for the largest step.
///
/// Draws come first: [`Gpu::sample`] reads them in vectors of 16 bytes, and the lengths of the other inputs need not be
/// multiples of 16 bytes. These are read word by word.
#[derive(Clone, Copy)]
struct Layout {
    tokens: usize,
    rows: usize,
}

impl Layout {
    const fn draws(self) -> Range<usize> {
        0..self.rows * DRAW
    }

    const fn ids(self) -> Range<usize> {
        let at = self.draws().end;
        at..at + self.tokens
    }

    const fn slots(self) -> Range<usize> {
        let at = self.ids().end;
        at..at + self.tokens
    }

    const fn positions(self) -> Range<usize> {
        let at = self.slots().end;
        at..at + self.tokens
    }

    const fn rows(self) -> Range<usize> {
        let at = self.positions().end;
        at..at + self.rows
    }

    const fn parts(self) -> [Range<usize>; 5] {
        [
            self.draws(),
            self.ids(),
            self.slots(),
            self.positions(),
            self.rows(),
        ]
    }

    /// Words of all inputs together.
    const fn words(self) -> usize {
        self.rows().end
    }
}

/// Elements that each token has in the buffers: `residual`, `normed`, `qkv`, `attention`, `gate_up`, `gated` and `branch`.
fn widths(a: &Architecture) -> [usize; 7] {
    let (hidden, intermediate) = (a.hidden, a.intermediate);
    [
        hidden,
        hidden,
        a.qkv_width(),
        a.q_width(),
        2 * intermediate,
        intermediate,
        hidden,
    ]
}

/// Bytes of all buffers.
pub(super) fn bytes(a: &Architecture, options: &GpuOptions) -> u64 {
    let (tokens, rows) = (options.step_tokens as usize, options.step_requests as usize);
    let of_token = widths(a).iter().sum::<usize>() * size_of::<bf16>();
    let of_row = (logits::stride(a.vocabulary) + 1) * size_of::<u32>();
    let inputs = Layout { tokens, rows }.words() * size_of::<u32>();
    (tokens * of_token + rows * of_row + inputs) as u64
}

impl Buffers {
    pub(super) fn new(gpu: &Gpu, a: &Architecture, options: &GpuOptions) -> Result<Self, Error> {
        let (tokens, rows) = (options.step_tokens as usize, options.step_requests as usize);
        let of_tokens = |width: usize| DeviceBuffer::zeroed(gpu, tokens * width);
        let layout = Layout { tokens, rows };
        let [residual, normed, qkv, attention, gate_up, gated, branch] = widths(a);
        Ok(Self {
            residual: of_tokens(residual)?,
            normed: of_tokens(normed)?,
            qkv: of_tokens(qkv)?,
            attention: of_tokens(attention)?,
            gate_up: of_tokens(gate_up)?,
            gated: of_tokens(gated)?,
            branch: of_tokens(branch)?,
            logits: DeviceBuffer::zeroed(gpu, rows * logits::stride(a.vocabulary))?,
            sampled: DeviceBuffer::zeroed(gpu, rows)?,
            inputs: DeviceBuffer::zeroed(gpu, layout.words())?,
            layout,
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
        let parts = staged.words_mut().get_disjoint_mut(self.layout.parts());
        let [draws, ids, slots, positions, rows] = parts.expect("parts that do not overlap");
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
                    self.ids(self.layout.tokens).address + 4 * u64::from(token),
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

    fn part<T>(&self, part: Range<usize>, len: usize) -> DeviceArray<T> {
        DeviceArray::new(self.inputs.address() + 4 * part.start as u64, len)
    }

    pub(super) fn ids(&self, tokens: usize) -> DeviceArray<u32> {
        self.part(self.layout.ids(), tokens)
    }

    pub(super) fn slots(&self, tokens: usize) -> DeviceArray<u32> {
        self.part(self.layout.slots(), tokens)
    }

    pub(super) fn positions(&self, tokens: usize) -> DeviceArray<u32> {
        self.part(self.layout.positions(), tokens)
    }

    pub(super) fn draws(&self, rows: usize) -> DeviceArray<Draw> {
        self.part(self.layout.draws(), rows)
    }

    /// The first rows of logits.
    pub(super) fn logits(&self, a: &Architecture, rows: usize) -> DeviceTensor<2> {
        let logits = self.logits.tensor([rows, a.vocabulary]);
        logits.with_stride(0, logits::stride(a.vocabulary))
    }

    /// The drawn tokens of the first rows.
    pub(super) fn sampled(&self, rows: usize) -> DeviceArray<u32> {
        DeviceArray::new(self.sampled.address(), rows)
    }

    pub(super) fn rows(&self, rows: usize) -> DeviceArray<u32> {
        self.part(self.layout.rows(), rows)
    }
}

pub(super) fn cuda(call: &'static str, error: &DriverError) -> Error {
    Error::Cuda {
        call,
        status: error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel that samples reads draws in vectors of 16 bytes, whatever the largest step is.
    #[test]
    fn draws_are_aligned_whatever_the_sizes_of_steps_are() {
        for (tokens, rows) in (1..=9).flat_map(|tokens| (1..=3).map(move |rows| (tokens, rows))) {
            let layout = Layout { tokens, rows };
            assert_eq!(4 * layout.draws().start % 16, 0, "{tokens} tokens");
            let mut words = vec![0_u32; layout.words()];
            let parts = words.get_disjoint_mut(layout.parts()).expect("apart");
            let lengths = parts.map(|part| part.len());
            assert_eq!(lengths, [rows * DRAW, tokens, tokens, tokens, rows]);
            assert_eq!(lengths.iter().sum::<usize>(), layout.words());
        }
    }
}

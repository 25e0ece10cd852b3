//! Copies weights to the device.

use cudarc::driver::result::memcpy_dtod_async;
use half::bf16;
use std::collections::HashMap;
use tandem_attn::exec::gpu::{DeviceBuffer, Gpu, Stream};

use super::cuda;
use crate::{
    Error, Weights,
    backend::layers::{Store, stacked},
};

/// Random numbers from which matrices are cut: more than fit the L2 cache.
const NOISE: usize = 1 << 26;
/// Distance in elements between the beginnings of successive matrices, so that they differ. A multiple of 256 bytes.
const STRIDE: usize = 0x9e_3779 & !0x7f;

/// Copies weights to the device. Random weights are generated there: each matrix is a different piece of the same
/// random numbers.
pub(super) struct OnDevice<'a> {
    gpu: &'a Gpu,
    weights: &'a Weights,
    /// Random numbers by matrix width, which determines their size.
    noise: HashMap<usize, DeviceBuffer<bf16>>,
    at: usize,
}

impl<'a> OnDevice<'a> {
    pub(super) fn new(gpu: &'a Gpu, weights: &'a Weights) -> Self {
        Self {
            gpu,
            weights,
            noise: HashMap::new(),
            at: 0,
        }
    }

    /// Fills a buffer with random numbers of the size that weights of a matrix of this width have.
    pub(super) fn fill(&mut self, buffer: &DeviceBuffer<bf16>, width: usize) -> Result<(), Error> {
        let noise = match self.noise.entry(width) {
            std::collections::hash_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::hash_map::Entry::Vacant(new) => {
                let rows = NOISE / width;
                let host: Vec<bf16> = self.weights.get("noise", &[rows, width])?;
                new.insert(DeviceBuffer::from_slice(self.gpu, &host)?)
            }
        };
        self.at = (self.at + STRIDE) % (noise.len() & !0x7f);
        repeat(noise, self.at, buffer)
    }
}

/// Fills a buffer with numbers of another one, from index `from` on, and again from its beginning.
pub(super) fn repeat<T>(
    numbers: &DeviceBuffer<T>,
    mut from: usize,
    buffer: &DeviceBuffer<T>,
) -> Result<(), Error> {
    let mut to = 0;
    while to < buffer.len() {
        let elements = (numbers.len() - from).min(buffer.len() - to);
        let bytes = |elements: usize| elements * size_of::<T>();
        let address = |of: &DeviceBuffer<T>, at: usize| of.address() + bytes(at) as u64;
        // SAFETY: both ranges lie in their buffers, and the default stream is waited for before the next matrix is made.
        unsafe {
            memcpy_dtod_async(
                address(buffer, to),
                address(numbers, from),
                bytes(elements),
                Stream::DEFAULT.as_raw().cast(),
            )
        }
        .map_err(|error| cuda("cuMemcpyDtoDAsync", &error))?;
        (from, to) = (0, to + elements);
    }
    Ok(())
}

impl Store for OnDevice<'_> {
    type Matrix = DeviceBuffer<bf16>;

    fn tensor(
        &mut self,
        parts: &[(String, usize)],
        width: Option<usize>,
    ) -> Result<Self::Matrix, Error> {
        let random = self.weights.are_random();
        let Some(width) = width.filter(|_| random) else {
            let host = stacked::<bf16>(self.weights, parts, width)?;
            return Ok(DeviceBuffer::from_slice(self.gpu, &host)?);
        };
        let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
        let buffer = DeviceBuffer::zeroed(self.gpu, rows * width)?;
        self.fill(&buffer, width)?;
        Ok(buffer)
    }
}

//! Measurements of the hardware's limits: see [`kernels_gpu::measure::ceilings`].

use kernels_gpu::{
    abi::CeilingParams,
    measure::ceilings::{MULTIPLIERS, MULTIPLY_FLOPS, MULTIPLY_SHARED, READ_TILE, READERS},
    registry::{Element, Op},
};

use super::{DevicePtr, Gpu, Stream, launch::Launch};
use crate::Error;

impl Gpu {
    /// Reads memory at full speed, in whole tiles of 64 KB.
    ///
    /// # Safety
    /// `bytes` from `source` on can be read and 4 from `sink` on be written until the work on `stream` is done,
    /// a stream of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Driver`] if the launch fails.
    pub unsafe fn read_all(
        &self,
        source: DevicePtr,
        bytes: usize,
        sink: DevicePtr,
        stream: Stream,
    ) -> Result<(), Error> {
        let kernel = self.pass(Op::MeasureRead, Element::Any)?;
        let count = u32::try_from(bytes / READ_TILE as usize).unwrap_or(u32::MAX);
        let launch = Launch::new((4 * self.multiprocessors).min(count), READERS);
        let params = CeilingParams {
            source,
            sink,
            count,
            reserved: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch(kernel, &launch, &params, stream) }
    }

    /// Multiplies matrices at full speed on all SMs, for this number of rounds of about half a microsecond. Returns the
    /// number of operations.
    ///
    /// # Safety
    /// 4 bytes from `sink` on can be written until the work on `stream` is done, a stream of the device's
    /// primary context.
    ///
    /// # Errors
    /// [`Error::NotOnDevice`] before Hopper, [`Error::Driver`] if the launch fails.
    pub unsafe fn multiply(
        &self,
        rounds: u32,
        sink: DevicePtr,
        stream: Stream,
    ) -> Result<u64, Error> {
        let kernel = self.pass(Op::MeasureProducts, Element::Any)?;
        let mut launch = Launch::new(self.multiprocessors, MULTIPLIERS);
        launch.shared = MULTIPLY_SHARED;
        let params = CeilingParams {
            source: 0,
            sink,
            count: rounds,
            reserved: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch(kernel, &launch, &params, stream) }?;
        Ok(u64::from(rounds) * u64::from(self.multiprocessors) * MULTIPLY_FLOPS)
    }
}

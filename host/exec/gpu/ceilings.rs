//! The limits of the hardware, to measure by: see [`kernels_gpu::ceilings`].

use kernels_gpu::{
    abi::CeilingParams,
    ceilings::{MULTIPLIERS, MULTIPLY_FLOPS, MULTIPLY_SHARED, READ_TILE, READERS},
};

use super::{
    DevicePtr, Gpu, Stream,
    launch::Launch,
    module::{Carveout, Kernel, Modules},
};
use crate::Error;

pub(super) struct Kernels {
    read: Kernel,
    /// None before Hopper.
    multiply: Option<Kernel>,
}

impl Kernels {
    pub(super) fn load(modules: &Modules, max_shared: u32) -> Result<Self, Error> {
        Ok(Self {
            read: modules.kernel("ceiling_read", Carveout::Default, max_shared)?,
            multiply: modules
                .kernel("ceiling_multiply", Carveout::Shared, max_shared)
                .ok(),
        })
    }
}

impl Gpu {
    /// Reads memory as fast as that can be done, in whole tiles of 64 KB.
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
        let count = u32::try_from(bytes / READ_TILE as usize).unwrap_or(u32::MAX);
        let launch = Launch::new((4 * self.multiprocessors).min(count), READERS);
        let params = CeilingParams {
            source,
            sink,
            count,
            reserved: 0,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch(&self.ceilings.read, &launch, &params, stream) }
    }

    /// Multiplies matrices as fast as that can be done, on all SMs, so many rounds; the operations that it
    /// takes. A round is about half a microsecond.
    ///
    /// # Safety
    /// 4 bytes from `sink` on can be written until the work on `stream` is done, a stream of the device's
    /// primary context.
    ///
    /// # Errors
    /// [`Error::UnsupportedArchitecture`] before Hopper, [`Error::Driver`] if the launch fails.
    pub unsafe fn multiply(
        &self,
        rounds: u32,
        sink: DevicePtr,
        stream: Stream,
    ) -> Result<u64, Error> {
        let Some(kernel) = &self.ceilings.multiply else {
            return Err(Error::UnsupportedArchitecture {
                device: self.name.clone(),
                compute: self.compute,
                built_for: vec!["sm_90a"],
            });
        };
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

//! Launches of [`kernels_gpu::loops`]: how well work at two limits overlaps, without attention.

use kernels_gpu::{
    abi::LoopsParams,
    loops::{Binding, SHARED, THREADS},
};

use super::{
    Gpu, Stream,
    launch::Launch,
    module::{Carveout, Kernel, Modules},
};
use crate::Error;

pub(super) fn load(modules: &Modules, max_shared: u32) -> Result<Kernel, Error> {
    modules.kernel("overlap_loops", Carveout::Default, max_shared)
}

impl Gpu {
    /// Runs the memory-bound loop, the compute-bound one, or both in one launch.
    ///
    /// # Safety
    /// Memory is as [`LoopsParams`] says, with counters for every SM, until the work on `stream` is done, a
    /// stream of the device's primary context.
    ///
    /// # Errors
    /// [`Error::Driver`] if the launch fails.
    pub unsafe fn overlap_loops(
        &self,
        binding: Binding,
        mut params: LoopsParams,
        stream: Stream,
    ) -> Result<(), Error> {
        params.binding = binding as u32;
        let loops = match binding {
            Binding::Memory | Binding::Compute => 1,
            Binding::ByBlock | Binding::BySm => 2,
        };
        let mut launch = Launch::new(loops * params.blocks, THREADS);
        launch.shared = SHARED;
        // SAFETY: the caller's promise.
        unsafe { self.launch(&self.loops, &launch, &params, stream) }
    }
}

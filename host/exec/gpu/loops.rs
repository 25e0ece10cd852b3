//! Launches of [`kernels_gpu::measure::loops`]: how well work at two limits overlaps, without attention.

use kernels_gpu::{
    abi::LoopsParams,
    measure::loops::{Binding, SHARED, THREADS},
    registry::{Element, Op},
};

use super::{Gpu, Stream, launch::Launch};
use crate::Error;

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
        let kernel = self.pass(Op::MeasureOverlap, Element::Any)?;
        params.binding = binding as u32;
        let loops = match binding {
            Binding::Memory | Binding::Compute => 1,
            Binding::ByBlock | Binding::BySm => 2,
        };
        let mut launch = Launch::new(loops * params.blocks, THREADS);
        launch.shared = SHARED;
        // SAFETY: the caller's promise.
        unsafe { self.launch(kernel, &launch, &params, stream) }
    }
}

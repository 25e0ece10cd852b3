//! Streams, contexts and device memory of the crate `cudarc` (feature `cudarc`).
//!
//! Constructors here turn its objects into the plain descriptions that every call of [`gpu`](super) takes; lengths
//! are checked, and element types are those of the memory. `cudarc` orders work on several streams by events: each
//! description comes with a [`SyncOnDrop`] that is to be dropped once the call that uses it has returned, and not before.

use cudarc::driver::{CudaContext, CudaStream};

use super::{DeviceArray, DevicePtr, DeviceTensor, Gpu, GpuBuilder, Stream, driver};
use crate::{Error, checks::check_least, tensor::Element};

pub use cudarc::driver::SyncOnDrop;

/// A stream of `cudarc`. It must live until the work on it is done.
#[must_use]
pub fn stream(stream: &CudaStream) -> Stream {
    Stream::from_raw(stream.cu_stream().cast())
}

fn elements<const RANK: usize>(shape: &[usize; RANK]) -> usize {
    shape
        .iter()
        .fold(1, |all, &extent| all.saturating_mul(extent))
}

impl<const RANK: usize> DeviceTensor<RANK> {
    /// A dense tensor at the start of memory that a call on `stream` reads (feature `cudarc`).
    ///
    /// `cudarc` orders work on several streams by events: the guard is to be dropped once the call that uses the tensor has
    /// returned, and not before.
    ///
    /// ```no_run
    /// use ::cudarc::driver::{CudaContext, CudaSlice};
    /// use half::bf16;
    /// use tandem_attn::gpu::{DeviceTensor, Gpu, KvPool, Stream, Workspace};
    ///
    /// # fn layer(workspace: &mut Workspace, pool: KvPool) -> Result<(), Box<dyn std::error::Error>> {
    /// let context = CudaContext::new(0)?;
    /// let gpu = Gpu::builder().build_in_cudarc(&context)?;
    /// let stream = context.new_stream()?;
    /// let q: CudaSlice<bf16> = stream.alloc_zeros(64 * 32 * 128)?;
    /// let mut out: CudaSlice<bf16> = stream.alloc_zeros(64 * 32 * 128)?;
    ///
    /// let (q, _read) = DeviceTensor::in_cudarc(&q, &stream, [64, 32, 128])?;
    /// let (to, _written) = DeviceTensor::in_cudarc_mut(&mut out, &stream, [64, 32, 128])?;
    /// let on = Stream::from_raw(stream.cu_stream().cast());
    /// // SAFETY: all of it is in this GPU's memory, and the stream is one of its.
    /// unsafe { gpu.run(workspace, &q, &[pool], &to, None, on)? };
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::Extent`] where the memory is too short.
    pub fn in_cudarc<'a, T: Element>(
        memory: &'a impl cudarc::driver::DevicePtr<T>,
        stream: &'a CudaStream,
        shape: [usize; RANK],
    ) -> Result<(Self, SyncOnDrop<'a>), Error> {
        check_least("the tensor", "elements", memory.len(), elements(&shape), "")?;
        let (address, read): (DevicePtr, _) = memory.device_ptr(stream);
        Ok((Self::new(address, T::DTYPE, shape), read))
    }

    /// The same for memory that the call writes.
    ///
    /// # Errors
    /// As [`in_cudarc`](Self::in_cudarc).
    pub fn in_cudarc_mut<'a, T: Element>(
        memory: &'a mut impl cudarc::driver::DevicePtrMut<T>,
        stream: &'a CudaStream,
        shape: [usize; RANK],
    ) -> Result<(Self, SyncOnDrop<'a>), Error> {
        check_least("the tensor", "elements", memory.len(), elements(&shape), "")?;
        let (address, written): (DevicePtr, _) = memory.device_ptr_mut(stream);
        Ok((Self::new(address, T::DTYPE, shape), written))
    }
}

impl<T> DeviceArray<T> {
    /// All of some memory that a call on `stream` reads.
    pub fn in_cudarc<'a>(
        memory: &'a impl cudarc::driver::DevicePtr<T>,
        stream: &'a CudaStream,
    ) -> (Self, SyncOnDrop<'a>) {
        let (address, read) = memory.device_ptr(stream);
        (Self::new(address, memory.len()), read)
    }
}

impl GpuBuilder<'_> {
    /// Attaches to the device of a context of `cudarc` and loads the kernels there.
    ///
    /// # Errors
    /// As [`build`](Self::build), and [`Error::ForeignContext`] for a context that is not its device's primary one.
    pub fn build_in_cudarc(self, context: &CudaContext) -> Result<Gpu, Error> {
        let ordinal = u32::try_from(context.ordinal()).unwrap_or(u32::MAX);
        let gpu = self.build(ordinal)?;
        match gpu.context.raw() == driver::Context::from_raw(context.cu_ctx().cast()) {
            true => Ok(gpu),
            false => Err(Error::ForeignContext { ordinal }),
        }
    }
}

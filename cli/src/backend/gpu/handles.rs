//! Memory, streams and events of the driver that give themselves back.

use std::ptr;

use bytemuck::Pod;
use cust::{memory::DeviceBuffer, prelude::CopyDestination, sys};
use tandem_attn::exec::gpu::CUstream;

use crate::{Failure, tensors::Tensor};

/// Success, or a failure that names the call.
pub fn ok(call: &str, code: sys::CUresult) -> Result<(), Failure> {
    match code {
        sys::CUresult::CUDA_SUCCESS => Ok(()),
        code => Err(Failure::Wrong(format!("{call} failed: {code:?}"))),
    }
}

/// Device memory.
pub struct Memory(DeviceBuffer<u8>);

impl Memory {
    /// Of so many bytes, at least 16, with anything in them.
    pub fn of_bytes(bytes: usize) -> Result<Self, Failure> {
        // SAFETY: bytes may have any value.
        unsafe { DeviceBuffer::uninitialized(bytes.max(16)) }
            .map(Self)
            .map_err(|error| Failure::Backend(format!("{bytes} bytes on the GPU: {error}")))
    }

    pub fn new(tensor: &Tensor) -> Result<Self, Failure> {
        let bytes = tensor.bytes();
        let memory = Self::of_bytes(bytes.len())?;
        if !bytes.is_empty() {
            let mut place = memory.0.index(..bytes.len());
            place.copy_from(bytes).map_err(copying)?;
        }
        Ok(memory)
    }

    pub fn address(&self) -> u64 {
        self.0.as_device_ptr().as_raw()
    }

    pub fn read<T: Pod>(&self, values: &mut [T]) -> Result<(), Failure> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        if bytes.is_empty() {
            return Ok(());
        }
        self.0.index(..bytes.len()).copy_to(bytes).map_err(copying)
    }
}

fn copying(error: cust::error::CudaError) -> Failure {
    Failure::Wrong(format!("copying between host and GPU: {error}"))
}

/// A stream that the default stream does not wait for.
pub struct Stream {
    pub handle: CUstream,
}

impl Stream {
    pub fn new() -> Result<Self, Failure> {
        const NON_BLOCKING: u32 = 1;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        ok("cuStreamCreate", unsafe {
            sys::cuStreamCreate(&mut handle, NON_BLOCKING)
        })?;
        Ok(Self { handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.handle) };
    }
}

/// A moment of a stream.
pub struct Event(pub sys::CUevent);

impl Event {
    pub fn new() -> Result<Self, Failure> {
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        ok("cuEventCreate", unsafe {
            sys::cuEventCreate(&mut handle, 0)
        })?;
        Ok(Self(handle))
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { sys::cuEventDestroy_v2(self.0) };
    }
}

//! Memory, streams and events of the driver that give themselves back.

use std::ffi::{CStr, c_void};

use bytemuck::Pod;
use libcuda::{Code, DevicePtr};
use tandem_attn::exec::gpu;

use crate::{Failure, tensors::Tensor};

/// Success, or a failure that names the call.
pub fn ok(call: &str, code: Code) -> Result<(), Failure> {
    match code {
        Code::SUCCESS => Ok(()),
        code => Err(Failure::Wrong(format!("{call} failed: {}", name(code)))),
    }
}

fn name(code: Code) -> String {
    let mut text = std::ptr::null();
    // SAFETY: writes the address of a static text, or fails.
    if unsafe { libcuda::cuGetErrorName(code, &mut text) } != Code::SUCCESS || text.is_null() {
        return format!("code {}", code.0);
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Device memory.
pub struct Memory(DevicePtr);

impl Memory {
    /// Of so many bytes, at least 16, with anything in them.
    pub fn of_bytes(bytes: usize) -> Result<Self, Failure> {
        let mut address = 0;
        // SAFETY: writes one address.
        match unsafe { libcuda::cuMemAlloc(&mut address, bytes.max(16)) } {
            Code::SUCCESS => Ok(Self(address)),
            code => Err(Failure::Backend(format!(
                "{bytes} bytes on the GPU: {}",
                name(code)
            ))),
        }
    }

    pub fn new(tensor: &Tensor) -> Result<Self, Failure> {
        let bytes = tensor.bytes();
        let memory = Self::of_bytes(bytes.len())?;
        if !bytes.is_empty() {
            let from = bytes.as_ptr().cast::<c_void>();
            // SAFETY: both sides have as many bytes.
            ok("cuMemcpyHtoD", unsafe {
                libcuda::cuMemcpyHtoD(memory.0, from, bytes.len())
            })?;
        }
        Ok(memory)
    }

    pub fn address(&self) -> u64 {
        self.0
    }

    /// Reads as many values as fit; the memory has them.
    pub fn read<T: Pod>(&self, values: &mut [T]) -> Result<(), Failure> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller allocated as many bytes; the driver checks the address.
        ok("cuMemcpyDtoH", unsafe {
            libcuda::cuMemcpyDtoH(bytes.as_mut_ptr().cast(), self.0, bytes.len())
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated by us. Waits for work that uses it.
        let _ = unsafe { libcuda::cuMemFree(self.0) };
    }
}

/// A stream that the default stream does not wait for.
pub struct Stream {
    pub handle: gpu::Stream,
}

impl Stream {
    pub fn new() -> Result<Self, Failure> {
        const NON_BLOCKING: u32 = 1;
        let mut handle = gpu::Stream::NULL;
        // SAFETY: writes one handle.
        ok("cuStreamCreate", unsafe {
            libcuda::cuStreamCreate(&mut handle, NON_BLOCKING)
        })?;
        Ok(Self { handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { libcuda::cuStreamDestroy(self.handle) };
    }
}

/// A moment of a stream.
pub struct Event(libcuda::Event);

impl Event {
    pub fn new() -> Result<Self, Failure> {
        let mut handle = libcuda::Event::NULL;
        // SAFETY: writes one handle.
        ok("cuEventCreate", unsafe {
            libcuda::cuEventCreate(&mut handle, 0)
        })?;
        Ok(Self(handle))
    }

    /// Moves it to what is on the stream now.
    pub fn record(&self, stream: gpu::Stream) -> Result<(), Failure> {
        // SAFETY: both live.
        ok("cuEventRecord", unsafe {
            libcuda::cuEventRecord(self.0, stream)
        })
    }

    /// How long after it another one was; both have passed.
    pub fn microseconds_to(&self, end: &Self) -> Result<f64, Failure> {
        let mut milliseconds = 0.0;
        // SAFETY: writes one number.
        let code = unsafe { libcuda::cuEventElapsedTime(&mut milliseconds, self.0, end.0) };
        ok("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { libcuda::cuEventDestroy(self.0) };
    }
}

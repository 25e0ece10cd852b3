//! Memory, streams and events of the driver that release themselves.

use std::ffi::{CStr, c_void};

use bytemuck::Pod;
use libcuda::{Code, DevicePtr};
use tandem_attn::exec::gpu;

use crate::{
    Failure,
    failure::{A_SMALLER_CASE, too_little_memory},
    tensors::Tensor,
};

/// Converts a return code to a result whose failure names the call.
pub fn ok(call: &str, code: Code) -> Result<(), Failure> {
    match code {
        Code::SUCCESS => Ok(()),
        code => Err(Failure::Wrong(format!("{call} failed: {}", name(code)))),
    }
}

fn name(code: Code) -> String {
    let mut text = std::ptr::null();
    // SAFETY: the call writes the address of a static string, or fails.
    if unsafe { libcuda::cuGetErrorName(code, &mut text) } != Code::SUCCESS || text.is_null() {
        return format!("code {}", code.0);
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Device memory.
pub struct Memory(DevicePtr);

impl Memory {
    /// Allocates `bytes` bytes, at least 16, uninitialised.
    pub fn of_bytes(bytes: usize) -> Result<Self, Failure> {
        let mut address = 0;
        // SAFETY: the call writes one address.
        match unsafe { libcuda::cuMemAlloc(&mut address, bytes.max(16)) } {
            Code::SUCCESS => Ok(Self(address)),
            Code::OUT_OF_MEMORY => {
                let (mut free, mut all) = (0, 0);
                // SAFETY: the call writes two numbers.
                ok("cuMemGetInfo", unsafe {
                    libcuda::cuMemGetInfo(&mut free, &mut all)
                })?;
                Err(too_little_memory([bytes, free, all], A_SMALLER_CASE))
            }
            code => Err(Failure::Backend(format!(
                "{bytes} bytes on the GPU: {}",
                name(code)
            ))),
        }
    }

    pub fn new(tensor: &Tensor) -> Result<Self, Failure> {
        Self::of(tensor.bytes())
    }

    /// Memory with these values.
    pub fn of<T: Pod>(values: &[T]) -> Result<Self, Failure> {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        let memory = Self::of_bytes(bytes.len())?;
        if !bytes.is_empty() {
            let from = bytes.as_ptr().cast::<c_void>();
            // SAFETY: both sides have this many bytes.
            ok("cuMemcpyHtoD", unsafe {
                libcuda::cuMemcpyHtoD(memory.0, from, bytes.len())
            })?;
        }
        Ok(memory)
    }

    pub fn address(&self) -> u64 {
        self.0
    }

    /// Copies the first bytes of the memory to `values`. The memory must be at least as large.
    pub fn read<T: Pod>(&self, values: &mut [T]) -> Result<(), Failure> {
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        if bytes.is_empty() {
            return Ok(());
        }
        // SAFETY: the caller allocated this many bytes; the driver checks the address.
        ok("cuMemcpyDtoH", unsafe {
            libcuda::cuMemcpyDtoH(bytes.as_mut_ptr().cast(), self.0, bytes.len())
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: we allocated it. The call waits for work that uses it.
        let _ = unsafe { libcuda::cuMemFree(self.0) };
    }
}

/// A stream that does not synchronise with the default stream.
pub struct Stream {
    pub handle: gpu::Stream,
}

impl Stream {
    pub fn new() -> Result<Self, Failure> {
        const NON_BLOCKING: u32 = 1;
        let mut handle = gpu::Stream::NULL;
        // SAFETY: the call writes one handle.
        ok("cuStreamCreate", unsafe {
            libcuda::cuStreamCreate(&mut handle, NON_BLOCKING)
        })?;
        Ok(Self { handle })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: we created it.
        let _ = unsafe { libcuda::cuStreamDestroy(self.handle) };
    }
}

/// A point in the work of a stream.
pub struct Event(libcuda::Event);

impl Event {
    pub fn new() -> Result<Self, Failure> {
        let mut handle = libcuda::Event::NULL;
        // SAFETY: the call writes one handle.
        ok("cuEventCreate", unsafe {
            libcuda::cuEventCreate(&mut handle, 0)
        })?;
        Ok(Self(handle))
    }

    /// Moves the event to the current end of the stream.
    pub fn record(&self, stream: gpu::Stream) -> Result<(), Failure> {
        // SAFETY: both handles are alive.
        ok("cuEventRecord", unsafe {
            libcuda::cuEventRecord(self.0, stream)
        })
    }

    /// Waits until the event has passed.
    pub fn wait(&self) -> Result<(), Failure> {
        // SAFETY: the handle is alive.
        ok("cuEventSynchronize", unsafe {
            libcuda::cuEventSynchronize(self.0)
        })
    }

    /// Microseconds from this event to `end`. Both have passed.
    pub fn microseconds_to(&self, end: &Self) -> Result<f64, Failure> {
        let mut milliseconds = 0.0;
        // SAFETY: the call writes one number.
        let code = unsafe { libcuda::cuEventElapsedTime(&mut milliseconds, self.0, end.0) };
        ok("cuEventElapsedTime", code)?;
        Ok(f64::from(milliseconds) * 1e3)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: we created it.
        let _ = unsafe { libcuda::cuEventDestroy(self.0) };
    }
}

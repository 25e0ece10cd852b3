//! Memory, streams and events of the driver that are given back when dropped.

use std::{ffi::c_void, ptr};

use cust::{context::Context, device::Device};

use super::{
    driver::{
        self, CUcontext, CUdeviceptr, CUevent, CUstream, Code, Current, cuEventCreate,
        cuEventDestroy, cuEventQuery, cuEventRecord, cuEventSynchronize, cuMemAlloc, cuMemFree,
        cuMemFreeHost, cuMemHostAlloc, cuMemsetD8, cuStreamCreate, cuStreamDestroy,
        cuStreamSynchronize, cuStreamWaitEvent,
    },
    failed,
};
use crate::Error;

/// Retains the primary context of a device; what is current on the thread stays so, if anything is.
pub(super) fn retain(device: Device) -> Result<Context, Error> {
    let before = driver::current()?;
    let context =
        Context::new(device).map_err(|error| failed("cuDevicePrimaryCtxRetain", error))?;
    driver::restore(before)?;
    Ok(context)
}

/// Bytes on the device.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    address: CUdeviceptr,
    context: CUcontext,
}

impl DeviceMemory {
    /// All zero. Waits for the device.
    pub(super) fn zeroed(context: CUcontext, bytes: usize) -> Result<Self, Error> {
        let _current = Current::enter(context)?;
        let mut memory = Self {
            address: 0,
            context,
        };
        // SAFETY: writes one address, and zeroes to what lies there.
        unsafe {
            cuMemAlloc(&mut memory.address, bytes.max(1)).check("cuMemAlloc")?;
            cuMemsetD8(memory.address, 0, bytes).check("cuMemsetD8")?;
            // Streams that do not wait for the default stream are to find it so.
            cuStreamSynchronize(ptr::null_mut()).check("cuStreamSynchronize")?;
        }
        Ok(memory)
    }

    pub(super) fn address(&self) -> CUdeviceptr {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // SAFETY: allocated by us, or null. Waits for work that uses it.
            let _ = unsafe { cuMemFree(self.address) };
        }
    }
}

/// Bytes on the host that the device copies from by itself.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    address: *mut u8,
    bytes: usize,
    context: CUcontext,
}

impl PinnedMemory {
    pub(super) fn zeroed(context: CUcontext, bytes: usize) -> Result<Self, Error> {
        let _current = Current::enter(context)?;
        let mut address = ptr::null_mut::<c_void>();
        // SAFETY: writes one address.
        unsafe { cuMemHostAlloc(&mut address, bytes.max(1), 0) }.check("cuMemHostAlloc")?;
        let address = address.cast::<u8>();
        // SAFETY: so many bytes are there.
        unsafe { address.write_bytes(0, bytes) };
        Ok(Self {
            address,
            bytes,
            context,
        })
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: allocated and initialised; borrowed as a whole.
        unsafe { std::slice::from_raw_parts_mut(self.address, self.bytes) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // SAFETY: allocated by us.
            let _ = unsafe { cuMemFreeHost(self.address.cast()) };
        }
    }
}

/// A stream that the default stream does not wait for.
#[derive(Debug)]
pub(super) struct Stream {
    handle: CUstream,
    context: CUcontext,
}

impl Stream {
    pub(super) fn new(context: CUcontext) -> Result<Self, Error> {
        const NON_BLOCKING: u32 = 1;
        let _current = Current::enter(context)?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { cuStreamCreate(&mut handle, NON_BLOCKING) }.check("cuStreamCreate")?;
        Ok(Self { handle, context })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.handle
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // SAFETY: made by us; work on it goes on.
            let _ = unsafe { cuStreamDestroy(self.handle) };
        }
    }
}

/// A point in the work of a stream. Methods that take a stream want the context current.
#[derive(Debug)]
pub(super) struct Event {
    handle: CUevent,
    context: CUcontext,
}

impl Event {
    pub(super) fn new(context: CUcontext) -> Result<Self, Error> {
        const WITHOUT_TIME: u32 = 2;
        let _current = Current::enter(context)?;
        let mut handle = ptr::null_mut();
        // SAFETY: writes one handle.
        unsafe { cuEventCreate(&mut handle, WITHOUT_TIME) }.check("cuEventCreate")?;
        Ok(Self { handle, context })
    }

    /// Moves the event to the end of what is on the stream now.
    ///
    /// # Safety
    /// The stream is one of this context, or null.
    pub(super) unsafe fn record(&self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { cuEventRecord(self.handle, stream) }.check("cuEventRecord")
    }

    /// What is put on the stream from now on waits for the event.
    ///
    /// # Safety
    /// The stream is one of this context, or null.
    pub(super) unsafe fn hold(&self, stream: CUstream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { cuStreamWaitEvent(stream, self.handle, 0) }.check("cuStreamWaitEvent")
    }

    /// Waits on the host until the event has passed; an event that was never recorded has.
    pub(super) fn wait(&self) -> Result<(), Error> {
        // SAFETY: the event lives.
        match unsafe { cuEventQuery(self.handle) } {
            // SAFETY: as above.
            Code::NOT_READY => {
                unsafe { cuEventSynchronize(self.handle) }.check("cuEventSynchronize")
            }
            code => code.check("cuEventQuery"),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // SAFETY: made by us.
            let _ = unsafe { cuEventDestroy(self.handle) };
        }
    }
}

// SAFETY, all of them: the handles belong to a context, not to a thread.
unsafe impl Send for DeviceMemory {}
unsafe impl Sync for DeviceMemory {}
unsafe impl Send for PinnedMemory {}
unsafe impl Sync for PinnedMemory {}
unsafe impl Send for Stream {}
unsafe impl Sync for Stream {}
unsafe impl Send for Event {}
unsafe impl Sync for Event {}

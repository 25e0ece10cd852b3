//! Memory, streams and events of the driver that are given back when dropped.

use std::{ffi::c_void, ptr};

use super::driver::{
    self, Check, Code, Context, Current, Device, DevicePtr, Event, Stream, cuCtxSetCurrent,
    cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRetain, cuEventCreate, cuEventDestroy,
    cuEventQuery, cuEventRecord, cuEventSynchronize, cuMemAlloc, cuMemFree, cuMemFreeHost,
    cuMemGetInfo, cuMemHostAlloc, cuMemsetD8, cuStreamCreate, cuStreamDestroy, cuStreamSynchronize,
    cuStreamWaitEvent,
};
use crate::Error;

/// The primary context of a device, retained. The CUDA runtime and other CUDA crates share it.
#[derive(Debug)]
pub(super) struct PrimaryContext {
    handle: Context,
    device: Device,
}

impl PrimaryContext {
    /// If no context is current on the calling thread, this one is from now on.
    pub(super) fn retain(device: Device) -> Result<Self, Error> {
        let context = Self::of(device)?;
        if driver::current()?.is_null() {
            // SAFETY: the context was retained above.
            unsafe { cuCtxSetCurrent(context.handle) }.check("cuCtxSetCurrent")?;
        }
        Ok(context)
    }

    /// Retains the context once more, for objects that outlive this one.
    pub(super) fn again(&self) -> Result<Self, Error> {
        Self::of(self.device)
    }

    fn of(device: Device) -> Result<Self, Error> {
        let mut handle = Context::NULL;
        // SAFETY: writes one handle.
        unsafe { cuDevicePrimaryCtxRetain(&mut handle, device) }
            .check("cuDevicePrimaryCtxRetain")?;
        Ok(Self { handle, device })
    }

    pub(super) fn raw(&self) -> Context {
        self.handle
    }

    pub(super) fn device(&self) -> Device {
        self.device
    }
}

impl Drop for PrimaryContext {
    fn drop(&mut self) {
        // SAFETY: retained once by us. A driver that is shutting down refuses, and may.
        let _ = unsafe { cuDevicePrimaryCtxRelease(self.device) };
    }
}

/// Bytes on the device.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    address: DevicePtr,
    context: Context,
}

impl DeviceMemory {
    /// Allocates memory. Its bytes are those that were there.
    pub(super) fn new(context: Context, bytes: usize) -> Result<Self, Error> {
        let _current = Current::enter(context)?;
        let mut address = 0;
        // SAFETY: writes one address.
        match unsafe { cuMemAlloc(&mut address, bytes.max(1)) } {
            Code::OUT_OF_MEMORY => {
                let (mut free, mut total) = (0, 0);
                // SAFETY: writes two numbers. If it fails, it leaves zeros, and what was asked for is said all the same.
                let _ = unsafe { cuMemGetInfo(&mut free, &mut total) };
                Err(Error::OutOfMemory { bytes, free, total })
            }
            code => code.check("cuMemAlloc").map(|()| Self { address, context }),
        }
    }

    /// Allocates memory that is all zero. Waits for the device.
    pub(super) fn zeroed(context: Context, bytes: usize) -> Result<Self, Error> {
        let _current = Current::enter(context)?;
        let memory = Self::new(context, bytes)?;
        // SAFETY: the bytes were allocated above.
        unsafe {
            cuMemsetD8(memory.address, 0, bytes).check("cuMemsetD8")?;
            // Non-blocking streams must also find the memory zeroed.
            cuStreamSynchronize(Stream::DEFAULT).check("cuStreamSynchronize")?;
        }
        Ok(memory)
    }

    /// Copies bytes to an offset in the memory. Waits for the copy.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Error> {
        let _current = Current::enter(self.context)?;
        // SAFETY: the memory is ours, and the caller's layout has room there.
        unsafe { driver::copy_to_device(self.address + at, bytes.as_ptr().cast(), bytes.len()) }
    }

    pub(super) const fn address(&self) -> DevicePtr {
        self.address
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // SAFETY: allocated by us. Waits for work that uses it.
            let _ = unsafe { cuMemFree(self.address) };
        }
    }
}

/// Bytes on the host that the device copies from by itself.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    address: *mut u8,
    bytes: usize,
    context: Context,
}

impl PinnedMemory {
    pub(super) fn zeroed(context: Context, bytes: usize) -> Result<Self, Error> {
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

/// A non-blocking stream, which does not synchronise with the default stream. It is destroyed when dropped, and dereferences to its
/// handle.
#[derive(Debug)]
pub struct OwnedStream {
    handle: Stream,
    /// Keeps the context alive as long as the stream, with or without a GPU.
    context: PrimaryContext,
}

impl OwnedStream {
    pub(super) fn new(context: &PrimaryContext) -> Result<Self, Error> {
        const NON_BLOCKING: u32 = 1;
        let context = context.again()?;
        let _current = Current::enter(context.raw())?;
        let mut handle = Stream::NULL;
        // SAFETY: writes one handle.
        unsafe { cuStreamCreate(&mut handle, NON_BLOCKING) }.check("cuStreamCreate")?;
        Ok(Self { handle, context })
    }

    pub(super) fn raw(&self) -> Stream {
        self.handle
    }

    pub(super) fn handle(&self) -> &Stream {
        &self.handle
    }

    pub(super) fn context(&self) -> &PrimaryContext {
        &self.context
    }
}

impl Drop for OwnedStream {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context.raw()) {
            // SAFETY: made by us; work on it goes on.
            let _ = unsafe { cuStreamDestroy(self.handle) };
        }
    }
}

/// A point in the work of a stream. Methods that take a stream require that the context is current.
#[derive(Debug)]
pub(super) struct OwnedEvent {
    handle: Event,
    context: Context,
}

impl OwnedEvent {
    pub(super) fn new(context: Context) -> Result<Self, Error> {
        const WITHOUT_TIME: u32 = 2;
        let _current = Current::enter(context)?;
        let mut handle = Event::NULL;
        // SAFETY: writes one handle.
        unsafe { cuEventCreate(&mut handle, WITHOUT_TIME) }.check("cuEventCreate")?;
        Ok(Self { handle, context })
    }

    /// Moves the event to the end of the work that is on the stream now.
    ///
    /// # Safety
    /// The stream is one of this context, or null.
    pub(super) unsafe fn record(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { cuEventRecord(self.handle, stream) }.check("cuEventRecord")
    }

    /// Later work on the stream waits for the event.
    ///
    /// # Safety
    /// The stream is one of this context, or null.
    pub(super) unsafe fn hold(&self, stream: Stream) -> Result<(), Error> {
        // SAFETY: the caller's promise.
        unsafe { cuStreamWaitEvent(stream, self.handle, 0) }.check("cuStreamWaitEvent")
    }

    /// Waits on the host until the event has passed. An event that was never recorded has passed.
    pub(super) fn wait(&self) -> Result<(), Error> {
        let _current = Current::enter(self.context)?;
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

impl Drop for OwnedEvent {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // SAFETY: made by us.
            let _ = unsafe { cuEventDestroy(self.handle) };
        }
    }
}

// SAFETY: it is allocated once and freed once; what it points to is used by the driver and by `&mut` alone.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

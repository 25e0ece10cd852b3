//! Device memory, streams and captured graphs for programs that use no other CUDA crate.

use std::{ffi::c_void, fmt, marker::PhantomData, mem::ManuallyDrop, ops::Deref};

use bytemuck::Pod;

use super::{
    DeviceArray, DevicePtr, DeviceTensor, Gpu, Stream,
    captured::{self, Note},
    driver::{
        self, Check, Context, Current, cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiate,
        cuGraphLaunch, cuMemcpyDtoH, cuStreamBeginCapture, cuStreamEndCapture, cuStreamSynchronize,
    },
    resources::{DeviceMemory, OwnedStream, PrimaryContext},
};
use crate::{
    Error,
    checks::{check_least, extent},
    tensor::Element,
};

/// `len` values of type `T` in device memory, freed when dropped.
///
/// ```no_run
/// # use tandem_attn::gpu::{DeviceBuffer, Gpu};
/// let gpu = Gpu::new(0)?;
/// let mut values = DeviceBuffer::from_slice(&gpu, &[1.0_f32, 2.0, 3.0])?;
/// values.write(1, &[7.0])?;
/// assert_eq!(values.read()?, [1.0, 7.0, 3.0]);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
pub struct DeviceBuffer<T> {
    memory: DeviceMemory,
    len: usize,
    /// Keeps the context alive as long as the memory, with or without a GPU: it is dropped after the memory.
    context: PrimaryContext,
    values: PhantomData<T>,
}

impl<T: Pod> DeviceBuffer<T> {
    /// Allocates `len` values, all bytes zero.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`], [`Error::Extent`] if the number of bytes overflows.
    pub fn zeroed(gpu: &Gpu, len: usize) -> Result<Self, Error> {
        Self::new(gpu, len, DeviceMemory::zeroed)
    }

    /// Allocates memory and copies values of the host to it.
    ///
    /// # Errors
    /// As [`zeroed`](Self::zeroed).
    pub fn from_slice(gpu: &Gpu, values: &[T]) -> Result<Self, Error> {
        let mut buffer = Self::new(gpu, values.len(), DeviceMemory::new)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    fn new(
        gpu: &Gpu,
        len: usize,
        allocate: fn(Context, usize) -> Result<DeviceMemory, Error>,
    ) -> Result<Self, Error> {
        let Some(bytes) = len.checked_mul(size_of::<T>()) else {
            let (most, each) = (usize::MAX / size_of::<T>(), size_of::<T>());
            let rule = format!("at most {most} of {each} bytes each");
            return Err(extent("a device buffer", "elements", len, rule));
        };
        let context = gpu.context.again()?;
        Ok(Self {
            memory: allocate(context.raw(), bytes)?,
            len,
            context,
            values: PhantomData,
        })
    }

    /// Copies values of the host to the buffer, starting at index `at`, and waits for the copy.
    ///
    /// # Errors
    /// [`Error::Extent`] if they do not fit, [`Error::Driver`].
    pub fn write(&mut self, at: usize, values: &[T]) -> Result<(), Error> {
        let (end, why) = (at.saturating_add(values.len()), " for what is copied");
        check_least("a device buffer", "elements", self.len, end, why)?;
        if values.is_empty() {
            return Ok(());
        }
        let at = (at * size_of::<T>()) as u64;
        self.memory.write(at, bytemuck::cast_slice(values))
    }

    /// Copies all values to the host. Wait for the work that writes them first, with [`OwnedStream::synchronize`].
    ///
    /// # Errors
    /// [`Error::Driver`], also for errors of earlier work.
    pub fn read(&self) -> Result<Vec<T>, Error> {
        let mut values = vec![T::zeroed(); self.len];
        if self.len > 0 {
            let _current = Current::enter(self.context.raw())?;
            let to = values.as_mut_ptr().cast::<c_void>();
            // SAFETY: both sides have as many bytes, and a `T` may have any.
            unsafe { cuMemcpyDtoH(to, self.address(), size_of_val(&values[..])) }
                .check("cuMemcpyDtoH")?;
        }
        Ok(values)
    }
}

impl<T> DeviceBuffer<T> {
    /// The address of the first value.
    #[must_use]
    pub const fn address(&self) -> DevicePtr {
        self.memory.address()
    }

    /// The number of values.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no values.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The values as an array for the calls of [`gpu`](super).
    #[must_use]
    pub const fn array(&self) -> DeviceArray<T> {
        DeviceArray::new(self.address(), self.len)
    }
}

impl<T: Element> DeviceBuffer<T> {
    /// The values as a dense tensor.
    ///
    /// # Panics
    /// Where the shape has more elements than the buffer.
    #[must_use]
    pub fn tensor<const RANK: usize>(&self, shape: [usize; RANK]) -> DeviceTensor<RANK> {
        let mut extents = shape.iter();
        let elements = extents.try_fold(1_usize, |product, &extent| product.checked_mul(extent));
        assert!(
            elements.is_some_and(|elements| elements <= self.len),
            "a tensor of {shape:?} in a buffer of {} elements",
            self.len
        );
        DeviceTensor::new(self.address(), T::DTYPE, shape)
    }
}

impl<T> fmt::Debug for DeviceBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceBuffer({} at {:#x})", self.len, self.address())
    }
}

impl Gpu {
    /// Makes a non-blocking stream: it does not synchronise with the default stream.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn stream(&self) -> Result<OwnedStream, Error> {
        OwnedStream::new(&self.context)
    }

    /// Captures the work that `work` puts on a stream of another CUDA crate in a graph, as [`OwnedStream::capture`] does on a
    /// stream of this library. Prefer it to a capture by that crate: [`Graph::launch`] compares the plans of its runs.
    ///
    /// `work` may also call that crate, as long as the calls can be captured.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, not the default stream. It is not in capture, and lives until the
    /// capture has ended. Memory that the captured work reads or writes, temporaries of the other crate included, is not freed or used
    /// otherwise while the graph can be launched.
    ///
    /// # Errors
    /// As [`OwnedStream::capture`].
    pub unsafe fn capture(
        &self,
        stream: Stream,
        work: impl FnOnce(Stream) -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        // SAFETY: the caller's promise.
        unsafe { Graph::captured(&self.context, stream, work) }
    }
}

impl OwnedStream {
    /// Waits on the host until all work on the stream is done.
    ///
    /// # Errors
    /// [`Error::Driver`], which may be of any earlier work.
    pub fn synchronize(&self) -> Result<(), Error> {
        let _current = Current::enter(self.context().raw())?;
        // SAFETY: the stream lives.
        unsafe { cuStreamSynchronize(**self) }.check("cuStreamSynchronize")
    }

    /// Captures the work that `work` puts on the stream in a CUDA graph, without running it.
    ///
    /// # Errors
    /// The error of `work`, or [`Error::Driver`] if something in it cannot be captured.
    pub fn capture(&self, work: impl FnOnce(Stream) -> Result<(), Error>) -> Result<Graph, Error> {
        // SAFETY: the stream lives as long as `self`.
        unsafe { Graph::captured(self.context(), **self, work) }
    }
}

/// A stream in capture. The capture ends when this is dropped, also if the work panics: a stream that stays in capture
/// refuses all work that cannot be captured.
struct Capture(Stream);

impl Capture {
    /// # Safety
    /// The stream lives until this is dropped.
    unsafe fn begin(stream: Stream) -> Result<Self, Error> {
        /// The capture ignores calls of other threads.
        const THREAD_LOCAL: u32 = 1;
        // SAFETY: the caller's promise.
        unsafe { cuStreamBeginCapture(stream, THREAD_LOCAL) }.check("cuStreamBeginCapture")?;
        captured::open(stream);
        Ok(Self(stream))
    }

    /// Ends the capture and returns what was captured, with notes of its runs.
    fn end(self) -> Result<(Template, Vec<Note>), Error> {
        ManuallyDrop::new(self).leave()
    }

    /// Called once.
    fn leave(&mut self) -> Result<(Template, Vec<Note>), Error> {
        let runs = captured::close();
        let mut template = Template(driver::Graph::NULL);
        // SAFETY: the stream lives and is in capture.
        unsafe { cuStreamEndCapture(self.0, &mut template.0) }
            .check("cuStreamEndCapture")
            .map(|()| (template, runs))
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.leave();
    }
}

/// A graph that can be instantiated.
struct Template(driver::Graph);

impl Drop for Template {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by a capture, and used by nobody any more.
            let _ = unsafe { cuGraphDestroy(self.0) };
        }
    }
}

impl Deref for OwnedStream {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        self.handle()
    }
}

/// A captured CUDA graph, which can be launched any number of times.
#[derive(Debug)]
pub struct Graph {
    handle: driver::GraphExec,
    /// What its runs can compute.
    runs: Vec<Note>,
    context: PrimaryContext,
}

impl Graph {
    /// # Safety
    /// As [`Gpu::capture`].
    unsafe fn captured(
        context: &PrimaryContext,
        stream: Stream,
        work: impl FnOnce(Stream) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let context = context.again()?;
        let _current = Current::enter(context.raw())?;
        // SAFETY: the caller's promise.
        let capture = unsafe { Capture::begin(stream) }?;
        let worked = work(stream);
        let captured = capture.end();
        worked?;
        let (template, runs) = captured?;
        let mut graph = Self {
            handle: driver::GraphExec::NULL,
            runs,
            context,
        };
        // SAFETY: the template lives.
        unsafe { cuGraphInstantiate(&mut graph.handle, template.0, 0) }
            .check("cuGraphInstantiate")?;
        Ok(graph)
    }

    /// Launches the graph on a stream.
    ///
    /// First it compares each run in the graph with the plan that was uploaded last to the workspace of the run. It knows
    /// the runs that the capturing thread made within the capture.
    ///
    /// # Safety
    /// The safety conditions of the captured calls hold for each launch: the memory, workspaces and GPU handles that they used live
    /// until the work is done, and uploads come before it, both in the order of the calls and on the stream. If another thread
    /// made captured runs, it is also up to the caller that plans fit their tensors and pools, and need no launch that
    /// [`Workspace::launch_only_needed`](super::Workspace::launch_only_needed) left out.
    ///
    /// # Errors
    /// [`Error::NotInGraph`] for a plan that needs a launch which the graph does not contain; [`Error::BeyondGraph`] for a
    /// plan with more query tokens than the captured tensors, or with page ids beyond, or another page size than, the
    /// captured pools; [`Error::OtherLaunches`] for a plan with other launches, items or merges than the captured one, if
    /// the workspace has no launch set; [`Error::NoPlan`] after an upload that failed; [`Error::Driver`].
    pub unsafe fn launch(&self, stream: Stream) -> Result<(), Error> {
        self.runs.iter().try_for_each(Note::check)?;
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the caller's promise.
        unsafe { cuGraphLaunch(self.handle, stream) }.check("cuGraphLaunch")
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context.raw()) {
            // SAFETY: made by us, or null.
            let _ = unsafe { cuGraphExecDestroy(self.handle) };
        }
    }
}

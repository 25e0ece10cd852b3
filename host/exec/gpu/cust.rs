//! Streams, contexts and device memory of the crate `cust` (feature `cust`).
//!
//! [`stream`] and the constructors here turn its objects into the plain descriptions that every call of
//! [`gpu`](super) takes; lengths are checked. [`Gpu::run_and_wait`] is safe from end to end: it borrows all
//! memory until the work is done.

use bytemuck::Pod;
use cust::{context::Context, memory::DeviceCopy, memory::DeviceSlice};

use super::{
    DeviceTensor, Gpu, GpuBuilder, KvPool, Stream, Workspace,
    driver::{self, Check, Current, cuStreamSynchronize},
    pool::check_page_size,
};
use crate::{
    Error,
    checks::check_least,
    problem::{Dtype, KvLayout, Spec},
};

/// A stream of `cust`. It must live until the work on it is done.
#[must_use]
pub fn stream(stream: &cust::stream::Stream) -> Stream {
    Stream::from_raw(stream.as_inner().cast())
}

/// Refuses memory that is too short for what it must hold.
fn check_bytes<T: DeviceCopy>(
    tensor: &'static str,
    memory: &DeviceSlice<T>,
    needed: usize,
) -> Result<(), Error> {
    check_least(tensor, "bytes", memory.len() * size_of::<T>(), needed, "")
}

impl<const RANK: usize> DeviceTensor<RANK> {
    /// A dense tensor at the start of `memory`. The element type of `memory` is only how its bytes were allocated.
    ///
    /// # Errors
    /// [`Error::Extent`] where the memory is too short.
    pub fn in_cust<T: DeviceCopy>(
        memory: &DeviceSlice<T>,
        dtype: Dtype,
        shape: [usize; RANK],
    ) -> Result<Self, Error> {
        // Without wrapping: a shape of too many elements would fit any memory.
        let bytes = shape.iter().fold(dtype.bytes() as usize, |all, &extent| {
            all.saturating_mul(extent)
        });
        check_bytes("the tensor", memory, bytes)?;
        Ok(Self::new(memory.as_device_ptr().as_raw(), dtype, shape))
    }
}

/// Dense pools of keys and values in memory of `cust` (feature `cust`), for [`Gpu::run_and_wait`], which is safe from end to
/// end: it borrows all memory until the work is done.
///
/// ```no_run
/// use cust::{memory::DeviceBuffer, stream::{Stream, StreamFlags}};
/// use tandem_attn::gpu::{Gpu, Pool, Workspace};
/// # use tandem_attn::problem::KvLayout;
///
/// # fn layer(context: &cust::context::Context, workspace: &mut Workspace) -> Result<(), Box<dyn std::error::Error>> {
/// let gpu = Gpu::builder().build_in_cust(context)?;
/// let stream = Stream::new(StreamFlags::DEFAULT, None)?;
/// let (q, mut out) = (DeviceBuffer::<u16>::zeroed(64 * 32 * 128)?, DeviceBuffer::<u16>::zeroed(64 * 32 * 128)?);
/// let (k, v) = (DeviceBuffer::<u16>::zeroed(1 << 24)?, DeviceBuffer::<u16>::zeroed(1 << 24)?);
/// let pool = Pool { layout: KvLayout::Nhd, page_size: 16, k: &k, v: &v };
/// gpu.run_and_wait(workspace, 64, &q, &[pool], &mut out, None, &stream)?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Pool<'a, T: DeviceCopy> {
    /// The layout of pages.
    pub layout: KvLayout,
    /// Tokens of a page.
    pub page_size: u32,
    /// The keys: as many pages as fit.
    pub k: &'a DeviceSlice<T>,
    /// The values, for as many pages.
    pub v: &'a DeviceSlice<T>,
}

impl<T: DeviceCopy> Pool<'_, T> {
    /// The description of the pool for [`Gpu::run`].
    ///
    /// # Errors
    /// [`Error::Extent`] if there is less than a page of keys, or there are fewer values than keys; [`Error::Problem`] for an invalid
    /// page size or specification.
    pub fn describe(&self, spec: &Spec) -> Result<KvPool, Error> {
        check_page_size(0, self.page_size)?;
        spec.check()?;
        let page = |dim: u32| {
            let tokens = self.page_size as usize * spec.kv_heads as usize;
            tokens * dim as usize * spec.kv_dtype.bytes() as usize
        };
        let (k_page, v_page) = (page(spec.head_dim_qk), page(spec.head_dim_v));
        check_bytes("k", self.k, k_page.max(1))?;
        let pages = self.k.len() * size_of::<T>() / k_page;
        check_bytes("v", self.v, pages * v_page)?;
        Ok(KvPool::new(
            spec,
            self.layout,
            self.page_size,
            u32::try_from(pages).unwrap_or(u32::MAX),
            self.k.as_device_ptr().as_raw(),
            self.v.as_device_ptr().as_raw(),
        ))
    }
}

impl GpuBuilder<'_> {
    /// Attaches to the device of a context of `cust` and loads the kernels there.
    ///
    /// # Errors
    /// As [`build`](Self::build), and [`Error::ForeignContext`] for a context that is not its device's primary one.
    pub fn build_in_cust(self, context: &Context) -> Result<Gpu, Error> {
        driver::initialise(0)?;
        let raw = driver::Context::from_raw(context.as_raw().cast());
        let mut device = 0;
        {
            let _current = Current::enter(raw)?;
            // SAFETY: writes one integer.
            unsafe { driver::cuCtxGetDevice(&mut device) }.check("cuCtxGetDevice")?;
        }
        let gpu = self.build(device.unsigned_abs())?;
        if gpu.context.raw() != raw {
            return Err(Error::ForeignContext {
                ordinal: device.unsigned_abs(),
            });
        }
        Ok(gpu)
    }
}

impl Gpu {
    /// Runs the plan in the workspace on `tokens` tokens of dense queries, and waits until it is done.
    ///
    /// Any bits are a value of the type of the outputs, such as `u16` or `half::bf16`. Those of others may become no value:
    ///
    /// ```compile_fail
    /// # use cust::{memory::DeviceSlice, stream::Stream};
    /// # use tandem_attn::{Error, gpu::{Gpu, Workspace}};
    /// # fn run(gpu: &Gpu, workspace: &mut Workspace, q: &DeviceSlice<u16>, out: &mut DeviceSlice<bool>, on: &Stream)
    /// # -> Result<(), Error> {
    /// gpu.run_and_wait::<u16, u16, bool>(workspace, 1, q, &[], out, None, on)
    /// # }
    /// ```
    ///
    /// Pools have neither scales nor strides of their own, and there are no sinks or other parameters: specifications that need them
    /// are refused. Run those by [`Gpu::run`].
    ///
    /// # Errors
    /// As [`Gpu::run`], and [`Error::Extent`] where memory is too short.
    #[allow(clippy::too_many_arguments)]
    pub fn run_and_wait<Q: DeviceCopy, K: DeviceCopy, O: DeviceCopy + Pod>(
        &self,
        workspace: &mut Workspace,
        tokens: usize,
        q: &DeviceSlice<Q>,
        pools: &[Pool<'_, K>],
        out: &mut DeviceSlice<O>,
        lse: Option<&mut DeviceSlice<f32>>,
        on: &cust::stream::Stream,
    ) -> Result<(), Error> {
        let spec = *workspace.spec();
        let heads = spec.q_heads as usize;
        let rows = |dim: u32| [tokens, heads, dim as usize];
        let q = DeviceTensor::in_cust(q, spec.q_dtype, rows(spec.head_dim_qk))?;
        let out = DeviceTensor::in_cust(out, spec.out_dtype, rows(spec.head_dim_v))?;
        let lse = lse
            .map(|lse| DeviceTensor::in_cust(lse, Dtype::F32, [tokens, heads]))
            .transpose()?;
        let pools: Vec<KvPool> = pools
            .iter()
            .map(|pool| pool.describe(&spec))
            .collect::<Result<_, _>>()?;
        let on = stream(on);
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the stream lives. The plan may be on its way on another one.
        unsafe { workspace.hold_uploaded(on) }?;
        // SAFETY: the tensors lie in memory that is borrowed until this call returns, `out` and `lse` alone; any bits are a
        // value of their types. The upload vouched for the plan, and earlier runs for being ordered before this one. The
        // stream is borrowed, too.
        let run = unsafe { self.run(workspace, &q, &pools, &out, lse.as_ref(), on) };
        // Also after an error: launches before it may be under way.
        // SAFETY: the stream lives.
        let waited = unsafe { cuStreamSynchronize(on) }.check("cuStreamSynchronize");
        run.and(waited)
    }
}

#[cfg(test)]
mod tests {
    use cust::memory::DevicePointer;

    use super::*;

    #[test]
    fn pools_of_pages_without_tokens_are_refused() {
        let spec = Spec::new(8, 2, 128);
        // SAFETY: nothing looks at what is there.
        let memory = unsafe {
            DeviceSlice::<u16>::from_raw_parts(DevicePointer::from_raw(1 << 20), 4 * 16 * 2 * 128)
        };
        let pool = |page_size| {
            let layout = KvLayout::Nhd;
            let (k, v) = (&memory, &memory);
            let pool = Pool {
                layout,
                page_size,
                k,
                v,
            };
            pool.describe(&spec).map(|pool| pool.pages)
        };
        assert_eq!(pool(16), Ok(4));
        let error = pool(0).unwrap_err();
        assert!(matches!(error, Error::Problem(_)), "{error}");
    }

    /// In 64 bits they wrapped to none.
    #[test]
    fn shapes_of_too_many_bytes_are_refused() {
        // SAFETY: nothing looks at what is there.
        let memory =
            unsafe { DeviceSlice::<u16>::from_raw_parts(DevicePointer::from_raw(1 << 20), 64) };
        let tensor = DeviceTensor::in_cust(&memory, Dtype::BF16, [1 << 56, 1, 128]);
        assert!(matches!(tensor, Err(Error::Extent { .. })), "{tensor:?}");
        DeviceTensor::in_cust(&memory, Dtype::BF16, [1, 1, 64]).unwrap();
    }

    #[test]
    fn pools_of_no_heads_are_refused() {
        let mut spec = Spec::new(8, 2, 128);
        spec.kv_heads = 0;
        // SAFETY: nothing looks at what is there.
        let memory =
            unsafe { DeviceSlice::<u16>::from_raw_parts(DevicePointer::from_raw(1 << 20), 64) };
        let pool = Pool {
            layout: KvLayout::Nhd,
            page_size: 16,
            k: &memory,
            v: &memory,
        };
        let error = pool.describe(&spec).unwrap_err();
        assert!(matches!(error, Error::Problem(_)), "{error}");
    }
}

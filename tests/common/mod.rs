//! What GPU tests and benchmarks share: a GPU or a reason why there is none, device memory, random data,
//! and a comparison that says where two tensors part.
// Each program uses its own part of this.
#![allow(dead_code)]

pub mod adversarial;
pub mod blocks;
pub mod heads;
pub mod latent_parts;
pub mod modules;
mod numeric;
pub mod passed;
pub mod problems;
pub mod sinks;
pub mod straight;

pub use numeric::*;

use std::{io::Write, path::Path, ptr, sync::OnceLock};

use bytemuck::Pod;
use cust::{
    memory::{CopyDestination, DeviceBuffer},
    sys,
};
use half::{bf16, f16};
use tandem_attn::{
    Error,
    abi::KvStrides,
    exec::gpu::{DeviceArray, DeviceTensor, Gpu, Stream as Handle, modules_of},
    problem::Dtype,
    tensor::{Element, F8E4M3},
};

/// With PTX where there is no machine code: the tests run on new GPUs and on the emulator, too. `TANDEM_MODULES` names a
/// folder with kernels that stand in for those in the program.
pub fn load() -> Result<Gpu, Error> {
    load_from(std::env::var_os("TANDEM_MODULES").as_deref().map(Path::new))
}

/// The GPU with the kernels of a folder.
pub fn load_from(folder: Option<&Path>) -> Result<Gpu, Error> {
    let replaced = folder.map(modules_of).transpose()?;
    let mut tell = |step| eprintln!("{step}");
    let builder = Gpu::builder().compile_ptx(&mut tell);
    match &replaced {
        Some(replaced) => builder.modules(&replaced.modules).build(0),
        None => builder.build(0),
    }
}

/// The first GPU, or `None` and a line that names the test and the reason.
///
/// With `TANDEM_REQUIRE_GPU` set, a missing GPU is a failure.
pub fn gpu(test: &str) -> Option<&'static Gpu> {
    static GPU: OnceLock<Result<Gpu, Error>> = OnceLock::new();
    match GPU.get_or_init(load) {
        Ok(gpu) => {
            gpu.make_current().expect("the primary context is there");
            Some(gpu)
        }
        Err(error @ (Error::NoDriver { .. } | Error::NoDevice { .. })) => {
            assert!(
                std::env::var_os("TANDEM_REQUIRE_GPU").is_none(),
                "{test}: {error}"
            );
            let reason = match error {
                Error::NoDriver { reason, .. } => format!("no CUDA driver ({reason})"),
                _ => error.to_string(),
            };
            // Past the test runner, which would show this for failures only.
            let _ = writeln!(std::io::stderr(), "skipped: {test}: {reason}");
            None
        }
        Err(error) => panic!("{test}: {error}"),
    }
}

/// A stream of its own, that the default stream does not wait for.
pub struct Stream(pub Handle);

impl Stream {
    pub fn new() -> Self {
        let mut stream = ptr::null_mut();
        // SAFETY: writes one handle. 1 is CU_STREAM_NON_BLOCKING.
        let code = unsafe { sys::cuStreamCreate(&mut stream, 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        Self(Handle::from_raw(stream.cast()))
    }

    pub fn wait(&self) {
        // SAFETY: the stream lives.
        let code = unsafe { sys::cuStreamSynchronize(self.0.as_raw().cast()) };
        assert_eq!(
            code,
            sys::CUresult::CUDA_SUCCESS,
            "work on the stream failed"
        );
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made by us.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.0.as_raw().cast()) };
    }
}

/// Device memory, as bytes.
pub struct Memory(DeviceBuffer<u8>);

/// Waits until copies to the device are there. They return when the values are on their way, and streams that do not
/// block do not wait for them.
fn arrived() {
    // SAFETY: waits.
    let code = unsafe { sys::cuStreamSynchronize(ptr::null_mut()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

impl Memory {
    pub fn new<T: Pod>(values: &[T]) -> Self {
        let memory = DeviceBuffer::from_slice(bytemuck::cast_slice(values));
        arrived();
        Self(memory.expect("device memory"))
    }

    /// Of so many bytes, with anything in it.
    pub fn of_bytes(bytes: usize) -> Self {
        Self::try_of_bytes(bytes).expect("device memory")
    }

    /// The same, `None` where the GPU has not as much.
    pub fn try_of_bytes(bytes: usize) -> Option<Self> {
        // SAFETY: bytes may have any value.
        unsafe { DeviceBuffer::uninitialized(bytes) }.ok().map(Self)
    }

    pub fn address(&self) -> u64 {
        self.0.as_device_ptr().as_raw()
    }

    /// The values in it; all work on it must be done.
    /// Zeroes the first bytes, a multiple of four, on a stream.
    pub fn clear_on(&self, bytes: usize, stream: Handle) {
        // SAFETY: inside the memory.
        let code =
            unsafe { sys::cuMemsetD32Async(self.address(), 0, bytes / 4, stream.as_raw().cast()) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }

    pub fn read<T: Pod>(&self) -> Vec<T> {
        let mut values = vec![T::zeroed(); self.0.len() / size_of::<T>()];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        self.0.copy_to(bytes).expect("device memory is readable");
        values
    }

    /// Writes values from byte `at` on.
    pub fn write_at<T: Pod>(&self, at: usize, values: &[T]) {
        let bytes: &[u8] = bytemuck::cast_slice(values);
        self.0
            .index(at..at + bytes.len())
            .copy_from(bytes)
            .expect("device memory is writable");
        arrived();
    }

    /// `count` values from byte `at` on; all work on them must be done.
    pub fn read_at<T: Pod>(&self, at: usize, count: usize) -> Vec<T> {
        let mut values = vec![T::zeroed(); count];
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
        self.0
            .index(at..at + bytes.len())
            .copy_to(bytes)
            .expect("device memory is readable");
        values
    }

    pub fn array<T>(&self) -> DeviceArray<T> {
        DeviceArray::new(self.address(), self.0.len() / size_of::<T>())
    }

    pub fn tensor<const RANK: usize>(
        &self,
        dtype: Dtype,
        shape: [usize; RANK],
    ) -> DeviceTensor<RANK> {
        DeviceTensor::new(self.address(), dtype, shape)
    }

    /// Scales of tokens and KV heads that lie in their pages as `strides` say.
    pub fn scales_of_tokens(&self, pages: u32, heads: u32, strides: KvStrides) -> DeviceTensor<3> {
        let shape = [pages, strides.page_size, heads].map(|extent| extent as usize);
        self.tensor(Dtype::F32, shape)
            .with_stride(0, strides.page as usize)
            .with_stride(1, strides.token as usize)
            .with_stride(2, strides.head as usize)
    }
}

/// The bytes of a tensor of `dtype` with these values.
pub fn encode(dtype: Dtype, values: &[f32]) -> Vec<u8> {
    fn as_type<T: Element>(values: &[f32]) -> Vec<u8> {
        let values: Vec<T> = values.iter().map(|&x| T::from_f32(x)).collect();
        bytemuck::cast_slice(&values).to_vec()
    }
    match dtype {
        Dtype::BF16 => as_type::<bf16>(values),
        Dtype::F16 => as_type::<f16>(values),
        Dtype::F8E4M3 => as_type::<F8E4M3>(values),
        _ => as_type::<f32>(values),
    }
}

/// Values that may lie anywhere.
fn unaligned<T: Pod>(bytes: &[u8]) -> Vec<T> {
    let values = bytes.chunks_exact(size_of::<T>());
    values.map(bytemuck::pod_read_unaligned).collect()
}

/// The values of a tensor of `dtype`.
pub fn decode(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::BF16 => to_f64(&unaligned::<bf16>(bytes)),
        Dtype::F16 => to_f64(&unaligned::<f16>(bytes)),
        _ => to_f64(&unaligned::<f32>(bytes)),
    }
}

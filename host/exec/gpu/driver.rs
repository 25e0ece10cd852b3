//! The driver's functions, as this crate calls them.
//!
//! The bindings of `cust` declare the result of a call as a Rust enum with the codes of CUDA 11.4; a code
//! that came later would be undefined behaviour. Here it is a number. Functions younger than the bindings
//! are looked up by name.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem,
    ptr::{self, NonNull},
};

pub use cust::sys::{CUcontext, CUdevice, CUdeviceptr, CUevent, CUfunction, CUmodule, CUstream};

use crate::Error;

/// The result of a driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
#[must_use]
pub struct Code(pub c_uint);

impl Code {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_IMAGE: Self = Self(200);
    pub const NO_BINARY_FOR_GPU: Self = Self(209);
    pub const NOT_READY: Self = Self(600);
    pub const UNSUPPORTED_PTX_VERSION: Self = Self(222);

    /// Turns every code but success into an error that names the call.
    pub fn check(self, call: &'static str) -> Result<(), Error> {
        if self == Self::SUCCESS {
            return Ok(());
        }
        Err(Error::Driver {
            call,
            code: self.0,
            name: self.name(),
            text: describe(self, cuGetErrorString),
        })
    }

    /// The name of the code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
    pub fn name(self) -> String {
        describe(self, cuGetErrorName)
    }
}

fn describe(
    code: Code,
    function: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
) -> String {
    let mut text = ptr::null();
    // SAFETY: both functions write a pointer to a static string, or fail.
    let answered = unsafe { function(code, &mut text) };
    if answered != Code::SUCCESS || text.is_null() {
        return "a code that the driver does not know".into();
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

unsafe extern "C" {
    pub fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code;
    pub fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code;
    pub fn cuInit(flags: c_uint) -> Code;
    pub fn cuDriverGetVersion(version: *mut c_int) -> Code;
    pub fn cuDeviceGetCount(count: *mut c_int) -> Code;
    pub fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: CUdevice) -> Code;
    pub fn cuCtxGetCurrent(context: *mut CUcontext) -> Code;
    pub fn cuCtxSetCurrent(context: CUcontext) -> Code;
    pub fn cuCtxSynchronize() -> Code;
    pub fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: CUfunction,
        threads: c_int,
        shared: usize,
    ) -> Code;
    pub fn cuModuleLoadDataEx(
        module: *mut CUmodule,
        image: *const c_void,
        options: c_uint,
        keys: *const c_uint,
        values: *const *mut c_void,
    ) -> Code;
    pub fn cuModuleUnload(module: CUmodule) -> Code;
    pub fn cuModuleGetFunction(
        function: *mut CUfunction,
        module: CUmodule,
        name: *const c_char,
    ) -> Code;
    pub fn cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: CUfunction) -> Code;
    pub fn cuFuncSetAttribute(function: CUfunction, attribute: c_uint, value: c_int) -> Code;
    #[link_name = "cuMemAlloc_v2"]
    pub fn cuMemAlloc(address: *mut CUdeviceptr, bytes: usize) -> Code;
    #[link_name = "cuMemFree_v2"]
    pub fn cuMemFree(address: CUdeviceptr) -> Code;
    pub fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint) -> Code;
    pub fn cuMemFreeHost(address: *mut c_void) -> Code;
    #[link_name = "cuMemsetD8_v2"]
    pub fn cuMemsetD8(address: CUdeviceptr, value: u8, count: usize) -> Code;
    #[link_name = "cuMemcpyHtoDAsync_v2"]
    pub fn cuMemcpyHtoDAsync(
        to: CUdeviceptr,
        from: *const c_void,
        bytes: usize,
        stream: CUstream,
    ) -> Code;
    #[link_name = "cuMemcpyDtoH_v2"]
    pub fn cuMemcpyDtoH(to: *mut c_void, from: CUdeviceptr, bytes: usize) -> Code;
    pub fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) -> Code;
    #[link_name = "cuStreamDestroy_v2"]
    pub fn cuStreamDestroy(stream: CUstream) -> Code;
    pub fn cuStreamSynchronize(stream: CUstream) -> Code;
    pub fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) -> Code;
    pub fn cuEventCreate(event: *mut CUevent, flags: c_uint) -> Code;
    #[link_name = "cuEventDestroy_v2"]
    pub fn cuEventDestroy(event: CUevent) -> Code;
    pub fn cuEventRecord(event: CUevent, stream: CUstream) -> Code;
    pub fn cuEventQuery(event: CUevent) -> Code;
    pub fn cuEventSynchronize(event: CUevent) -> Code;
    #[allow(clippy::too_many_arguments)]
    pub fn cuLaunchKernel(
        function: CUfunction,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: CUstream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> Code;
}

/// `CU_DEVICE_ATTRIBUTE_*`.
pub mod device_attribute {
    use std::ffi::c_uint;

    pub const MULTIPROCESSOR_COUNT: c_uint = 16;
    pub const COMPUTE_CAPABILITY_MAJOR: c_uint = 75;
    pub const COMPUTE_CAPABILITY_MINOR: c_uint = 76;
    pub const MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: c_uint = 81;
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_uint = 97;
}

/// `CU_FUNC_ATTRIBUTE_*`.
pub mod function_attribute {
    use std::ffi::c_uint;

    pub const MAX_THREADS_PER_BLOCK: c_uint = 0;
    pub const SHARED_SIZE_BYTES: c_uint = 1;
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_uint = 8;
    pub const PREFERRED_SHARED_MEMORY_CARVEOUT: c_uint = 9;
}

/// `CU_JIT_*`.
pub mod jit_option {
    use std::ffi::c_uint;

    pub const ERROR_LOG_BUFFER: c_uint = 5;
    pub const ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
}

/// `CUlaunchAttribute`.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub struct LaunchAttribute {
    pub id: c_uint,
    pub pad: u32,
    /// The union; each attribute used here is one or three integers.
    pub value: [u32; 16],
}

impl LaunchAttribute {
    pub const CLUSTER_DIMENSION: c_uint = 4;
    pub const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

    pub fn new<const N: usize>(id: c_uint, integers: [u32; N]) -> Self {
        let mut value = [0; 16];
        value[..N].copy_from_slice(&integers);
        Self { id, pad: 0, value }
    }
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct LaunchConfig {
    pub grid: [c_uint; 3],
    pub block: [c_uint; 3],
    pub shared: c_uint,
    pub stream: CUstream,
    pub attributes: *const LaunchAttribute,
    pub attribute_count: c_uint,
}

// As in the driver's header.
const _: () = {
    assert!(size_of::<LaunchAttribute>() == 72 && mem::offset_of!(LaunchAttribute, value) == 8);
    assert!(size_of::<LaunchConfig>() == 56 && mem::offset_of!(LaunchConfig, stream) == 32);
};

/// `cuLaunchKernelEx`, of CUDA 11.8.
pub type LaunchKernelEx = unsafe extern "C" fn(
    *const LaunchConfig,
    CUfunction,
    *mut *mut c_void,
    *mut *mut c_void,
) -> Code;

/// `cuTensorMapEncodeTiled`, of CUDA 12.0.
pub type TensorMapEncodeTiled = unsafe extern "C" fn(
    map: *mut c_void,
    data_type: c_uint,
    rank: c_uint,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    box_dims: *const u32,
    element_strides: *const u32,
    interleave: c_uint,
    swizzle: c_uint,
    l2_promotion: c_uint,
    out_of_bounds_fill: c_uint,
) -> Code;

/// A function that is younger than the bindings.
///
/// # Safety
/// `F` is a function pointer of the type of the function `name`.
pub unsafe fn young_function<F: Copy>(
    name: &'static CStr,
    since: &'static str,
) -> Result<F, Error> {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
    let function = libcuda::symbol(name).ok_or(Error::OldDriver {
        function: name.to_str().unwrap_or("function"),
        since,
    })?;
    // SAFETY: the caller vouches for the type; the size was compared above.
    Ok(unsafe { mem::transmute_copy(&function) })
}

/// Opens the driver, or says why that cannot be.
pub fn initialise() -> Result<(), Error> {
    libcuda::driver().map_err(|missing| Error::NoDriver {
        searched: missing.searched.clone(),
        reason: missing.reason.clone(),
    })?;
    // SAFETY: may be called any number of times, by any thread.
    unsafe { cuInit(0) }.check("cuInit")
}

/// The newest CUDA version that the driver knows, `(major, minor)`.
pub fn version() -> Result<(u32, u32), Error> {
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { cuDriverGetVersion(&mut version) }.check("cuDriverGetVersion")?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// The thread's context, null if there is none.
pub fn current() -> Result<CUcontext, Error> {
    let mut context = ptr::null_mut();
    // SAFETY: writes one pointer.
    unsafe { cuCtxGetCurrent(&mut context) }.check("cuCtxGetCurrent")?;
    Ok(context)
}

/// Makes a context of [`current`] the thread's again, if there was one.
pub fn restore(context: CUcontext) -> Result<(), Error> {
    if context.is_null() {
        return Ok(());
    }
    // SAFETY: it was current before.
    unsafe { cuCtxSetCurrent(context) }.check("cuCtxSetCurrent")
}

/// Makes a context current for as long as it lives, and then what was current before.
pub struct Current {
    before: CUcontext,
    switched: bool,
}

impl Current {
    pub fn enter(context: CUcontext) -> Result<Self, Error> {
        let before = current()?;
        let switched = before != context;
        if switched {
            // SAFETY: the context is one that the caller holds.
            unsafe { cuCtxSetCurrent(context) }.check("cuCtxSetCurrent")?;
        }
        Ok(Self { before, switched })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.switched {
            // SAFETY: this was the thread's context. If it is gone by now there is nothing to restore.
            let _ = unsafe { cuCtxSetCurrent(self.before) };
        }
    }
}

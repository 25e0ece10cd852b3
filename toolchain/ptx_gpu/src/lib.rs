//! One GPU whose kernels run on the CPU, with [`ptx_run`], behind the functions of the CUDA driver.
//!
//! [`symbol`] finds them by name, as in a driver library. Each call performs its work at once; streams and events are
//! only names. A fault of a kernel is returned as an error of the launch, with the report as its text
//! (`cuGetErrorString`), and again by every later call, as with a real driver.
//!
//! [`configure`] sets the properties of the GPU and its schedule; the default is taken from `PTX_DRIVER`, which has
//! `name=value` pairs:
//!
//! | name | value | default |
//! |---|---|---|
//! | `compute` | compute capability, 80 or 90 | 90 |
//! | `sms` | multiprocessors | 2 |
//! | `schedule` | `round`, `random` or `late` | `random` |
//! | `seed` | seed of the schedule; each launch derives its own | 0 |
//! | `limit` | maximum warp instructions of a launch, in millions | 1000 |
//! | `log` | 1: write a line for each launch to standard error | 0 |
#![allow(non_snake_case, clippy::missing_safety_doc)]

#[allow(missing_docs)]
mod calls;
mod gpu;
mod settings;
mod work;

use std::{
    ffi::{CStr, c_void},
    ptr::NonNull,
};

pub use calls::*;
pub use ptx_run;
pub use settings::Settings;

/// Calls a macro with the names of all functions.
#[macro_export]
macro_rules! functions {
    ($then:ident) => {
        $then! {
            cuCtxEnablePeerAccess
            cuCtxGetCurrent
            cuCtxGetDevice
            cuCtxSetCurrent
            cuCtxSynchronize
            cuDeviceCanAccessPeer
            cuDeviceGet
            cuDeviceGetAttribute
            cuDeviceGetCount
            cuDeviceGetName
            cuDevicePrimaryCtxRelease_v2
            cuDevicePrimaryCtxRetain
            cuDeviceTotalMem_v2
            cuDriverGetVersion
            cuEventCreate
            cuEventDestroy_v2
            cuEventElapsedTime
            cuEventQuery
            cuEventRecord
            cuEventSynchronize
            cuFuncGetAttribute
            cuFuncSetAttribute
            cuGetErrorName
            cuGetErrorString
            cuGraphDestroy
            cuGraphExecDestroy
            cuGraphInstantiateWithFlags
            cuGraphLaunch
            cuInit
            cuLaunchKernel
            cuLaunchKernelEx
            cuMemAlloc_v2
            cuMemFreeHost
            cuMemFree_v2
            cuMemGetInfo_v2
            cuMemHostAlloc
            cuMemcpyDtoDAsync_v2
            cuMemcpyDtoHAsync_v2
            cuMemcpyDtoH_v2
            cuMemcpyHtoDAsync_v2
            cuMemcpyHtoD_v2
            cuMemsetD32Async
            cuMemsetD8Async
            cuMemsetD8_v2
            cuModuleGetFunction
            cuModuleLoadDataEx
            cuModuleUnload
            cuOccupancyMaxActiveBlocksPerMultiprocessor
            cuStreamBeginCapture_v2
            cuStreamCreate
            cuStreamDestroy_v2
            cuStreamEndCapture
            cuStreamQuery
            cuStreamSynchronize
            cuStreamWaitEvent
            cuTensorMapEncodeTiled
            ptx_driver_forget_failure
            ptx_driver_launches
            ptx_driver_loaded
            ptx_driver_trace
        }
    };
}

macro_rules! find {
    ($($name:ident)*) => {
        /// The address of a driver function; `None` if the emulated driver lacks it.
        #[must_use]
        pub fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
            let found = match name.to_str().ok()? {
                $(stringify!($name) => calls::$name as *const () as *mut c_void,)*
                _ => return None,
            };
            NonNull::new(found)
        }
    };
}
functions!(find);

/// Changes the GPU's settings from now on. A program that has loaded kernels must keep its architecture.
pub fn configure(settings: Settings) {
    gpu::gpu().settings = settings;
}

/// The timelines of launches traced since the last call, in order.
#[must_use]
pub fn take_timelines() -> Vec<ptx_run::Timeline> {
    std::mem::take(&mut gpu::gpu().timelines)
}

/// Clears the failure of a launch, which a real driver does not allow.
pub fn forget_failure() {
    ptx_driver_forget_failure();
}

#[cfg(test)]
mod tests;

//! One GPU whose kernels run on the CPU, with [`ptx_run`], behind the functions of the CUDA driver.
//!
//! [`symbol`] finds them by name, as in a driver's library. Work is done when it is asked for, one call after the
//! other; streams and events are names only. What a kernel does wrong comes back as an error of the launch, with the
//! report as its text (`cuGetErrorString`), and again from every call behind it, as the driver has it.
//!
//! Which GPU is played, and in which order things happen on it, is said by [`configure`], or by `PTX_DRIVER`, which
//! holds `name=value` pairs:
//!
//! | name | value | default |
//! |---|---|---|
//! | `compute` | compute capability, 80 or 90 | 90 |
//! | `sms` | multiprocessors | 2 |
//! | `schedule` | `round`, `random` or `late` | `random` |
//! | `seed` | of the schedule's choices; each launch has its own | 0 |
//! | `limit` | millions of warp instructions that a launch may take | 1000 |
//! | `log` | 1: a line for each launch on standard error | 0 |
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
            cuCtxGetCurrent
            cuCtxSetCurrent
            cuCtxSynchronize
            cuDeviceGet
            cuDeviceGetAttribute
            cuDeviceGetCount
            cuDeviceGetName
            cuDevicePrimaryCtxRelease_v2
            cuDevicePrimaryCtxRetain
            cuDriverGetVersion
            cuEventCreate
            cuEventDestroy_v2
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
        /// The address of a function of the driver; `None` for those that the emulated one does not have.
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

/// Plays another GPU from now on, or in another order. A program that has loaded kernels keeps its architecture.
pub fn configure(settings: Settings) {
    gpu::gpu().settings = settings;
}

/// The timelines of launches that were traced since the last call, in their order.
#[must_use]
pub fn take_timelines() -> Vec<ptx_run::Timeline> {
    std::mem::take(&mut gpu::gpu().timelines)
}

/// Goes on behind a launch that failed, as no driver does.
pub fn forget_failure() {
    ptx_driver_forget_failure();
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A program that loads modules again and again keeps none that it gave back.
    #[test]
    fn modules_that_are_unloaded_take_no_memory() {
        let text = c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing()\n{\n\tret;\n}\n";
        let (mut module, mut function) = (std::ptr::null_mut::<c_void>(), std::ptr::null_mut());
        // SAFETY: places for handles, texts that end with a zero.
        unsafe {
            assert_eq!(
                cuModuleLoadDataEx(
                    &mut module,
                    text.as_ptr(),
                    0,
                    std::ptr::null(),
                    std::ptr::null()
                ),
                0
            );
            assert_eq!(
                cuModuleGetFunction(&mut function, module, c"nothing".as_ptr()),
                0
            );
        }
        let kept = std::sync::Arc::downgrade(&gpu::gpu().modules[&module.addr()]);
        assert!(gpu::gpu().functions.contains_key(&function.addr()));
        assert_eq!(cuModuleUnload(module), 0);
        assert!(kept.upgrade().is_none());
        assert!(!gpu::gpu().functions.contains_key(&function.addr()));
    }

    /// What is allocated is missing from what is free, until it is given back. Other tests allocate beside this one.
    #[test]
    fn memory_that_is_allocated_is_not_free() {
        const MANY: usize = 1 << 26;
        let free = || {
            let (mut free, mut total) = (0, 0);
            // SAFETY: places for two numbers.
            assert_eq!(unsafe { cuMemGetInfo_v2(&mut free, &mut total) }, 0);
            assert!(free <= total);
            free
        };
        let (before, mut memory) = (free(), 0);
        // SAFETY: a place for an address.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut memory, MANY) }, 0);
        let between = free();
        assert!(between < before - MANY / 2, "{before}, {between}");
        assert_eq!(cuMemFree_v2(memory), 0);
        assert!(free() > between + MANY / 2);
    }

    /// What goes on a second stream, which waits for an event of the first, is a part of the first one's graph.
    #[test]
    fn a_capture_takes_in_streams_that_wait_for_it() {
        let mut handles = [std::ptr::null_mut::<c_void>(); 4];
        let [first, second, event, graph] = &mut handles;
        let mut memory = 0;
        // SAFETY: places for handles, memory of four bytes.
        unsafe {
            assert_eq!(cuStreamCreate(first, 1), 0);
            assert_eq!(cuStreamCreate(second, 1), 0);
            assert_eq!(cuEventCreate(event, 0), 0);
            assert_eq!(cuMemAlloc_v2(&mut memory, 4), 0);
            assert_eq!(cuMemsetD8_v2(memory, 1, 4), 0);
            assert_eq!(cuStreamBeginCapture_v2(*first, 1), 0);
            assert_eq!(cuEventRecord(*event, *first), 0);
            assert_eq!(cuStreamWaitEvent(*second, *event, 0), 0);
            assert_eq!(cuMemsetD8Async(memory, 7, 4, *second), 0);
            assert_eq!(cuStreamEndCapture(*first, graph), 0);
        }
        let read = || {
            let mut bytes = [0_u8; 4];
            // SAFETY: four bytes on both sides.
            let code = unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, 4) };
            assert_eq!(code, 0);
            bytes
        };
        assert_eq!(read(), [1; 4]);
        assert_eq!(cuGraphLaunch(*graph, *first), 0);
        assert_eq!(read(), [7; 4]);
    }
}

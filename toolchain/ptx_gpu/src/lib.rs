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
mod tests {
    use super::*;

    /// A program may load and unload modules repeatedly without using more memory.
    #[test]
    fn modules_that_are_unloaded_take_no_memory() {
        let text = c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing()\n{\n\tret;\n}\n";
        let (mut module, mut function) = (std::ptr::null_mut::<c_void>(), std::ptr::null_mut());
        // SAFETY: the arguments point to handles and to NUL-terminated texts.
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

    fn module(text: &CStr) -> *mut c_void {
        let (mut module, null) = (std::ptr::null_mut(), std::ptr::null());
        // SAFETY: the arguments point to a handle and to a text.
        let code = unsafe { cuModuleLoadDataEx(&mut module, text.as_ptr(), 0, null, null.cast()) };
        assert_eq!(code, 0);
        module
    }

    fn function(module: *mut c_void, name: &CStr) -> *mut c_void {
        let mut function = std::ptr::null_mut();
        // SAFETY: the arguments point to a handle and to a name.
        let code = unsafe { cuModuleGetFunction(&mut function, module, name.as_ptr()) };
        assert_eq!(code, 0);
        function
    }

    fn launch(function: *mut c_void, grid: u32, shared: u32) -> u32 {
        let null = std::ptr::null_mut;
        // SAFETY: the entry has no parameters.
        unsafe {
            cuLaunchKernel(
                function,
                grid,
                1,
                1,
                32,
                1,
                1,
                shared,
                null(),
                null().cast(),
                null().cast(),
            )
        }
    }

    /// `#[kernel(cluster = 2)]` says it in the code.
    #[test]
    fn a_launch_has_the_clusters_that_the_code_declares() {
        let text = c".version 8.0\n.target sm_90\n.address_size 64\n.visible .entry pair()\n.reqnctapercluster 2, 1, 1\n{\n\
            barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;\n\tret;\n}\n";
        let pair = function(module(text), c"pair");
        assert_eq!(launch(pair, 4, 0), 0);
    }

    /// A function that is missing looks like a driver that is too old.
    #[test]
    fn every_function_that_this_project_calls_is_there() {
        let functions = concat!(env!("CARGO_MANIFEST_DIR"), "/../libcuda/src/functions.rs");
        let text = std::fs::read_to_string(functions).unwrap();
        let names = text
            .lines()
            .filter_map(|line| line.strip_prefix("    \"cu"));
        let names: Vec<_> = names.filter_map(|rest| rest.split('"').next()).collect();
        assert!(names.len() > 50, "{names:?}");
        let has = |name: &str| symbol(&std::ffi::CString::new(format!("cu{name}")).unwrap());
        let missing: Vec<_> = names.iter().filter(|name| has(name).is_none()).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn events_have_times_and_contexts_a_device() {
        let (mut first, mut second) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (mut time, mut device) = (0.0, -1);
        let stream = std::ptr::null_mut();
        // SAFETY: the arguments point to handles and numbers.
        unsafe {
            assert_eq!(cuEventCreate(&mut first, 0), 0);
            assert_eq!(cuEventCreate(&mut second, 0), 0);
            assert_eq!(cuEventElapsedTime(&mut time, first, second), 400);
            assert_eq!(
                (cuEventRecord(first, stream), cuEventRecord(second, stream)),
                (0, 0)
            );
            assert_eq!(cuEventElapsedTime(&mut time, first, second), 0);
            assert!(time > 0.0);
            cuCtxSetCurrent(std::ptr::null_mut());
            assert_eq!(cuCtxGetDevice(&mut device), 201);
            let mut context = std::ptr::null_mut();
            assert_eq!(cuDevicePrimaryCtxRetain(&mut context, 0), 0);
            assert_eq!(cuCtxSetCurrent(context), 0);
            assert_eq!((cuCtxGetDevice(&mut device), device), (0, 0));
            assert_eq!(cuDeviceGet(&mut device, 1), 101);
        }
    }

    /// More than 48 KiB are to be asked for, and there are no more than the GPU has.
    #[test]
    fn shared_memory_is_limited_as_on_a_gpu() {
        let text = c".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry takes()\n{\n\
            .shared .align 4 .b8 array[1024];\n.reg .b32 %r<2>;\nmov.u32 %r1, array;\nst.shared.b32 [%r1], 1;\nret;\n}\n";
        let takes = function(module(text), c"takes");
        let mut own = 0;
        // SAFETY: the argument points to an integer.
        assert_eq!(unsafe { cuFuncGetAttribute(&mut own, 1, takes) }, 0);
        assert_eq!(own, 1024);
        assert_eq!(launch(takes, 1, 47 << 10), 0);
        assert_eq!(launch(takes, 1, 48 << 10), 1);
        assert_eq!(cuFuncSetAttribute(takes, 8, 227 << 10), 1);
        assert_eq!(cuFuncSetAttribute(takes, 8, 226 << 10), 0);
        assert_eq!(launch(takes, 1, 226 << 10), 0);
        assert_eq!(launch(takes, 1, (226 << 10) + 4), 1);
    }

    /// Allocated memory is not reported as free until it is freed. Other tests allocate concurrently.
    #[test]
    fn memory_that_is_allocated_is_not_free() {
        const MANY: usize = 1 << 26;
        let free = || {
            let (mut free, mut total) = (0, 0);
            // SAFETY: the arguments point to two numbers.
            assert_eq!(unsafe { cuMemGetInfo_v2(&mut free, &mut total) }, 0);
            assert!(free <= total);
            free
        };
        let (before, mut memory) = (free(), 0);
        // SAFETY: the argument points to an address.
        assert_eq!(unsafe { cuMemAlloc_v2(&mut memory, MANY) }, 0);
        let between = free();
        assert!(between < before - MANY / 2, "{before}, {between}");
        assert_eq!(cuMemFree_v2(memory), 0);
        assert!(free() > between + MANY / 2);
    }

    /// Programs that ask for more than there is get an error. An earlier version ended the process.
    #[test]
    fn more_memory_than_there_is_is_an_error() {
        let mut memory = 0;
        for many in [usize::MAX, usize::MAX - 2048, 1 << 50, 142 << 30] {
            // SAFETY: the argument points to an address.
            assert_eq!(unsafe { cuMemAlloc_v2(&mut memory, many) }, 2);
        }
        let mut block = std::ptr::null_mut();
        // SAFETY: the argument points to an address.
        assert_eq!(unsafe { cuMemHostAlloc(&mut block, 1 << 50, 0) }, 2);
        assert_eq!(memory, 0);
    }

    /// Nothing can wait for a stream that is being captured.
    #[test]
    fn a_stream_that_is_captured_is_not_waited_for() {
        let (mut stream, mut graph) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the arguments point to handles.
        unsafe {
            assert_eq!(cuStreamCreate(&mut stream, 1), 0);
            assert_eq!(cuStreamBeginCapture_v2(stream, 1), 0);
            assert_eq!(cuStreamSynchronize(stream), 900);
            assert_eq!(cuStreamEndCapture(stream, &mut graph), 0);
            assert_eq!(cuStreamSynchronize(stream), 0);
        }
    }

    /// Work on a second stream that waits for an event of the first is part of the first one's graph.
    #[test]
    fn a_capture_takes_in_streams_that_wait_for_it() {
        let mut handles = [std::ptr::null_mut::<c_void>(); 4];
        let [first, second, event, graph] = &mut handles;
        let mut memory = 0;
        // SAFETY: the arguments point to handles and to four bytes of memory.
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
            // SAFETY: both sides have four bytes.
            let code = unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, 4) };
            assert_eq!(code, 0);
            bytes
        };
        assert_eq!(read(), [1; 4]);
        assert_eq!(cuGraphLaunch(*graph, *first), 0);
        assert_eq!(read(), [7; 4]);
    }
}

//! The driver's functions, each looked up on its first call.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    mem, ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use crate::{
    Code, Context, Device, DevicePtr, Event, Function, Graph, GraphExec, LaunchConfig, Module,
    Stream,
    driver::{driver, symbol},
};

/// The address of a function, or the error code to return. The address is cached, because the driver is never closed.
fn look_up(slot: &AtomicPtr<c_void>, name: &CStr) -> Result<*mut c_void, Code> {
    let found = slot.load(Ordering::Relaxed);
    if !found.is_null() {
        return Ok(found);
    }
    if driver().is_err() {
        return Err(Code::NO_DEVICE);
    }
    let found = symbol(name).ok_or(Code::NO_FUNCTION)?.as_ptr();
    slot.store(found, Ordering::Relaxed);
    Ok(found)
}

const fn terminated(name: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(name.as_bytes()) {
        Ok(name) => name,
        Err(_) => panic!("no terminating zero"),
    }
}

macro_rules! functions {
    ($($symbol:literal $name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {$(
        #[doc = concat!("`", $symbol, "`")]
        ///
        /// # Safety
        /// As the driver's documentation requires of the arguments.
        #[allow(non_snake_case, clippy::too_many_arguments)]
        pub unsafe fn $name($($argument: $type),*) -> Code {
            static SLOT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
            const NAME: &CStr = terminated(concat!($symbol, "\0"));
            match look_up(&SLOT, NAME) {
                Ok(address) => {
                    // SAFETY: in all drivers, the function of this name has this type.
                    let function: unsafe extern "C" fn($($type),*) -> Code = unsafe { mem::transmute(address) };
                    // SAFETY: the caller's promise.
                    unsafe { function($($argument),*) }
                }
                Err(code) => code,
            }
        }
    )*};
}

functions! {
    "cuInit" cuInit(flags: c_uint);
    "cuGetErrorName" cuGetErrorName(code: Code, text: *mut *const c_char);
    "cuGetErrorString" cuGetErrorString(code: Code, text: *mut *const c_char);
    "cuDriverGetVersion" cuDriverGetVersion(version: *mut c_int);

    "cuDeviceGetCount" cuDeviceGetCount(count: *mut c_int);
    "cuDeviceGet" cuDeviceGet(device: *mut Device, ordinal: c_int);
    "cuDeviceGetName" cuDeviceGetName(name: *mut c_char, length: c_int, device: Device);
    "cuDeviceTotalMem_v2" cuDeviceTotalMem(bytes: *mut usize, device: Device);
    "cuDeviceGetAttribute" cuDeviceGetAttribute(value: *mut c_int, attribute: c_uint, device: Device);

    "cuDevicePrimaryCtxRetain" cuDevicePrimaryCtxRetain(context: *mut Context, device: Device);
    "cuDevicePrimaryCtxRelease_v2" cuDevicePrimaryCtxRelease(device: Device);
    "cuCtxGetCurrent" cuCtxGetCurrent(context: *mut Context);
    "cuCtxSetCurrent" cuCtxSetCurrent(context: Context);
    "cuCtxGetDevice" cuCtxGetDevice(device: *mut Device);
    "cuCtxSynchronize" cuCtxSynchronize();

    "cuDeviceCanAccessPeer" cuDeviceCanAccessPeer(possible: *mut c_int, device: Device, other: Device);
    "cuCtxEnablePeerAccess" cuCtxEnablePeerAccess(other: Context, flags: c_uint);

    "cuModuleLoadDataEx" cuModuleLoadDataEx(
        module: *mut Module,
        image: *const c_void,
        options: c_uint,
        keys: *const c_uint,
        values: *const *mut c_void,
    );
    "cuModuleUnload" cuModuleUnload(module: Module);
    "cuModuleGetFunction" cuModuleGetFunction(function: *mut Function, module: Module, name: *const c_char);
    "cuFuncGetAttribute" cuFuncGetAttribute(value: *mut c_int, attribute: c_uint, function: Function);
    "cuFuncSetAttribute" cuFuncSetAttribute(function: Function, attribute: c_uint, value: c_int);
    "cuOccupancyMaxActiveBlocksPerMultiprocessor" cuOccupancyMaxActiveBlocksPerMultiprocessor(
        blocks: *mut c_int,
        function: Function,
        threads: c_int,
        shared: usize,
    );

    "cuMemGetInfo_v2" cuMemGetInfo(free: *mut usize, total: *mut usize);
    "cuMemAlloc_v2" cuMemAlloc(address: *mut DevicePtr, bytes: usize);
    "cuMemFree_v2" cuMemFree(address: DevicePtr);
    "cuMemHostAlloc" cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, flags: c_uint);
    "cuMemFreeHost" cuMemFreeHost(address: *mut c_void);
    "cuMemsetD8_v2" cuMemsetD8(address: DevicePtr, value: u8, count: usize);
    "cuMemsetD8Async" cuMemsetD8Async(address: DevicePtr, value: u8, count: usize, stream: Stream);
    "cuMemcpyHtoD_v2" cuMemcpyHtoD(to: DevicePtr, from: *const c_void, bytes: usize);
    "cuMemcpyHtoDAsync_v2" cuMemcpyHtoDAsync(to: DevicePtr, from: *const c_void, bytes: usize, stream: Stream);
    "cuMemcpyDtoH_v2" cuMemcpyDtoH(to: *mut c_void, from: DevicePtr, bytes: usize);
    "cuMemcpyDtoHAsync_v2" cuMemcpyDtoHAsync(to: *mut c_void, from: DevicePtr, bytes: usize, stream: Stream);
    "cuMemcpyDtoDAsync_v2" cuMemcpyDtoDAsync(to: DevicePtr, from: DevicePtr, bytes: usize, stream: Stream);

    "cuStreamCreate" cuStreamCreate(stream: *mut Stream, flags: c_uint);
    "cuStreamDestroy_v2" cuStreamDestroy(stream: Stream);
    "cuStreamSynchronize" cuStreamSynchronize(stream: Stream);
    "cuStreamQuery" cuStreamQuery(stream: Stream);
    "cuStreamWaitEvent" cuStreamWaitEvent(stream: Stream, event: Event, flags: c_uint);
    "cuStreamBeginCapture_v2" cuStreamBeginCapture(stream: Stream, mode: c_uint);
    "cuStreamEndCapture" cuStreamEndCapture(stream: Stream, graph: *mut Graph);
    "cuGraphInstantiateWithFlags" cuGraphInstantiate(executable: *mut GraphExec, graph: Graph, flags: u64);
    "cuGraphLaunch" cuGraphLaunch(executable: GraphExec, stream: Stream);
    "cuGraphExecDestroy" cuGraphExecDestroy(executable: GraphExec);
    "cuGraphDestroy" cuGraphDestroy(graph: Graph);
    "cuEventCreate" cuEventCreate(event: *mut Event, flags: c_uint);
    "cuEventDestroy_v2" cuEventDestroy(event: Event);
    "cuEventRecord" cuEventRecord(event: Event, stream: Stream);
    "cuEventQuery" cuEventQuery(event: Event);
    "cuEventSynchronize" cuEventSynchronize(event: Event);
    "cuEventElapsedTime" cuEventElapsedTime(milliseconds: *mut f32, begin: Event, end: Event);

    "cuLaunchKernel" cuLaunchKernel(
        function: Function,
        grid_x: c_uint,
        grid_y: c_uint,
        grid_z: c_uint,
        block_x: c_uint,
        block_y: c_uint,
        block_z: c_uint,
        shared: c_uint,
        stream: Stream,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    "cuLaunchKernelEx" cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: Function,
        parameters: *mut *mut c_void,
        extra: *mut *mut c_void,
    );
    "cuTensorMapEncodeTiled" cuTensorMapEncodeTiled(
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
    );
}

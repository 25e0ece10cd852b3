//! What the GPU is, and its context.

use std::{
    cell::Cell,
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
};

use super::{handle, memory::TOTAL, state};
use crate::gpu::{
    Architecture, Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_PEER_ACCESS, SUCCESS,
    gpu,
};

thread_local! {
    /// The thread's current context.
    static CURRENT: Cell<*mut c_void> = const { Cell::new(ptr::null_mut()) };
}
/// The handle of the first context, and the difference between two.
const CONTEXT: usize = 0x100;

/// The GPU of the thread's current context; that of the settings if the thread has none.
pub fn architecture() -> Architecture {
    let of_context = CURRENT.get().addr().checked_sub(CONTEXT);
    let gpu = gpu();
    let retained = of_context.and_then(|offset| gpu.contexts.get(offset / CONTEXT));
    retained.copied().unwrap_or(gpu.settings.architecture())
}

pub extern "C" fn cuCtxSynchronize() -> Code {
    state()
}

pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the argument points to an integer.
    unsafe { *version = 13_000 };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the argument points to an integer.
    unsafe { *count = 1 };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> Code {
    if ordinal != 0 {
        return INVALID_DEVICE;
    }
    // SAFETY: the argument points to an integer.
    unsafe { *device = 0 };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _: c_int) -> Code {
    let text = b"Emulated GPU";
    let Some(room) = usize::try_from(length)
        .ok()
        .and_then(|length| length.checked_sub(1))
    else {
        return INVALID_VALUE;
    };
    let length = text.len().min(room);
    // SAFETY: the buffer has room for this much and a zero.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), name, length);
        name.add(length).write(0);
    }
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_uint, _: c_int) -> Code {
    let settings = gpu().settings.clone();
    let found = match which {
        16 => settings.multiprocessors as c_int,
        75 => settings.compute / 10,
        76 => settings.compute % 10,
        // Shared memory of a multiprocessor and of a block.
        81 => settings.architecture().shared_memory().0 as c_int,
        97 => settings.architecture().shared_memory().1 as c_int,
        // Memory clock (kHz), bus width (bits), L2 (bytes), clock (kHz).
        36 => 2_619_000,
        37 => 5_120,
        38 => 50 << 20,
        13 => 1_980_000,
        _ => return INVALID_VALUE,
    };
    // SAFETY: the argument points to an integer.
    unsafe { *value = found };
    SUCCESS
}

pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _: c_int) -> Code {
    let mut gpu = gpu();
    let asked = gpu.settings.architecture();
    let found = gpu.contexts.iter().position(|&retained| retained == asked);
    let index = found.unwrap_or_else(|| {
        gpu.contexts.push(asked);
        gpu.contexts.len() - 1
    });
    // SAFETY: the argument points to a handle.
    unsafe { *context = handle(CONTEXT * (index + 1)) };
    SUCCESS
}

pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> Code {
    // SAFETY: the argument points to a handle.
    unsafe { *context = CURRENT.get() };
    SUCCESS
}

pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Code {
    CURRENT.set(context);
    SUCCESS
}

pub unsafe extern "C" fn cuCtxGetDevice(device: *mut c_int) -> Code {
    if CURRENT.get().is_null() {
        return INVALID_CONTEXT;
    }
    // SAFETY: the argument points to an integer.
    unsafe { *device = 0 };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, _: c_int) -> Code {
    // SAFETY: the argument points to a number.
    unsafe { *bytes = TOTAL };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceCanAccessPeer(possible: *mut c_int, _: c_int, _: c_int) -> Code {
    // SAFETY: the argument points to an integer.
    unsafe { *possible = 0 };
    SUCCESS
}

pub extern "C" fn cuCtxEnablePeerAccess(_: *mut c_void, _: c_uint) -> Code {
    NO_PEER_ACCESS
}

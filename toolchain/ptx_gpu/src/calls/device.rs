//! What the GPU is, and its context.

use std::{
    ffi::{c_char, c_int, c_uint, c_void},
    ptr,
    sync::atomic::{AtomicPtr, Ordering},
};

use super::{handle, state};
use crate::gpu::{Code, INVALID_VALUE, SUCCESS, gpu};

static CURRENT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
const CONTEXT: usize = 0x77;

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
    // SAFETY: the argument points to an integer.
    unsafe { *device = ordinal };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _: c_int) -> Code {
    let text = c"Emulated GPU".to_bytes_with_nul();
    if (length as usize) < text.len() {
        return INVALID_VALUE;
    }
    // SAFETY: the buffer has this much room.
    unsafe { ptr::copy_nonoverlapping(text.as_ptr().cast(), name, text.len()) };
    SUCCESS
}

pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_uint, _: c_int) -> Code {
    let settings = gpu().settings.clone();
    let found = match which {
        16 => settings.multiprocessors as c_int,
        75 => settings.compute / 10,
        76 => settings.compute % 10,
        // Shared memory of a multiprocessor and of a block.
        81 => 233_472,
        97 => 232_448,
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
    // SAFETY: the argument points to a handle.
    unsafe { *context = handle(CONTEXT) };
    SUCCESS
}

pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> Code {
    // SAFETY: the argument points to a handle.
    unsafe { *context = CURRENT.load(Ordering::SeqCst) };
    SUCCESS
}

pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Code {
    CURRENT.store(context, Ordering::SeqCst);
    SUCCESS
}

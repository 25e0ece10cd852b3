//! Memory: allocations, copies and fills.

use std::{
    ffi::{c_uint, c_void},
    ptr,
};

use crate::{
    gpu::{CAPTURING, Code, Gpu, INVALID_VALUE, LAUNCH_FAILED, OUT_OF_MEMORY, SUCCESS, gpu},
    work::Work,
};

/// Memory of the emulated GPU: that of an H200.
pub(super) const TOTAL: usize = 141 << 30;

pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Code {
    let mut gpu = gpu();
    if gpu.forbids_unsafe_calls() {
        return CAPTURING;
    }
    let memory = &mut gpu.memory;
    if bytes > TOTAL.saturating_sub(memory.allocated()) {
        return OUT_OF_MEMORY;
    }
    let Some(allocated) = memory.try_allocate(bytes) else {
        return OUT_OF_MEMORY;
    };
    // SAFETY: the argument points to an address.
    unsafe { *address = allocated };
    SUCCESS
}

pub extern "C" fn cuMemFree_v2(address: u64) -> Code {
    let mut gpu = gpu();
    if address == 0 {
        return SUCCESS;
    }
    if gpu.forbids_unsafe_calls() {
        return CAPTURING;
    }
    match gpu.memory.free(address) {
        true => SUCCESS,
        false => INVALID_VALUE,
    }
}

/// Reports the memory of an H200, less what is allocated.
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    // SAFETY: the arguments point to two numbers.
    unsafe {
        *free = TOTAL.saturating_sub(gpu().memory.allocated());
        *total = TOTAL;
    }
    SUCCESS
}

/// [`cuMemFreeHost`] frees the memory. Its size is stored before it.
pub unsafe extern "C" fn cuMemHostAlloc(
    address: *mut *mut c_void,
    bytes: usize,
    _: c_uint,
) -> Code {
    if gpu().forbids_unsafe_calls() {
        return CAPTURING;
    }
    let words = bytes.div_ceil(16) + 1;
    let mut block = Vec::new();
    if block.try_reserve_exact(words).is_err() {
        return OUT_OF_MEMORY;
    }
    block.resize(words, 0_u128);
    let mut block = block.into_boxed_slice();
    block[0] = words as u128;
    // SAFETY: the argument points to an address, and the block is larger than its header.
    unsafe { *address = Box::into_raw(block).cast::<u128>().add(1).cast() };
    SUCCESS
}

pub unsafe extern "C" fn cuMemFreeHost(address: *mut c_void) -> Code {
    // SAFETY: `cuMemHostAlloc` made it.
    unsafe {
        let start = address.cast::<u128>().sub(1);
        let words = *start as usize;
        drop(Box::from_raw(ptr::slice_from_raw_parts_mut(start, words)));
    }
    SUCCESS
}

fn fill(target: u64, pattern: &[u8], count: usize, stream: *mut c_void) -> Code {
    let mut gpu = gpu();
    let length = pattern.len().saturating_mul(count);
    if gpu.memory.read(target, length).is_err() {
        return INVALID_VALUE;
    }
    let bytes = pattern.repeat(count);
    gpu.put(stream.addr(), Work::Write { target, bytes })
}

pub extern "C" fn cuMemsetD8_v2(target: u64, value: u8, count: usize) -> Code {
    if gpu().forbids_unsafe_calls() {
        return CAPTURING;
    }
    fill(target, &[value], count, ptr::null_mut())
}

pub extern "C" fn cuMemsetD8Async(
    target: u64,
    value: u8,
    count: usize,
    stream: *mut c_void,
) -> Code {
    fill(target, &[value], count, stream)
}

pub extern "C" fn cuMemsetD32Async(
    target: u64,
    value: u32,
    count: usize,
    stream: *mut c_void,
) -> Code {
    fill(target, &value.to_le_bytes(), count, stream)
}

pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    target: u64,
    source: *const c_void,
    bytes: usize,
    stream: *mut c_void,
) -> Code {
    if bytes == 0 {
        return SUCCESS;
    }
    let source = source.expose_provenance();
    let work = Work::Fetch {
        target,
        source,
        bytes,
    };
    gpu().put(stream.addr(), work)
}

pub unsafe extern "C" fn cuMemcpyHtoD_v2(target: u64, source: *const c_void, bytes: usize) -> Code {
    if gpu().forbids_unsafe_calls() {
        return CAPTURING;
    }
    // SAFETY: the caller's promise.
    unsafe { cuMemcpyHtoDAsync_v2(target, source, bytes, ptr::null_mut()) }
}

/// Copies at once.
///
/// # Safety
/// The target takes so many bytes.
unsafe fn fetch(gpu: &mut Gpu, target: *mut c_void, source: u64, bytes: usize) -> Code {
    if gpu.failed {
        return LAUNCH_FAILED;
    }
    let Ok(values) = gpu.memory.read(source, bytes) else {
        return INVALID_VALUE;
    };
    // SAFETY: the caller's promise.
    unsafe { ptr::copy_nonoverlapping(values.as_ptr(), target.cast(), bytes) };
    SUCCESS
}

pub unsafe extern "C" fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, bytes: usize) -> Code {
    let mut gpu = gpu();
    if gpu.forbids_unsafe_calls() {
        return CAPTURING;
    }
    // SAFETY: the caller's promise.
    unsafe { fetch(&mut gpu, target, source, bytes) }
}

/// The emulator's graphs copy nothing to the host.
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    target: *mut c_void,
    source: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Code {
    let mut gpu = gpu();
    if gpu.is_captured(stream.addr()) {
        return CAPTURING;
    }
    // SAFETY: the caller's promise.
    unsafe { fetch(&mut gpu, target, source, bytes) }
}

pub extern "C" fn cuMemcpyDtoDAsync_v2(
    target: u64,
    source: u64,
    bytes: usize,
    stream: *mut c_void,
) -> Code {
    gpu().put(
        stream.addr(),
        Work::Copy {
            target,
            source,
            bytes,
        },
    )
}

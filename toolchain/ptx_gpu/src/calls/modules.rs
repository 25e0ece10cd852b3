//! Modules and their functions.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::Arc,
};

use ptx_run::Module;

use super::{device::architecture, handle};
use crate::gpu::{Code, Function, INVALID_PTX, INVALID_VALUE, NO_BINARY, NOT_FOUND, SUCCESS, gpu};

/// Bytes of shared memory that a block has without [`cuFuncSetAttribute`].
const WITHOUT_ASKING: u32 = 48 << 10;

/// A module for a GPU of this compute capability.
fn parsed(text: &str, compute: c_int) -> Result<Module, String> {
    let module = Module::parse(text).map_err(|error| error.to_string())?;
    match module.target() {
        Some(target) if target as c_int > compute => Err(format!(
            "the module is for sm_{target}, the GPU has compute capability {}.{}",
            compute / 10,
            compute % 10
        )),
        _ => Ok(module),
    }
}

pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_char,
    count: c_uint,
    keys: *const c_uint,
    values: *const *mut c_void,
) -> Code {
    // SAFETY: both cubins and PTX have more than four bytes.
    if unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 4) } == b"\x7fELF" {
        return NO_BINARY;
    }
    // SAFETY: an image that is not a cubin is NUL-terminated text.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy();
    let compute = architecture().compute;
    match parsed(&text, compute) {
        Ok(parsed) => {
            let mut gpu = gpu();
            let number = gpu.handle();
            gpu.modules.insert(number, Arc::new(parsed));
            // SAFETY: the argument points to a handle.
            unsafe { *module = handle(number) };
            SUCCESS
        }
        Err(error) => {
            let (keys, values): (&[c_uint], &[*mut c_void]) = match count {
                0 => (&[], &[]),
                // SAFETY: the arrays have this many options.
                _ => unsafe {
                    (
                        std::slice::from_raw_parts(keys, count as usize),
                        std::slice::from_raw_parts(values, count as usize),
                    )
                },
            };
            let option = |key| {
                keys.iter()
                    .position(|&found| found == key)
                    .map(|at| values[at])
            };
            // CU_JIT_ERROR_LOG_BUFFER and its size.
            if let (Some(buffer), Some(size)) = (option(5), option(6)) {
                let text = error;
                let length = text.len().min((size as usize).saturating_sub(1));
                // SAFETY: the buffer has this size.
                unsafe {
                    ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), length);
                    buffer.cast::<u8>().add(length).write(0);
                }
            }
            INVALID_PTX
        }
    }
}

pub extern "C" fn cuModuleUnload(module: *mut c_void) -> Code {
    let mut gpu = gpu();
    if let Some(module) = gpu.modules.remove(&module.addr()) {
        gpu.functions
            .retain(|_, function| !Arc::ptr_eq(&function.module, &module));
    }
    SUCCESS
}

pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> Code {
    // SAFETY: the name is NUL-terminated.
    let name = unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned();
    let mut gpu = gpu();
    let Some(module) = gpu.modules.get(&module.addr()).cloned() else {
        return INVALID_VALUE;
    };
    let Some(entry) = module.entry(&name) else {
        return NOT_FOUND;
    };
    let number = gpu.handle();
    let Ok(static_shared) = module.static_shared(&name) else {
        return INVALID_PTX;
    };
    let made = Function {
        module,
        entry: name,
        static_shared: static_shared as u32,
        max_dynamic: WITHOUT_ASKING.saturating_sub(static_shared as u32),
        large_clusters: false,
        max_threads: entry.max_threads.unwrap_or(1024),
        min_blocks: entry.min_blocks.unwrap_or(1),
    };
    gpu.functions.insert(number, made);
    // SAFETY: the argument points to a handle.
    unsafe { *function = handle(number) };
    SUCCESS
}

pub unsafe extern "C" fn cuFuncGetAttribute(
    value: *mut c_int,
    which: c_uint,
    function: *mut c_void,
) -> Code {
    let gpu = gpu();
    let Some(function) = gpu.functions.get(&function.addr()) else {
        return INVALID_VALUE;
    };
    let found = match which {
        0 => function.max_threads as c_int,
        1 => function.static_shared as c_int,
        8 => function.max_dynamic as c_int,
        _ => 0,
    };
    // SAFETY: the argument points to an integer.
    unsafe { *value = found };
    SUCCESS
}

pub extern "C" fn cuFuncSetAttribute(function: *mut c_void, which: c_uint, value: c_int) -> Code {
    let (_, of_block) = architecture().shared_memory();
    let mut gpu = gpu();
    let Some(function) = gpu.functions.get_mut(&function.addr()) else {
        return INVALID_VALUE;
    };
    match (which, u32::try_from(value)) {
        // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES.
        (8, Ok(bytes)) if bytes <= of_block - function.static_shared.min(of_block) => {
            function.max_dynamic = bytes;
        }
        // The share of shared memory in L1 is a preference.
        (9, _) => {}
        // CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED.
        (14, Ok(allowed)) => function.large_clusters = allowed != 0,
        _ => return INVALID_VALUE,
    }
    SUCCESS
}

pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: *mut c_void,
    _threads: c_int,
    shared: usize,
) -> Code {
    let (of_multiprocessor, _) = architecture().shared_memory();
    let gpu = gpu();
    let Some(function) = gpu.functions.get(&function.addr()) else {
        return INVALID_VALUE;
    };
    // The system reserves one kilobyte of shared memory per block.
    let of_block = shared + function.static_shared as usize + 1024;
    let by_shared = (of_multiprocessor as usize / of_block) as c_int;
    // SAFETY: the argument points to an integer.
    unsafe { *blocks = by_shared.min(function.min_blocks as c_int) };
    SUCCESS
}

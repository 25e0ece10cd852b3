//! Launches.

use std::{
    ffi::{c_uint, c_void},
    ptr,
};

use ptx_run::Launch;

use super::device::architecture;
use crate::{
    gpu::{Code, INVALID_CLUSTER_SIZE, INVALID_VALUE, gpu},
    work::Work,
};

/// # Safety
/// `parameters` points to a pointer for each parameter of the entry.
unsafe fn launch(
    function: *mut c_void,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    launch: Launch,
    cluster: Option<u32>,
) -> Code {
    let architecture = architecture();
    let mut gpu = gpu();
    let Some(function) = gpu.functions.get(&function.addr()).cloned() else {
        return INVALID_VALUE;
    };
    let Some(entry) = function.module.entry(&function.entry) else {
        return INVALID_VALUE;
    };
    // Both may say it, and then agree.
    let declared = entry.cluster.or(cluster).unwrap_or(1);
    if cluster.is_some_and(|cluster| cluster != declared) {
        return INVALID_CLUSTER_SIZE;
    }
    if declared > 8 && !function.large_clusters {
        return INVALID_CLUSTER_SIZE;
    }
    let (_, of_block) = architecture.shared_memory();
    if launch.shared > function.max_dynamic || launch.shared + function.static_shared > of_block {
        return INVALID_VALUE;
    }
    if parameters.is_null() && !entry.parameters.is_empty() {
        return INVALID_VALUE;
    }
    let mut bytes = vec![0_u8; entry.parameter_bytes];
    for (index, &(offset, size)) in entry.parameters.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let from = *parameters.add(index);
            ptr::copy_nonoverlapping(from.cast(), bytes[offset..].as_mut_ptr(), size);
        }
    }
    let multiprocessors = architecture.multiprocessors;
    let launch = Launch {
        multiprocessors,
        resident: multiprocessors * function.min_blocks.max(1),
        limit: gpu.settings.limit * 1_000_000,
        cluster: declared,
        ..launch
    };
    gpu.put(
        stream.addr(),
        Work::Launch {
            function,
            launch,
            parameters: bytes,
        },
    )
}

pub unsafe extern "C" fn cuLaunchKernel(
    function: *mut c_void,
    gx: c_uint,
    gy: c_uint,
    gz: c_uint,
    bx: c_uint,
    by: c_uint,
    bz: c_uint,
    shared: c_uint,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    if !extra.is_null() {
        return INVALID_VALUE;
    }
    let made = Launch {
        grid: [gx, gy, gz],
        block: [bx, by, bz],
        shared,
        ..Launch::default()
    };
    // SAFETY: the caller's promise.
    unsafe { launch(function, stream, parameters, made, None) }
}

/// `CUlaunchAttribute`.
#[repr(C)]
pub struct Attribute {
    id: c_uint,
    padding: c_uint,
    value: [u32; 16],
}

/// `CUlaunchConfig`.
#[repr(C)]
pub struct Config {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: *mut c_void,
    attributes: *const Attribute,
    count: c_uint,
}

pub unsafe extern "C" fn cuLaunchKernelEx(
    config: *const Config,
    function: *mut c_void,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code {
    if !extra.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller's promise. Without attributes the pointer may be null.
    let (config, attributes) = unsafe {
        let config = &*config;
        let attributes = match config.count {
            0 => &[],
            count => std::slice::from_raw_parts(config.attributes, count as usize),
        };
        (config, attributes)
    };
    let mut made = Launch {
        grid: config.grid,
        block: config.block,
        shared: config.shared,
        ..Launch::default()
    };
    let mut cluster = None;
    for attribute in attributes {
        match attribute.id {
            // CU_LAUNCH_ATTRIBUTE_IGNORE.
            0 => {}
            // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
            6 => made.overlaps = attribute.value[0] != 0,
            // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION.
            4 if attribute.value[1..3] == [1, 1] => cluster = Some(attribute.value[0]),
            _ => return INVALID_VALUE,
        }
    }
    // SAFETY: the caller's promise.
    unsafe { launch(function, config.stream, parameters, made, cluster) }
}

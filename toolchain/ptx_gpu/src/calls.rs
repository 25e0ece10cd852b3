//! The driver's functions.
//!
//! # Safety of all functions
//! As for the driver's functions of the same name: pointers refer to the memory that these read or write.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr,
    sync::{
        Arc,
        atomic::{AtomicPtr, Ordering},
    },
};

use ptx_run::{Launch, Module, Swizzle, TensorMap};

use crate::{
    gpu::{
        CAPTURING, Code, Function, INVALID_PTX, INVALID_VALUE, LAUNCH_FAILED, NO_BINARY, NOT_FOUND,
        OUT_OF_MEMORY, SUCCESS, gpu,
    },
    work::Work,
};

static CURRENT: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
const CONTEXT: usize = 0x77;

fn handle(number: usize) -> *mut c_void {
    ptr::without_provenance_mut(number)
}

macro_rules! succeed {
    ($($name:ident($($type:ty),*);)*) => {$(
                pub extern "C" fn $name($(_: $type),*) -> Code {
            SUCCESS
        }
    )*};
}

succeed! {
    cuInit(c_uint);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuStreamDestroy_v2(*mut c_void);
    cuEventDestroy_v2(*mut c_void);
    cuEventQuery(*mut c_void);
    cuEventSynchronize(*mut c_void);
    cuFuncSetAttribute(*mut c_void, c_uint, c_int);
}

pub extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> Code {
    gpu().record(event.addr(), stream.addr());
    SUCCESS
}

pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _: c_uint) -> Code {
    gpu().hold(stream.addr(), event.addr());
    SUCCESS
}

/// After a failure, waiting functions return its code.
fn state() -> Code {
    if gpu().failed { LAUNCH_FAILED } else { SUCCESS }
}

pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> Code {
    if gpu().captures.contains_key(&stream.addr()) {
        return CAPTURING;
    }
    state()
}

/// Not a driver function: clears a failure, so that the next launch runs.
pub extern "C" fn ptx_driver_forget_failure() {
    gpu().failed = false;
}

/// Not a driver function: number of launches so far.
pub extern "C" fn ptx_driver_launches() -> u64 {
    gpu().launches
}

/// Not a driver function: traces this block of each later launch ([`Settings::trace`](crate::Settings::trace)); none if
/// it is negative.
pub extern "C" fn ptx_driver_trace(block: i32) {
    gpu().settings.trace = u32::try_from(block).ok();
}

/// Not a driver function: bytes that the traced block copied to shared memory since the last call. Stores by its
/// threads do not count.
pub extern "C" fn ptx_driver_loaded() -> u64 {
    let timelines = crate::take_timelines();
    let flights = timelines.iter().flat_map(|timeline| &timeline.flights);
    let loads = flights.filter(|flight| flight.what == ptx_run::Beside::Loads);
    loads.map(|flight| flight.amount).sum()
}

pub extern "C" fn cuCtxSynchronize() -> Code {
    state()
}

pub unsafe extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    let name = match code {
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        NO_BINARY => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        INVALID_PTX => c"CUDA_ERROR_INVALID_PTX",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        CAPTURING => c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        _ => c"CUDA_ERROR_UNKNOWN",
    };
    // SAFETY: the argument points to a pointer.
    unsafe { *text = name.as_ptr() };
    SUCCESS
}

pub unsafe extern "C" fn cuGetErrorString(code: Code, text: *mut *const c_char) -> Code {
    let failure = gpu().failure.clone().filter(|_| code == LAUNCH_FAILED);
    let said: &'static CStr = match failure {
        // The caller may keep the string forever. The leak is small, because a program fails only once.
        Some(failure) => Box::leak(failure.into_boxed_c_str()),
        None => match code {
            OUT_OF_MEMORY => c"not enough memory, on the emulated GPU or on the host",
            CAPTURING => c"the stream is being captured, and nothing can wait for it",
            _ => c"an error of the emulated driver",
        },
    };
    // SAFETY: the argument points to a pointer.
    unsafe { *text = said.as_ptr() };
    SUCCESS
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
    match Module::parse(&text) {
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
                let text = error.to_string();
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
    let made = Function {
        module,
        entry: name,
        static_shared: 0,
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
        _ => 0,
    };
    // SAFETY: the argument points to an integer.
    unsafe { *value = found };
    SUCCESS
}

pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    function: *mut c_void,
    _threads: c_int,
    shared: usize,
) -> Code {
    let gpu = gpu();
    let Some(function) = gpu.functions.get(&function.addr()) else {
        return INVALID_VALUE;
    };
    // The system reserves one kilobyte of shared memory per block.
    let by_shared = (233_472 / (shared + 1024)) as c_int;
    // SAFETY: the argument points to an integer.
    unsafe { *blocks = by_shared.min(function.min_blocks as c_int) };
    SUCCESS
}

/// # Safety
/// `parameters` points to a pointer for each parameter of the entry.
unsafe fn launch(
    function: *mut c_void,
    stream: *mut c_void,
    parameters: *mut *mut c_void,
    launch: Launch,
) -> Code {
    let mut gpu = gpu();
    let Some(function) = gpu.functions.get(&function.addr()).cloned() else {
        return INVALID_VALUE;
    };
    let Some(entry) = function.module.entry(&function.entry) else {
        return INVALID_VALUE;
    };
    let mut bytes = vec![0_u8; entry.parameter_bytes];
    for (index, &(offset, size)) in entry.parameters.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let from = *parameters.add(index);
            ptr::copy_nonoverlapping(from.cast(), bytes[offset..].as_mut_ptr(), size);
        }
    }
    let multiprocessors = gpu.settings.multiprocessors;
    let launch = Launch {
        multiprocessors,
        resident: multiprocessors * function.min_blocks.max(1),
        limit: gpu.settings.limit * 1_000_000,
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
    _extra: *mut *mut c_void,
) -> Code {
    let made = Launch {
        grid: [gx, gy, gz],
        block: [bx, by, bz],
        shared,
        ..Launch::default()
    };
    // SAFETY: the caller's promise.
    unsafe { launch(function, stream, parameters, made) }
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
    _extra: *mut *mut c_void,
) -> Code {
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
    for attribute in attributes {
        match attribute.id {
            // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION.
            6 => made.overlaps = attribute.value[0] != 0,
            // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION.
            4 if attribute.value[1..3] == [1, 1] => made.cluster = attribute.value[0],
            _ => return INVALID_VALUE,
        }
    }
    // SAFETY: the caller's promise.
    unsafe { launch(function, config.stream, parameters, made) }
}

/// Memory of the emulated GPU: that of an H200.
const TOTAL: usize = 141 << 30;

pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, bytes: usize) -> Code {
    let memory = &mut gpu().memory;
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
    if address == 0 || gpu().memory.free(address) {
        SUCCESS
    } else {
        INVALID_VALUE
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
    gpu().put(
        stream.addr(),
        Work::Write {
            target,
            bytes: pattern.repeat(count),
        },
    )
}

pub extern "C" fn cuMemsetD8_v2(target: u64, value: u8, count: usize) -> Code {
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
    // SAFETY: the caller's promise.
    let bytes = unsafe { std::slice::from_raw_parts(source.cast::<u8>(), bytes) }.to_vec();
    gpu().put(stream.addr(), Work::Write { target, bytes })
}

pub unsafe extern "C" fn cuMemcpyHtoD_v2(target: u64, source: *const c_void, bytes: usize) -> Code {
    // SAFETY: the caller's promise.
    unsafe { cuMemcpyHtoDAsync_v2(target, source, bytes, ptr::null_mut()) }
}

pub unsafe extern "C" fn cuMemcpyDtoH_v2(target: *mut c_void, source: u64, bytes: usize) -> Code {
    let mut gpu = gpu();
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

pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _: c_uint) -> Code {
    // SAFETY: the argument points to a handle.
    unsafe { *stream = handle(gpu().handle()) };
    SUCCESS
}

pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _: c_uint) -> Code {
    // SAFETY: the argument points to a handle.
    unsafe { *event = handle(gpu().handle()) };
    SUCCESS
}

pub extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, _: c_uint) -> Code {
    gpu().captures.insert(stream.addr(), Vec::new());
    SUCCESS
}

pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> Code {
    let mut gpu = gpu();
    let Some(captured) = gpu.end_capture(stream.addr()) else {
        return INVALID_VALUE;
    };
    let number = gpu.handle();
    gpu.graphs.insert(number, captured);
    // SAFETY: the argument points to a handle.
    unsafe { *graph = handle(number) };
    SUCCESS
}

pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    made: *mut *mut c_void,
    graph: *mut c_void,
    _: u64,
) -> Code {
    // SAFETY: the argument points to a handle. A graph never changes, so the executable graph is the graph itself.
    unsafe { *made = graph };
    SUCCESS
}

/// A graph and its executable share one handle. It is kept here, because programs use the executable for longer.
pub extern "C" fn cuGraphDestroy(_: *mut c_void) -> Code {
    SUCCESS
}

pub extern "C" fn cuGraphExecDestroy(graph: *mut c_void) -> Code {
    gpu().graphs.remove(&graph.addr());
    SUCCESS
}

pub extern "C" fn cuGraphLaunch(graph: *mut c_void, stream: *mut c_void) -> Code {
    let mut gpu = gpu();
    let Some(work) = gpu.graphs.get(&graph.addr()).cloned() else {
        return INVALID_VALUE;
    };
    work.into_iter()
        .map(|one| gpu.put(stream.addr(), one))
        .find(|&code| code != SUCCESS)
        .unwrap_or(SUCCESS)
}

pub unsafe extern "C" fn cuTensorMapEncodeTiled(
    map: *mut u64,
    data_type: c_uint,
    rank: c_uint,
    address: *mut c_void,
    dims: *const u64,
    strides: *const u64,
    box_dims: *const c_uint,
    element_strides: *const c_uint,
    interleave: c_uint,
    swizzle: c_uint,
    _l2: c_uint,
    fill: c_uint,
) -> Code {
    let element_bytes = match data_type {
        0 => 1,
        1 | 6 | 9 => 2,
        2 | 3 | 7 => 4,
        4 | 5 | 8 => 8,
        _ => return INVALID_VALUE,
    };
    let (count, Some(swizzle)) = (rank as usize, Swizzle::from_number(swizzle.into())) else {
        return INVALID_VALUE;
    };
    if !(1..=5).contains(&count) || interleave != 0 || fill != 0 {
        return INVALID_VALUE;
    }
    let mut made = TensorMap {
        address: address.addr() as u64,
        element_bytes,
        is_f32: data_type == 7,
        rank,
        dims: [0; 5],
        strides: [0; 4],
        box_dims: [0; 5],
        swizzle,
    };
    // SAFETY: the arrays have one entry per dimension, the strides one less.
    unsafe {
        for axis in 0..count {
            made.dims[axis] = *dims.add(axis);
            made.box_dims[axis] = *box_dims.add(axis);
            if *element_strides.add(axis) != 1 {
                return INVALID_VALUE;
            }
        }
        for axis in 0..count - 1 {
            made.strides[axis] = *strides.add(axis);
        }
        map.cast::<[u64; 16]>().write(made.encode());
    }
    SUCCESS
}

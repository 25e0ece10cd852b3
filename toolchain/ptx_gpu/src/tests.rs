use super::*;

/// A program may load and unload modules repeatedly without using more memory.
#[test]
fn modules_that_are_unloaded_take_no_memory() {
    let text =
        c".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry nothing()\n{\n\tret;\n}\n";
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

/// The emulator took calls in a capture that a GPU refuses. The thread of a thread-local capture neither allocates nor makes calls that
/// wait; other threads do.
#[test]
fn a_thread_that_captures_neither_allocates_nor_waits() {
    let (stream, there) = (new_stream(), new_memory(3));
    let calls = || {
        let (mut memory, mut pinned, mut bytes) = (0, std::ptr::null_mut(), [3_u8; 4]);
        // SAFETY: both sides have four bytes.
        let codes = unsafe {
            [
                cuMemAlloc_v2(&mut memory, 4),
                cuMemHostAlloc(&mut pinned, 4, 0),
                cuMemsetD8_v2(there, 3, 4),
                cuMemcpyHtoD_v2(there, bytes.as_ptr().cast(), 4),
                cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), there, 4),
            ]
        };
        if !pinned.is_null() {
            // SAFETY: it was allocated above.
            assert_eq!(unsafe { cuMemFreeHost(pinned) }, 0);
        }
        (codes, cuMemFree_v2(memory))
    };
    assert_eq!(cuStreamBeginCapture_v2(stream, 1), 0);
    assert_eq!(calls(), ([900; 5], 0));
    assert_eq!(cuMemFree_v2(there), 900);
    let of_another = std::thread::scope(|scope| scope.spawn(calls).join());
    assert_eq!(of_another.unwrap(), ([0; 5], 0));
    assert!(end_capture(stream).is_ok());
    assert_eq!(calls(), ([0; 5], 0));
    assert_eq!(cuStreamBeginCapture_v2(stream, 2), 0);
    assert_eq!(calls(), ([0; 5], 0));
    assert!(end_capture(stream).is_ok());
    assert_eq!(cuStreamBeginCapture_v2(stream, 3), 1);
    assert_eq!(cuMemFree_v2(there), 0);
}

fn new_stream() -> *mut c_void {
    let mut stream = std::ptr::null_mut();
    // SAFETY: the argument points to a handle.
    assert_eq!(unsafe { cuStreamCreate(&mut stream, 1) }, 0);
    stream
}

fn new_event() -> *mut c_void {
    let mut event = std::ptr::null_mut();
    // SAFETY: the argument points to a handle.
    assert_eq!(unsafe { cuEventCreate(&mut event, 0) }, 0);
    event
}

/// Four bytes of memory, all of this value.
fn new_memory(value: u8) -> u64 {
    let mut memory = 0;
    // SAFETY: the argument points to an address.
    assert_eq!(unsafe { cuMemAlloc_v2(&mut memory, 4) }, 0);
    assert_eq!(cuMemsetD8_v2(memory, value, 4), 0);
    memory
}

fn read(memory: u64) -> [u8; 4] {
    let mut bytes = [0_u8; 4];
    // SAFETY: both sides have four bytes.
    let code = unsafe { cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), memory, 4) };
    assert_eq!(code, 0);
    bytes
}

fn end_capture(stream: *mut c_void) -> Result<*mut c_void, u32> {
    let (mut graph, mut executable) = (std::ptr::null_mut(), std::ptr::null_mut());
    // SAFETY: the arguments point to handles.
    unsafe {
        match cuStreamEndCapture(stream, &mut graph) {
            0 => {}
            code => return Err(code),
        }
        assert_eq!(cuGraphInstantiateWithFlags(&mut executable, graph, 0), 0);
        assert_eq!(cuGraphDestroy(graph), 0);
    }
    Ok(executable)
}

/// Work on a second stream that waits for an event of the first is part of the first one's graph, if the first waits for
/// its end.
#[test]
fn a_capture_takes_in_streams_that_wait_for_it() {
    let [first, second] = [new_stream(), new_stream()];
    let [begin, end] = [new_event(), new_event()];
    let memory = new_memory(1);
    let capture = |awaited: bool| {
        assert_eq!(cuStreamBeginCapture_v2(first, 1), 0);
        assert_eq!(cuEventRecord(begin, first), 0);
        assert_eq!(cuStreamWaitEvent(second, begin, 0), 0);
        assert_eq!(cuMemsetD8Async(memory, 7, 4, second), 0);
        assert_eq!((cuStreamQuery(second), cuEventQuery(begin)), (900, 907));
        if awaited {
            assert_eq!(cuEventRecord(end, second), 0);
            assert_eq!(cuStreamWaitEvent(first, end, 0), 0);
        }
        end_capture(first)
    };
    assert_eq!(capture(false), Err(904));
    let graph = capture(true).unwrap();
    assert_eq!((cuStreamQuery(second), cuEventQuery(begin)), (0, 0));
    assert_eq!(read(memory), [1; 4]);
    assert_eq!(cuGraphLaunch(graph, first), 0);
    assert_eq!(read(memory), [7; 4]);
    assert_eq!(cuGraphExecDestroy(graph), 0);
    assert_eq!(cuGraphLaunch(graph, first), 1);
}

/// A graph reads the host's memory each time that it is launched.
#[test]
fn a_captured_copy_brings_what_is_there_then() {
    let (stream, memory, mut bytes) = (new_stream(), new_memory(0), [1_u8; 4]);
    assert_eq!(cuStreamBeginCapture_v2(stream, 1), 0);
    let source = bytes.as_mut_ptr();
    // SAFETY: both sides have four bytes, during the launches of the graph, too.
    unsafe {
        assert_eq!(cuMemcpyHtoDAsync_v2(memory, source.cast(), 4, stream), 0);
        let graph = end_capture(stream).unwrap();
        for value in [2, 3] {
            source.write_bytes(value, 4);
            assert_eq!(cuGraphLaunch(graph, stream), 0);
            assert_eq!(read(memory), [value; 4]);
        }
    }
}

#[test]
fn tensor_maps_that_a_driver_refuses() {
    let encode = |address: usize, stride: u64, row: u32, rows: u32, swizzle: u32| {
        let (dims, strides) = ([1024_u64, 64], [stride]);
        let (boxes, steps) = ([row, rows], [1_u32; 2]);
        let (address, mut map) = (std::ptr::without_provenance_mut(address), [0_u64; 16]);
        // SAFETY: the arrays have two dimensions, and the map has 128 bytes.
        unsafe {
            cuTensorMapEncodeTiled(
                map.as_mut_ptr(),
                6,
                2,
                address,
                dims.as_ptr(),
                strides.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                0,
                swizzle,
                2,
                0,
            )
        }
    };
    assert_eq!(encode(1 << 30, 2048, 64, 64, 3), 0);
    assert_eq!(encode((1 << 30) + 8, 2048, 64, 64, 3), 1);
    assert_eq!(encode(1 << 30, 2056, 64, 64, 3), 1);
    assert_eq!(encode(1 << 30, 2048, 72, 64, 3), 1);
    assert_eq!(encode(1 << 30, 2048, 60, 64, 3), 1);
    assert_eq!(encode(1 << 30, 2048, 64, 257, 3), 1);
    assert_eq!(encode(1 << 30, 2048, 64, 0, 3), 1);
    assert_eq!(encode(1 << 30, 2048, 128, 64, 0), 0);
}

/// The context is usable after it.
#[test]
fn copies_out_of_bounds_are_refused() {
    let memory = new_memory(5);
    assert_eq!(cuMemsetD8_v2(memory, 1, usize::MAX), 1);
    // SAFETY: eight bytes are there on the host; the emulator checks the other side.
    unsafe { assert_eq!(cuMemcpyHtoD_v2(memory, [1_u64].as_ptr().cast(), 8), 1) };
    assert_eq!(read(memory), [5; 4]);
}

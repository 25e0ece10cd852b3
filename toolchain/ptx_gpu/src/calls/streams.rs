//! Streams, events, captures and graphs.

use std::ffi::{c_uint, c_void};

use super::{handle, state};
use crate::gpu::{
    CAPTURED_EVENT, CAPTURING, CaptureMode, Code, INVALID_HANDLE, INVALID_VALUE, SUCCESS, gpu,
};

pub extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> Code {
    gpu().record(event.addr(), stream.addr());
    SUCCESS
}

pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, _: c_uint) -> Code {
    gpu().hold(stream.addr(), event.addr());
    SUCCESS
}

pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> Code {
    if gpu().is_captured(stream.addr()) {
        return CAPTURING;
    }
    state()
}

pub extern "C" fn cuEventQuery(event: *mut c_void) -> Code {
    if gpu().belongs_to_capture(event.addr()) {
        return CAPTURED_EVENT;
    }
    state()
}

pub extern "C" fn cuEventSynchronize(event: *mut c_void) -> Code {
    cuEventQuery(event)
}

pub extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> Code {
    gpu().times.remove(&event.addr());
    SUCCESS
}

/// All work is done at once.
pub extern "C" fn cuStreamQuery(stream: *mut c_void) -> Code {
    cuStreamSynchronize(stream)
}

pub unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: *mut f32,
    begin: *mut c_void,
    end: *mut c_void,
) -> Code {
    let gpu = gpu();
    let [Some(begin), Some(end)] = [begin, end].map(|event| gpu.times.get(&event.addr())) else {
        return INVALID_HANDLE;
    };
    let time = end.saturating_duration_since(*begin).as_secs_f32() * 1e3;
    // SAFETY: the argument points to a number.
    unsafe { *milliseconds = time.max(1e-6) };
    SUCCESS
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

pub extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_uint) -> Code {
    let Some(mode) = CaptureMode::new(mode) else {
        return INVALID_VALUE;
    };
    let mut gpu = gpu();
    gpu.captures.insert(stream.addr(), Vec::new());
    gpu.modes.insert(stream.addr(), mode);
    SUCCESS
}

pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, graph: *mut *mut c_void) -> Code {
    let mut gpu = gpu();
    let captured = match gpu.end_capture(stream.addr()) {
        Ok(captured) => captured,
        Err(code) => return code,
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
    let mut gpu = gpu();
    let Some(work) = gpu.graphs.get(&graph.addr()).cloned() else {
        return INVALID_VALUE;
    };
    let number = gpu.handle();
    gpu.graphs.insert(number, work);
    // SAFETY: the argument points to a handle.
    unsafe { *made = handle(number) };
    SUCCESS
}

pub extern "C" fn cuGraphDestroy(graph: *mut c_void) -> Code {
    match gpu().graphs.remove(&graph.addr()) {
        Some(_) => SUCCESS,
        None => INVALID_VALUE,
    }
}

pub extern "C" fn cuGraphExecDestroy(graph: *mut c_void) -> Code {
    cuGraphDestroy(graph)
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

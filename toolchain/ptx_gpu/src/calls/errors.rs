//! Names and texts of codes.

use std::ffi::{CStr, c_char};

use crate::gpu::{
    CAPTURED_EVENT, CAPTURING, Code, INVALID_CLUSTER_SIZE, INVALID_CONTEXT, INVALID_DEVICE,
    INVALID_HANDLE, INVALID_PTX, INVALID_VALUE, LAUNCH_FAILED, NO_BINARY, NO_PEER_ACCESS,
    NOT_FOUND, OUT_OF_MEMORY, SUCCESS, UNJOINED, gpu,
};

pub unsafe extern "C" fn cuGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    let name = match code {
        INVALID_VALUE => c"CUDA_ERROR_INVALID_VALUE",
        OUT_OF_MEMORY => c"CUDA_ERROR_OUT_OF_MEMORY",
        INVALID_DEVICE => c"CUDA_ERROR_INVALID_DEVICE",
        INVALID_CONTEXT => c"CUDA_ERROR_INVALID_CONTEXT",
        NO_PEER_ACCESS => c"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        INVALID_HANDLE => c"CUDA_ERROR_INVALID_HANDLE",
        NO_BINARY => c"CUDA_ERROR_NO_BINARY_FOR_GPU",
        INVALID_PTX => c"CUDA_ERROR_INVALID_PTX",
        NOT_FOUND => c"CUDA_ERROR_NOT_FOUND",
        LAUNCH_FAILED => c"CUDA_ERROR_LAUNCH_FAILED",
        UNJOINED => c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        CAPTURED_EVENT => c"CUDA_ERROR_CAPTURED_EVENT",
        INVALID_CLUSTER_SIZE => c"CUDA_ERROR_INVALID_CLUSTER_SIZE",
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
            UNJOINED => {
                c"a stream joined the capture, and the captured stream does not wait for its end"
            }
            CAPTURING => c"the stream is being captured, and nothing can wait for it",
            _ => c"an error of the emulated driver",
        },
    };
    // SAFETY: the argument points to a pointer.
    unsafe { *text = said.as_ptr() };
    SUCCESS
}

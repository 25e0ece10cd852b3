//! The driver's functions with typed errors.

use std::ffi::{CStr, c_char, c_void};

pub use libcuda::*;

use crate::Error;

/// The CUDA version of each function that is younger than the oldest driver for compute capability 8.0.
const YOUNG: [(&str, &str); 3] = [
    ("cuGraphInstantiate", "11.4"),
    ("cuLaunchKernelEx", "11.8"),
    ("cuTensorMapEncodeTiled", "12.0"),
];

/// Converts the result of a driver call to an error of this library.
pub trait Check {
    /// Turns every code but success into an error that names the call.
    fn check(self, call: &'static str) -> Result<(), Error>;
}

impl Check for Code {
    fn check(self, call: &'static str) -> Result<(), Error> {
        match self {
            Self::SUCCESS => Ok(()),
            Self::NO_FUNCTION => {
                let young = YOUNG.iter().find(|(function, _)| *function == call);
                Err(Error::OldDriver {
                    function: call,
                    since: young.map_or("11.0", |(_, since)| since),
                })
            }
            code => Err(Error::Driver {
                call,
                code: code.0,
                name: name(code),
                text: describe(code, cuGetErrorString),
            }),
        }
    }
}

/// The name of a code, such as `CUDA_ERROR_OUT_OF_MEMORY`.
pub fn name(code: Code) -> String {
    describe(code, cuGetErrorName)
}

fn describe(code: Code, function: unsafe fn(Code, *mut *const c_char) -> Code) -> String {
    let mut text = std::ptr::null();
    // SAFETY: both functions write a pointer to a static string, or fail.
    let answered = unsafe { function(code, &mut text) };
    if answered != Code::SUCCESS || text.is_null() {
        return "a code that the driver does not know".into();
    }
    // SAFETY: see above.
    unsafe { CStr::from_ptr(text) }
        .to_string_lossy()
        .into_owned()
}

/// Opens the driver, or returns why this is not possible. A driver that shows no GPU, because none is there or
/// `CUDA_VISIBLE_DEVICES` hides it, is the error that no GPU has number `ordinal`.
pub fn initialise(ordinal: u32) -> Result<(), Error> {
    libcuda::driver().map_err(|missing| Error::NoDriver {
        searched: missing.searched.clone(),
        reason: missing.reason.clone(),
    })?;
    // SAFETY: may be called any number of times, by any thread.
    match unsafe { cuInit(0) } {
        // There is a driver, so this is its own answer.
        Code::NO_DEVICE => Err(Error::NoDevice { ordinal, count: 0 }),
        code => code.check("cuInit"),
    }
}

/// The newest CUDA version that the driver knows, `(major, minor)`.
pub fn version() -> Result<(u32, u32), Error> {
    let mut version = 0;
    // SAFETY: writes one integer.
    unsafe { cuDriverGetVersion(&mut version) }.check("cuDriverGetVersion")?;
    let version = version.unsigned_abs();
    Ok((version / 1000, version % 1000 / 10))
}

/// Copies to the device and waits until the bytes have arrived. The copy call itself may return earlier, and
/// non-blocking streams would not wait for the bytes.
///
/// # Safety
/// So many bytes are at both addresses, and the context of the device's is current.
pub unsafe fn copy_to_device(
    to: DevicePtr,
    from: *const c_void,
    bytes: usize,
) -> Result<(), Error> {
    // SAFETY: the caller's promises.
    unsafe {
        cuMemcpyHtoD(to, from, bytes).check("cuMemcpyHtoD")?;
        cuStreamSynchronize(Stream::DEFAULT).check("cuStreamSynchronize")
    }
}

/// The thread's context, null if there is none.
pub fn current() -> Result<Context, Error> {
    let mut context = Context::NULL;
    // SAFETY: writes one pointer.
    unsafe { cuCtxGetCurrent(&mut context) }.check("cuCtxGetCurrent")?;
    Ok(context)
}

/// Makes a context current during its own lifetime, and then restores the previous one.
pub struct Current {
    before: Context,
    switched: bool,
}

impl Current {
    pub fn enter(context: Context) -> Result<Self, Error> {
        let before = current()?;
        let switched = before != context;
        if switched {
            // SAFETY: the context is one that the caller holds.
            unsafe { cuCtxSetCurrent(context) }.check("cuCtxSetCurrent")?;
        }
        Ok(Self { before, switched })
    }
}

impl Drop for Current {
    fn drop(&mut self) {
        if self.switched {
            // SAFETY: this was the thread's context. If it is gone by now there is nothing to restore.
            let _ = unsafe { cuCtxSetCurrent(self.before) };
        }
    }
}

//! Handles, codes and structs of the driver API.

use std::{
    ffi::{c_int, c_uint, c_void},
    fmt, mem, ptr,
};

/// The result of a driver call. A number, not an enum, because drivers return codes that no binding lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
#[must_use]
pub struct Code(pub c_uint);

impl Code {
    /// `CUDA_SUCCESS`
    pub const SUCCESS: Self = Self(0);
    /// `CUDA_ERROR_OUT_OF_MEMORY`
    pub const OUT_OF_MEMORY: Self = Self(2);
    /// `CUDA_ERROR_NO_DEVICE`; also returned by every function if there is no driver.
    pub const NO_DEVICE: Self = Self(100);
    /// `CUDA_ERROR_NOT_FOUND`
    pub const NOT_FOUND: Self = Self(500);
    /// `CUDA_ERROR_INVALID_IMAGE`
    pub const INVALID_IMAGE: Self = Self(200);
    /// `CUDA_ERROR_NO_BINARY_FOR_GPU`
    pub const NO_BINARY_FOR_GPU: Self = Self(209);
    /// `CUDA_ERROR_UNSUPPORTED_PTX_VERSION`
    pub const UNSUPPORTED_PTX_VERSION: Self = Self(222);
    /// `CUDA_ERROR_NOT_READY`
    pub const NOT_READY: Self = Self(600);
    /// Not a code of the driver: this driver lacks the function.
    pub const NO_FUNCTION: Self = Self(u32::MAX);
}

/// A device address.
pub type DevicePtr = u64;
/// `CUdevice`
pub type Device = c_int;

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        ///
        /// A plain handle: it owns nothing, and copies refer to the same object.
        #[derive(Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(transparent)]
        pub struct $name(*mut c_void);

        impl $name {
            /// No object; as a stream, the default stream.
            pub const NULL: Self = Self(ptr::null_mut());

            /// A handle of another CUDA library; cast its pointer with `.cast()`.
            #[must_use]
            pub const fn from_raw(handle: *mut c_void) -> Self {
                Self(handle)
            }

            /// The handle, for another CUDA library; cast the pointer with `.cast()`.
            #[must_use]
            pub const fn as_raw(self) -> *mut c_void {
                self.0
            }

            /// Whether it is [`NULL`](Self::NULL).
            #[must_use]
            pub fn is_null(self) -> bool {
                self.0.is_null()
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::NULL
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:p})"), self.0)
            }
        }

        // SAFETY: the object belongs to a context, not to a thread, and the driver locks internally.
        unsafe impl Send for $name {}
        // SAFETY: as above.
        unsafe impl Sync for $name {}
    )*};
}

handles! {
    /// `CUstream`
    Stream;
    /// `CUcontext`
    Context;
    /// `CUevent`
    Event;
    /// `CUfunction`
    Function;
    /// `CUmodule`
    Module;
    /// `CUgraph`
    Graph;
    /// `CUgraphExec`
    GraphExec;
}

impl Stream {
    /// The default stream.
    pub const DEFAULT: Self = Self::NULL;
}

/// `CU_DEVICE_ATTRIBUTE_*`
#[allow(missing_docs)]
pub mod device_attribute {
    use std::ffi::c_uint;

    pub const MULTIPROCESSOR_COUNT: c_uint = 16;
    pub const COMPUTE_CAPABILITY_MAJOR: c_uint = 75;
    pub const COMPUTE_CAPABILITY_MINOR: c_uint = 76;
    pub const MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: c_uint = 81;
    pub const MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: c_uint = 97;
}

/// `CU_FUNC_ATTRIBUTE_*`
#[allow(missing_docs)]
pub mod function_attribute {
    use std::ffi::c_uint;

    pub const MAX_THREADS_PER_BLOCK: c_uint = 0;
    pub const SHARED_SIZE_BYTES: c_uint = 1;
    pub const MAX_DYNAMIC_SHARED_SIZE_BYTES: c_uint = 8;
    pub const PREFERRED_SHARED_MEMORY_CARVEOUT: c_uint = 9;
}

/// `CU_JIT_*`
#[allow(missing_docs)]
pub mod jit_option {
    use std::ffi::c_uint;

    pub const ERROR_LOG_BUFFER: c_uint = 5;
    pub const ERROR_LOG_BUFFER_SIZE_BYTES: c_uint = 6;
}

/// `CUlaunchAttribute`
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug)]
pub struct LaunchAttribute {
    id: c_uint,
    pad: u32,
    /// The union. Each attribute used here is one integer or three.
    value: [u32; 16],
}

impl LaunchAttribute {
    /// `CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION`: three integers.
    pub const CLUSTER_DIMENSION: c_uint = 4;
    /// `CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION`: one integer.
    pub const PROGRAMMATIC_STREAM_SERIALIZATION: c_uint = 6;

    /// An attribute whose value is integers.
    #[must_use]
    pub fn new<const N: usize>(id: c_uint, integers: [u32; N]) -> Self {
        let mut value = [0; 16];
        value[..N].copy_from_slice(&integers);
        Self { id, pad: 0, value }
    }
}

/// `CUlaunchConfig`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct LaunchConfig {
    /// CTAs along x, y and z.
    pub grid: [c_uint; 3],
    /// Threads of a CTA along x, y and z.
    pub block: [c_uint; 3],
    /// Bytes of dynamic shared memory.
    pub shared: c_uint,
    /// The stream of the launch.
    pub stream: Stream,
    /// The first attribute.
    pub attributes: *const LaunchAttribute,
    /// Number of attributes.
    pub attribute_count: c_uint,
}

// These values are those of the driver's header.
const _: () = {
    assert!(size_of::<LaunchAttribute>() == 72 && mem::offset_of!(LaunchAttribute, value) == 8);
    assert!(size_of::<LaunchConfig>() == 56 && mem::offset_of!(LaunchConfig, stream) == 32);
};

//! Finds libraries at run time: the driver, cuBLAS, NCCL. The build needs nothing of CUDA.

use std::{
    ffi::{CStr, OsStr, c_int, c_void},
    mem,
    ptr::{self, NonNull},
};

use libcuda::{Code, Library, device_attribute};

/// A GPU, as its driver describes it.
#[derive(Clone, Debug)]
pub(super) struct GpuFacts {
    pub(super) name: String,
    pub(super) compute: (i32, i32),
    pub(super) multiprocessors: i32,
    pub(super) memory_bytes: usize,
}

/// A driver that was opened.
#[derive(Clone, Debug)]
pub(super) struct Driver {
    /// Its file name.
    pub(super) name: String,
    /// The newest CUDA version that it supports: 1000 · major + 10 · minor.
    pub(super) version: i32,
    /// The reason why it does not start.
    pub(super) error: Option<String>,
    pub(super) gpus: Vec<GpuFacts>,
}

/// The driver and its GPUs, or the names that were tried and the reason of the failure.
pub(super) fn driver() -> Result<Driver, String> {
    let opened = libcuda::driver().map_err(ToString::to_string)?;
    let mut driver = Driver {
        name: opened.name().to_owned(),
        version: 0,
        error: None,
        gpus: Vec::new(),
    };
    driver.error = ask(&mut driver).err();
    Ok(driver)
}

/// Initialises the driver and queries its version and its devices.
fn ask(driver: &mut Driver) -> Result<(), String> {
    let ok = |code: Code| match code {
        Code::SUCCESS => Ok(()),
        code => Err(message(code)),
    };
    // SAFETY: each call gets valid pointers for its results, and the device indices are below the driver's count.
    unsafe {
        ok(libcuda::cuDriverGetVersion(&mut driver.version))?;
        ok(libcuda::cuInit(0))?;
        let mut devices = 0;
        ok(libcuda::cuDeviceGetCount(&mut devices))?;
        for ordinal in 0..devices {
            let (mut device, mut memory_bytes, mut name) = (0, 0, [0; 128]);
            ok(libcuda::cuDeviceGet(&mut device, ordinal))?;
            let length = name.len() as c_int - 1;
            ok(libcuda::cuDeviceGetName(name.as_mut_ptr(), length, device))?;
            ok(libcuda::cuDeviceTotalMem(&mut memory_bytes, device))?;
            let mut values = [0; 3];
            let wanted = [
                device_attribute::COMPUTE_CAPABILITY_MAJOR,
                device_attribute::COMPUTE_CAPABILITY_MINOR,
                device_attribute::MULTIPROCESSOR_COUNT,
            ];
            for (value, what) in values.iter_mut().zip(wanted) {
                ok(libcuda::cuDeviceGetAttribute(value, what, device))?;
            }
            driver.gpus.push(GpuFacts {
                // The buffer's last byte is zero, whatever the call wrote.
                name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                compute: (values[0], values[1]),
                multiprocessors: values[2],
                memory_bytes,
            });
        }
    }
    Ok(())
}

/// The driver's message for an error.
fn message(code: Code) -> String {
    let mut text = ptr::null();
    // SAFETY: the call writes the address of a constant string, or nothing for an unknown error.
    let known = unsafe { libcuda::cuGetErrorString(code, &mut text) } == Code::SUCCESS;
    if !known || text.is_null() {
        return format!("error {}", code.0);
    }
    // SAFETY: the string is NUL-terminated.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} (error {})", text.to_string_lossy(), code.0)
}

/// The first of several libraries that the loader finds, with its name.
fn open<'a>(names: impl IntoIterator<Item = &'a str>) -> Option<(&'a str, Library)> {
    names.into_iter().find_map(|name| {
        // SAFETY: opening runs the library's initialisers, as in every program that uses it.
        let library = unsafe { Library::open(OsStr::new(name)) };
        Some((name, library.ok()?))
    })
}

/// The names by which the engine looks for cuBLASLt, in its order, and its function for the version.
#[cfg(all(feature = "engine", feature = "cuda"))]
fn cublas_names() -> (Vec<String>, &'static CStr) {
    (tandem_engine::cublas_lt_names(), c"cublasLtGetProperty")
}

/// Nothing in this build opens it.
#[cfg(not(all(feature = "engine", feature = "cuda")))]
fn cublas_names() -> (Vec<String>, &'static CStr) {
    let (library, property) = match cfg!(feature = "engine") {
        true => ("libcublasLt.so", c"cublasLtGetProperty"),
        false => ("libcublas.so", c"cublasGetProperty"),
    };
    let names = ["", ".13", ".12", ".11"].map(|end| format!("{library}{end}"));
    (names.to_vec(), property)
}

/// File and version of the cuBLASLt that models open, or in a build without them of the first cuBLAS that the loader finds.
pub(super) fn cublas() -> Option<String> {
    type Property = unsafe extern "C" fn(c_int, *mut c_int) -> c_int;
    let (names, property) = cublas_names();
    let (name, library) = open(names.iter().map(String::as_str))?;
    let property = library.symbol(property).map(|address| {
        // SAFETY: this is the type that cuBLAS declares for it, and the library stays open.
        unsafe { mem::transmute::<NonNull<c_void>, Property>(address) }
    });
    let number = |what: c_int| {
        let mut value = 0;
        // SAFETY: properties 0 to 2 (major, minor, patch) are numbers and need no handle.
        let code = unsafe { property?(what, &mut value) };
        (code == 0).then_some(value)
    };
    Some(match (number(0), number(1), number(2)) {
        (Some(major), Some(minor), Some(patch)) => {
            format!("{name}, version {major}.{minor}.{patch}")
        }
        _ => name.to_owned(),
    })
}

/// File and version of NCCL.
pub(super) fn nccl() -> Option<String> {
    type Version = unsafe extern "C" fn(*mut c_int) -> c_int;
    // As `Gpu::nccl_rank` does.
    let named = std::env::var("TANDEM_LIBNCCL").ok();
    let file = named.as_deref().unwrap_or("libnccl.so.2");
    let (name, library) = open([file])?;
    let version = library.symbol(c"ncclGetVersion").and_then(|address| {
        // SAFETY: this is the type that NCCL declares for it, and the library stays open.
        let get = unsafe { mem::transmute::<NonNull<c_void>, Version>(address) };
        let mut version = 0;
        // SAFETY: the call writes one number.
        let code = unsafe { get(&mut version) };
        (code == 0).then_some(version)
    });
    Some(match version {
        Some(all) => {
            let (major, minor, patch) = (all / 10_000, all / 100 % 100, all % 100);
            format!("{name}, version {major}.{minor}.{patch}")
        }
        None => name.to_owned(),
    })
}

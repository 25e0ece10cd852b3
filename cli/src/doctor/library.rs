//! Libraries that are opened where they are: the driver, cuBLAS, NCCL. Nothing of CUDA is needed to build this.

use std::{
    ffi::{CStr, OsString, c_char, c_int},
    ptr,
};

use libloading::{Library, Symbol};

/// A GPU as its driver describes it.
#[derive(Clone, Debug)]
pub(super) struct GpuFacts {
    pub(super) name: String,
    pub(super) compute: (i32, i32),
    pub(super) multiprocessors: i32,
    pub(super) memory_bytes: usize,
}

/// A driver that could be opened.
#[derive(Clone, Debug)]
pub(super) struct Driver {
    /// Its file.
    pub(super) name: String,
    /// The newest CUDA that it runs: 1000 · major + 10 · minor.
    pub(super) version: i32,
    /// Why it does not start.
    pub(super) error: Option<String>,
    pub(super) gpus: Vec<GpuFacts>,
}

/// Where drivers lie, as the library's own search has it.
const DRIVERS: [&str; 4] = [
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
];

/// The first of some files that can be opened, kept open until the process ends.
fn open(names: &[OsString]) -> Result<(String, &'static Library), String> {
    let mut reason = None;
    for name in names {
        // SAFETY: opening runs the library's initialisers, as every program does that uses it. It is never closed,
        // so its functions stay where they are.
        match unsafe { Library::new(name) } {
            Ok(library) => {
                let name = name.to_string_lossy().into_owned();
                return Ok((name, Box::leak(Box::new(library))));
            }
            Err(error) => reason = reason.or(Some(error.to_string())),
        }
    }
    Err(reason.unwrap_or_default())
}

type Initialise = unsafe extern "C" fn(u32) -> c_int;
type Number = unsafe extern "C" fn(*mut c_int) -> c_int;
type Of = unsafe extern "C" fn(*mut c_int, c_int) -> c_int;
type OfDevice = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
type Bytes = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
type Message = unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int;

/// A function of a library.
fn function<T>(library: &'static Library, name: &str) -> Result<Symbol<'static, T>, String> {
    // SAFETY: callers name the type that the headers of the library declare for the function.
    unsafe { library.get(name.as_bytes()) }.map_err(|error| error.to_string())
}

/// The driver, and what it says of its GPUs; or what was tried and the reason.
pub(super) fn driver() -> Result<Driver, String> {
    let names = match std::env::var_os("TANDEM_LIBCUDA") {
        Some(name) => vec![name],
        None => DRIVERS.map(OsString::from).to_vec(),
    };
    let (name, library) = open(&names)?;
    let mut driver = Driver {
        name,
        version: 0,
        error: None,
        gpus: Vec::new(),
    };
    driver.error = ask(library, &mut driver).err();
    Ok(driver)
}

/// Starts the driver and asks it for its version and its devices.
fn ask(library: &'static Library, driver: &mut Driver) -> Result<(), String> {
    // Compute capability and multiprocessors, in the numbers of CUdevice_attribute.
    const MAJOR: c_int = 75;
    const MINOR: c_int = 76;
    const MULTIPROCESSORS: c_int = 16;
    let ok = |code: c_int| match code {
        0 => Ok(()),
        code => Err(message(library, code)),
    };
    let version: Symbol<Number> = function(library, "cuDriverGetVersion")?;
    let initialise: Symbol<Initialise> = function(library, "cuInit")?;
    let count: Symbol<Number> = function(library, "cuDeviceGetCount")?;
    let device: Symbol<Of> = function(library, "cuDeviceGet")?;
    let attribute: Symbol<OfDevice> = function(library, "cuDeviceGetAttribute")?;
    let name_of: Symbol<Name> = function(library, "cuDeviceGetName")?;
    let memory: Symbol<Bytes> = function(library, "cuDeviceTotalMem_v2")?;
    // SAFETY: the functions of the driver's interface, with places for what each writes.
    unsafe {
        ok(version(&mut driver.version))?;
        ok(initialise(0))?;
        let mut devices = 0;
        ok(count(&mut devices))?;
        for ordinal in 0..devices {
            let (mut handle, mut memory_bytes, mut name) = (0, 0, [0; 128]);
            ok(device(&mut handle, ordinal))?;
            ok(name_of(name.as_mut_ptr(), name.len() as c_int - 1, handle))?;
            ok(memory(&mut memory_bytes, handle))?;
            let mut values = [0; 3];
            for (value, what) in values.iter_mut().zip([MAJOR, MINOR, MULTIPROCESSORS]) {
                ok(attribute(value, what, handle))?;
            }
            driver.gpus.push(GpuFacts {
                // The last byte is zero, whatever was written.
                name: CStr::from_ptr(name.as_ptr()).to_string_lossy().into_owned(),
                compute: (values[0], values[1]),
                multiprocessors: values[2],
                memory_bytes,
            });
        }
    }
    Ok(())
}

/// What the driver says of an error.
fn message(library: &'static Library, code: c_int) -> String {
    let mut text = ptr::null();
    let said: Result<Symbol<Message>, _> = function(library, "cuGetErrorString");
    // SAFETY: it writes the address of a constant text, or nothing for an error that it does not know.
    let known = said.is_ok_and(|said| unsafe { said(code, &mut text) } == 0) && !text.is_null();
    if !known {
        return format!("error {code}");
    }
    // SAFETY: a text that ends with zero.
    let text = unsafe { CStr::from_ptr(text) };
    format!("{} (error {code})", text.to_string_lossy())
}

/// File and version of cuBLAS, the newest that the loader finds.
pub(super) fn cublas() -> Option<String> {
    let names = [
        "libcublas.so.13",
        "libcublas.so.12",
        "libcublas.so.11",
        "libcublas.so",
    ];
    let (name, library) = open(&names.map(OsString::from)).ok()?;
    let property: Result<Symbol<unsafe extern "C" fn(c_int, *mut c_int) -> c_int>, _> =
        function(library, "cublasGetProperty");
    let Ok(property) = property else {
        return Some(name);
    };
    let mut version = [0; 3];
    for (what, value) in (0..).zip(&mut version) {
        // SAFETY: major, minor and patch are properties 0 to 2, each a number; no handle is needed for them.
        let code = unsafe { property(what, value) };
        if code != 0 {
            return Some(name);
        }
    }
    let [major, minor, patch] = version;
    Some(format!("{name}, version {major}.{minor}.{patch}"))
}

/// File and version of NCCL.
pub(super) fn nccl() -> Option<String> {
    let (name, library) = open(&["libnccl.so.2", "libnccl.so"].map(OsString::from)).ok()?;
    let get: Result<Symbol<Number>, _> = function(library, "ncclGetVersion");
    let mut version = 0;
    // SAFETY: it writes one number.
    match get.map(|get| unsafe { get(&mut version) }) {
        Ok(0) => Some(format!(
            "{name}, version {}.{}.{}",
            version / 10_000,
            version / 100 % 100,
            version % 100
        )),
        _ => Some(name),
    }
}

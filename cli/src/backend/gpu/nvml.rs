//! NVML, the management library of NVIDIA's driver, opened at run time.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void},
    mem,
    ptr::{self, NonNull},
};

use libcuda::{Code, Device, Library};

use super::ok;
use crate::{
    Failure,
    backend::meter::{Meter, MeterError},
};

const FILE: &str = "libnvidia-ml.so.1";
/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: c_int = 3;
/// Length of a PCI address with its zero, at most.
const BUS_ID: usize = 32;

type Handle = *mut c_void;
type Lookup<'a> = &'a dyn Fn(&CStr) -> Option<NonNull<c_void>>;

/// A GPU as NVML knows it.
pub(super) struct Nvml {
    handle: Handle,
    energy: unsafe extern "C" fn(Handle, *mut c_ulonglong) -> c_int,
    power: unsafe extern "C" fn(Handle, *mut c_uint) -> c_int,
    text: unsafe extern "C" fn(c_int) -> *const c_char,
}

/// The function of a name.
///
/// # Safety
/// `F` is the type of a function pointer, and what the library has under this name is of that type.
unsafe fn function<F: Copy>(lookup: Lookup<'_>, name: &'static CStr) -> Result<F, MeterError> {
    const { assert!(size_of::<F>() == size_of::<NonNull<c_void>>()) };
    let address = lookup(name).ok_or_else(|| MeterError::NoFunction {
        file: FILE,
        function: name.to_str().unwrap_or_default(),
    })?;
    // SAFETY: the caller's promise.
    Ok(unsafe { mem::transmute_copy(&address) })
}

impl Nvml {
    /// The GPU of the current context.
    pub(super) fn of_context() -> Result<Self, Failure> {
        let bus_id = bus_id()?;
        // SAFETY: NVML is part of the driver; every program that reads a GPU's power opens it.
        let library = unsafe { Library::open(FILE.as_ref()) };
        let library = library.map_err(|reason| MeterError::Missing { file: FILE, reason })?;
        // SAFETY: NVML's functions have these types.
        Ok(unsafe { Self::of(&|name| library.symbol(name), bus_id_of(&bus_id)) }?)
    }

    /// The GPU at a PCI address.
    ///
    /// # Safety
    /// The functions behave as those of NVML with the same names, as long as the program runs.
    unsafe fn of(lookup: Lookup<'_>, bus_id: &CStr) -> Result<Self, MeterError> {
        type Init = unsafe extern "C" fn() -> c_int;
        type ByBusId = unsafe extern "C" fn(*const c_char, *mut Handle) -> c_int;
        // SAFETY: these are the types that NVML documents.
        let (init, by_bus_id, nvml) = unsafe {
            let nvml = Self {
                handle: ptr::null_mut(),
                energy: function(lookup, c"nvmlDeviceGetTotalEnergyConsumption")?,
                power: function(lookup, c"nvmlDeviceGetPowerUsage")?,
                text: function(lookup, c"nvmlErrorString")?,
            };
            let init: Init = function(lookup, c"nvmlInit_v2")?;
            let by_bus_id: ByBusId = function(lookup, c"nvmlDeviceGetHandleByPciBusId_v2")?;
            (init, by_bus_id, nvml)
        };
        // SAFETY: takes nothing. It counts its calls, and NVML stays in use until the process ends.
        nvml.checked("nvmlInit_v2", unsafe { init() })?;
        let mut handle = ptr::null_mut();
        // SAFETY: reads a terminated string and writes one handle.
        let code = unsafe { by_bus_id(bus_id.as_ptr(), &mut handle) };
        nvml.checked("nvmlDeviceGetHandleByPciBusId_v2", code)?;
        Ok(Self { handle, ..nvml })
    }

    fn checked(&self, call: &'static str, code: c_int) -> Result<(), MeterError> {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: returns a static string for every code, or null.
        let text = unsafe { (self.text)(code) };
        let text = match text.is_null() {
            true => "no text".into(),
            // SAFETY: as above.
            false => unsafe { CStr::from_ptr(text) }.to_string_lossy(),
        };
        Err(MeterError::Call {
            call,
            code,
            text: text.into_owned(),
        })
    }
}

impl Meter for Nvml {
    fn millijoules(&mut self) -> Result<Option<u64>, MeterError> {
        let mut millijoules = 0;
        // SAFETY: writes one number for a handle of the library.
        let code = unsafe { (self.energy)(self.handle, &mut millijoules) };
        if code == NOT_SUPPORTED {
            return Ok(None);
        }
        self.checked("nvmlDeviceGetTotalEnergyConsumption", code)?;
        Ok(Some(millijoules))
    }

    fn milliwatts(&mut self) -> Result<u32, MeterError> {
        let mut milliwatts = 0;
        // SAFETY: as above.
        let code = unsafe { (self.power)(self.handle, &mut milliwatts) };
        self.checked("nvmlDeviceGetPowerUsage", code)?;
        Ok(milliwatts)
    }
}

/// The PCI address of the current context's GPU, by which NVML finds it: both number GPUs in their own way.
fn bus_id() -> Result<[u8; BUS_ID], Failure> {
    type BusId = unsafe extern "C" fn(*mut c_char, c_int, Device) -> Code;
    let lookup = &|name: &CStr| libcuda::symbol(name);
    // SAFETY: the driver documents this type.
    let function: BusId = unsafe { function(lookup, c"cuDeviceGetPCIBusId") }?;
    // SAFETY: a device is a number.
    let mut device: Device = unsafe { mem::zeroed() };
    let mut bus_id = [0; BUS_ID];
    // SAFETY: the first call writes one number, the second at most this many bytes with a zero at the end.
    unsafe {
        ok("cuCtxGetDevice", libcuda::cuCtxGetDevice(&mut device))?;
        let text = bus_id.as_mut_ptr().cast();
        ok(
            "cuDeviceGetPCIBusId",
            function(text, BUS_ID as c_int, device),
        )?;
    }
    Ok(bus_id)
}

fn bus_id_of(bytes: &[u8; BUS_ID]) -> &CStr {
    CStr::from_bytes_until_nul(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn init() -> c_int {
        0
    }

    unsafe extern "C" fn by_bus_id(bus_id: *const c_char, handle: *mut Handle) -> c_int {
        // SAFETY: the caller's string.
        if unsafe { CStr::from_ptr(bus_id) } != c"0000:01:00.0" {
            return 6;
        }
        // SAFETY: the caller's handle.
        unsafe { *handle = ptr::without_provenance_mut(7) };
        0
    }

    unsafe extern "C" fn energy(handle: Handle, millijoules: *mut c_ulonglong) -> c_int {
        assert_eq!(handle.addr(), 7);
        // SAFETY: the caller's number.
        unsafe { *millijoules = 1 << 40 };
        0
    }

    unsafe extern "C" fn no_energy(_: Handle, _: *mut c_ulonglong) -> c_int {
        NOT_SUPPORTED
    }

    unsafe extern "C" fn power(handle: Handle, milliwatts: *mut c_uint) -> c_int {
        assert_eq!(handle.addr(), 7);
        // SAFETY: the caller's number.
        unsafe { *milliwatts = 700_000 };
        0
    }

    unsafe extern "C" fn text(_: c_int) -> *const c_char {
        c"Not Found".as_ptr()
    }

    fn address(function: *const c_void) -> Option<NonNull<c_void>> {
        NonNull::new(function.cast_mut())
    }

    fn stand_in(name: &CStr) -> Option<NonNull<c_void>> {
        address(match name.to_str().unwrap() {
            "nvmlInit_v2" => init as *const c_void,
            "nvmlDeviceGetHandleByPciBusId_v2" => by_bus_id as *const c_void,
            "nvmlDeviceGetTotalEnergyConsumption" => energy as *const c_void,
            "nvmlDeviceGetPowerUsage" => power as *const c_void,
            "nvmlErrorString" => text as *const c_void,
            _ => ptr::null(),
        })
    }

    fn opened(lookup: Lookup<'_>, bus_id: &CStr) -> Result<Nvml, MeterError> {
        // SAFETY: the stand-ins have NVML's types.
        unsafe { Nvml::of(lookup, bus_id) }
    }

    #[test]
    fn a_gpu_is_found_by_its_pci_address() {
        let mut nvml = opened(&stand_in, c"0000:01:00.0").unwrap();
        assert_eq!(nvml.millijoules(), Ok(Some(1 << 40)));
        assert_eq!(nvml.milliwatts(), Ok(700_000));
        let other = opened(&stand_in, c"0000:02:00.0").err().unwrap();
        assert_eq!(
            other,
            MeterError::Call {
                call: "nvmlDeviceGetHandleByPciBusId_v2",
                code: 6,
                text: "Not Found".to_owned()
            }
        );
    }

    #[test]
    fn a_gpu_without_a_counter_says_so() {
        let lookup = |name: &CStr| match name == c"nvmlDeviceGetTotalEnergyConsumption" {
            true => address(no_energy as *const c_void),
            false => stand_in(name),
        };
        let mut nvml = opened(&lookup, c"0000:01:00.0").unwrap();
        assert_eq!(nvml.millijoules(), Ok(None));
    }

    #[test]
    fn a_library_without_a_function_is_named() {
        let lookup = |name: &CStr| match name == c"nvmlDeviceGetPowerUsage" {
            true => None,
            false => stand_in(name),
        };
        let error = opened(&lookup, c"0000:01:00.0").err().unwrap();
        let function = "nvmlDeviceGetPowerUsage";
        assert_eq!(
            error,
            MeterError::NoFunction {
                file: FILE,
                function
            }
        );
    }
}

//! Kernels that no call of the library launches, and kernels of tests.

use std::{
    borrow::Cow,
    collections::BTreeMap,
    ffi::{CString, c_void},
    ptr,
    sync::Mutex,
};

use cust::sys;
use tandem_attn::exec::gpu::{Image, MODULES};

use crate::common::Stream;

/// An entry of a module that stays loaded.
pub struct Entry {
    function: sys::CUfunction,
    name: CString,
}

/// The modules of this process, by what they were loaded from: compiling one takes milliseconds.
static MODULES_LOADED: Mutex<BTreeMap<Vec<u8>, usize>> = Mutex::new(BTreeMap::new());

fn module(image: Vec<u8>) -> Result<sys::CUmodule, String> {
    let mut loaded = MODULES_LOADED.lock().expect("no thread panicked here");
    if let Some(&module) = loaded.get(&image) {
        return Ok(ptr::with_exposed_provenance_mut(module));
    }
    let mut module: sys::CUmodule = ptr::null_mut();
    // SAFETY: the image ends with a zero, and the options are none.
    let code = unsafe {
        sys::cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            0,
            ptr::null_mut(),
            ptr::null_mut(),
        )
    };
    if code != sys::CUresult::CUDA_SUCCESS {
        return Err(format!("the module: {code:?}"));
    }
    loaded.insert(image, module.expose_provenance());
    Ok(module)
}

impl Entry {
    /// Of PTX, or of machine code; the driver's answer where it takes neither.
    pub fn load(image: &[u8], name: &str) -> Result<Self, String> {
        let mut image = image.to_vec();
        image.push(0);
        let name = CString::new(name).expect("a name without zeroes");
        let mut function = ptr::null_mut();
        // SAFETY: the module stays loaded.
        let found =
            unsafe { sys::cuModuleGetFunction(&mut function, module(image)?, name.as_ptr()) };
        match found {
            sys::CUresult::CUDA_SUCCESS => Ok(Self { function, name }),
            error => Err(format!("{name:?}: {error:?}")),
        }
    }

    /// A kernel of the program's own modules: as machine code, or as PTX where the driver does not take that.
    pub fn of_program(arch: &str, family: &str, name: &str) -> Result<Self, String> {
        let module = MODULES
            .iter()
            .find(|module| (module.arch, module.family) == (arch, family))
            .ok_or_else(|| format!("no module {family} for {arch}"))?;
        let unpack = |image: &Image| image.unpack().map(Cow::into_owned);
        let cubin = module.cubin.as_ref().map(unpack).transpose();
        let cubin = cubin.map_err(|error| error.to_string())?;
        if let Some(entry) = cubin.and_then(|cubin| Self::load(&cubin, name).ok()) {
            return Ok(entry);
        }
        let ptx = unpack(&module.ptx).map_err(|error| error.to_string())?;
        Self::load(&ptx, name)
    }

    /// Launches it with parameters that follow each other, and waits.
    ///
    /// # Safety
    /// The entry takes these parameters, and they describe memory that is there.
    pub unsafe fn launch(
        &self,
        grid: u32,
        block: u32,
        shared: u32,
        parameters: &mut [*mut c_void],
        stream: &Stream,
    ) -> Result<(), String> {
        // As the library says it of its launches.
        if std::env::var_os("TANDEM_TRACE").is_some_and(|value| value == "1") {
            eprintln!(
                "tandem: {} on a stream of the test",
                self.name.to_string_lossy()
            );
        }
        // SAFETY: 8 is CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES; the rest is the caller's promise.
        let launched = unsafe {
            let attribute =
                sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let _ = sys::cuFuncSetAttribute(self.function, attribute, shared as i32);
            sys::cuLaunchKernel(
                self.function,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                stream.0.as_raw().cast(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        if launched != sys::CUresult::CUDA_SUCCESS {
            return Err(format!("the launch: {launched:?}"));
        }
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamSynchronize(stream.0.as_raw().cast()) } {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            failed => Err(format!("the launch: {failed:?}")),
        }
    }
}

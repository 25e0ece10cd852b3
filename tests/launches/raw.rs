//! Kernels that no call of the library launches, and kernels of tests.

use std::{
    borrow::Cow,
    ffi::{CString, c_void},
    ptr,
};

use cust::sys;
use tandem_attn::exec::gpu::{Image, MODULES};

use crate::common::Stream;

/// An entry of a module.
pub struct Entry {
    module: sys::CUmodule,
    function: sys::CUfunction,
}

impl Entry {
    /// Of PTX, or of machine code; the driver's answer where it takes neither.
    pub fn load(image: &[u8], name: &str) -> Result<Self, String> {
        let mut image = image.to_vec();
        image.push(0);
        let mut made = Self {
            module: ptr::null_mut(),
            function: ptr::null_mut(),
        };
        let name = CString::new(name).expect("a name without zeroes");
        // SAFETY: the image ends with a zero, and the options are none.
        let loaded = unsafe {
            sys::cuModuleLoadDataEx(
                &mut made.module,
                image.as_ptr().cast(),
                0,
                ptr::null_mut(),
                ptr::null_mut(),
            )
        };
        if loaded != sys::CUresult::CUDA_SUCCESS {
            return Err(format!("the module: {loaded:?}"));
        }
        // SAFETY: the module was just loaded.
        let found =
            unsafe { sys::cuModuleGetFunction(&mut made.function, made.module, name.as_ptr()) };
        match found {
            sys::CUresult::CUDA_SUCCESS => Ok(made),
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
        stream.wait();
        Ok(())
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        // SAFETY: loaded by us, and nothing of it runs.
        let _ = unsafe { sys::cuModuleUnload(self.module) };
    }
}

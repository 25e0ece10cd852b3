//! The kernels in the program, and how they are loaded into the driver.

mod arch;
mod kernel;

use std::{
    ffi::{CString, c_uint, c_void},
    fmt, ptr,
};

use kernels_gpu::registry::{Family, KernelInfo};
use rayon::prelude::*;

use self::arch::{Arch, choose};
pub use self::kernel::Kernel;
use super::driver::{
    self, Check, Code, Context, Current, Function, cuCtxSynchronize, cuModuleGetFunction,
    cuModuleLoadDataEx, cuModuleUnload, jit_option,
};
use super::embedded::{Image, Module};
use crate::Error;

/// A module that the driver is about to compile: this takes a minute or more, unless the driver has cached it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compiling {
    /// The architecture of its PTX.
    pub arch: &'static str,
    /// The family of kernels in it.
    pub family: &'static str,
    /// Number of the module, from 1 on.
    pub number: usize,
    /// Number of all modules.
    pub of: usize,
}

impl fmt::Display for Compiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            arch,
            family,
            number,
            of,
        } = self;
        write!(f, "compiling {family} for {arch}, module {number} of {of}")
    }
}

/// Called with every module before the driver compiles it.
pub(super) type Progress<'a> = &'a mut dyn FnMut(Compiling);

/// The name of a GPU, and what it can run.
pub(super) struct GpuName<'a> {
    pub(super) device: &'a str,
    pub(super) compute: (u32, u32),
    /// Whether it may run machine code.
    pub(super) machine_code: bool,
}

/// The modules of one GPU, loaded into its context.
#[derive(Debug)]
pub struct Modules {
    arch: &'static str,
    /// Each with its family.
    handles: Vec<(&'static str, driver::Module)>,
    context: Context,
}

impl Modules {
    /// Loads the modules for the GPU: machine code or, with `progress`, PTX if there is no machine code or the driver
    /// refuses it.
    pub(super) fn load(
        modules: &[Module],
        gpu: &GpuName<'_>,
        context: Context,
        mut progress: Option<&mut Progress<'_>>,
    ) -> Result<Self, Error> {
        let (arch, chosen) = choose(modules, gpu.device, gpu.compute)?;
        let runs = gpu.machine_code
            && Arch::parse(arch).is_some_and(|arch| arch.cubin_runs_on(gpu.compute));
        // Unpacking takes longer than loading, so it runs on all cores.
        let cubins: Vec<Option<_>> = chosen
            .par_iter()
            .map(|module| module.cubin.as_ref().filter(|_| runs).map(Image::unpack))
            .collect();
        let _current = Current::enter(context)?;
        // Filled one by one, so that an error unloads the modules that were loaded before.
        let mut loaded = Self {
            arch,
            handles: Vec::with_capacity(chosen.len()),
            context,
        };
        let of = chosen.len();
        for (at, (module, cubin)) in chosen.iter().zip(cubins).enumerate() {
            let refused_cubin = match cubin.transpose().map_err(damaged)? {
                None => None,
                Some(cubin) => match load_image(&cubin) {
                    Ok(handle) => {
                        loaded.handles.push((module.family, handle));
                        continue;
                    }
                    // The driver is older than the ptxas that made the cubin; it may still compile the PTX.
                    Err((code @ (Code::INVALID_IMAGE | Code::NO_BINARY_FOR_GPU), _)) => Some(code),
                    Err((code, log)) => return Err(refused(module, code, log)),
                },
            };
            let Some(progress) = progress.as_mut() else {
                return Err(Error::NoMachineCode {
                    device: gpu.device.into(),
                    compute: gpu.compute,
                    arch,
                    family: module.family,
                    refused: refused_cubin.map(driver::name),
                });
            };
            progress(Compiling {
                arch,
                family: module.family,
                number: at + 1,
                of,
            });
            loaded.handles.push((module.family, compile(module)?));
        }
        Ok(loaded)
    }

    /// The architecture that was chosen.
    #[must_use]
    pub fn arch(&self) -> &'static str {
        self.arch
    }

    /// Finds a kernel and sets its attributes, once for all launches.
    pub(super) fn kernel(
        &self,
        info: &'static KernelInfo,
        max_shared: u32,
    ) -> Result<Kernel, Error> {
        self.entry(info, Some(info.family), info.name, max_shared)
    }

    /// The same for an entry that replaces a kernel, in the module of a family or in any module.
    pub(super) fn entry(
        &self,
        info: &'static KernelInfo,
        family: Option<Family>,
        name: &str,
        max_shared: u32,
    ) -> Result<Kernel, Error> {
        let _current = Current::enter(self.context)?;
        let symbol = CString::new(name).unwrap_or_default();
        // Other modules are not searched: tools that watch the driver report a failed search as an error.
        let of_family = |&&(of, _): &&(&str, _)| family.is_none_or(|family| of == family.name());
        for &(_, module) in self.handles.iter().filter(of_family) {
            let mut function = Function::NULL;
            // SAFETY: the module is loaded and the name ends with a zero.
            match unsafe { cuModuleGetFunction(&mut function, module, symbol.as_ptr()) } {
                Code::NOT_FOUND => {}
                found => {
                    found.check("cuModuleGetFunction")?;
                    return Kernel::new(info, function, max_shared);
                }
            }
        }
        Err(Error::NoKernel {
            kernel: name.into(),
            arch: self.arch,
        })
    }
}

impl Drop for Modules {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context) {
            // Kernels may still be queued. A driver that is shutting down refuses both calls, and may.
            // SAFETY: waits.
            let _ = unsafe { cuCtxSynchronize() };
            for &(_, module) in &self.handles {
                // SAFETY: loaded by us and not used any more.
                let _ = unsafe { cuModuleUnload(module) };
            }
        }
    }
}

/// Lets the driver compile a module's PTX.
fn compile(module: &Module) -> Result<driver::Module, Error> {
    let mut ptx = module.ptx.unpack().map_err(damaged)?.into_owned();
    let version = ptx_version(&String::from_utf8_lossy(&ptx[..ptx.len().min(4096)]));
    ptx.push(0);
    match load_image(&ptx) {
        Ok(handle) => Ok(handle),
        Err((Code::UNSUPPORTED_PTX_VERSION, _)) => Err(Error::PtxTooNew {
            arch: module.arch,
            ptx: version,
            driver: driver::version()?,
        }),
        Err((code, log)) => Err(refused(module, code, log)),
    }
}

fn damaged(corrupt: kernels_bin::Corrupt) -> Error {
    Error::DamagedKernels {
        reason: corrupt.to_string(),
    }
}

fn refused(module: &Module, code: Code, log: String) -> Error {
    Error::ModuleRefused {
        arch: module.arch,
        code: code.0,
        name: driver::name(code),
        log,
    }
}

/// Loads a cubin, or PTX that ends with a zero, into the current context.
fn load_image(image: &[u8]) -> Result<driver::Module, (Code, String)> {
    let mut log = vec![0_u8; 8 << 10];
    let keys: [c_uint; 2] = [
        jit_option::ERROR_LOG_BUFFER,
        jit_option::ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let values = [
        log.as_mut_ptr().cast::<c_void>(),
        ptr::without_provenance_mut(log.len()),
    ];
    let mut module = driver::Module::NULL;
    // SAFETY: the image is a whole cubin or a terminated text, the two options take a buffer and its size,
    // and both outlive the call.
    let code = unsafe {
        cuModuleLoadDataEx(
            &mut module,
            image.as_ptr().cast(),
            2,
            keys.as_ptr(),
            values.as_ptr(),
        )
    };
    if code == Code::SUCCESS {
        return Ok(module);
    }
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    Err((code, String::from_utf8_lossy(&log[..end]).trim().into()))
}

/// The version that a `.version` directive states.
fn ptx_version(ptx: &str) -> (u32, u32) {
    let version = ptx
        .lines()
        .find_map(|line| line.trim().strip_prefix(".version"))
        .and_then(|version| {
            let (major, minor) = version.trim().split_once('.')?;
            Some((major.parse().ok()?, minor.parse().ok()?))
        });
    version.unwrap_or((0, 0))
}

#[cfg(test)]
mod tests;

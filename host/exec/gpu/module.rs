//! The kernels in the program, and how they get into the driver.

use std::{
    ffi::{CString, c_int, c_uint, c_void},
    fmt, ptr,
};

use kernels_gpu::registry::{Family, KernelInfo};
use rayon::prelude::*;

use super::driver::{
    self, Check, Code, Context, Current, Function, cuCtxSynchronize, cuFuncGetAttribute,
    cuFuncSetAttribute, cuModuleGetFunction, cuModuleLoadDataEx, cuModuleUnload,
    cuOccupancyMaxActiveBlocksPerMultiprocessor, function_attribute, jit_option,
};
use super::embedded::{Image, Module};
use crate::Error;

/// A module that the driver is about to compile: a minute or more where it has not done so before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Compiling {
    /// The architecture of its PTX.
    pub arch: &'static str,
    /// The family of kernels in it.
    pub family: &'static str,
    /// Which module it is, from 1 on.
    pub number: usize,
    /// Of how many.
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

/// Told of every module before the driver compiles it.
pub(super) type Progress<'a> = &'a mut dyn FnMut(Compiling);

/// An architecture in numbers: `sm_90a` is 9.0 and *specific*, its code runs there and nowhere else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Arch {
    compute: (u32, u32),
    specific: bool,
}

impl Arch {
    fn parse(name: &str) -> Option<Self> {
        let digits = name.strip_prefix("sm_")?;
        let specific = digits.ends_with('a');
        let number: u32 = digits.trim_end_matches('a').parse().ok()?;
        Some(Self {
            compute: (number / 10, number % 10),
            specific,
        })
    }

    /// Whether PTX for it runs on a GPU: on its own and all later ones, unless it is specific.
    fn ptx_runs_on(self, gpu: (u32, u32)) -> bool {
        self.compute == gpu || !self.specific && self.compute < gpu
    }

    /// Whether machine code for it does: within its generation only.
    fn cubin_runs_on(self, gpu: (u32, u32)) -> bool {
        self.ptx_runs_on(gpu) && self.compute.0 == gpu.0
    }
}

/// The modules that suit a GPU best: all those of the highest architecture that runs there.
fn choose<'a>(
    modules: &'a [Module],
    device: &str,
    compute: (u32, u32),
) -> Result<(&'static str, Vec<&'a Module>), Error> {
    let arch_of = |module: &Module| Arch::parse(module.arch);
    let best = modules
        .iter()
        .filter(|module| arch_of(module).is_some_and(|arch| arch.ptx_runs_on(compute)))
        .max_by_key(|module| arch_of(module));
    let Some(best) = best else {
        let mut built_for: Vec<_> = modules.iter().map(|module| module.arch).collect();
        built_for.sort_unstable();
        built_for.dedup();
        return Err(Error::UnsupportedArchitecture {
            device: device.into(),
            compute,
            built_for,
        });
    };
    let chosen = modules.iter().filter(|module| module.arch == best.arch);
    Ok((best.arch, chosen.collect()))
}

/// What a GPU is called, and what it can run.
pub(super) struct GpuName<'a> {
    pub(super) device: &'a str,
    pub(super) compute: (u32, u32),
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
    /// Loads what suits the GPU: machine code, or with `progress` PTX where there is none or the driver refuses it.
    pub(super) fn load(
        modules: &[Module],
        gpu: &GpuName<'_>,
        context: Context,
        mut progress: Option<&mut Progress<'_>>,
    ) -> Result<Self, Error> {
        let (arch, chosen) = choose(modules, gpu.device, gpu.compute)?;
        let runs = Arch::parse(arch).is_some_and(|arch| arch.cubin_runs_on(gpu.compute));
        // Unpacking takes longer than loading, and goes on all cores.
        let cubins: Vec<Option<_>> = chosen
            .par_iter()
            .map(|module| module.cubin.as_ref().filter(|_| runs).map(Image::unpack))
            .collect();
        let _current = Current::enter(context)?;
        // Filled one by one, so that an error unloads what was loaded before it.
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

    /// The same for an entry in the place of a kernel, in the module of a family or in any.
    pub(super) fn entry(
        &self,
        info: &'static KernelInfo,
        family: Option<Family>,
        name: &str,
        max_shared: u32,
    ) -> Result<Kernel, Error> {
        let _current = Current::enter(self.context)?;
        let symbol = CString::new(name).unwrap_or_default();
        // Elsewhere it is not looked for: tools that watch the driver take a refused look for an error.
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

/// Has the driver compile a module's PTX.
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

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its row.
    pub info: &'static KernelInfo,
    /// Threads of a block at most.
    pub max_threads: u32,
    /// Bytes of dynamic shared memory that a launch may ask for.
    pub max_dynamic_shared: u32,
    /// CTAs that an SM holds, at least 1.
    pub ctas_per_sm: u32,
    pub(super) function: Function,
}

impl Kernel {
    /// In the current context.
    fn new(info: &'static KernelInfo, function: Function, max_shared: u32) -> Result<Self, Error> {
        let get = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            unsafe { cuFuncGetAttribute(&mut value, attribute, function) }
                .check("cuFuncGetAttribute")?;
            Ok::<u32, Error>(value.unsigned_abs())
        };
        let set = |attribute, value: u32| {
            // SAFETY: the driver checks attribute and value.
            unsafe { cuFuncSetAttribute(function, attribute, value as c_int) }
                .check("cuFuncSetAttribute")
        };
        let static_shared = get(function_attribute::SHARED_SIZE_BYTES)?;
        let max_dynamic_shared = max_shared.saturating_sub(static_shared);
        set(
            function_attribute::MAX_DYNAMIC_SHARED_SIZE_BYTES,
            max_dynamic_shared,
        )?;
        // All of an SM's memory for shared memory, so that blocks of several kernels find room on it; but passes have
        // their loads in flight in L1, which is not cut down there.
        if info.is_attention() || info.shared_bytes > SMALL {
            set(function_attribute::PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        let mut kernel = Self {
            info,
            max_threads: get(function_attribute::MAX_THREADS_PER_BLOCK)?,
            max_dynamic_shared,
            ctas_per_sm: info.ctas_per_sm.max(1),
            function,
        };
        if info.ctas_per_sm == 0 && info.shared_bytes <= max_dynamic_shared {
            kernel.ctas_per_sm = kernel.resident(info.shared_bytes)?;
        }
        Ok(kernel)
    }

    /// CTAs of so much shared memory that an SM holds at the same time, at least 1. In the current context.
    pub(super) fn resident(&self, shared: u32) -> Result<u32, Error> {
        let mut blocks = 0;
        // SAFETY: writes one integer.
        unsafe {
            cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.function,
                self.info.threads as c_int,
                shared as usize,
            )
        }
        .check("cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        Ok(blocks.unsigned_abs().max(1))
    }
}

/// Shared memory of a kernel that does not live of it.
const SMALL: u32 = 1 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    const fn module(arch: &'static str) -> Module {
        Module {
            arch,
            family: "all",
            ptx: Image::raw(b".version 8.0\n"),
            cubin: None,
        }
    }

    static BUILT: [Module; 3] = [module("sm_80"), module("sm_90a"), module("sm_90a")];

    #[test]
    fn the_highest_architecture_that_runs_is_chosen_with_all_its_modules() {
        for (gpu, arch, count) in [
            ((8, 0), "sm_80", 1),
            ((8, 9), "sm_80", 1),
            ((9, 0), "sm_90a", 2),
            ((10, 0), "sm_80", 1),
        ] {
            let (chosen, modules) = choose(&BUILT, "a GPU", gpu).unwrap();
            assert_eq!((chosen, modules.len()), (arch, count), "{gpu:?}");
        }
    }

    #[test]
    fn a_gpu_that_is_too_old_is_told_what_there_is() {
        let error = choose(&BUILT, "a Turing", (7, 5)).unwrap_err();
        assert_eq!(
            error,
            Error::UnsupportedArchitecture {
                device: "a Turing".into(),
                compute: (7, 5),
                built_for: vec!["sm_80", "sm_90a"],
            }
        );
        assert!(error.to_string().contains("sm_80, sm_90a"), "{error}");
    }

    #[test]
    fn machine_code_stays_in_its_generation() {
        let arch = |name| Arch::parse(name).unwrap();
        assert!(arch("sm_80").cubin_runs_on((8, 6)) && !arch("sm_80").cubin_runs_on((9, 0)));
        assert!(!arch("sm_86").cubin_runs_on((8, 0)) && !arch("sm_86").ptx_runs_on((8, 0)));
        assert!(arch("sm_90a").cubin_runs_on((9, 0)) && !arch("sm_90a").ptx_runs_on((10, 0)));
        assert_eq!(Arch::parse("compute_80"), None);
    }

    #[test]
    fn the_version_of_ptx_is_read() {
        assert_eq!(
            ptx_version("//\n// by\n.version 8.7\n.target sm_90a"),
            (8, 7)
        );
        assert_eq!(ptx_version("nothing"), (0, 0));
    }
}

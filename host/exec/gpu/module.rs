//! The kernels in the program, and how they get into the driver.

use std::{
    ffi::{CString, c_int, c_uint, c_void},
    ptr,
};

use super::driver::{
    self, CUcontext, CUfunction, CUmodule, Code, Current, cuCtxSynchronize, cuFuncGetAttribute,
    cuFuncSetAttribute, cuModuleGetFunction, cuModuleLoadDataEx, cuModuleUnload,
    cuOccupancyMaxActiveBlocksPerMultiprocessor, function_attribute, jit_option,
};
use super::embedded::EmbeddedModule;
use crate::Error;

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
    modules: &'a [EmbeddedModule],
    device: &str,
    compute: (u32, u32),
) -> Result<(&'static str, Vec<&'a EmbeddedModule>), Error> {
    let arch_of = |module: &EmbeddedModule| Arch::parse(module.arch);
    let best = modules
        .iter()
        .filter(|module| arch_of(module).is_some_and(|arch| arch.ptx_runs_on(compute)))
        .max_by_key(|module| arch_of(module));
    let Some(best) = best else {
        let mut built_for: Vec<_> = modules.iter().map(|module| module.arch).collect();
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

/// The modules of one GPU, loaded into its context.
#[derive(Debug)]
pub struct Modules {
    arch: &'static str,
    handles: Vec<CUmodule>,
    context: CUcontext,
}

// SAFETY: module handles belong to a context, not to a thread; the driver takes them from any thread.
unsafe impl Send for Modules {}
// SAFETY: as above; all methods take the driver's own locks.
unsafe impl Sync for Modules {}

impl Modules {
    /// Loads what suits the GPU: cubins, or PTX where there are none or the driver refuses them.
    pub(super) fn load(
        modules: &[EmbeddedModule],
        device: &str,
        compute: (u32, u32),
        context: CUcontext,
    ) -> Result<Self, Error> {
        let (arch, chosen) = choose(modules, device, compute)?;
        let _current = Current::enter(context)?;
        // Filled one by one, so that an error unloads what was loaded before it.
        let mut loaded = Self {
            arch,
            handles: Vec::with_capacity(chosen.len()),
            context,
        };
        for module in chosen {
            loaded.handles.push(load_one(module, compute)?);
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
        name: &'static str,
        carveout: Carveout,
        max_shared: u32,
    ) -> Result<Kernel, Error> {
        let _current = Current::enter(self.context)?;
        let symbol = CString::new(name).unwrap_or_default();
        for &module in &self.handles {
            let mut function = ptr::null_mut();
            // SAFETY: the module is loaded and the name ends with a zero.
            let found = unsafe { cuModuleGetFunction(&mut function, module, symbol.as_ptr()) };
            if found == Code::SUCCESS {
                return Kernel::new(name, function, carveout, max_shared);
            }
        }
        Err(Error::NoKernel {
            kernel: name,
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
            for &module in &self.handles {
                // SAFETY: loaded by us and not used any more.
                let _ = unsafe { cuModuleUnload(module) };
            }
        }
    }
}

fn load_one(module: &EmbeddedModule, compute: (u32, u32)) -> Result<CUmodule, Error> {
    let runs = Arch::parse(module.arch).is_some_and(|arch| arch.cubin_runs_on(compute));
    if let Some(cubin) = module.cubin.filter(|_| runs) {
        match load_image(cubin) {
            Ok(handle) => return Ok(handle),
            // The driver is older than the ptxas that made the cubin; it may still compile the PTX.
            Err((Code::INVALID_IMAGE | Code::NO_BINARY_FOR_GPU, _)) => {}
            Err((code, log)) => return Err(refused(module, code, log)),
        }
    }
    let mut ptx = Vec::with_capacity(module.ptx.len() + 1);
    ptx.extend_from_slice(module.ptx.as_bytes());
    ptx.push(0);
    match load_image(&ptx) {
        Ok(handle) => Ok(handle),
        Err((Code::UNSUPPORTED_PTX_VERSION, _)) => Err(Error::PtxTooNew {
            arch: module.arch,
            ptx: ptx_version(module.ptx),
            driver: driver::version()?,
        }),
        Err((code, log)) => Err(refused(module, code, log)),
    }
}

fn refused(module: &EmbeddedModule, code: Code, log: String) -> Error {
    Error::ModuleRefused {
        arch: module.arch,
        code: code.0,
        name: code.name(),
        log,
    }
}

/// Loads a cubin, or PTX that ends with a zero, into the current context.
fn load_image(image: &[u8]) -> Result<CUmodule, (Code, String)> {
    let mut log = vec![0_u8; 8 << 10];
    let keys: [c_uint; 2] = [
        jit_option::ERROR_LOG_BUFFER,
        jit_option::ERROR_LOG_BUFFER_SIZE_BYTES,
    ];
    let values = [
        log.as_mut_ptr().cast::<c_void>(),
        ptr::without_provenance_mut(log.len()),
    ];
    let mut module = ptr::null_mut();
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

/// How an SM's memory is shared out between L1 and shared memory while a kernel is on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Carveout {
    /// The driver decides, from what one block uses.
    Default,
    /// All to shared memory: blocks of several kernels can then share the SM.
    Shared,
}

/// A kernel that is ready to be launched.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// Its name in the module.
    pub name: &'static str,
    /// Threads of a block at most.
    pub max_threads: u32,
    /// Bytes of dynamic shared memory that a launch may ask for.
    pub max_dynamic_shared: u32,
    pub(super) function: CUfunction,
}

// SAFETY: function handles belong to a context, not to a thread.
unsafe impl Send for Kernel {}
// SAFETY: as above, and nothing of it changes.
unsafe impl Sync for Kernel {}

impl Kernel {
    fn new(
        name: &'static str,
        function: CUfunction,
        carveout: Carveout,
        max_shared: u32,
    ) -> Result<Self, Error> {
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
        if carveout == Carveout::Shared {
            set(function_attribute::PREFERRED_SHARED_MEMORY_CARVEOUT, 100)?;
        }
        Ok(Self {
            name,
            max_threads: get(function_attribute::MAX_THREADS_PER_BLOCK)?,
            max_dynamic_shared,
            function,
        })
    }
}

impl Modules {
    /// Blocks of a launch that an SM holds at the same time.
    pub(super) fn blocks_per_multiprocessor(
        &self,
        kernel: &Kernel,
        threads: u32,
        shared: u32,
    ) -> Result<u32, Error> {
        let _current = Current::enter(self.context)?;
        let mut blocks = 0;
        // SAFETY: writes one integer.
        unsafe {
            cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                kernel.function,
                threads as c_int,
                shared as usize,
            )
        }
        .check("cuOccupancyMaxActiveBlocksPerMultiprocessor")?;
        Ok(blocks.unsigned_abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn module(arch: &'static str) -> EmbeddedModule {
        EmbeddedModule {
            arch,
            ptx: ".version 8.0\n",
            cubin: None,
        }
    }

    const BUILT: [EmbeddedModule; 3] = [module("sm_80"), module("sm_90a"), module("sm_90a")];

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

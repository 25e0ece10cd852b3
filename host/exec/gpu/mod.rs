//! Running plans on an NVIDIA GPU of compute capability 8.0 or newer.
//!
//! [`Gpu`] attaches to the primary context of a device, which the CUDA runtime and other CUDA crates also use. Their
//! memory and streams can be used here without conversion: pass device addresses ([`DeviceTensor`], [`DeviceArray`]) and the
//! handle of the stream ([`Stream`]).
//!
//! ```
//! use tandem_attn::{Error, gpu::Gpu};
//!
//! match Gpu::new(0) {
//!     Ok(gpu) => println!("{} with {} SMs", gpu.name(), gpu.multiprocessors()),
//!     Err(error @ Error::NoDriver { .. }) => println!("{error}"),
//!     Err(error) => return Err(error),
//! }
//! # Ok::<(), Error>(())
//! ```
//!
//! A [`Workspace`] runs the plans of one thread. Call [`Workspace::upload`] once per step and [`Gpu::run`] once per layer.
//!
//! ```no_run
//! use tandem_attn::gpu::{DeviceTensor, Gpu, KvPool, Stream, Workspace, WorkspaceOptions};
//! use tandem_attn::plan::{BatchLimits, Bound, PlanOptions, Planner};
//! use tandem_attn::problem::{Batch, Spec};
//!
//! # fn serve(batches: Vec<(Batch, DeviceTensor<3>, DeviceTensor<3>)>, pools: Vec<KvPool>, stream: Stream)
//! # -> Result<(), tandem_attn::Error> {
//! let (gpu, spec) = (Gpu::new(0)?, Spec::new(32, 8, 128));
//! let device = gpu.device();
//! let mut options = PlanOptions::default();
//! // Up to 256 requests of 8192 keys on pages of 16, and 2048 query tokens in a step.
//! let limits = BatchLimits::decodes(256, 8192, 16).with_query_tokens(2048);
//! let bound = Bound::new(&spec, &device, &options, &limits)?;
//! options.bound = Some(bound);
//! let mut workspace = gpu.workspace(&spec, &bound, WorkspaceOptions::default())?;
//! let mut planner = Planner::new();
//! // Queries and outputs have the query tokens of their batch.
//! for (batch, q, out) in batches {
//!     let plan = planner.plan(&spec, &batch, &device, &options)?;
//!     unsafe { workspace.upload(&plan, stream)? };
//!     for pool in &pools {
//!         unsafe { gpu.run(&mut workspace, &q, &[*pool], &out, None, stream)? };
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! All calls check their arguments before they launch anything. They return as soon as the work is
//! queued. Errors of the work itself are reported by the next call that waits for it.

// Each group imports only from itself and from those before it.

// The driver: contexts, streams and events, loaded modules, a launch.
mod driver;
mod embedded;
mod launch;
mod module;
mod resources;
mod tensor_map;

// Which kernels there are, and which of them a plan needs.
mod launch_key;
mod launch_plan;
mod launch_set;
mod registry;

// Arguments: tensors, pools, scales, and the tensor maps that describe them.
mod latent_parts;
mod maps;
mod pool;
mod scales;
mod tensor;
mod vectors;
mod walk;

// Launches of single kernels: their checks and parameters.
mod by_rows;
mod decode;
mod latent;
mod merge;
mod pod;
mod prefill;
mod steps;

// Runs of whole plans, and graphs of them.
mod captured;
mod device;
mod in_f32;
mod indices;
mod inspect;
mod memory;
mod pad;
mod run;
mod workspace;

// Calls without a plan.
mod append;
#[cfg(feature = "unstable")]
mod calls;
#[cfg(feature = "unstable")]
mod ceilings;
mod copy_pages;
mod latent_656;
#[cfg(feature = "unstable")]
mod loops;
mod quantise;
#[cfg(feature = "unstable")]
mod ranks;
#[cfg(feature = "unstable")]
mod replaced;
mod results;
#[cfg(feature = "unstable")]
mod step;

#[cfg(all(feature = "cudarc", feature = "unstable"))]
pub mod cudarc;
#[cfg(all(feature = "cudarc", not(feature = "unstable")))]
mod cudarc;
#[cfg(all(feature = "cust", feature = "unstable"))]
pub mod cust;
#[cfg(all(feature = "cust", not(feature = "unstable")))]
mod cust;

use std::{
    fmt,
    sync::atomic::{AtomicU64, Ordering},
};

use kernels_gpu::Hooks;

#[cfg(feature = "cust")]
pub use self::cust::Pool;
pub use driver::Stream;
pub use launch_set::LaunchSet;
pub use memory::{DeviceBuffer, Graph};
pub use pool::KvPool;
pub use quantise::AppendScales;
#[cfg(feature = "unstable")]
pub use ranks::{NcclId, NcclRank, Rank, RankOptions, RankTensors};
#[cfg(feature = "unstable")]
pub use replaced::{ReplacedModules, module_file, modules_of};
pub use resources::OwnedStream;
pub use scales::KvScales;
#[cfg(feature = "unstable")]
pub use step::{DeviceRope, QkNorm, QkvStep};
pub use steps::RunTensors;
pub use tensor::{DeviceArray, DeviceTensor};
pub use workspace::{Workspace, WorkspaceOptions};
unstable! {
    use decode::{DecodeCall, DecodeTile};
    use driver::DevicePtr;
    use embedded::{Image, MODULES, Module};
    use kernels_gpu::registry::{Arch, Family, KernelId, KernelInfo};
    use launch_key::LaunchKey;
    use merge::PartialStates;
    use module::Compiling;
    use pool::RopePart;
    use prefill::PrefillCall;
    use steps::Extras;
    use tensor_map::{Swizzle, TensorMap};
}

use crate::Error;
use driver::{Check, device_attribute};
use module::{GpuName, Modules, Progress};
use registry::Kernels;

/// Options for opening a [`Gpu`]: see [`Gpu::builder`].
pub struct GpuBuilder<'a> {
    modules: &'a [Module],
    variants: Vec<(Hooks, &'a [Module])>,
    machine_code: bool,
    progress: Option<Progress<'a>>,
}

impl<'a> GpuBuilder<'a> {
    /// Uses these kernels instead of those in the program.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn modules(mut self, modules: &'a [Module]) -> Self {
        self.modules = modules;
        self
    }

    /// Adds the kernels of a variant of your own, made by [`variant_kernels!`](kernels_gpu::variant_kernels).
    /// Specifications name the variant by [`Spec::with_hooks`](crate::problem::Spec::with_hooks), so its name must differ from those
    /// of other variants and of the library's ([`BUILT_IN`](kernels_gpu::variants::BUILT_IN)).
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn variant(mut self, hooks: &Hooks, modules: &'a [Module]) -> Self {
        self.variants.push((*hooks, modules));
        self
    }

    /// Lets the driver compile PTX if no machine code runs on the GPU: for a new GPU generation, or a driver older than the
    /// machine code. This takes a minute or more at the first start; the driver caches the result.
    /// `progress` is called with every module before it is compiled.
    #[must_use]
    pub fn compile_ptx(mut self, progress: &'a mut dyn FnMut(Compiling)) -> Self {
        self.progress = Some(progress);
        self
    }

    /// Leaves machine code aside, which would be unpacked for a driver that runs none.
    #[cfg(feature = "emulator")]
    pub(crate) fn without_machine_code(mut self) -> Self {
        self.machine_code = false;
        self
    }

    /// Attaches to device `ordinal` and loads the kernels.
    ///
    /// # Errors
    /// As [`Gpu::new`]; with variants [`Error::VariantArchitecture`]; with other modules [`Error::NoKernel`] if a kernel is
    /// missing; if the driver compiles, [`Error::PtxTooNew`].
    pub fn build(self, ordinal: u32) -> Result<Gpu, Error> {
        Gpu::load(ordinal, self)
    }
}

impl fmt::Debug for GpuBuilder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuBuilder")
            .field("modules", &self.modules)
            .field("variants", &self.variants)
            .field("machine_code", &self.machine_code)
            .field("compiles", &self.progress.is_some())
            .finish()
    }
}

/// A GPU with the kernels loaded. Make one for each device and keep it. Threads may share it.
pub struct Gpu {
    kernels: Kernels,
    modules: Modules,
    /// Modules of variants, which stay loaded as long as their kernels are used.
    variants: Vec<Modules>,
    // Declared after the modules, so that it is released after them.
    context: resources::PrimaryContext,
    device: driver::Device,
    name: String,
    compute: (u32, u32),
    multiprocessors: u32,
    /// Shared memory of an SM.
    shared_per_sm: u32,
    /// A number that no other `Gpu` of the process has.
    number: u64,
}

impl Gpu {
    /// Attaches to the primary context of device `ordinal` and loads the machine code of the kernels, which is in the
    /// program. Nothing is compiled.
    ///
    /// If no context is current on the calling thread, the primary context becomes current and stays current.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], [`Error::UnsupportedArchitecture`], [`Error::NoMachineCode`],
    /// [`Error::ModuleRefused`] or [`Error::Driver`].
    pub fn new(ordinal: u32) -> Result<Self, Error> {
        Self::builder().build(ordinal)
    }

    /// As [`new`](Self::new), with options: which kernels are loaded, and whether the driver may compile them.
    #[must_use]
    pub fn builder<'a>() -> GpuBuilder<'a> {
        GpuBuilder {
            modules: MODULES,
            variants: Vec::new(),
            machine_code: true,
            progress: None,
        }
    }

    fn load(ordinal: u32, mut builder: GpuBuilder<'_>) -> Result<Self, Error> {
        // The number of the next `Gpu`. No `Gpu` has the number 0.
        static NUMBER: AtomicU64 = AtomicU64::new(1);
        builder.check_names()?;
        driver::initialise(ordinal)?;
        let mut count = 0;
        // SAFETY: writes one integer.
        unsafe { driver::cuDeviceGetCount(&mut count) }.check("cuDeviceGetCount")?;
        let count = count.unsigned_abs();
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let mut device = 0;
        // SAFETY: writes one integer; the ordinal is one of the driver's.
        unsafe { driver::cuDeviceGet(&mut device, ordinal as i32) }.check("cuDeviceGet")?;
        let name = device_name(device)?;
        let attribute = |attribute| {
            let mut value = 0;
            // SAFETY: writes one integer.
            unsafe { driver::cuDeviceGetAttribute(&mut value, attribute, device) }
                .check("cuDeviceGetAttribute")?;
            Ok::<u32, Error>(value.unsigned_abs())
        };
        let compute = (
            attribute(device_attribute::COMPUTE_CAPABILITY_MAJOR)?,
            attribute(device_attribute::COMPUTE_CAPABILITY_MINOR)?,
        );
        let max_shared = attribute(device_attribute::MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let shared_per_sm = attribute(device_attribute::MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)?;
        let multiprocessors = attribute(device_attribute::MULTIPROCESSOR_COUNT)?;

        let context = resources::PrimaryContext::retain(device)?;
        let gpu = GpuName {
            device: &name,
            compute,
            machine_code: builder.machine_code,
        };
        let mut load =
            |modules| Modules::load(modules, &gpu, context.raw(), builder.progress.as_mut());
        let modules = load(builder.modules)?;
        let mut kernels = Kernels::load(&modules, max_shared)?;
        let mut variants = Vec::new();
        for (hooks, modules) in &builder.variants {
            let modules = load(modules).map_err(|error| match error {
                Error::UnsupportedArchitecture {
                    device,
                    compute,
                    built_for,
                } => Error::VariantArchitecture {
                    variant: hooks.name,
                    device,
                    compute,
                    built_for,
                },
                other => other,
            })?;
            kernels.add(hooks, &modules, None, max_shared)?;
            variants.push(modules);
        }
        Ok(Self {
            kernels,
            modules,
            variants,
            context,
            device,
            name,
            compute,
            multiprocessors,
            shared_per_sm,
            number: NUMBER.fetch_add(1, Ordering::Relaxed),
        })
    }

    /// Makes the primary context current on the calling thread, for direct calls to the driver.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn make_current(&self) -> Result<(), Error> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { driver::cuCtxSetCurrent(self.context.raw()) }.check("cuCtxSetCurrent")
    }

    /// The name of the device.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its compute capability, `(major, minor)`.
    #[must_use]
    pub fn compute_capability(&self) -> (u32, u32) {
        self.compute
    }

    /// The number of its SMs.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.multiprocessors
    }

    /// The architecture of the loaded kernels.
    #[must_use]
    pub fn arch(&self) -> &'static str {
        self.modules.arch()
    }
}

impl fmt::Debug for Gpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Gpu")
            .field("name", &self.name)
            .field("compute", &self.compute)
            .field("multiprocessors", &self.multiprocessors)
            .field("modules", &self.modules)
            .field("variants", &self.variants)
            .finish_non_exhaustive()
    }
}

/// The driver's name of a device.
fn device_name(device: driver::Device) -> Result<String, Error> {
    let mut name = [0_u8; 256];
    // SAFETY: writes at most so many bytes, a zero among them.
    unsafe { driver::cuDeviceGetName(name.as_mut_ptr().cast(), name.len() as i32, device) }
        .check("cuDeviceGetName")?;
    let end = name
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(name.len());
    Ok(String::from_utf8_lossy(&name[..end]).into_owned())
}

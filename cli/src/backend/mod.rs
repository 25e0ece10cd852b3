//! Where plans run. A backend loads a plan with its tensors, runs it any number of times, and gives results.

mod ceilings;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tandem_attn::plan::{DeviceDescription, Plan};

use crate::{
    Failure,
    tensors::{Tensor, Tensors},
    workload::json::positive,
};

pub use cpu::CpuBackend;
pub(crate) use cpu::processor;
#[cfg(feature = "cuda")]
pub use gpu::GpuBackend;
#[cfg(feature = "cuda")]
pub(crate) use gpu::{Event, ok};

/// A backend by name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Choice {
    /// The first NVIDIA GPU that there is, else all threads of the CPU.
    #[default]
    Auto,
    /// All threads of the CPU.
    Cpu,
    /// The first NVIDIA GPU.
    Gpu,
    /// Refused: times of an emulated GPU mean nothing.
    #[value(hide = true)]
    Emulated,
}

/// The machine that ran something.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// `cpu` or `gpu`.
    pub backend: String,
    /// The processor.
    pub name: String,
    /// What else there is to know: threads and instruction set, or driver and architecture.
    pub details: String,
}

/// The hardware's limits, measured.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceilings {
    /// Reading memory, in bytes per second.
    #[serde(deserialize_with = "positive")]
    pub read_bytes_per_s: f64,
    /// Copying memory, bytes read and written per second.
    #[serde(deserialize_with = "positive")]
    pub copy_bytes_per_s: f64,
    /// Multiplying and adding what is in registers or shared memory, in operations per second.
    #[serde(deserialize_with = "positive")]
    pub flops_per_s: f64,
}

impl Ceilings {
    /// The least time that so many bytes and operations can take, in seconds.
    #[must_use]
    pub fn least_seconds(&self, bytes: u64, flops: u64) -> f64 {
        (bytes as f64 / self.read_bytes_per_s).max(flops as f64 / self.flops_per_s)
    }
}

/// What comes out of a run.
#[derive(Clone, Debug)]
pub struct Results {
    /// `[total_q, q_heads, head_dim_v]`.
    pub out: Tensor,
    /// `[total_q, q_heads]`, natural log.
    pub lse: Vec<f32>,
}

/// A place where plans run.
pub trait Backend {
    /// What it is.
    fn machine(&self) -> Machine;

    /// What to plan for.
    fn device(&self) -> DeviceDescription;

    /// Bytes of tensors that it can hold.
    fn memory_bytes(&self) -> u64;

    /// Measures the limits of the hardware.
    ///
    /// # Errors
    /// Where the hardware fails.
    fn ceilings(&mut self) -> Result<Ceilings, Failure>;

    /// Brings a plan and its tensors to where they run.
    ///
    /// # Errors
    /// Where the backend cannot run the plan, or has no room for it.
    fn load<'a>(
        &'a mut self,
        plan: &'a Plan,
        tensors: &'a Tensors,
    ) -> Result<Box<dyn Loaded + 'a>, Failure>;
}

/// A plan that is ready to run.
pub trait Loaded {
    /// Runs once and says how long it took; with `flush`, after caches were filled with something else.
    ///
    /// # Errors
    /// Where the run fails.
    fn run(&mut self, flush: bool) -> Result<Duration, Failure>;

    /// Reads as many bytes of the keys as fast as that can be done, behind a flush; none where that says nothing.
    ///
    /// # Errors
    /// Where the run fails.
    fn read(&mut self, _bytes: u64) -> Option<Result<Duration, Failure>> {
        None
    }

    /// What the last run computed.
    ///
    /// # Errors
    /// Where results cannot be fetched.
    fn results(&mut self) -> Result<Results, Failure>;
}

/// Opens a backend.
///
/// # Errors
/// [`Failure::Backend`] where it is not there.
pub fn open(choice: Choice) -> Result<Box<dyn Backend>, Failure> {
    match choice {
        Choice::Auto => open_gpu().or_else(|_| Ok(Box::new(CpuBackend::new()))),
        Choice::Cpu => Ok(Box::new(CpuBackend::new())),
        Choice::Gpu => open_gpu(),
        Choice::Emulated => Err(emulated()),
    }
}

/// Why nothing is run or measured on the emulator here.
pub(crate) fn emulated() -> Failure {
    Failure::Input(
        "times of an emulated GPU mean nothing: `tandem trace` (--features emulator) draws what kernels do on it, \
         and --backend cpu or gpu measures"
            .to_owned(),
    )
}

#[cfg(feature = "cuda")]
fn open_gpu() -> Result<Box<dyn Backend>, Failure> {
    Ok(Box::new(GpuBackend::new()?))
}

#[cfg(not(feature = "cuda"))]
fn open_gpu() -> Result<Box<dyn Backend>, Failure> {
    Err(Failure::Backend(
        "this program was built without support for GPUs: build it with --features cuda, or use --backend cpu"
            .to_owned(),
    ))
}

//! Backends, which run plans. A backend loads a plan with its tensors, runs it any number of times, and returns
//! results.

mod ceilings;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;

use std::time::Duration;

use serde::{Deserialize, Serialize};
#[cfg(feature = "cuda")]
use tandem_attn::Error;
#[cfg(feature = "cuda")]
pub(crate) use tandem_attn::exec::gpu::Gpu;
use tandem_attn::plan::{DeviceDescription, Plan};

#[cfg(feature = "cuda")]
use crate::failure::in_flags;
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
    /// The first NVIDIA GPU if there is one, else all threads of the CPU.
    #[default]
    Auto,
    /// All threads of the CPU.
    Cpu,
    /// The first NVIDIA GPU.
    Gpu,
    /// Refused: only `tandem trace` runs on an emulated GPU.
    #[value(hide = true)]
    Emulated,
}

/// The machine on which something ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    /// `cpu` or `gpu`.
    pub backend: String,
    /// The processor.
    pub name: String,
    /// Further details: threads and instruction set, or driver and architecture.
    pub details: String,
}

/// The measured limits of the hardware.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ceilings {
    /// Reading memory, in bytes per second.
    #[serde(deserialize_with = "positive")]
    pub read_bytes_per_s: f64,
    /// Copying memory, bytes read and written per second.
    #[serde(deserialize_with = "positive")]
    pub copy_bytes_per_s: f64,
    /// Multiply-adds on values in registers or shared memory, in operations per second.
    #[serde(deserialize_with = "positive")]
    pub flops_per_s: f64,
}

impl Ceilings {
    /// The minimum time for this many bytes and operations, in seconds.
    #[must_use]
    pub fn least_seconds(&self, bytes: u64, flops: u64) -> f64 {
        (bytes as f64 / self.read_bytes_per_s).max(flops as f64 / self.flops_per_s)
    }
}

/// Results of a run.
#[derive(Clone, Debug)]
pub struct Results {
    /// `[total_q, q_heads, head_dim_v]`.
    pub out: Tensor,
    /// `[total_q, q_heads]`, natural log.
    pub lse: Vec<f32>,
}

/// Runs plans.
pub trait Backend {
    /// The machine.
    fn machine(&self) -> Machine;

    /// The device to plan for.
    fn device(&self) -> DeviceDescription;

    /// Bytes of tensors that fit its memory.
    fn memory_bytes(&self) -> u64;

    /// Measures the limits of the hardware.
    ///
    /// # Errors
    /// If the hardware fails.
    fn ceilings(&mut self) -> Result<Ceilings, Failure>;

    /// Loads a plan and its tensors to the device.
    ///
    /// # Errors
    /// If the backend cannot run the plan or lacks memory for it.
    fn load<'a>(
        &'a mut self,
        plan: &'a Plan,
        tensors: &'a Tensors,
    ) -> Result<Box<dyn Loaded + 'a>, Failure>;
}

/// A plan that is ready to run.
pub trait Loaded {
    /// Runs once and returns the time. With `flush`, the contents of the caches are evicted first.
    ///
    /// # Errors
    /// If the run fails.
    fn run(&mut self, flush: bool) -> Result<Duration, Failure>;

    /// Reads this many bytes of the keys as fast as possible after a flush. `None` if that is no useful comparison.
    ///
    /// # Errors
    /// If the run fails.
    fn read(&mut self, _bytes: u64) -> Option<Result<Duration, Failure>> {
        None
    }

    /// The results of the last run.
    ///
    /// # Errors
    /// If the results cannot be fetched.
    fn results(&mut self) -> Result<Results, Failure>;
}

/// Opens a backend.
///
/// # Errors
/// [`Failure::Backend`] if it is not available.
pub fn open(choice: Choice) -> Result<Box<dyn Backend>, Failure> {
    #[cfg(feature = "cuda")]
    if let Some(gpu) = gpu(choice)? {
        return Ok(Box::new(GpuBackend::on(gpu)?));
    }
    #[cfg(not(feature = "cuda"))]
    gpu(choice)?;
    Ok(Box::new(CpuBackend::new()))
}

/// This build supports no GPU.
#[cfg(not(feature = "cuda"))]
pub(crate) type Gpu = std::convert::Infallible;

/// The GPU of a choice, or none for the CPU. A GPU that is there and cannot be used is an error: a result of the CPU would be taken for
/// one of the GPU.
#[cfg(feature = "cuda")]
pub(crate) fn gpu(choice: Choice) -> Result<Option<Gpu>, Failure> {
    match choice {
        Choice::Cpu => Ok(None),
        Choice::Emulated => Err(emulated()),
        Choice::Gpu => Ok(Some(Gpu::new(0)?)),
        Choice::Auto => if_there(Gpu::new(0)),
    }
}

#[cfg(feature = "cuda")]
fn if_there<T>(gpu: Result<T, Error>) -> Result<Option<T>, Failure> {
    match gpu {
        Ok(gpu) => Ok(Some(gpu)),
        Err(Error::NoDriver { .. } | Error::NoDevice { .. }) => Ok(None),
        Err(error) => Err(Failure::Backend(format!(
            "{}; --backend cpu does not use the GPU",
            in_flags(&error.to_string())
        ))),
    }
}

#[cfg(not(feature = "cuda"))]
pub(crate) fn gpu(choice: Choice) -> Result<Option<Gpu>, Failure> {
    match choice {
        Choice::Gpu => Err(Failure::Backend(
            "this program was built without support for GPUs: build it with --features cuda, or use --backend cpu"
                .to_owned(),
        )),
        Choice::Emulated => Err(emulated()),
        Choice::Auto | Choice::Cpu => Ok(None),
    }
}

/// The error of commands that do not run on the emulator: no time on it means anything, and steps take minutes.
pub(crate) fn emulated() -> Failure {
    Failure::Input(
        "only `tandem trace` (--features emulator) runs on an emulated GPU, and draws what kernels do there: give \
         --backend cpu or gpu"
            .to_owned(),
    )
}

#[cfg(all(test, feature = "cuda"))]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_does_not_stand_in_for_a_gpu_that_fails() {
        let absent = Error::NoDevice {
            ordinal: 0,
            count: 0,
        };
        assert_eq!(if_there::<()>(Err(absent)).unwrap(), None);
        let old = Error::UnsupportedArchitecture {
            device: "T4".to_owned(),
            compute: (7, 5),
            built_for: vec!["sm_90a"],
        };
        let failure = if_there::<()>(Err(old)).unwrap_err();
        assert!(matches!(failure, Failure::Backend(_)));
        assert!(failure.to_string().contains("--backend cpu"), "{failure}");
    }
}

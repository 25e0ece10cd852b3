//! Backends, which run plans. A backend loads a plan with its tensors, runs it any number of times, and returns
//! results.

mod ceilings;
mod cpu;
#[cfg(feature = "cuda")]
mod gpu;
pub mod meter;
mod place;

use std::time::Duration;

use serde::{Deserialize, Serialize};
use tandem_attn::plan::{DeviceDescription, Plan};

use crate::{
    Failure,
    table::scaled,
    tensors::{Tensor, Tensors},
    workload::json::positive,
};

pub use cpu::CpuBackend;
pub(crate) use cpu::processor;
#[cfg(feature = "cuda")]
pub use gpu::GpuBackend;
#[cfg(feature = "cuda")]
pub(crate) use gpu::{Event, ok};
#[cfg(feature = "engine")]
pub(crate) use place::Gpu;
pub(crate) use place::MODULES_VARIABLE;
pub use place::Place;

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
    /// Whether that is the planner's number for the device, because no kernel measures it there.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub flops_from_description: bool,
}

impl Ceilings {
    /// The limit of multiply-adds in words.
    #[must_use]
    pub fn multiply_add(&self) -> String {
        let flops = scaled(self.flops_per_s, "FLOP/s");
        match self.flops_from_description {
            true => format!("{flops} (not measured: the planner's number)"),
            false => flops,
        }
    }

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

    /// What reads the energy of this device.
    ///
    /// # Errors
    /// [`Failure::Input`] if it is no GPU, [`Failure::Backend`] if NVML is missing or too old.
    fn meter(&self) -> Result<Box<dyn meter::Meter>, Failure> {
        Err(Failure::Input(
            "--energy is for NVIDIA GPUs: leave it out, or give --backend gpu".to_owned(),
        ))
    }

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

    /// Runs without a pause, in groups of `together` runs. `more` gets the number of runs that have ended after each group, while
    /// the next group runs, and says whether to go on.
    ///
    /// # Errors
    /// If a run fails, or that of `more`.
    fn run_while(
        &mut self,
        together: u32,
        more: &mut dyn FnMut(u32) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let mut ended = 0_u32;
        loop {
            for _ in 0..together {
                self.run(false)?;
            }
            ended = ended.saturating_add(together);
            if !more(ended)? {
                return Ok(());
            }
        }
    }

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

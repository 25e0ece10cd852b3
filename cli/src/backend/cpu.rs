//! Backend for all threads of the CPU.

use std::time::{Duration, Instant};

use tandem_attn::{
    exec::Cpu,
    plan::{DeviceDescription, Plan, PlannedPart},
};

use super::{Backend, Ceilings, Loaded, Machine, Results, ceilings};
use crate::{
    Failure, memory,
    table::counted,
    tensors::{self, Tensor, Tensors, kv_view},
    with_hooks, with_keys_and_values, with_tensor,
};

/// The CPU.
#[derive(Debug, Default)]
pub struct CpuBackend {
    cpu: Cpu,
    /// Memory larger than the caches; empty until the first flush.
    flush: Vec<u64>,
}

impl CpuBackend {
    /// A backend with all threads and the best instruction set.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }
}

/// The model name of the processor.
pub(crate) fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(':'))
        .map(|(_, name)| name.trim().to_owned());
    name.unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

/// Bytes of free memory.
pub(super) fn available_bytes() -> u64 {
    memory::available()
}

impl Backend for CpuBackend {
    fn machine(&self) -> Machine {
        let threads = rayon::current_num_threads();
        Machine {
            backend: "cpu".to_owned(),
            name: processor(),
            details: format!(
                "{}, {}",
                counted(threads, "thread"),
                self.cpu.instruction_set()
            ),
        }
    }

    fn device(&self) -> DeviceDescription {
        self.cpu.device()
    }

    fn memory_bytes(&self) -> u64 {
        available_bytes() / 4 * 3
    }

    fn ceilings(&mut self) -> Result<Ceilings, Failure> {
        memory::check(
            "measuring the limits of this machine",
            ceilings::BYTES,
            "raise the limit of this process (ulimit -v), or end other programs",
        )?;
        Ok(ceilings::measure())
    }

    fn load<'a>(
        &'a mut self,
        plan: &'a Plan,
        tensors: &'a Tensors,
    ) -> Result<Box<dyn Loaded + 'a>, Failure> {
        if tensors.indices.is_some() {
            return Err(Failure::Input(
                "the CPU reads no keys that are chosen in the memory of a GPU (top_k): give --backend gpu".to_owned(),
            ));
        }
        let heads = plan.total_q as usize * plan.spec.q_heads as usize;
        let out = Tensor::zeros(plan.spec.out_dtype, heads * plan.spec.head_dim_v as usize)?;
        Ok(Box::new(LoadedOnCpu {
            backend: self,
            plan,
            tensors,
            out,
            lse: vec![0.0; heads],
        }))
    }
}

struct LoadedOnCpu<'a> {
    backend: &'a mut CpuBackend,
    plan: &'a Plan,
    tensors: &'a Tensors,
    out: Tensor,
    lse: Vec<f32>,
}

impl Loaded for LoadedOnCpu<'_> {
    fn run(&mut self, flush: bool) -> Result<Duration, Failure> {
        let Self {
            backend: CpuBackend { cpu, flush: memory },
            plan,
            tensors,
            out,
            lse,
        } = self;
        if flush {
            ceilings::flush(memory);
        }
        let page_size = plan.parts[0].page_size;
        let sinks = tensors.sinks(&plan.spec);
        let heads = tensors::heads(&sinks);
        let own = tensors.own(&plan.spec);
        with_keys_and_values!(&tensors.k, &tensors.v, |k, v| {
            let view = |part: &PlannedPart| {
                let spec = tensors::of_part(&plan.spec, part.heads);
                kv_view(&spec, tensors.layout, page_size, k, v)
                    .with_scales(tensors.scales(&spec, page_size))
            };
            let views: Vec<_> = plan.parts.iter().map(view).collect();
            with_tensor!(&tensors.q, q => with_tensor!(&mut *out, out => {
                let begin = Instant::now();
                let lse = Some(&mut lse[..]);
                match &own {
                    Some(own) => with_hooks!(own, &plan.spec, variant => {
                        cpu.run_with(variant, plan, q, &views, out, lse, &heads)?;
                    }),
                    None => cpu.run_heads(plan, q, &views, out, lse, &heads)?,
                }
                Ok(begin.elapsed())
            }))
        })
    }

    fn results(&mut self) -> Result<Results, Failure> {
        Ok(Results {
            out: self.out.clone(),
            lse: self.lse.clone(),
        })
    }
}

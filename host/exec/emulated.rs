//! Running plans on an emulated GPU: the kernels' PTX runs on the CPU, under a chosen schedule. Races, missing fences, reads
//! of uninitialised memory and deadlocks are errors of the run.
//!
//! It replaces the CUDA driver of the whole process, so everything in [`gpu`] runs on it, too:
//! [`Emulated::gpu`] is an ordinary [`Gpu`]. It is for tests and for writing kernels. Times on it have no
//! meaning.
//!
//! ```standalone_crate
//! use tandem_attn::{
//!     emulated::{Emulated, Schedule, Settings},
//!     kv::KvView,
//!     plan::{PlanOptions, Planner},
//!     problem::{Batch, KvLayout, PageTable, Spec},
//! };
//! use half::bf16;
//!
//! let late = Settings { schedule: Schedule::Late, seed: 7, ..Settings::default() };
//! let (emulated, spec) = (Emulated::new(late)?, Spec::new(4, 1, 64));
//! let mut table = PageTable::new(16, 1);
//! table.push(&[0], 3);
//! let batch = Batch::new(vec![0, 1], table);
//! let plan = Planner::new().plan(&spec, &batch, &emulated.device(), &PlanOptions::default())?;
//!
//! let (q, pool) = ([bf16::ONE; 256], [bf16::ONE; 16 * 64]);
//! let kv = KvView::new(&spec, KvLayout::Nhd, 16, &pool, &pool);
//! let mut out = [bf16::ZERO; 256];
//! emulated.run(&plan, &q, &[kv], &mut out, None)?;
//! assert_eq!(out, [bf16::ONE; 256]);
//! # Ok::<(), tandem_attn::Error>(())
//! ```

use std::sync::{Mutex, MutexGuard, PoisonError};

use bytemuck::Pod;
pub use ptx_gpu::{Settings, ptx_run::Schedule};
unstable! {
    use ptx_gpu::ptx_run::{Beside, COPY_STEPS, Flight, Interval, State, Timeline};
}

use super::{
    cpu::check,
    gpu::{
        self, DeviceArray, DeviceBuffer, DeviceTensor, Gpu, KvPool, RopePart, RunTensors,
        WorkspaceOptions,
    },
};
use crate::{
    Error,
    kv::{KvScales, KvStrides, KvView},
    plan::{Bound, DeviceDescription, Plan},
    problem::{Dtype, KvLayout, Spec},
    tensor::{Element, HeadTensors},
};

/// The name of the stand-in for the driver.
const NAME: &str = "the emulator";

/// Runs of a process take turns, because there is only one emulated GPU.
static TURNS: Mutex<()> = Mutex::new(());

/// The GPUs with their kernels, by compute capability and number of SMs. They stay loaded as long as the process: unpacking
/// and parsing the kernels takes longer than most runs.
static LOADED: Mutex<Vec<((i32, u32), &Gpu)>> = Mutex::new(Vec::new());

/// The emulated GPU of the process.
#[derive(Debug)]
pub struct Emulated {
    gpu: &'static Gpu,
    settings: Settings,
}

impl Emulated {
    /// Replaces the driver of the process, and loads the kernels the first time.
    ///
    /// # Errors
    /// [`Error::NoDriver`] if the process has already opened a real driver, or looked for one; the errors of
    /// [`Gpu::new`].
    pub fn new(settings: Settings) -> Result<Self, Error> {
        libcuda::stand_in(NAME, ptx_gpu::symbol).map_err(|instead| Error::NoDriver {
            searched: vec![NAME.to_owned()],
            reason: match instead {
                Ok(driver) => format!("{} is in use; the emulator must come first", driver.name()),
                Err(missing) => format!("{missing} before; the emulator must come first"),
            },
        })?;
        Ok(Self {
            gpu: loaded(&settings)?,
            settings,
        })
    }

    /// The GPU, for calls that do not run a plan. Its launches use the schedule of the last run.
    #[must_use]
    pub const fn gpu(&self) -> &Gpu {
        self.gpu
    }

    /// Continues after a failed launch on [`gpu`](Self::gpu). A real GPU cannot do this.
    pub fn forget_failure(&self) {
        ptx_gpu::forget_failure();
    }

    /// The description of this GPU for the planner.
    #[must_use]
    pub fn device(&self) -> DeviceDescription {
        self.gpu.device()
    }

    /// Computes the attention of a plan's batch: the same call as [`Cpu::run`](super::Cpu::run).
    ///
    /// # Errors
    /// As [`Cpu::run`](super::Cpu::run) and [`Gpu::run`]. The text of [`Error::Driver`] says what went
    /// wrong in a kernel: which two instructions race, or what each warp waits for.
    pub fn run<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
    ) -> Result<(), Error> {
        self.run_heads(plan, q, kv, out, lse, &HeadTensors::default())
    }

    /// [`run`](Self::run) with the variant's data for each query head.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn run_heads<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        check(plan, q, kv, out, lse.as_deref())?;
        heads.check(&plan.spec)?;
        let _turn = turn(&self.settings);
        alone(self.run_checked(plan, q, kv, out, lse, heads))
    }

    /// Records what the warps of CTA `cta` do in each launch of a run, step by step. In each step, all warps that can continue execute
    /// one instruction.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn trace<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        cta: u32,
    ) -> Result<Vec<Timeline>, Error> {
        check(plan, q, kv, out, None)?;
        let heads = HeadTensors::default();
        heads.check(&plan.spec)?;
        let settings = Settings {
            trace: Some(cta),
            ..self.settings.clone()
        };
        let _turn = turn(&settings);
        drop(ptx_gpu::take_timelines());
        let result = self.run_checked(plan, q, kv, out, None, &heads);
        let timelines = ptx_gpu::take_timelines();
        // Later launches of the GPU are not traced, and run in the order that the settings say.
        ptx_gpu::configure(self.settings.clone());
        alone(result.map(|()| timelines))
    }

    fn run_checked<Q: Element, T: Element, O: Element>(
        &self,
        plan: &Plan,
        q: &[Q],
        kv: &[KvView<'_, T>],
        out: &mut [O],
        lse: Option<&mut [f32]>,
        heads: &HeadTensors<'_>,
    ) -> Result<(), Error> {
        let (gpu, spec) = (self.gpu, &plan.spec);
        let options = WorkspaceOptions::default();
        let mut workspace = gpu.workspace(spec, &Bound::of(plan), options)?;
        let stream = gpu.stream()?;
        let mut memory = Memory {
            gpu,
            buffers: Vec::new(),
        };
        let mut pools = Vec::with_capacity(kv.len());
        for (view, part) in kv.iter().zip(&plan.parts) {
            let spec = &spec.times(part.heads);
            let k = memory.put(view.k)?;
            let v = match spec.latent {
                true => k,
                false => memory.put(view.v)?,
            };
            let pages = view.pages(spec);
            let pool = KvPool::new(spec, KvLayout::Nhd, view.k_strides.page_size, pages, k, v);
            let mut pool = pool
                .with_strides(view.k_strides, view.v_strides)
                .with_scales(memory.scales(spec, &view.scales, pages)?);
            if let Some(rope) = view.rope {
                pool.rope = Some(RopePart {
                    pool: memory.put(rope.pool)?,
                    strides: rope.strides,
                });
            }
            pools.push(pool);
        }
        let [tokens, q_heads] = [plan.total_q, spec.q_heads].map(|extent| extent as usize);
        let rows = |dim: u32| [tokens, q_heads, dim as usize];
        let q = DeviceTensor::new(memory.put(q)?, Q::DTYPE, rows(spec.head_dim_qk));
        let results = memory.put(out)?;
        let of_out = DeviceTensor::new(results, O::DTYPE, rows(spec.head_dim_v));
        let states = memory.put(&vec![0.0_f32; tokens * q_heads])?;
        let of_lse = DeviceTensor::new(states, Dtype::F32, [tokens, q_heads]);
        let mut tensors = RunTensors::new(&q, &pools, &of_out).with_lse(&of_lse);
        if let Some(sinks) = heads.sinks {
            tensors = tensors.with_sinks(DeviceArray::new(memory.put(sinks)?, sinks.len()));
        }
        // SAFETY: all memory lives until the stream was waited for, and the stream is ours.
        unsafe {
            workspace.upload(plan, *stream)?;
            gpu.run_with(&mut workspace, &tensors, *stream)?;
        }
        stream.synchronize()?;
        bytemuck::cast_slice_mut(out).copy_from_slice(&memory.get(results)?);
        if let Some(lse) = lse {
            bytemuck::cast_slice_mut(lse).copy_from_slice(&memory.get(states)?);
        }
        Ok(())
    }
}

/// The GPU of these settings with its kernels.
fn loaded(settings: &Settings) -> Result<&'static Gpu, Error> {
    let key = (settings.compute, settings.multiprocessors);
    let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, gpu)) = loaded.iter().find(|(of, _)| *of == key) {
        return Ok(gpu);
    }
    let _turn = turn(settings);
    let gpu = Gpu::builder()
        .compile_ptx(&mut |_| {})
        .without_machine_code()
        .build(0)?;
    let gpu: &Gpu = Box::leak(Box::new(gpu));
    loaded.push((key, gpu));
    Ok(gpu)
}

/// Clears errors of a run on the emulated GPU, so that the next run starts without them.
fn alone<T>(result: Result<T, Error>) -> Result<T, Error> {
    result.inspect_err(|_| ptx_gpu::forget_failure())
}

/// Waits for runs of other threads. Launches until the next turn use the schedule of these settings.
fn turn(settings: &Settings) -> MutexGuard<'static, ()> {
    let turn = TURNS.lock().unwrap_or_else(PoisonError::into_inner);
    ptx_gpu::configure(settings.clone());
    turn
}

/// Device copies of the arguments of a run.
struct Memory<'a> {
    gpu: &'a Gpu,
    buffers: Vec<DeviceBuffer<u8>>,
}

impl Memory<'_> {
    fn put<T: Pod>(&mut self, values: &[T]) -> Result<u64, Error> {
        let buffer = DeviceBuffer::from_slice(self.gpu, bytemuck::cast_slice(values))?;
        let address = buffer.address();
        self.buffers.push(buffer);
        Ok(address)
    }

    fn get(&self, address: u64) -> Result<Vec<u8>, Error> {
        let mut buffers = self.buffers.iter();
        let buffer = buffers.find(|buffer| buffer.address() == address);
        buffer.map_or(Ok(Vec::new()), DeviceBuffer::read)
    }

    /// The scales of a pool with this number of pages.
    fn scales(
        &mut self,
        spec: &Spec,
        scales: &KvScales<'_>,
        pages: u32,
    ) -> Result<gpu::KvScales, Error> {
        let mut of = |values: &[f32]| -> Result<DeviceTensor<1>, Error> {
            Ok(DeviceTensor::new(
                self.put(values)?,
                Dtype::F32,
                [values.len()],
            ))
        };
        match *scales {
            KvScales::One => Ok(gpu::KvScales::One),
            KvScales::InRow => Ok(gpu::KvScales::InRow),
            KvScales::Tensor { k, v } => Ok(gpu::KvScales::Tensor {
                k: of(&[k])?,
                v: of(&[v])?,
            }),
            KvScales::Head { k, v } => Ok(gpu::KvScales::Head {
                k: of(k)?,
                v: of(v)?,
            }),
            KvScales::Request { k, v, of_token } => {
                let mut of = |values: &[f32]| -> Result<DeviceTensor<2>, Error> {
                    let heads = spec.kv_heads as usize;
                    let shape = [values.len() / heads, heads];
                    Ok(DeviceTensor::new(self.put(values)?, Dtype::F32, shape))
                };
                let (k, v) = (of(k)?, of(v)?);
                let of_token = DeviceArray::new(self.put(of_token)?, of_token.len());
                Ok(gpu::KvScales::Request { k, v, of_token })
            }
            KvScales::Token {
                k,
                v,
                k_strides,
                v_strides,
            } => {
                let mut of =
                    |values: &[f32], strides: KvStrides| -> Result<DeviceTensor<3>, Error> {
                        let shape =
                            [pages, strides.page_size, spec.kv_heads].map(|extent| extent as usize);
                        Ok(DeviceTensor::new(self.put(values)?, Dtype::F32, shape)
                            .with_stride(0, strides.page as usize)
                            .with_stride(1, strides.token as usize)
                            .with_stride(2, strides.head as usize))
                    };
                let (k, v) = (of(k, k_strides)?, of(v, v_strides)?);
                Ok(gpu::KvScales::Token { k, v })
            }
        }
    }
}

//! Backend for the first NVIDIA GPU.

mod handles;
mod nvml;
mod scales;

use std::time::Duration;

use tandem_attn::{
    exec::gpu::{
        DeviceArray, DeviceTensor, Gpu, KvPool, RunTensors, Stream as StreamHandle, Workspace,
        WorkspaceOptions,
    },
    plan::{Bound, DeviceDescription, Plan},
    problem::Dtype,
};

use super::{Backend, Ceilings, Loaded, Machine, Results, meter::Meter, place::of_gpu};
use crate::{
    Failure,
    tensors::{self, Tensor, Tensors},
    with_tensor,
};
pub(crate) use handles::{Event, ok};
use handles::{Memory, Stream};
use scales::OnGpu;

/// Bytes written between repetitions to evict the caches: several times the L2 of any GPU.
const FLUSHED_BYTES: usize = 256 << 20;

/// Bytes read and copied to measure the ceilings.
const CEILING_BYTES: usize = 1 << 30;

/// Repetitions. The best one counts, because a ceiling is an upper limit.
const CEILING_RUNS: usize = 9;

/// Multiply rounds that keep the GPU busy while the host queues the timed work. They do not touch the caches.
const AHEAD_ROUNDS: u32 = 100;

/// Multiply rounds to measure the ceiling: some milliseconds.
const CEILING_ROUNDS: u32 = 10_000;

/// What keeps the GPU busy while the host queues the timed work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ahead {
    /// The caches are flushed.
    Flush,
    /// Products that leave the caches as they are.
    Products,
    /// The caches are flushed, and the work itself warms them again. Nothing shorter than a flush surely lasts until the timed
    /// work is queued, and all that moves memory changes the caches.
    FlushAndWork,
}

impl Ahead {
    const fn of(flush: bool, multiplies: bool) -> Self {
        match (flush, multiplies) {
            (true, _) => Self::Flush,
            (false, true) => Self::Products,
            (false, false) => Self::FlushAndWork,
        }
    }
}

/// A GPU with a stream and memory for measurements.
pub struct GpuBackend {
    stream: Stream,
    flush: Memory,
    options: WorkspaceOptions,
    // After the fields that live in its context, so that it is released after them.
    gpu: Gpu,
}

impl GpuBackend {
    /// A GPU.
    ///
    /// # Errors
    /// If its driver refuses a stream or memory.
    pub fn on(gpu: Gpu) -> Result<Self, Failure> {
        gpu.make_current()?;
        Ok(Self {
            stream: Stream::new()?,
            flush: Memory::of_bytes(FLUSHED_BYTES)?,
            options: WorkspaceOptions::default(),
            gpu,
        })
    }

    /// Whether the kernels include one that measures products: it has Hopper's instructions. Newer GPUs run Ampere's kernels.
    fn multiplies(&self) -> bool {
        self.gpu.arch() == "sm_90a"
    }

    /// Time of `work` on the GPU. Other work runs before it, so that the time excludes queueing on the host.
    fn time(
        &self,
        flush: bool,
        mut work: impl FnMut(StreamHandle) -> Result<(), Failure>,
    ) -> Result<Duration, Failure> {
        let stream = self.stream.handle;
        let [begin, end] = [Event::new()?, Event::new()?];
        let ahead = Ahead::of(flush, self.multiplies());
        // SAFETY: the memory has this many bytes, and the handles are alive.
        unsafe {
            if ahead == Ahead::Products {
                self.gpu
                    .multiply(AHEAD_ROUNDS, self.flush.address(), stream)?;
            } else {
                let code = libcuda::cuMemsetD8Async(self.flush.address(), 1, FLUSHED_BYTES, stream);
                ok("cuMemsetD8Async", code)?;
            }
            if ahead == Ahead::FlushAndWork {
                work(stream)?;
            }
            begin.record(stream)?;
            work(stream)?;
            end.record(stream)?;
            ok("cuStreamSynchronize", libcuda::cuStreamSynchronize(stream))?;
        }
        Ok(Duration::from_secs_f64(begin.microseconds_to(&end)? / 1e6))
    }

    fn best_seconds(
        &self,
        mut work: impl FnMut(StreamHandle) -> Result<(), Failure>,
    ) -> Result<f64, Failure> {
        let mut best = f64::INFINITY;
        for _ in 0..CEILING_RUNS {
            best = best.min(self.time(true, &mut work)?.as_secs_f64());
        }
        Ok(best)
    }
}

impl Backend for GpuBackend {
    fn machine(&self) -> Machine {
        let (major, minor) = self.gpu.compute_capability();
        Machine {
            backend: "gpu".to_owned(),
            name: self.gpu.name().to_owned(),
            details: format!(
                "{} SMs, compute capability {major}.{minor}, kernels for {}",
                self.gpu.multiprocessors(),
                self.gpu.arch()
            ),
        }
    }

    fn device(&self) -> DeviceDescription {
        self.gpu.device()
    }

    fn memory_bytes(&self) -> u64 {
        let (mut free, mut all) = (0, 0);
        // SAFETY: the call writes two numbers.
        let code = unsafe { libcuda::cuMemGetInfo(&mut free, &mut all) };
        match code {
            // The host also holds the tensors, and a copy of them.
            libcuda::Code::SUCCESS => (free as u64 / 4 * 3).min(super::cpu::available_bytes() / 3),
            _ => 0,
        }
    }

    fn ceilings(&mut self) -> Result<Ceilings, Failure> {
        let [source, target] = [
            Memory::of_bytes(CEILING_BYTES)?,
            Memory::of_bytes(CEILING_BYTES)?,
        ];
        let result = Memory::of_bytes(16)?;
        let bytes = CEILING_BYTES as f64;
        let read = self.best_seconds(|stream| {
            // SAFETY: the memory is allocated and lives until the stream is done.
            unsafe {
                self.gpu
                    .read_all(source.address(), CEILING_BYTES, result.address(), stream)
            }
            .map_err(Failure::from)
        })?;
        let copy = self.best_seconds(|stream| {
            // SAFETY: as above.
            let code = unsafe {
                libcuda::cuMemcpyDtoDAsync(
                    target.address(),
                    source.address(),
                    CEILING_BYTES,
                    stream,
                )
            };
            ok("cuMemcpyDtoDAsync", code)
        })?;
        let mut flops = 0;
        let flops_per_s = if self.multiplies() {
            let multiply = self.best_seconds(|stream| {
                // SAFETY: as above.
                flops = unsafe { self.gpu.multiply(CEILING_ROUNDS, result.address(), stream) }?;
                Ok(())
            })?;
            flops as f64 / multiply
        } else {
            self.gpu.device().flops_per_ns * 1e9
        };
        Ok(Ceilings {
            read_bytes_per_s: bytes / read,
            copy_bytes_per_s: 2.0 * bytes / copy,
            flops_per_s,
            flops_from_description: !self.multiplies(),
        })
    }

    fn meter(&self) -> Result<Box<dyn Meter>, Failure> {
        Ok(Box::new(nvml::Nvml::of_context()?))
    }

    fn load<'a>(
        &'a mut self,
        plan: &'a Plan,
        tensors: &'a Tensors,
    ) -> Result<Box<dyn Loaded + 'a>, Failure> {
        let spec = &plan.spec;
        let mut workspace = self
            .gpu
            .workspace(spec, &Bound::of(plan), self.options.clone())
            .map_err(of_gpu)?;
        // SAFETY: we own the stream.
        unsafe { workspace.upload(plan, self.stream.handle) }.map_err(of_gpu)?;
        let heads = spec.q_heads as usize;
        let rows = plan.total_q as usize * heads;
        let page_size = plan.parts[0].page_size;
        let tokens = tensors.k.len() / (spec.kv_heads as usize * tensors::key_elements(spec));
        let (k, v) = (Memory::new(&tensors.k)?, Memory::new(&tensors.v)?);
        let pages = (tokens / page_size as usize) as u32;
        let scales = OnGpu::of(tensors.scales.as_ref())?;
        // A page of a part with several heads is as many pages of others.
        let pool = |heads: u32| {
            let (spec, pages) = (&tensors::of_part(spec, heads), pages / heads);
            let pool = match spec.latent {
                true if tensors::has_rows_656(spec) => {
                    KvPool::latent_656(page_size, pages, k.address())
                }
                true => KvPool::latent(spec, page_size, pages, k.address()),
                false => KvPool::new(
                    spec,
                    tensors.layout,
                    page_size,
                    pages,
                    k.address(),
                    v.address(),
                ),
            };
            match &scales {
                Some(scales) => {
                    let scales = scales.of_pool(spec, &pool, tensors.layout);
                    pool.with_scales(scales)
                }
                None => pool,
            }
        };
        let pools = plan.parts.iter().map(|part| pool(part.heads)).collect();
        let values = rows * spec.head_dim_v as usize;
        let own = tensors.own(spec);
        let of_hooks = own
            .as_ref()
            .map(|own| Memory::of(own.in_memory()))
            .transpose()?;
        let own = match (&own, &of_hooks) {
            (Some(own), Some(memory)) => own.bytes(spec, memory.address())?,
            _ => Vec::new(),
        };
        Ok(Box::new(LoadedOnGpu {
            q: Memory::new(&tensors.q)?,
            out: Memory::of_bytes(values * spec.out_dtype.bytes() as usize)?,
            lse: Memory::of_bytes(rows * 4)?,
            _pool_memory: [k, v],
            _scales: scales,
            sinks: tensors
                .sinks(spec)
                .map(|sinks| Memory::new(&Tensor::F32(sinks)))
                .transpose()?,
            indices: match &tensors.indices {
                Some(indices) => Some((Memory::of(indices)?, indices.len())),
                None => None,
            },
            own,
            _of_hooks: of_hooks,
            pools,
            workspace,
            plan,
            backend: self,
        }))
    }
}

struct LoadedOnGpu<'a> {
    workspace: Workspace,
    plan: &'a Plan,
    q: Memory,
    _pool_memory: [Memory; 2],
    _scales: Option<OnGpu>,
    sinks: Option<Memory>,
    /// What the hooks are given; it names the address of their numbers.
    own: Vec<u8>,
    _of_hooks: Option<Memory>,
    /// The chosen keys, and their number.
    indices: Option<(Memory, usize)>,
    /// One for each part.
    pools: Vec<KvPool>,
    out: Memory,
    lse: Memory,
    backend: &'a GpuBackend,
}

impl LoadedOnGpu<'_> {
    /// Queues a run.
    fn queue(&mut self, stream: StreamHandle) -> Result<(), Failure> {
        let spec = &self.plan.spec;
        let [tokens, heads, dim_qk, dim_v] = [
            self.plan.total_q,
            spec.q_heads,
            spec.head_dim_qk,
            spec.head_dim_v,
        ]
        .map(|extent| extent as usize);
        let q = DeviceTensor::new(self.q.address(), spec.q_dtype, [tokens, heads, dim_qk]);
        let out = DeviceTensor::new(self.out.address(), spec.out_dtype, [tokens, heads, dim_v]);
        let lse = DeviceTensor::new(self.lse.address(), Dtype::F32, [tokens, heads]);
        let workspace = &mut self.workspace;
        let mut tensors = RunTensors::new(&q, &self.pools, &out).with_lse(&lse);
        if let Some(sinks) = &self.sinks {
            tensors = tensors.with_sinks(DeviceArray::new(sinks.address(), spec.sinks()));
        }
        if let Some((indices, len)) = &self.indices {
            tensors = tensors.with_indices(DeviceArray::new(indices.address(), *len));
        }
        tensors.own = &self.own;
        let GpuBackend { gpu, .. } = self.backend;
        // SAFETY: the plan comes from the planner, and its tensors live until the stream is done.
        unsafe { gpu.run_with(workspace, &tensors, stream) }.map_err(of_gpu)
    }
}

impl Loaded for LoadedOnGpu<'_> {
    fn run(&mut self, flush: bool) -> Result<Duration, Failure> {
        let backend = self.backend;
        backend.time(flush, |stream| self.queue(stream))
    }

    fn run_while(
        &mut self,
        together: u32,
        more: &mut dyn FnMut(u32) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        let stream = self.backend.stream.handle;
        let [mut before, mut next] = [Event::new()?, Event::new()?];
        let mut group = |end: &Event| {
            (0..together).try_for_each(|_| self.queue(stream))?;
            end.record(stream)
        };
        let mut groups = || {
            group(&before)?;
            let mut ended = 0_u32;
            loop {
                group(&next)?;
                before.wait()?;
                ended = ended.saturating_add(together);
                if !more(ended)? {
                    return Ok(());
                }
                std::mem::swap(&mut before, &mut next);
            }
        };
        let queued = groups();
        // SAFETY: the handle is alive.
        let done = ok("cuStreamSynchronize", unsafe {
            libcuda::cuStreamSynchronize(stream)
        });
        queued.and(done)
    }

    fn read(&mut self, bytes: u64) -> Option<Result<Duration, Failure>> {
        // With separate keys and values, a plain read would need two passes.
        if !self.plan.spec.latent {
            return None;
        }
        let GpuBackend { gpu, .. } = self.backend;
        let pool = self.pools[0];
        let (strides, address) = (pool.k_strides, pool.k);
        let element = u64::from(pool.dtype.bytes());
        let pool = u64::from(pool.pages) * u64::from(strides.page) * element;
        let bytes = bytes.min(pool) as usize;
        Some(self.backend.time(true, |stream| {
            // SAFETY: the pool has this many bytes. The call may overwrite four bytes of the LSEs.
            unsafe { gpu.read_all(address, bytes, self.lse.address(), stream) }
                .map_err(Failure::from)
        }))
    }

    fn results(&mut self) -> Result<Results, Failure> {
        let spec = &self.plan.spec;
        let rows = self.plan.total_q as usize * spec.q_heads as usize;
        let mut out = Tensor::zeros(spec.out_dtype, rows * spec.head_dim_v as usize)?;
        with_tensor!(&mut out, values => self.out.read(values))?;
        let mut lse = vec![0.0; rows];
        self.lse.read(&mut lse)?;
        Ok(Results { out, lse })
    }
}

#[cfg(test)]
mod tests {
    use super::Ahead;

    /// On GPUs without Hopper's products nothing ran ahead of warm runs, and their times contained the queueing on the host.
    #[test]
    fn every_gpu_is_busy_while_work_is_queued_and_warm_runs_find_warm_caches() {
        assert_eq!(Ahead::of(false, true), Ahead::Products);
        assert_eq!(Ahead::of(false, false), Ahead::FlushAndWork);
        for multiplies in [false, true] {
            assert_eq!(Ahead::of(true, multiplies), Ahead::Flush);
        }
    }
}

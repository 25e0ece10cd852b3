//! A GPU with memory for measurements: its pools hold the whole batch, with equal contents on every GPU.

use half::bf16;
use tandem_attn::{
    abi::KvStrides,
    exec::gpu::{DeviceBuffer, Gpu, KvPool, OwnedStream},
    problem::{Batch, Spec},
    shard::Share,
};

use crate::{
    Failure,
    backend::{Place, ok},
    table::scaled,
    workload::Case,
};

/// Bytes written between runs to evict the caches: several times the L2 of any GPU.
const FLUSHED_BYTES: usize = 256 << 20;

/// Random numbers that are repeated. The length is odd, so that heads and tokens do not repeat with them.
const TILE: usize = (8 << 20) + 1027 * 8;

pub(super) struct Device {
    pub(super) stream: OwnedStream,
    pub(super) flush: DeviceBuffer<u8>,
    // After the fields that live in its context.
    pub(super) gpu: Gpu,
}

/// Keys, values and queries of a batch.
pub(super) struct Pools {
    k: DeviceBuffer<bf16>,
    v: DeviceBuffer<bf16>,
    pub(super) q: DeviceBuffer<bf16>,
    /// Strides of the pools with all heads.
    strides: KvStrides,
    page_size: u32,
    pages: u32,
}

impl Device {
    pub(super) fn new(place: Place, ordinal: u32) -> Result<Self, Failure> {
        let gpu = place.open_gpu(ordinal)?;
        Ok(Self {
            stream: gpu.stream()?,
            flush: DeviceBuffer::zeroed(&gpu, FLUSHED_BYTES)?,
            gpu,
        })
    }

    /// Enqueues writes that evict the caches.
    pub(super) fn flush(&self) -> Result<(), Failure> {
        let (address, bytes) = (self.flush.address(), self.flush.len());
        // SAFETY: the memory has this many bytes.
        let code = unsafe { libcuda::cuMemsetD8Async(address, 1, bytes, *self.stream) };
        ok("cuMemsetD8Async", code)
    }

    /// Allocates memory for a batch, with equal numbers on every GPU.
    pub(super) fn load(&self, case: &Case, batch: &Batch) -> Result<Pools, Failure> {
        let (spec, table) = (&case.spec, &batch.parts[0].table);
        let Spec {
            q_heads,
            kv_heads,
            head_dim_qk: dim,
            head_dim_v,
            ..
        } = *spec;
        if dim != head_dim_v {
            return Err(Failure::Input(
                "several GPUs are measured with one head dimension".to_owned(),
            ));
        }
        let strides = case.layout.strides(table.page_size, kv_heads, dim);
        let elements = table.pool_pages as usize * strides.page as usize;
        let rows = batch.total_q() as usize * q_heads as usize;
        // Keys and values; queries, those of the rank, its results before the merge in two turns, and the merged ones.
        let needed = 2 * (2 * elements as u64 + 6 * (rows * dim as usize) as u64);
        self.check_memory(needed)?;
        Ok(Pools {
            k: self.random(elements, 1)?,
            v: self.random(elements, 2)?,
            q: self.random(rows * dim as usize, 3)?,
            strides,
            page_size: table.page_size,
            pages: table.pool_pages,
        })
    }

    /// Checks that the tensors leave a quarter of the free memory, for the plan and its partial states.
    fn check_memory(&self, needed: u64) -> Result<(), Failure> {
        self.gpu.make_current()?;
        let (mut free, mut all) = (0, 0);
        // SAFETY: the call writes two numbers.
        ok("cuMemGetInfo", unsafe {
            libcuda::cuMemGetInfo(&mut free, &mut all)
        })?;
        let free = free as u64 / 4 * 3;
        if needed > free {
            return Err(Failure::Input(format!(
                "it needs {} on each GPU, and {} can be used of {}: give shorter or fewer requests",
                scaled(needed as f64, "B"),
                scaled(free as f64, "B"),
                self.gpu.name()
            )));
        }
        Ok(())
    }

    /// Random numbers from −1 to 1.
    fn random(&self, elements: usize, seed: u64) -> Result<DeviceBuffer<bf16>, Failure> {
        let mut random = fastrand::Rng::with_seed(seed);
        let tile: Vec<bf16> = (0..TILE.min(elements))
            .map(|_| bf16::from_f32(2.0 * random.f32() - 1.0))
            .collect();
        let mut buffer = DeviceBuffer::<bf16>::zeroed(&self.gpu, elements)?;
        buffer.write(0, &tile)?;
        let mut done = tile.len();
        while done < elements {
            let more = done.min(elements - done);
            let to = buffer.address() + 2 * done as u64;
            // SAFETY: both ranges are in the buffer and do not overlap.
            let code =
                unsafe { libcuda::cuMemcpyDtoDAsync(to, buffer.address(), 2 * more, *self.stream) };
            ok("cuMemcpyDtoDAsync", code)?;
            done += more;
        }
        self.stream.synchronize()?;
        Ok(buffer)
    }
}

impl Pools {
    /// The heads of a share, with the strides of the whole pool.
    pub(super) fn of(&self, share: &Share) -> KvPool {
        let skipped = 2 * u64::from(share.kv_heads.start * self.strides.head);
        let [k, v] = [&self.k, &self.v].map(|pool| pool.address() + skipped);
        let layout = tandem_attn::problem::KvLayout::Nhd;
        KvPool::new(&share.spec, layout, self.page_size, self.pages, k, v)
            .with_strides(self.strides, self.strides)
    }
}

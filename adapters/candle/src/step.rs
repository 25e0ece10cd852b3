//! Devices and steps: the inputs of plans, and where plans are kept.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use candle_core::{Device, DeviceLocation, Result, bail};
use tandem_attn::{
    Cpu,
    plan::{BatchLimits, Bound, DeviceDescription, Plan, PlanOptions},
    problem::{Batch, PageTable, Spec},
};

#[cfg(feature = "cuda")]
use crate::cuda;
use crate::{
    class::Class,
    tables::{BlockTables, Lengths},
    wrap,
};

/// The planners, kernels and workspaces of a device. A process has one set per device: all `Attention`s of a device
/// share it, and it stays until the process ends.
#[derive(Clone, Debug)]
pub struct Attention(pub(crate) Arc<Shared>);

#[derive(Debug)]
pub struct Shared {
    pub backend: Backend,
    pub location: DeviceLocation,
    description: DeviceDescription,
    classes: Mutex<Vec<Class>>,
}

// There is only one for each device of a process.
#[allow(clippy::large_enum_variant)]
#[derive(Debug)]
pub enum Backend {
    Cpu(Cpu),
    #[cfg(feature = "cuda")]
    Cuda(cuda::Backend),
}

impl Attention {
    /// Gets the set for a device. On a GPU, the first call loads the kernels: less than a second, since nothing is compiled. On a GPU
    /// newer than Hopper, and with a driver older than the machine code, the driver compiles them, which takes a minute or more at the
    /// first start of a program; it keeps the result.
    ///
    /// # Errors
    /// If there is no backend for the device, or no kernels for the GPU.
    pub fn new(device: &Device) -> Result<Self> {
        static KNOWN: Mutex<Vec<(DeviceLocation, Attention)>> = Mutex::new(Vec::new());
        let (mut known, location) = (lock(&KNOWN), device.location());
        if let Some((_, attention)) = known.iter().find(|(of, _)| *of == location) {
            return Ok(attention.clone());
        }
        let attention = Self::load(device)?;
        known.push((location, attention.clone()));
        Ok(attention)
    }

    fn load(device: &Device) -> Result<Self> {
        let backend = match device {
            Device::Cpu => Backend::Cpu(Cpu::new()),
            #[cfg(feature = "cuda")]
            Device::Cuda(device) => Backend::Cuda(cuda::Backend::new(device)?),
            other => bail!(
                "there is no attention for {:?} in this build: use the CPU, or a CUDA device with the feature `cuda`",
                other.location()
            ),
        };
        let description = match &backend {
            Backend::Cpu(cpu) => cpu.device(),
            #[cfg(feature = "cuda")]
            Backend::Cuda(backend) => backend.description(),
        };
        Ok(Self(Arc::new(Shared {
            backend,
            location: device.location(),
            description,
            classes: Mutex::default(),
        })))
    }

    /// Checks that there are kernels for these heads. Call it when a model is loaded.
    ///
    /// # Errors
    /// The requirement that no kernel meets, and the closest supported one.
    pub fn supports(&self, spec: &Spec) -> Result<()> {
        self.0.description.supports(spec).map_err(wrap)
    }

    /// Allocates memory for all steps within these limits, so that none of them has to: on a GPU, for steps of this thread, on
    /// the stream of the `Device` that this process first used with that GPU. It is for layers of this specification, which
    /// [`Layer::spec`](crate::Layer::spec) gives. On the CPU, nothing is allocated. A step beyond the limits is planned without
    /// them, allocates once more, and waits for the device.
    ///
    /// # Errors
    /// If there is no kernel for the heads, or too little memory. In the latter case nothing is reserved for this specification.
    pub fn reserve(&self, spec: &Spec, limits: &BatchLimits) -> Result<()> {
        let shared = &*self.0;
        let bound = Bound::new(spec, &shared.description, &PlanOptions::default(), limits);
        let bound = bound.map_err(wrap)?;
        #[cfg(feature = "cuda")]
        if let Backend::Cuda(backend) = &shared.backend {
            let mut classes = lock(&shared.classes);
            let class = Class::of(&mut classes, spec);
            let bound = class.with(&bound);
            // If this fails, the former workspace is gone, too.
            class.reserved = None;
            backend.reserve(spec, &bound)?;
            class.reserved = Some(bound);
        }
        #[cfg(not(feature = "cuda"))]
        let _ = bound;
        Ok(())
    }

    /// A step of decodes: one query for each request, which is its last token.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn decode(
        &self,
        block_tables: &(impl BlockTables + ?Sized),
        context_lens: &(impl Lengths + ?Sized),
        block_size: usize,
    ) -> Result<Step> {
        let lengths = context_lens.to_host()?;
        let ones = vec![1_u32; lengths.len()];
        self.step(block_tables, &lengths, &ones, block_size)
    }

    /// A step of any batch: prompts, prompt chunks and decodes together.
    ///
    /// - `block_tables`: the blocks of each request
    /// - `context_lens`: its number of tokens, including those of this step
    /// - `query_lens`: its number of queries in this step, which are its last tokens
    /// - `block_size`: number of tokens in a block
    ///
    /// # Errors
    /// If these do not match each other.
    pub fn step(
        &self,
        block_tables: &(impl BlockTables + ?Sized),
        context_lens: &(impl Lengths + ?Sized),
        query_lens: &(impl Lengths + ?Sized),
        block_size: usize,
    ) -> Result<Step> {
        let page_size = u32::try_from(block_size).unwrap_or(u32::MAX);
        let mut table = PageTable::try_new(page_size, 0).map_err(wrap)?;
        block_tables.push_to(&mut table, &context_lens.to_host()?)?;
        // Whether the cache has as many blocks is checked when the cache is known.
        let ends = table.indices.iter().map(|id| id.saturating_add(1));
        table.pool_pages = ends.max().unwrap_or(0);
        let (queries, requests) = (query_lens.to_host()?, table.row_blocks());
        if queries.len() != requests {
            bail!(
                "there are {} lengths of queries for {requests} requests",
                queries.len()
            );
        }
        Ok(self.of_batch(Batch::new(cumulative(&queries)?, table), None))
    }

    pub(crate) fn of_batch(&self, batch: Batch, packed: Option<usize>) -> Step {
        Step {
            attention: self.clone(),
            batch,
            packed,
            plans: Mutex::default(),
        }
    }
}

/// The start of each request, and the end of the last one.
fn cumulative(lengths: &[u32]) -> Result<Vec<u32>> {
    let mut ends = vec![0_u32];
    for &length in lengths {
        match ends[ends.len() - 1].checked_add(length) {
            Some(end) => ends.push(end),
            None => bail!("the queries of a step are more than 32 bits count"),
        }
    }
    Ok(ends)
}

/// One batch, for all layers: the locations of keys, and the plans for the classes of layers met so far.
#[derive(Debug)]
pub struct Step {
    pub(crate) attention: Attention,
    batch: Batch,
    /// Number of packed keys without a cache; none if the keys are in a cache.
    packed: Option<usize>,
    plans: Mutex<Vec<Arc<Plan>>>,
}

impl Step {
    /// Number of query tokens of all requests.
    #[must_use]
    pub fn queries(&self) -> usize {
        self.batch.total_q() as usize
    }

    /// Number of plans made so far: one for each class of layers.
    #[must_use]
    pub fn plans(&self) -> usize {
        lock(&self.plans).len()
    }

    pub(crate) const fn packed(&self) -> Option<usize> {
        self.packed
    }

    /// The plan for some heads, made when they are first used.
    pub(crate) fn plan(&self, spec: &Spec) -> Result<Arc<Plan>> {
        let mut plans = lock(&self.plans);
        if let Some(plan) = plans.iter().find(|plan| plan.spec == *spec) {
            return Ok(plan.clone());
        }
        let shared = &*self.attention.0;
        let mut classes = lock(&shared.classes);
        let plan = Class::of(&mut classes, spec).plan(&self.batch, &shared.description)?;
        let plan = Arc::new(plan);
        plans.push(plan.clone());
        Ok(plan)
    }
}

/// A panic of another thread leaves plans and classes intact, so poisoning is ignored.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

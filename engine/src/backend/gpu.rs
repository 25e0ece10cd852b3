//! Computes on an NVIDIA GPU in bf16: matrix products with cuBLASLt, everything else with the kernels of tandem-attn.
//!
//! Steps that contain only decodes run from CUDA graphs. Requests are padded to a bucket (a power of two, or the largest
//! step) with tokens that write to no page. A bucket has one graph for each choice of attention kernels that its plans need, up to a limit. Other
//! steps launch kernel by kernel. Everything is on one stream: a step is enqueued while the previous one runs, and reads
//! the drawn tokens of that step on the device.
//!
//! A step in which a row's logits are adjusted, or log-probabilities are asked for, runs from a graph that ends with the logits.
//! What follows is launched kernel by kernel.

mod blas;
mod buffers;
mod capacity;
mod graphs;
mod kinds;
mod logit_buffers;
mod logits;
mod pools;
mod replan;
mod sizes;
mod slots;
mod step;
mod store;

pub use blas::cublas_lt_names;

use half::bf16;
use tandem_attn::{
    exec::gpu::{DeviceBuffer, Gpu, Graph, OwnedStream, Workspace},
    plan::{PlanOptions, SplitMode},
    problem::Batch,
    step::{LOG_PROBS, LogProb},
};
use tandem_schedule::CacheType;

use super::{Backend, StepTime, Work, check_page_size, layers::Model};
use crate::{Architecture, Error, Weights};
use blas::Blas;
use buffers::{Buffers, cuda};
use graphs::Graphs;
use kinds::{Kind, kinds, limits};
use logit_buffers::LogitBuffers;
use pools::Pools;
use replan::replan;
use slots::Slots;
use store::OnDevice;

/// Capacity of a [`GpuBackend`]. Loading allocates all memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuOptions {
    /// Capacity of the KV cache in tokens. By default 9/10 of the memory that is free once the weights, the workspaces and the
    /// buffers are loaded, less what rules of logits may need, but no more than the requests of a step can use.
    /// [`Backend::pages`] says what that is.
    pub cache_tokens: Option<u32>,
    /// Tokens in a page, at most 4096.
    pub page_size: u32,
    /// How keys and values are stored. On Hopper, 8-bit caches need heads of 64, 128 or 256. For prompt chunks, their keys are converted to 16 bits in a workspace of up to 1 GiB (with 8 KV heads of
    /// 128) for each kind of attention.
    pub cache_type: CacheType,
    /// Maximum number of tokens of a step.
    pub step_tokens: u32,
    /// Maximum number of requests of a step.
    pub step_requests: u32,
    /// Whether steps that contain only decodes run from CUDA graphs.
    pub graphs: bool,
}

impl Default for GpuOptions {
    fn default() -> Self {
        Self {
            cache_tokens: None,
            page_size: 16,
            cache_type: CacheType::Auto,
            step_tokens: 1024,
            step_requests: 64,
            graphs: true,
        }
    }
}

/// A model in the memory of a GPU.
pub struct GpuBackend {
    // Fields drop in this order: graphs before the memory that they use, and all memory before the GPU.
    graphs: Graphs<Graph>,
    /// Graphs that end with the logits.
    undrawn: Graphs<Graph>,
    kinds: Vec<Kind>,
    model: Model<DeviceBuffer<bf16>>,
    pools: Pools,
    buffers: Buffers,
    logit_buffers: LogitBuffers,
    slots: Slots,
    blas: Blas,
    stream: OwnedStream,
    gpu: Gpu,
    architecture: Architecture,
    options: GpuOptions,
    planning: PlanOptions,
    /// Rows of the last step.
    rows: usize,
    /// Whether the parts of steps are timed.
    apart: bool,
}

impl GpuBackend {
    /// Loads a model to a GPU. `progress` receives the number of layers loaded so far.
    ///
    /// # Errors
    /// [`Error::NoCublasLt`]; those of [`Weights::append`]; [`Error::Attention`] if there are no kernels for the heads,
    /// too little memory, or pages of none or more than 4096 tokens; [`Error::CacheType`] if there are no kernels for the
    /// type of the caches; [`Error::Unsupported`] if there are no kernels for the sizes of the model.
    pub fn load(
        gpu: Gpu,
        architecture: Architecture,
        weights: &Weights,
        options: &GpuOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let (a, mut options) = (&architecture, *options);
        sizes::check(a)?;
        check_page_size(options.page_size)?;
        for kind in &a.kinds {
            pools::check(&gpu.device(), &kind.spec, options.cache_type)?;
        }
        let blas = Blas::new(&gpu)?;
        let planning = PlanOptions::default();
        let kinds = kinds(&gpu, a, &options, planning)?;
        // Loading takes minutes, so what does not fit beside the workspaces is refused before.
        capacity::check(a, &options, capacity::memory(&gpu)?)?;
        let mut store = OnDevice::new(&gpu, weights);
        let model = Model::load(a, weights, &mut store, progress)?;
        let buffers = Buffers::new(&gpu, a, &options)?;
        let tokens = capacity::tokens(a, &options, capacity::memory(&gpu)?)?;
        options.cache_tokens = Some(tokens);
        let mut pools = Pools::new(&gpu, a, &options, tokens)?;
        if weights.are_random() {
            pools.fill(&gpu, weights, &mut store)?;
        }
        gpu.make_current()?;
        let slots = Slots::new(buffers.input_words(), options.step_requests as usize)?;
        drop(store);
        Ok(Self {
            graphs: Graphs::default(),
            undrawn: Graphs::default(),
            kinds,
            model,
            pools,
            buffers,
            logit_buffers: LogitBuffers::default(),
            slots,
            blas,
            stream: gpu.stream()?,
            gpu,
            options,
            planning,
            rows: 0,
            apart: false,
            architecture,
        })
    }

    /// The bucket that a step with only decodes is padded to; none if the step launches kernel by kernel.
    fn bucket(&self, work: &Work<'_>) -> Option<usize> {
        let batch = &work.inputs.batch;
        let requests = batch.qo_indptr.len() - 1;
        let decodes = batch.total_q() as usize == requests && work.rows.len() == requests;
        let most = self.options.step_requests.min(self.options.step_tokens) as usize;
        let graphs = self.options.graphs && !self.apart;
        let graphs = graphs && self.kinds.iter().all(|kind| kind.of_graphs().is_some());
        (graphs && decodes && requests > 0).then(|| graphs::bucket(requests, most))
    }

    /// Plans a batch for each kind of attention and uploads the plans.
    fn plan(&mut self, batch: &Batch, replayed: bool) -> Result<(), Error> {
        for kind in &mut self.kinds {
            let (_, plans, workspace) = kind.of(replayed);
            let plan = plans.plan(batch)?;
            // SAFETY: we own the stream, and all earlier work on this workspace is on it.
            unsafe { workspace.upload(plan, *self.stream)? };
        }
        Ok(())
    }

    fn run(&mut self, work: &Work<'_>) -> Result<(), Error> {
        let (tokens, rows) = (work.inputs.tokens.len(), work.rows.len());
        let stream = *self.stream;
        let bucket = self.bucket(work);
        self.plan(&work.inputs.batch, bucket.is_some())?;
        let slot = self.slots.next()?;
        slot.prepare(self.apart);
        let staged = &mut slot.inputs;
        // SAFETY: we own the stream, and the slot is not reused before this step is done.
        unsafe {
            self.buffers
                .upload(work, bucket.unwrap_or(0), staged, stream)?;
        }
        self.pools.copy(work.copies, stream)?;
        let needed = self.kinds.iter().filter_map(Kind::of_graphs);
        let needed: Vec<_> = needed.map(Workspace::needed_launches).collect();
        let draws = work.logits.is_empty();
        if let Some(bucket) = bucket {
            let mut graphs = std::mem::take(self.graphs(draws));
            graphs.prepare(bucket, &needed, |only_needed| {
                self.capture(bucket, only_needed, draws)
            });
            *self.graphs(draws) = graphs;
        }
        self.slots.next()?.begins(stream)?;
        let graph = bucket.and_then(|bucket| self.graphs(draws).get(bucket, &needed));
        match (bucket, graph) {
            (None, _) => self.forward(tokens, rows, false, draws, stream)?,
            // SAFETY: all memory that the graph uses lives in `self`, and the uploads come earlier on the same stream.
            (_, Some(graph)) => unsafe { graph.launch(stream)? },
            (Some(bucket), None) => self.forward(bucket, bucket, true, draws, stream)?,
        }
        if !draws {
            self.draw(&work.logits, tokens, rows)?;
        }
        let slot = self.slots.next()?;
        slot.ends(stream)?;
        (slot.rows, slot.log_prob_rows) = (rows, work.logits.log_probs.len());
        // SAFETY: we own the stream, and the slot's event is waited for before the tokens are read.
        unsafe {
            self.buffers.fetch(slot.tokens.target(0..rows), stream)?;
            let results = slot.log_prob_rows * LOG_PROBS as usize;
            self.logit_buffers
                .fetch(results, &mut slot.log_probs, &self.stream)?;
        }
        slot.copied(stream)?;
        self.slots.begin();
        Ok(())
    }

    /// The graphs of steps that draw their tokens, or end with the logits.
    const fn graphs(&mut self, draws: bool) -> &mut Graphs<Graph> {
        match draws {
            true => &mut self.graphs,
            false => &mut self.undrawn,
        }
    }

    /// Captures a graph for the uploaded plans, with all launches or only those that they need.
    fn capture(&mut self, bucket: usize, only_needed: bool, draws: bool) -> Result<Graph, Error> {
        if only_needed {
            for kind in &mut self.kinds {
                kind.of(true).2.launch_only_needed();
            }
        }
        // Capturing runs no work. The stream is moved out of `self` so that the rest of `self` can be borrowed.
        let stream = std::mem::replace(&mut self.stream, self.gpu.stream()?);
        let mut failed = None;
        let captured = stream.capture(|on| {
            match self.forward(bucket, bucket, true, draws, on) {
                Ok(()) => {}
                Err(Error::Attention(error)) => return Err(error),
                Err(other) => failed = Some(other),
            }
            Ok(())
        });
        self.stream = stream;
        match failed {
            Some(error) => Err(error),
            None => Ok(captured?),
        }
    }
}

impl Backend for GpuBackend {
    fn name(&self) -> String {
        self.gpu.name().to_owned()
    }

    fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    fn pages(&self) -> u32 {
        self.pools.pages()
    }

    fn page_size(&self) -> u32 {
        self.options.page_size
    }

    fn cache_type(&self) -> CacheType {
        self.options.cache_type
    }

    fn step_tokens(&self) -> u32 {
        self.options.step_tokens
    }

    fn step_requests(&self) -> u32 {
        self.options.step_requests
    }

    fn chunk_keys(&self) -> u32 {
        let limits = limits(&self.architecture, &self.options);
        self.options.cache_type.chunk_keys(&limits)
    }

    fn is_asynchronous(&self) -> bool {
        true
    }

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        let (got, rows) = (work.inputs.tokens.len(), work.rows.len());
        let (most_tokens, most_rows) = (self.options.step_tokens, self.options.step_requests);
        if got > most_tokens as usize || rows > most_rows as usize {
            return Err(Error::StepTooLarge {
                tokens: got,
                rows,
                most_tokens,
                most_rows,
            });
        }
        if self.kinds.is_empty() {
            return Err(Error::NoPlans);
        }
        self.gpu.make_current()?;
        self.run(work)?;
        self.rows = rows;
        Ok(())
    }

    fn finish(
        &mut self,
        tokens: &mut Vec<u32>,
        log_probs: &mut Vec<LogProb>,
    ) -> Result<StepTime, Error> {
        self.gpu.make_current()?;
        self.slots.finish(tokens, log_probs)
    }

    fn logits(&mut self) -> Result<Vec<f32>, Error> {
        self.stream.synchronize()?;
        let logits = self.buffers.logits.read()?;
        let vocabulary = self.architecture.vocabulary;
        Ok(logits::dense(logits, self.rows, vocabulary))
    }

    fn plan_with(&mut self, options: PlanOptions) -> Result<(), Error> {
        if self.slots.under_way() > 0 {
            return Err(Error::TooManySteps);
        }
        // Graphs contain addresses of the workspaces. They are captured again, and those that failed may fail again.
        self.graphs.clear();
        self.undrawn.clear();
        let (parts, present) = (&mut self.kinds, &mut self.planning);
        replan(parts, present, options, |options| {
            kinds(&self.gpu, &self.architecture, &self.options, options)
        })?;
        // Who asks for attention that does not depend on the batch asks for such steps.
        let fixed = matches!(options.split, SplitMode::Fixed { .. });
        self.blas.set_by_row(fixed);
        Ok(())
    }

    fn take_apart(&mut self, on: bool) {
        self.apart = on;
    }

    fn warnings(&mut self) -> Vec<String> {
        let mut warnings = self.graphs.failures();
        warnings.append(&mut self.undrawn.failures());
        warnings
    }
}

impl Drop for GpuBackend {
    fn drop(&mut self) {
        // Pinned memory must not be freed before the copies that use it end.
        let _ = self.stream.synchronize();
    }
}

impl std::fmt::Debug for GpuBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GpuBackend")
            .field("gpu", &self.gpu)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

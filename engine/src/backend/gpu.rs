//! Computes on an NVIDIA GPU in bf16: matrix products with cuBLASLt, everything else with the kernels of tandem-attn.
//!
//! Steps that contain only decodes run from CUDA graphs. Requests are padded to a bucket (a power of two, or the largest
//! step) with tokens that write to no page. A bucket has one graph for each choice of attention kernels that its plans need, up to a limit. Other
//! steps launch kernel by kernel. Everything is on one stream: a step is enqueued while the previous one runs, and reads
//! the drawn tokens of that step on the device.

mod blas;
mod buffers;
mod graphs;
mod logits;
mod pools;
mod replan;
mod sizes;
mod slots;
mod store;

use half::bf16;
use tandem_attn::{
    exec::gpu::{
        AppendScales, DeviceArray, DeviceBuffer, DevicePtr, DeviceRope, DeviceTensor, Gpu, Graph,
        KvPool, LaunchSet, OwnedStream, QkNorm, QkvStep, Stream, Workspace, WorkspaceOptions,
    },
    plan::{BatchLimits, Bound, PlanOptions},
    problem::{Batch, Spec},
};
use tandem_schedule::CacheType;

use super::{
    Backend, Part, StepTime, Work,
    attention::Plans,
    check_page_size,
    layers::{Layer, Model},
};
use crate::{Architecture, Error, Weights};
use blas::{Blas, Shape};
use buffers::{Buffers, cuda};
use graphs::Graphs;
use pools::Pools;
use replan::replan;
use slots::{Slot, Slots};
use store::OnDevice;

/// Capacity of a [`GpuBackend`]. Loading allocates all memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GpuOptions {
    /// Capacity of the KV cache in tokens.
    pub cache_tokens: u32,
    /// Tokens in a page, at most 128.
    pub page_size: u32,
    /// How keys and values are stored. 8-bit caches need a Hopper GPU, heads of 64, 128 or 256, and pages of a multiple of
    /// 8 tokens. For prompt chunks, their keys are converted to 16 bits in a workspace of up to 1 GiB (with 8 KV heads of
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
            cache_tokens: 65_536,
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
    kinds: Vec<Kind>,
    model: Model<DeviceBuffer<bf16>>,
    pools: Pools,
    buffers: Buffers,
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

/// A kind of attention, with plans and workspaces both for launched steps and for steps that a graph replays.
struct Kind {
    rope: DeviceRope,
    launched: (Plans, Workspace),
    replayed: (Plans, Workspace),
}

impl GpuBackend {
    /// Loads a model to a GPU. `progress` receives the number of layers loaded so far.
    ///
    /// # Errors
    /// [`Error::NoCublasLt`]; those of [`Weights::append`]; [`Error::Attention`] if there are no kernels for the heads,
    /// too little memory, or pages of none or more than 128 tokens; [`Error::CacheType`] if there are no kernels for the
    /// type of the caches; [`Error::Unsupported`] if there are no kernels for the sizes of the model.
    pub fn load(
        gpu: Gpu,
        architecture: Architecture,
        weights: &Weights,
        options: &GpuOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let (a, options) = (&architecture, *options);
        sizes::check(a)?;
        check_page_size(options.page_size)?;
        for kind in &a.kinds {
            pools::check(
                &gpu.device(),
                &kind.spec,
                options.cache_type,
                options.page_size,
            )?;
        }
        let blas = Blas::new(&gpu)?;
        let mut pools = Pools::new(&gpu, a, &options)?;
        let planning = PlanOptions::default();
        let kinds = kinds(&gpu, a, &options, planning)?;
        let mut store = OnDevice::new(&gpu, weights);
        let model = Model::load(a, weights, &mut store, progress)?;
        if weights.are_random() {
            pools.fill(&gpu, weights, &mut store)?;
        }
        let buffers = Buffers::new(&gpu, a, &options)?;
        gpu.make_current()?;
        let slots = Slots::new(buffers.input_words(), options.step_requests as usize)?;
        drop(store);
        Ok(Self {
            graphs: Graphs::default(),
            kinds,
            model,
            pools,
            buffers,
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
        (graphs && decodes && requests > 0).then(|| graphs::bucket(requests, most))
    }

    /// Plans a batch for each kind of attention and uploads the plans.
    fn plan(&mut self, batch: &Batch, replayed: bool) -> Result<(), Error> {
        for kind in &mut self.kinds {
            let (plans, workspace) = match replayed {
                true => &mut kind.replayed,
                false => &mut kind.launched,
            };
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
        let needed = self.kinds.iter();
        let needed: Vec<_> = needed
            .map(|kind| kind.replayed.1.needed_launches())
            .collect();
        if let Some(bucket) = bucket {
            let mut graphs = std::mem::take(&mut self.graphs);
            graphs.prepare(bucket, &needed, |only_needed| {
                self.capture(bucket, only_needed)
            });
            self.graphs = graphs;
        }
        self.slots.next()?.begins(stream)?;
        let graph = bucket.and_then(|bucket| self.graphs.get(bucket, &needed));
        match (bucket, graph) {
            (None, _) => self.forward(tokens, rows, false, stream)?,
            // SAFETY: all memory that the graph uses lives in `self`, and the uploads come earlier on the same stream.
            (_, Some(graph)) => unsafe { graph.launch(stream)? },
            (Some(bucket), None) => self.forward(bucket, bucket, true, stream)?,
        }
        let slot = self.slots.next()?;
        slot.ends(stream)?;
        slot.rows = rows;
        // SAFETY: we own the stream, and the slot's event is waited for before the tokens are read.
        unsafe {
            self.buffers.fetch(slot.tokens.target(0..rows), stream)?;
        }
        slot.copied(stream)?;
        self.slots.begin();
        Ok(())
    }

    /// Captures a graph for the uploaded plans, with all launches or only those that they need.
    fn capture(&mut self, bucket: usize, only_needed: bool) -> Result<Graph, Error> {
        if only_needed {
            for kind in &mut self.kinds {
                kind.replayed.1.launch_only_needed();
            }
        }
        // Capturing runs no work. The stream is moved out of `self` so that the rest of `self` can be borrowed.
        let stream = std::mem::replace(&mut self.stream, self.gpu.stream()?);
        let mut failed = None;
        let captured = stream.capture(|on| {
            match self.forward(bucket, bucket, true, on) {
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

    /// Enqueues a whole step on a stream, from token ids to drawn tokens.
    fn forward(
        &mut self,
        tokens: usize,
        rows: usize,
        replayed: bool,
        stream: Stream,
    ) -> Result<(), Error> {
        let Self {
            kinds,
            model,
            pools,
            buffers: b,
            blas,
            gpu,
            slots,
            architecture: a,
            ..
        } = self;
        let hidden = [tokens, a.hidden];
        let mut step = Step {
            gpu,
            blas,
            a,
            b,
            slot: slots.next()?,
            tokens,
            stream,
        };
        let table = model.embedding.tensor([a.vocabulary, a.hidden]);
        let residual = step.b.residual.tensor(hidden);
        // SAFETY: all buffers live in `self` longer than the work on its stream. They are as large as the shapes:
        // `begin` refuses more tokens and rows than they were made for.
        unsafe {
            step.gpu.embed(
                &table,
                step.b.ids(tokens),
                a.embedding_scale,
                &residual,
                stream,
            )?
        };
        for (index, layer) in model.layers.iter().enumerate() {
            let kind = &mut kinds[a.layers[index]];
            let (plans, workspace) = match replayed {
                true => &mut kind.replayed,
                false => &mut kind.launched,
            };
            let cache = (pools.layer(index), pools.append_scales());
            step.norm(&layer.norm_attention, index > 0)?;
            step.attention(layer, &plans.spec, &kind.rope, workspace, cache)?;
            step.feed(layer)?;
        }
        step.norm(&model.norm, !model.layers.is_empty())?;
        step.mark(Part::Norms)?;
        step.sample(model.head(), rows)
    }
}

/// What all parts of a step use.
struct Step<'a> {
    gpu: &'a Gpu,
    blas: &'a mut Blas,
    a: &'a Architecture,
    b: &'a Buffers,
    slot: &'a mut Slot,
    tokens: usize,
    stream: Stream,
}

// SAFETY of all calls below: see `GpuBackend::forward`. All work is on one stream, in order.
impl Step<'_> {
    fn mark(&mut self, part: Part) -> Result<(), Error> {
        self.slot.mark(part, self.stream)
    }

    fn multiply(
        &mut self,
        x: &DeviceBuffer<bf16>,
        w: &DeviceBuffer<bf16>,
        inputs: usize,
        outputs: usize,
        out: &DeviceBuffer<bf16>,
    ) -> Result<(), Error> {
        let shape = Shape {
            rows: self.tokens,
            inputs,
            outputs,
            out_stride: outputs,
            in_f32: false,
        };
        let matrices = [x, w, out].map(DeviceBuffer::address);
        // SAFETY: see above.
        unsafe { self.blas.multiply(shape, matrices, self.stream) }
    }

    /// Adds the output of the last branch, if there is one, to the residual. Normalises the sum.
    fn norm(&self, weight: &DeviceBuffer<bf16>, branch_waits: bool) -> Result<(), Error> {
        let (a, b) = (self.a, self.b);
        let shape = [self.tokens, a.hidden];
        let (weight, out) = (weight.tensor([a.hidden]), b.normed.tensor(shape));
        let residual = b.residual.tensor(shape);
        let (x, residual) = match branch_waits {
            false => (residual, None),
            true => (b.branch.tensor(shape), Some(&residual)),
        };
        // SAFETY: see above.
        unsafe {
            self.gpu
                .rms_norm(a.norm, &x, &weight, residual, &out, self.stream)?;
        }
        Ok(())
    }

    fn attention(
        &mut self,
        layer: &Layer<DeviceBuffer<bf16>>,
        spec: &Spec,
        rope: &DeviceRope,
        workspace: &mut Workspace,
        (pool, scales): (KvPool, AppendScales),
    ) -> Result<(), Error> {
        let (a, b, tokens) = (self.a, self.b, self.tokens);
        self.mark(Part::Norms)?;
        self.multiply(&b.normed, &layer.qkv, a.hidden, a.qkv_width(), &b.qkv)?;
        self.mark(Part::Qkv)?;
        let (heads, dim) = (spec.q_heads as usize, spec.head_dim_qk as usize);
        // Queries are not copied: they are read from the product's output.
        let q = b.qkv.tensor([tokens, a.qkv_width()]);
        let q = DeviceTensor::new(q.address, q.dtype, [tokens, heads, dim])
            .with_stride(0, a.qkv_width());
        let qkv = QkvStep {
            qkv: b.qkv.tensor([tokens, a.qkv_width()]),
            bias: layer
                .qkv_bias
                .as_ref()
                .map(|bias| bias.tensor([a.qkv_width()])),
            norm: layer.qk_norm.as_ref().map(|[q, k]| QkNorm {
                norm: a.norm,
                q: q.tensor([dim]),
                k: k.tensor([dim]),
            }),
            rope: Some((rope, b.positions(tokens))),
        };
        let out = b.attention.tensor([tokens, heads, dim]);
        // SAFETY: see above; the plan comes from the planner.
        unsafe {
            self.gpu
                .qkv_step(spec, &qkv, b.slots(tokens), &q, &pool, scales, self.stream)?;
        }
        self.mark(Part::Append)?;
        // SAFETY: as above.
        unsafe {
            self.gpu
                .run(workspace, &q, &[pool], &out, None, self.stream)?;
        }
        self.mark(Part::Attention)?;
        self.multiply(&b.attention, &layer.out, a.q_width(), a.hidden, &b.branch)?;
        self.mark(Part::Out)?;
        self.norm_branch(layer.norm_attention_out.as_ref())
    }

    fn feed(&mut self, layer: &Layer<DeviceBuffer<bf16>>) -> Result<(), Error> {
        let (a, b) = (self.a, self.b);
        self.norm(&layer.norm_feed, true)?;
        self.mark(Part::Norms)?;
        self.multiply(
            &b.normed,
            &layer.gate_up,
            a.hidden,
            2 * a.intermediate,
            &b.gate_up,
        )?;
        self.mark(Part::GateUp)?;
        let gate_up = b.gate_up.tensor([self.tokens, 2 * a.intermediate]);
        let gated = b.gated.tensor([self.tokens, a.intermediate]);
        // SAFETY: see above.
        unsafe { self.gpu.gate(a.activation, &gate_up, &gated, self.stream)? };
        self.mark(Part::Gate)?;
        self.multiply(&b.gated, &layer.down, a.intermediate, a.hidden, &b.branch)?;
        self.mark(Part::Down)?;
        self.norm_branch(layer.norm_feed_out.as_ref())
    }

    /// Normalises the output of a branch in place, if the family does so.
    fn norm_branch(&self, weight: Option<&DeviceBuffer<bf16>>) -> Result<(), Error> {
        let Some(weight) = weight else { return Ok(()) };
        let branch = self.b.branch.tensor([self.tokens, self.a.hidden]);
        let weight = weight.tensor([self.a.hidden]);
        // SAFETY: see above; the kernel reads a row before it writes it.
        unsafe {
            self.gpu
                .rms_norm(self.a.norm, &branch, &weight, None, &branch, self.stream)?;
        }
        Ok(())
    }

    /// Computes the logits of the rows that are needed, and draws a token from each.
    fn sample(&mut self, head: &DeviceBuffer<bf16>, rows: usize) -> Result<(), Error> {
        if rows == 0 {
            return Ok(());
        }
        let (a, b) = (self.a, self.b);
        let table = b.normed.tensor([self.tokens, a.hidden]);
        let wanted = b.branch.tensor([rows, a.hidden]);
        let shape = Shape {
            rows,
            inputs: a.hidden,
            outputs: a.vocabulary,
            out_stride: logits::stride(a.vocabulary),
            in_f32: true,
        };
        let matrices: [DevicePtr; 3] = [wanted.address, head.address(), b.logits.address()];
        let logits = b
            .logits
            .tensor([rows, a.vocabulary])
            .with_stride(0, shape.out_stride);
        // SAFETY: see above.
        unsafe {
            self.gpu
                .embed(&table, b.rows(rows), 1.0, &wanted, self.stream)?;
            self.blas.multiply(shape, matrices, self.stream)?;
        }
        self.mark(Part::Head)?;
        let ids = DeviceArray::new(b.sampled.address(), rows);
        // SAFETY: see above.
        unsafe {
            self.gpu.sample(&logits, b.draws(rows), ids, self.stream)?;
        }
        self.mark(Part::Sample)
    }
}

/// Plans and workspaces for each kind of attention of a model.
fn kinds(
    gpu: &Gpu,
    a: &Architecture,
    options: &GpuOptions,
    planning: PlanOptions,
) -> Result<Vec<Kind>, Error> {
    let kinds = a.kinds.iter().map(|kind| {
        let spec = options.cache_type.spec(kind.spec);
        Ok(Kind {
            rope: gpu.rope(&kind.rope.table().map_err(tandem_attn::Error::from)?)?,
            launched: plans(gpu, spec, a, options, planning, false)?,
            replayed: plans(gpu, spec, a, options, planning, true)?,
        })
    });
    kinds.collect()
}

/// The largest steps of decodes.
fn limits(a: &Architecture, options: &GpuOptions) -> BatchLimits {
    let longest = options.cache_tokens.min(a.positions);
    BatchLimits::decodes(options.step_requests, longest, options.page_size)
}

/// Keys of the common prefixes of a step for whose conversion graphs have room, if caches have 8 bits: with 8 heads of 128 about
/// 144 MiB. Decodes read further prefixes themselves.
const PREFIX_KEYS: u32 = 32_768;

/// Plans of one kind of attention, and their workspace.
fn plans(
    gpu: &Gpu,
    spec: Spec,
    a: &Architecture,
    options: &GpuOptions,
    planning: PlanOptions,
    replayed: bool,
) -> Result<(Plans, Workspace), tandem_attn::Error> {
    let device = gpu.device();
    let mut limits = limits(a, options);
    let mut of_workspace = WorkspaceOptions::default();
    match replayed {
        true => {
            let launches = LaunchSet::decodes_with(&device, &spec, &planning)?;
            // Decodes convert no keys. Prefills convert prefixes, where they read these for decodes; those of windows they do not.
            let reads_prefixes = launches.has_prefills() && spec.variant.window_left.is_none();
            limits = limits.with_prefill_keys(match reads_prefixes {
                true => PREFIX_KEYS.min(options.cache_tokens),
                false => 0,
            });
            of_workspace.launches = Some(launches);
        }
        false => limits = limits.with_query_tokens(options.step_tokens),
    }
    let planning = planning.with_bound(None);
    let bound = Bound::new(&spec, &device, &planning, &limits)?;
    let workspace = gpu.workspace(&spec, &bound, of_workspace)?;
    Ok((
        Plans::new(spec, device, planning.with_bound(bound)),
        workspace,
    ))
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

    fn finish(&mut self, tokens: &mut Vec<u32>) -> Result<StepTime, Error> {
        self.gpu.make_current()?;
        self.slots.finish(tokens)
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
        // Graphs contain addresses of the workspaces.
        self.graphs = Graphs::default();
        let (parts, present) = (&mut self.kinds, &mut self.planning);
        replan(parts, present, options, |options| {
            kinds(&self.gpu, &self.architecture, &self.options, options)
        })
    }

    fn take_apart(&mut self, on: bool) {
        self.apart = on;
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

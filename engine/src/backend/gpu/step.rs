//! Enqueues a step, from token ids to drawn tokens.

use half::bf16;
use tandem_attn::{
    exec::gpu::{
        AppendScales, DeviceBuffer, DevicePtr, DeviceRope, DeviceTensor, Gpu, KvPool, QkNorm,
        QkvStep, Stream, Workspace,
    },
    problem::Spec,
};

use super::{
    GpuBackend,
    blas::{Blas, Shape},
    buffers::Buffers,
    logits,
    slots::Slot,
};
use crate::{
    Architecture, Error, LogitWork,
    backend::{Part, layers::Layer},
};

impl GpuBackend {
    /// Enqueues a step on a stream, from token ids to logits, or to drawn tokens if it `draws`.
    pub(super) fn forward(
        &mut self,
        tokens: usize,
        rows: usize,
        replayed: bool,
        draws: bool,
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
            let (rope, plans, workspace) = kinds[a.layers[index]].of(replayed);
            let cache = (pools.layer(index), pools.append_scales());
            step.norm(&layer.norm_attention, index > 0)?;
            step.attention(layer, &plans.spec, rope, workspace, cache)?;
            step.feed_forward(layer)?;
        }
        step.norm(&model.norm, !model.layers.is_empty())?;
        step.mark(Part::Norms)?;
        step.logits(model.head(), rows)?;
        match draws {
            true => step.draw(rows),
            false => Ok(()),
        }
    }

    /// Enqueues what a step does with its logits: they are adjusted, tokens are drawn, the logits are what they were again, and
    /// log-probabilities are computed.
    pub(super) fn draw(
        &mut self,
        work: &LogitWork<'_>,
        tokens: usize,
        rows: usize,
    ) -> Result<(), Error> {
        let (gpu, a, b) = (&self.gpu, &self.architecture, &self.buffers);
        let (slot, stream) = (self.slots.next()?, *self.stream);
        let (logits, sampled) = (b.logits(a, rows), b.sampled(rows));
        let adjusts = !work.adjusted.is_empty();
        // SAFETY: all buffers live in `self` longer than the work on its stream, and are as large as the shapes. Rows, tokens and ids
        // are those of the step, and the rules of a request have each token once.
        unsafe {
            let buffers = &mut self.logit_buffers;
            let on = buffers.upload(gpu, work, slot, &self.stream)?;
            if adjusts {
                gpu.adjust(&logits, on.rows, on.tokens, b.ids(tokens), stream)?;
            }
            gpu.sample(&logits, b.draws(rows), sampled, stream)?;
            if adjusts {
                gpu.restore(&logits, on.rows, on.tokens, stream)?;
            }
            gpu.log_probs(&logits, on.log_probs, sampled, on.results, stream)?;
        }
        slot.mark(Part::Sample, stream)
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
        self.multiply_add(x, w, None, inputs, outputs, out)
    }

    fn multiply_add(
        &mut self,
        x: &DeviceBuffer<bf16>,
        w: &DeviceBuffer<bf16>,
        bias: Option<&DeviceBuffer<bf16>>,
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
            biased: bias.is_some(),
        };
        let matrices = [x, w, out].map(DeviceBuffer::address);
        let bias = bias.map(DeviceBuffer::address);
        // SAFETY: see above.
        unsafe { self.blas.multiply(shape, matrices, bias, self.stream) }
    }

    /// Adds the output of the last branch, if there is one, to the residual. Normalises the sum.
    fn norm(&self, weight: &DeviceBuffer<bf16>, branch_waits: bool) -> Result<(), Error> {
        let b = self.b;
        match branch_waits {
            false => self.norm_rows(&b.residual, weight, None, &b.normed),
            true => self.norm_rows(&b.branch, weight, Some(&b.residual), &b.normed),
        }
    }

    fn norm_rows(
        &self,
        x: &DeviceBuffer<bf16>,
        weight: &DeviceBuffer<bf16>,
        residual: Option<&DeviceBuffer<bf16>>,
        out: &DeviceBuffer<bf16>,
    ) -> Result<(), Error> {
        let (norm, hidden) = (self.a.norm, self.a.hidden);
        let weight = weight.tensor([hidden]);
        // The kernels for more rows than the GPU has SMs add in another order.
        let most = match self.blas.is_by_row() {
            true => self.gpu.multiprocessors() as usize,
            false => self.tokens,
        };
        for from in (0..self.tokens).step_by(most) {
            let rows = most.min(self.tokens - from);
            let part = |of: &DeviceBuffer<bf16>| {
                let mut part = of.tensor([rows, hidden]);
                part.address += (from * hidden * size_of::<bf16>()) as DevicePtr;
                part
            };
            let residual = residual.map(part);
            // SAFETY: see above; these are rows of the buffers, and the kernel reads a row before it writes it.
            unsafe {
                self.gpu.rms_norm(
                    norm,
                    &part(x),
                    &weight,
                    residual.as_ref(),
                    &part(out),
                    self.stream,
                )?;
            }
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
        self.multiply_add(
            &b.attention,
            &layer.out,
            layer.out_bias.as_ref(),
            a.q_width(),
            a.hidden,
            &b.branch,
        )?;
        self.mark(Part::Out)?;
        self.norm_branch(layer.norm_attention_out.as_ref())
    }

    fn feed_forward(&mut self, layer: &Layer<DeviceBuffer<bf16>>) -> Result<(), Error> {
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
        self.norm_rows(&self.b.branch, weight, None, &self.b.branch)
    }

    /// Computes the logits of the rows that are needed.
    fn logits(&mut self, head: &DeviceBuffer<bf16>, rows: usize) -> Result<(), Error> {
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
            biased: false,
        };
        let matrices: [DevicePtr; 3] = [wanted.address, head.address(), b.logits.address()];
        // SAFETY: see above.
        unsafe {
            self.gpu
                .embed(&table, b.rows(rows), 1.0, &wanted, self.stream)?;
            self.blas.multiply(shape, matrices, None, self.stream)?;
        }
        self.mark(Part::Head)
    }

    /// Draws a token from each row of logits.
    fn draw(&mut self, rows: usize) -> Result<(), Error> {
        if rows == 0 {
            return Ok(());
        }
        let (b, stream) = (self.b, self.stream);
        let (logits, ids) = (b.logits(self.a, rows), b.sampled(rows));
        // SAFETY: see above.
        unsafe {
            self.gpu.sample(&logits, b.draws(rows), ids, stream)?;
        }
        self.mark(Part::Sample)
    }
}

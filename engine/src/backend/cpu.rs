//! On the threads of the CPU, in f32 throughout: for small models, for tests, and to try things out.

use std::{collections::VecDeque, time::Instant};

use tandem_attn::{
    Cpu,
    kv::{AppendScales, KvScales, KvView, KvViewMut},
    plan::PlanOptions,
    problem::{Dtype, KvLayout},
    step::{RopeTable, cpu as step},
};

use super::{
    Backend, MOST_UNDER_WAY, Part, StepTime, Work,
    attention::Plans,
    layers::{Layer, Model, Store, stacked},
};
use crate::{Architecture, Error, Weights};

/// A model in main memory. Weights are widened to f32, and so are keys and values.
#[derive(Debug)]
pub struct CpuBackend {
    architecture: Architecture,
    model: Model<Vec<f32>>,
    cpu: Cpu,
    /// For each kind of attention.
    kinds: Vec<(Plans, RopeTable)>,
    /// For each layer keys and values of all pages.
    pools: Vec<[Vec<f32>; 2]>,
    pages: u32,
    page_size: u32,
    logits: Vec<f32>,
    buffers: Buffers,
    watch: Watch,
    /// Steps that were begun and not finished.
    under_way: VecDeque<(Vec<u32>, StepTime)>,
    /// The tokens of the last step.
    tokens: Vec<u32>,
}

/// Weights in main memory.
struct Host<'a>(&'a Weights);

impl Store for Host<'_> {
    type Matrix = Vec<f32>;

    fn tensor(
        &mut self,
        parts: &[(String, usize)],
        width: Option<usize>,
    ) -> Result<Vec<f32>, Error> {
        stacked(self.0, parts, width)
    }
}

/// Times the parts of a step, where that is wanted.
#[derive(Debug)]
struct Watch {
    on: bool,
    last: Instant,
    parts_s: Vec<f64>,
    /// When the last step ended.
    ended: Option<Instant>,
}

impl Watch {
    fn start(&mut self) {
        self.last = Instant::now();
        self.parts_s.clear();
        self.parts_s
            .resize(if self.on { Part::ALL.len() } else { 0 }, 0.0);
    }

    /// What ran since the last call was of this part.
    fn mark(&mut self, part: Part) {
        if let Some(seconds) = self.parts_s.get_mut(part as usize) {
            let now = Instant::now();
            *seconds += (now - self.last).as_secs_f64();
            self.last = now;
        }
    }
}

/// What a step leaves between its parts.
#[derive(Debug, Default)]
struct Buffers {
    residual: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    q: Vec<f32>,
    attention: Vec<f32>,
    gate_up: Vec<f32>,
    gated: Vec<f32>,
    branch: Vec<f32>,
}

impl CpuBackend {
    /// Loads a model and takes memory for `pages` pages of `page_size` tokens in each layer. `progress` hears how many
    /// layers are loaded.
    ///
    /// # Errors
    /// Those of [`Weights::append`], and [`Error::Attention`] for heads that cannot be computed.
    pub fn load(
        architecture: Architecture,
        weights: &Weights,
        pages: u32,
        page_size: u32,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let model = Model::load(&architecture, &mut Host(weights), progress)?;
        let cpu = Cpu::new();
        let kinds = architecture.kinds.iter().map(|kind| {
            let spec = kind.spec.with_dtype(Dtype::F32);
            let plans = Plans::new(spec, cpu.device(), PlanOptions::default());
            Ok((plans, kind.rope.table()?))
        });
        let kinds = kinds.collect::<Result<_, tandem_attn::Error>>()?;
        let spec = architecture.spec();
        let elements = pages as usize * (page_size * spec.kv_heads * spec.head_dim_qk) as usize;
        let pool = || [vec![0.0; elements], vec![0.0; elements]];
        Ok(Self {
            model,
            cpu,
            kinds,
            pools: architecture.layers.iter().map(|_| pool()).collect(),
            pages,
            page_size,
            logits: Vec::new(),
            buffers: Buffers::default(),
            watch: Watch {
                on: false,
                last: Instant::now(),
                parts_s: Vec::new(),
                ended: None,
            },
            under_way: VecDeque::new(),
            tokens: Vec::new(),
            architecture,
        })
    }

    /// Everything up to the logits of the wanted rows.
    fn forward(&mut self, work: &Work<'_>) -> Result<(), Error> {
        let (a, inputs) = (&self.architecture, work.inputs);
        let tokens = inputs.tokens.len();
        for (plans, _) in &mut self.kinds {
            plans.plan(&inputs.batch)?;
        }
        let mut ids = inputs.tokens.clone();
        for &(token, row) in work.drawn {
            ids[token as usize] = self.tokens[row as usize];
        }
        let (b, watch) = (&mut self.buffers, &mut self.watch);
        watch.start();
        fit(&mut b.residual, tokens * a.hidden);
        step::embed(
            &self.model.embedding,
            a.hidden,
            &ids,
            a.embedding_scale,
            &mut b.residual,
        )?;
        let mut branch_waits = false;
        for (index, layer) in self.model.layers.iter().enumerate() {
            let (plans, rope) = &self.kinds[a.layers[index]];
            let [k, v] = &mut self.pools[index];
            let mut pool = KvViewMut::new(&plans.spec, KvLayout::Nhd, self.page_size, k, v);
            for copy in work.copies {
                pool.copy_page(&plans.spec, copy.from, copy.to)
                    .map_err(tandem_attn::Error::from)?;
            }
            b.norm(a, &layer.norm_attention, branch_waits)?;
            watch.mark(Part::Norms);
            fit(&mut b.qkv, tokens * a.qkv_width());
            multiply(&b.normed, &layer.qkv, a.hidden, a.qkv_width(), &mut b.qkv);
            watch.mark(Part::Qkv);
            fit(&mut b.q, tokens * a.q_width());
            let qkv = step::QkvStep {
                qkv: &b.qkv,
                bias: layer.qkv_bias.as_deref(),
                norm: layer
                    .qk_norm
                    .as_ref()
                    .map(|[q, k]| step::QkNorm { norm: a.norm, q, k }),
                rope: Some((rope, &inputs.positions)),
            };
            let scales = AppendScales::Given(KvScales::One);
            step::qkv(
                &plans.spec,
                &qkv,
                &inputs.slots,
                &mut b.q,
                &mut pool,
                self.pages,
                scales,
            )?;
            watch.mark(Part::Append);
            fit(&mut b.attention, tokens * a.q_width());
            let view: KvView<'_, f32> = pool.view();
            self.cpu
                .run(plans.last(), &b.q, &[view], &mut b.attention, None)?;
            watch.mark(Part::Attention);
            b.feed(a, layer, watch)?;
            branch_waits = true;
        }
        b.norm(a, &self.model.norm, branch_waits)?;
        watch.mark(Part::Norms);

        fit(&mut b.branch, work.rows.len() * a.hidden);
        for (to, &row) in b.branch.chunks_exact_mut(a.hidden).zip(work.rows) {
            to.copy_from_slice(&b.normed[row as usize * a.hidden..][..a.hidden]);
        }
        fit(&mut self.logits, work.rows.len() * a.vocabulary);
        multiply(
            &b.branch,
            self.model.head(),
            a.hidden,
            a.vocabulary,
            &mut self.logits,
        );
        watch.mark(Part::Head);
        Ok(())
    }
}

impl Buffers {
    /// Adds what the last part of the network gave, if any, to the residual, and normalises the sum.
    fn norm(&mut self, a: &Architecture, weight: &[f32], branch_waits: bool) -> Result<(), Error> {
        fit(&mut self.normed, self.residual.len());
        match branch_waits {
            false => step::rms_norm(a.norm, &self.residual, weight, None, &mut self.normed)?,
            true => {
                let residual = Some(&mut self.residual[..]);
                step::rms_norm(a.norm, &self.branch, weight, residual, &mut self.normed)?;
            }
        }
        Ok(())
    }

    /// From the outputs of attention to those of the feed-forward part.
    fn feed(
        &mut self,
        a: &Architecture,
        layer: &Layer<Vec<f32>>,
        watch: &mut Watch,
    ) -> Result<(), Error> {
        let tokens = self.residual.len() / a.hidden;
        fit(&mut self.branch, self.residual.len());
        multiply(
            &self.attention,
            &layer.out,
            a.q_width(),
            a.hidden,
            &mut self.branch,
        );
        watch.mark(Part::Out);
        self.norm_branch(a, layer.norm_attention_out.as_deref())?;
        self.norm(a, &layer.norm_feed, true)?;
        watch.mark(Part::Norms);
        fit(&mut self.gate_up, tokens * 2 * a.intermediate);
        multiply(
            &self.normed,
            &layer.gate_up,
            a.hidden,
            2 * a.intermediate,
            &mut self.gate_up,
        );
        watch.mark(Part::GateUp);
        fit(&mut self.gated, tokens * a.intermediate);
        step::gate(a.activation, &self.gate_up, a.intermediate, &mut self.gated)?;
        watch.mark(Part::Gate);
        multiply(
            &self.gated,
            &layer.down,
            a.intermediate,
            a.hidden,
            &mut self.branch,
        );
        watch.mark(Part::Down);
        self.norm_branch(a, layer.norm_feed_out.as_deref())?;
        watch.mark(Part::Norms);
        Ok(())
    }

    /// The norm behind a part of the network, where the family has one.
    fn norm_branch(&mut self, a: &Architecture, weight: Option<&[f32]>) -> Result<(), Error> {
        if let Some(weight) = weight {
            fit(&mut self.normed, self.branch.len());
            step::rms_norm(a.norm, &self.branch, weight, None, &mut self.normed)?;
            std::mem::swap(&mut self.branch, &mut self.normed);
        }
        Ok(())
    }
}

/// Every element is written by what follows.
fn fit(buffer: &mut Vec<f32>, elements: usize) {
    buffer.resize(elements, 0.0);
}

/// `out = x · wᵀ`: `x` is `[rows, inputs]`, `w` is `[outputs, inputs]`.
fn multiply(x: &[f32], w: &[f32], inputs: usize, outputs: usize, out: &mut [f32]) {
    let rows = x.len() / inputs;
    assert_eq!(
        (x.len(), w.len(), out.len()),
        (rows * inputs, outputs * inputs, rows * outputs)
    );
    let threads = gemm::Parallelism::Rayon(rayon::current_num_threads());
    // SAFETY: the three matrices lie within their slices, as asserted, and `out` is nobody else's.
    unsafe {
        gemm::gemm(
            rows,
            outputs,
            inputs,
            out.as_mut_ptr(),
            1,
            outputs as isize,
            false,
            x.as_ptr(),
            1,
            inputs as isize,
            w.as_ptr(),
            inputs as isize,
            1,
            0.0,
            1.0,
            false,
            false,
            false,
            threads,
        );
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> String {
        format!(
            "the CPU: {} threads, {}",
            rayon::current_num_threads(),
            self.cpu.instruction_set()
        )
    }

    fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    fn pages(&self) -> u32 {
        self.pages
    }

    fn page_size(&self) -> u32 {
        self.page_size
    }

    fn step_tokens(&self) -> u32 {
        u32::MAX
    }

    fn step_requests(&self) -> u32 {
        u32::MAX
    }

    fn is_asynchronous(&self) -> bool {
        false
    }

    fn begin(&mut self, work: &Work<'_>) -> Result<(), Error> {
        if self.under_way.len() == MOST_UNDER_WAY {
            return Err(Error::TooManySteps);
        }
        let begun = Instant::now();
        self.forward(work)?;
        self.tokens.resize(work.rows.len(), 0);
        step::sample(
            &self.logits,
            self.architecture.vocabulary,
            work.draws,
            &mut self.tokens,
        )?;
        self.watch.mark(Part::Sample);
        let now = Instant::now();
        let time = StepTime {
            seconds: (now - begun).as_secs_f64(),
            gap_s: self.watch.ended.map(|ended| (begun - ended).as_secs_f64()),
            parts_s: self.watch.parts_s.clone(),
        };
        self.watch.ended = Some(now);
        self.under_way.push_back((self.tokens.clone(), time));
        Ok(())
    }

    fn finish(&mut self, tokens: &mut Vec<u32>) -> Result<StepTime, Error> {
        let (drawn, time) = self.under_way.pop_front().ok_or(Error::NoStep)?;
        *tokens = drawn;
        Ok(time)
    }

    fn logits(&mut self) -> Result<Vec<f32>, Error> {
        Ok(self.logits.clone())
    }

    fn plan_with(&mut self, options: PlanOptions) -> Result<(), Error> {
        if !self.under_way.is_empty() {
            return Err(Error::TooManySteps);
        }
        for (plans, _) in &mut self.kinds {
            plans.plan_with(options.with_bound(None));
        }
        Ok(())
    }

    fn take_apart(&mut self, on: bool) {
        self.watch.on = on;
    }
}

//! Computes on CPU threads, in f32 throughout: for small models, tests and trials.

mod pools;

use std::{collections::VecDeque, time::Instant};

use tandem_attn::{
    Cpu,
    plan::PlanOptions,
    problem::Dtype,
    step::{LOG_PROBS, LogProb, RopeTable, cpu as step},
};
use tandem_schedule::CacheType;

use super::{
    Backend, MOST_UNDER_WAY, Part, StepTime, Work,
    attention::Plans,
    check_page_size,
    layers::{Layer, Model, Store, stacked},
};
use crate::{Architecture, Error, Weights};
use pools::{Pages, Pool};

/// Capacity of a [`CpuBackend`]. Loading allocates all memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CpuOptions {
    /// Capacity of the KV cache in tokens.
    pub cache_tokens: u32,
    /// Tokens in a page, at most 4096.
    pub page_size: u32,
    /// How keys and values are stored.
    pub cache_type: CacheType,
}

impl Default for CpuOptions {
    fn default() -> Self {
        Self {
            cache_tokens: 4096,
            page_size: 16,
            cache_type: CacheType::Auto,
        }
    }
}

/// A model in main memory. Weights are in f32; so are keys and values, unless [`CpuOptions::cache_type`] says otherwise.
#[derive(Debug)]
pub struct CpuBackend {
    architecture: Architecture,
    model: Model<Vec<f32>>,
    cpu: Cpu,
    /// One for each kind of attention.
    kinds: Vec<(Plans, RopeTable)>,
    /// One for each layer.
    pools: Vec<Pool>,
    pages: Pages,
    cache_type: CacheType,
    logits: Vec<f32>,
    buffers: Buffers,
    watch: Watch,
    /// Steps that have begun and not finished.
    under_way: VecDeque<(Vec<u32>, Vec<LogProb>, StepTime)>,
    /// Drawn tokens of the last step.
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

/// Times the parts of a step if [`Backend::take_apart`] asked for it.
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

    /// Adds the time since the last call to a part.
    fn mark(&mut self, part: Part) {
        if let Some(seconds) = self.parts_s.get_mut(part as usize) {
            let now = Instant::now();
            *seconds += (now - self.last).as_secs_f64();
            self.last = now;
        }
    }
}

/// Intermediate results of a step.
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
    /// Loads a model and allocates its caches. `progress` receives the number of layers loaded so far.
    ///
    /// # Errors
    /// Those of [`Weights::append`]; [`Error::Attention`] if the heads are not supported, or pages have none or more than
    /// 4096 tokens; [`Error::CacheMemory`].
    pub fn load(
        architecture: Architecture,
        weights: &Weights,
        options: &CpuOptions,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        check_page_size(options.page_size)?;
        let cache_type = options.cache_type;
        let model = Model::load(&architecture, weights, &mut Host(weights), progress)?;
        let cpu = Cpu::new();
        let kinds = architecture.kinds.iter().map(|kind| {
            let spec = cache_type.spec(kind.spec.with_dtype(Dtype::F32));
            let plans = Plans::new(spec, cpu.device(), PlanOptions::default());
            Ok((plans, kind.rope.table()?))
        });
        let kinds = kinds.collect::<Result<_, tandem_attn::Error>>()?;
        let pages = Pages {
            count: options.cache_tokens.div_ceil(options.page_size),
            size: options.page_size,
        };
        let pool = |_| Pool::new(cache_type, architecture.spec(), pages);
        let pools: Option<Vec<_>> = architecture.layers.iter().map(pool).collect();
        let pools = pools.ok_or(Error::CacheMemory {
            tokens: options.cache_tokens,
        })?;
        Ok(Self {
            model,
            cpu,
            kinds,
            pools,
            pages,
            cache_type,
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

    /// Computes a step up to the logits of the rows that are needed.
    fn forward(&mut self, work: &Work<'_>) -> Result<(), Error> {
        let (a, inputs) = (&self.architecture, work.inputs);
        let tokens = inputs.tokens.len();
        for (plans, _) in &mut self.kinds {
            plans.plan(&inputs.batch)?;
        }
        let ids = self.ids(work);
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
            let pool = &mut self.pools[index];
            pool.copy(&plans.spec, work.copies)?;
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
            pool.append(&plans.spec, &qkv, &inputs.slots, &mut b.q)?;
            watch.mark(Part::Append);
            fit(&mut b.attention, tokens * a.q_width());
            pool.attend(&self.cpu, plans.last(), &b.q, &mut b.attention)?;
            watch.mark(Part::Attention);
            b.feed_forward(a, layer, watch)?;
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

    /// Draws a token from each row of logits, and computes log-probabilities. The logits stay as they are.
    fn draw(&mut self, work: &Work<'_>) -> Result<Vec<LogProb>, Error> {
        let (vocabulary, asked) = (self.architecture.vocabulary, work.logits);
        let mut adjusted = asked.tokens.to_vec();
        if !asked.adjusted.is_empty() {
            let ids = self.ids(work);
            let rows = asked.adjusted;
            step::adjust(&mut self.logits, vocabulary, rows, &mut adjusted, &ids)?;
        }
        self.tokens.resize(work.rows.len(), 0);
        step::sample(&self.logits, vocabulary, work.draws, &mut self.tokens)?;
        step::restore(&mut self.logits, vocabulary, asked.adjusted, &adjusted)?;
        let mut out = vec![LogProb::default(); asked.log_probs.len() * LOG_PROBS as usize];
        let rows = asked.log_probs;
        step::log_probs(&self.logits, vocabulary, rows, &self.tokens, &mut out)?;
        Ok(out)
    }

    /// The tokens of a step. `self.tokens` are still those that the previous step drew.
    fn ids(&self, work: &Work<'_>) -> Vec<u32> {
        let mut ids = work.inputs.tokens.clone();
        for &(token, row) in work.drawn {
            ids[token as usize] = self.tokens[row as usize];
        }
        ids
    }
}

impl Buffers {
    /// Adds the output of the last branch, if there is one, to the residual. Normalises the sum.
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

    /// Computes from the attention outputs to the outputs of the feed-forward part.
    fn feed_forward(
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
        if let Some(bias) = &layer.out_bias {
            for row in self.branch.chunks_exact_mut(a.hidden) {
                row.iter_mut().zip(bias).for_each(|(x, bias)| *x += bias);
            }
        }
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

    /// Normalises the output of a branch, if the family does so.
    fn norm_branch(&mut self, a: &Architecture, weight: Option<&[f32]>) -> Result<(), Error> {
        if let Some(weight) = weight {
            fit(&mut self.normed, self.branch.len());
            step::rms_norm(a.norm, &self.branch, weight, None, &mut self.normed)?;
            std::mem::swap(&mut self.branch, &mut self.normed);
        }
        Ok(())
    }
}

/// Resizes a buffer. Old contents stay: the caller overwrites every element.
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
    // SAFETY: the assertions above keep all three matrices within their slices, and `out` is borrowed exclusively.
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
        self.pages.count
    }

    fn page_size(&self) -> u32 {
        self.pages.size
    }

    fn cache_type(&self) -> CacheType {
        self.cache_type
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
        let log_probs = self.draw(work)?;
        self.watch.mark(Part::Sample);
        let now = Instant::now();
        let time = StepTime {
            seconds: (now - begun).as_secs_f64(),
            gap_s: self.watch.ended.map(|ended| (begun - ended).as_secs_f64()),
            parts_s: self.watch.parts_s.clone(),
        };
        self.watch.ended = Some(now);
        self.under_way
            .push_back((self.tokens.clone(), log_probs, time));
        Ok(())
    }

    fn finish(
        &mut self,
        tokens: &mut Vec<u32>,
        log_probs: &mut Vec<LogProb>,
    ) -> Result<StepTime, Error> {
        let time;
        (*tokens, *log_probs, time) = self.under_way.pop_front().ok_or(Error::NoStep)?;
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

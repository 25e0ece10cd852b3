//! A serving loop: requests arrive; hybrid batches are composed, planned and run on the CPU; tokens are streamed.
//!
//! The model is tiny and random (two layers, no position embedding), so its tokens are meaningless. Everything around
//! it is what a real loop does. `cargo run --release -p tandem-schedule --example serving_loop`

use std::{collections::BTreeMap, error::Error};

use tandem_attn::{
    Cpu,
    kv::KvViewMut,
    plan::{PlanOptions, Planner},
    problem::{Dtype, KvLayout, Spec},
};
use tandem_schedule::{
    Composer, Limits, Request, Sampled, Step, StepInputs, policy::SarathiServe, trace::Random,
};

const LAYERS: usize = 2;
const VOCAB: usize = 256;
const HIDDEN: usize = 64;
const KV: usize = 32;
const PAGES: u32 = 256;
const PAGE_SIZE: u32 = 16;

/// Runs the example.
pub fn main() -> Result<(), Box<dyn Error>> {
    let spec = Spec::new(4, 2, 16).with_dtype(Dtype::F32);
    let model = Model::random(7);
    let pool = vec![0.0_f32; PAGES as usize * PAGE_SIZE as usize * KV];
    let mut layers = vec![(pool.clone(), pool); LAYERS];

    let limits = Limits {
        step_tokens: 64,
        ..Limits::default()
    };
    let mut composer = Composer::new(limits, PAGES, PAGE_SIZE, SarathiServe)?;
    let system: Vec<u32> = "You are a small random model. Answer at length. "
        .bytes()
        .map(u32::from)
        .collect();
    let mut questions = ["Who are you?", "What is a page?", "And a prefix?"].into_iter();

    let (cpu, mut planner) = (Cpu::new(), Planner::new());
    let (mut step, mut inputs) = (Step::default(), StepInputs::default());
    let mut answers = BTreeMap::new();
    for number in 0.. {
        // A new request arrives every sixth step and joins the running ones.
        if number % 6 == 0
            && let Some(question) = questions.next()
        {
            let prompt = system
                .iter()
                .copied()
                .chain(question.bytes().map(u32::from));
            let id = composer.submit(Request::new(prompt.collect(), 12))?;
            answers.insert(id, (question, Vec::new()));
        }
        if !composer.compose(&mut step) {
            break;
        }
        // One plan serves all layers.
        composer.inputs(&step, &mut inputs);
        let plan = planner.plan(&spec, &inputs.batch, &cpu.device(), &PlanOptions::default())?;
        let mut x = model.embed(&inputs.tokens);
        for (weights, (k_pool, v_pool)) in model.layers.iter().zip(&mut layers) {
            let [q, k, v] = [&weights.q, &weights.k, &weights.v].map(|w| multiply(&x, w));
            let mut kv = KvViewMut::new(&spec, KvLayout::Nhd, PAGE_SIZE, k_pool, v_pool);
            Cpu::append_paged_kv(&spec, PAGES, &inputs.slots, &k, &v, &mut kv)?;
            let mut attended = vec![0.0_f32; q.len()];
            cpu.run(&plan, &q, &[kv.view()], &mut attended, None)?;
            let projected = multiply(&attended, &weights.o);
            x.iter_mut().zip(projected).for_each(|(x, y)| *x += y);
        }
        // Sample each request whose known tokens are all computed, and stream the token.
        let mut rows = inputs.logits.iter().flatten();
        let (chunks, decodes) = (step.shape().chunks.len(), step.shape().decodes);
        print!(
            "step {number:2}: {chunks} chunks, {decodes} decodes, {:2} tokens ",
            step.tokens()
        );
        let finished = composer.complete(&step, |entry| {
            let row = *rows.next().expect("one for each entry that samples") as usize;
            let token = model.next_token(&x[row * HIDDEN..][..HIDDEN]);
            print!(" {}→{token}", entry.request);
            answers
                .get_mut(&entry.request)
                .expect("submitted")
                .1
                .push(token);
            Sampled::Token(token)
        });
        println!();
        for finished in finished {
            let (question, tokens) = &answers[&finished.request];
            println!("  {question} {tokens:?}");
        }
    }
    println!(
        "{} prompt tokens came from the prefix cache",
        composer.cached_tokens()
    );
    Ok(())
}

struct Layer {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
}

struct Model {
    embedding: Vec<f32>,
    layers: Vec<Layer>,
    head: Vec<f32>,
}

impl Model {
    fn random(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut matrix = |rows: usize, columns: usize| {
            let scale = 2.0 * (3.0 / rows as f64).sqrt();
            (0..rows * columns)
                .map(|_| (scale * (random.unit() - 0.5)) as f32)
                .collect()
        };
        Self {
            embedding: matrix(HIDDEN, VOCAB),
            layers: (0..LAYERS)
                .map(|_| Layer {
                    q: matrix(HIDDEN, HIDDEN),
                    k: matrix(HIDDEN, KV),
                    v: matrix(HIDDEN, KV),
                    o: matrix(HIDDEN, HIDDEN),
                })
                .collect(),
            head: matrix(HIDDEN, VOCAB),
        }
    }

    fn embed(&self, tokens: &[u32]) -> Vec<f32> {
        let row = |&token: &u32| &self.embedding[token as usize * HIDDEN..][..HIDDEN];
        tokens.iter().flat_map(row).copied().collect()
    }

    fn next_token(&self, x: &[f32]) -> u32 {
        let score = |row: &[f32]| row.iter().zip(x).map(|(a, b)| a * b).sum::<f32>();
        let scores = self.head.chunks_exact(HIDDEN).map(score);
        let best = scores.enumerate().max_by(|a, b| a.1.total_cmp(&b.1));
        best.expect("the vocabulary is not empty").0 as u32
    }
}

/// `[tokens, HIDDEN] × [HIDDEN, columns]`
fn multiply(x: &[f32], weights: &[f32]) -> Vec<f32> {
    let columns = weights.len() / HIDDEN;
    let mut out = vec![0.0; x.len() / HIDDEN * columns];
    for (out, x) in out.chunks_exact_mut(columns).zip(x.chunks_exact(HIDDEN)) {
        for (x, weights) in x.iter().zip(weights.chunks_exact(columns)) {
            out.iter_mut().zip(weights).for_each(|(o, w)| *o += x * w);
        }
    }
    out
}

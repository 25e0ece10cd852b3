//! Fixtures, and the results of `transformers` on them. `fixtures/make.py` generates both.

#![allow(dead_code, reason = "each test file takes what it needs")]

pub mod reference;

use std::{
    fs,
    ops::Range,
    path::{Path, PathBuf},
};

use safetensors::{SafeTensors, tensor::TensorView};
use serde::Deserialize;
use tandem_attn::{
    kv::PageCopy,
    problem::{Batch, PageTable},
};
use tandem_engine::{
    Architecture, Backend, CacheType, CpuBackend, CpuOptions, Engine, Event, Generation, Limits,
    LogitWork, Message, Penalties, Sampling, Text, Weights, Work,
};
use tandem_schedule::StepInputs;

pub const FAMILIES: [&str; 5] = ["llama3", "qwen2", "qwen3", "mistral", "gemma3"];
pub const PAGES: u32 = 64;
pub const PAGE_SIZE: u32 = 16;

/// A folder with a tokenizer of the fixtures, this template, and what `write` adds, and the texts that it gives.
pub fn with_template(template: &str, write: impl FnOnce(&Path)) -> (tempfile::TempDir, Text) {
    let copy = tempfile::tempdir().expect("writable");
    let to = copy.path();
    let tokenizer = "tokenizer.json";
    fs::copy(folder("qwen2").join(tokenizer), to.join(tokenizer)).expect("writable");
    fs::write(to.join("chat_template.jinja"), template).expect("writable");
    write(to);
    let text = Text::read(to).unwrap_or_else(|error| panic!("{template}: {error}"));
    (copy, text)
}

pub fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures")
        .join(family)
}

/// A vocabulary whose size is no multiple of 8. The prompts of Llama 3's fixture have no further tokens.
pub const ODD_VOCABULARY: usize = 381;

/// A copy of Llama 3's fixture without the tokens behind [`ODD_VOCABULARY`].
pub fn of_odd_vocabulary() -> tempfile::TempDir {
    let (from, copy) = (folder("llama3"), tempfile::tempdir().expect("writable"));
    let config = fs::read(from.join("config.json")).expect("a fixture");
    let mut config: serde_json::Value = serde_json::from_slice(&config).expect("a fixture");
    config["vocab_size"] = ODD_VOCABULARY.into();
    fs::write(copy.path().join("config.json"), config.to_string()).expect("writable");
    let bytes = fs::read(from.join("model.safetensors")).expect("a fixture");
    let tensors = SafeTensors::deserialize(&bytes).expect("as made");
    let cut = tensors.iter().map(|(name, tensor)| {
        let (mut shape, mut data) = (tensor.shape().to_vec(), tensor.data());
        if matches!(name, "lm_head.weight" | "model.embed_tokens.weight") {
            data = &data[..data.len() / shape[0] * ODD_VOCABULARY];
            shape[0] = ODD_VOCABULARY;
        }
        let view = TensorView::new(tensor.dtype(), shape, data);
        (name, view.expect("whole rows"))
    });
    let file = safetensors::serialize(cut, None).expect("as before");
    fs::write(copy.path().join("model.safetensors"), file).expect("writable");
    copy
}

/// The expected logits of [`of_odd_vocabulary`].
pub fn odd_logits(right: &Expected) -> Vec<f32> {
    let vocabulary = right.logits.len() / right.prompt.len();
    let rows = right.logits.chunks(vocabulary);
    rows.flat_map(|row| &row[..ODD_VOCABULARY])
        .copied()
        .collect()
}

/// Contents of `expected.json`.
#[derive(Deserialize)]
pub struct ExpectedText {
    pub text: String,
    pub tokens: Vec<u32>,
    pub decoded: String,
    pub conversation: Vec<Message>,
    pub rendered: String,
    pub bf16: Rounded,
}

/// Distance of the logits of `transformers` in bf16 from those in f32.
#[derive(Deserialize)]
pub struct Rounded {
    pub mean_cosine: f64,
    pub least_cosine: f64,
    pub same_first: f64,
}

pub fn expected_text(family: &str) -> ExpectedText {
    let json = fs::read_to_string(folder(family).join("expected.json")).expect("a fixture");
    serde_json::from_str(&json).expect("as made")
}

pub struct Expected {
    pub prompt: Vec<u32>,
    pub logits: Vec<f32>,
    pub greedy: Vec<u32>,
}

pub fn expected(family: &str) -> Expected {
    let bytes = fs::read(folder(family).join("expected.safetensors")).expect("a fixture");
    let tensors = SafeTensors::deserialize(&bytes).expect("as made");
    let ids = |name| bytemuck::pod_collect_to_vec(tensors.tensor(name).expect("as made").data());
    Expected {
        prompt: ids("prompt"),
        logits: bytemuck::pod_collect_to_vec(tensors.tensor("logits").expect("as made").data()),
        greedy: ids("greedy"),
    }
}

/// Options for this number of pages.
pub fn options(pages: u32, page_size: u32) -> CpuOptions {
    let mut options = CpuOptions::default();
    (options.cache_tokens, options.page_size) = (pages * page_size, page_size);
    options
}

pub fn on_cpu(family: &str) -> Box<dyn Backend> {
    of_folder(&folder(family), CacheType::Auto)
}

/// The model of a folder with caches of a type.
pub fn of_folder(folder: &Path, cache_type: CacheType) -> Box<dyn Backend> {
    let architecture = Architecture::read(folder).expect("a fixture");
    let weights = Weights::open(folder).expect("a fixture");
    let mut layers = 0;
    let count = architecture.layers.len();
    let mut options = options(PAGES, PAGE_SIZE);
    options.cache_type = cache_type;
    let backend = CpuBackend::load(architecture, &weights, &options, &mut |done| layers = done);
    assert_eq!(layers, count);
    Box::new(backend.expect("a fixture"))
}

pub fn engine(family: &str, limits: Limits) -> Engine {
    Engine::new(on_cpu(family), limits).expect("limits that allow something")
}

/// Similarity of two sets of logits.
pub struct Nearness {
    pub least_cosine: f64,
    pub mean_cosine: f64,
    pub same_first: f64,
}

pub fn nearness(got: &[f32], right: &[f32], vocabulary: usize) -> Nearness {
    assert_eq!(got.len(), right.len());
    let dot = |a: &[f32], b: &[f32]| {
        a.iter()
            .zip(b)
            .map(|(a, b)| f64::from(*a) * f64::from(*b))
            .sum::<f64>()
    };
    let first = |row: &[f32]| {
        (0..row.len())
            .max_by(|&a, &b| row[a].total_cmp(&row[b]))
            .expect("a token")
    };
    let rows = got.chunks(vocabulary).zip(right.chunks(vocabulary));
    let (mut least, mut sum, mut same, mut count) = (1.0_f64, 0.0, 0.0, 0.0);
    for (got, right) in rows {
        let cosine = dot(got, right) / (dot(got, got) * dot(right, right)).sqrt();
        // A NaN must not count as near.
        assert!(cosine.is_finite(), "logits that are no numbers");
        least = least.min(cosine);
        sum += cosine;
        same += f64::from(u8::from(first(got) == first(right)));
        count += 1.0;
    }
    Nearness {
        least_cosine: least,
        mean_cosine: sum / count,
        same_first: same / count,
    }
}

/// Answers to prompts that the engine serves together.
pub fn answers(engine: &mut Engine, generations: &[Generation]) -> Vec<Vec<u32>> {
    let requests: Vec<_> = generations
        .iter()
        .map(|generation| engine.submit(generation.clone()).expect("it fits"))
        .collect();
    let mut answers = vec![Vec::new(); requests.len()];
    while !engine.is_idle() {
        let step = engine.step(&mut |event| {
            if let Event::Token { request, token, .. } = event {
                let index = requests
                    .iter()
                    .position(|&one| one == request)
                    .expect("one of them");
                answers[index].push(token);
            }
        });
        step.expect("a step");
    }
    answers
}

/// The logits behind a text.
pub fn logits(engine: &mut Engine, text: &[u32]) -> Vec<f32> {
    let all = engine.logits(text, 64).expect("a short text");
    let vocabulary = engine.architecture().vocabulary;
    all[all.len() - vocabulary..].to_vec()
}

/// The tokens that end an answer.
pub fn ends(engine: &Engine, asked: &Generation) -> Vec<u32> {
    let of_model = engine
        .architecture()
        .ends
        .iter()
        .filter(|_| !asked.ignore_ends);
    of_model.chain(&asked.stop_tokens).copied().collect()
}

/// The logits behind a prompt and the beginning of its answer, by the formulas of biases, bans and penalties in f64.
pub fn adjusted(engine: &mut Engine, asked: &Generation, answer: &[u32]) -> Vec<f64> {
    let Penalties {
        presence,
        frequency,
        repetition,
    } = asked.rules.penalties;
    let ends = ends(engine, asked);
    let text = [&asked.prompt, answer].concat();
    let one = |(token, logit): (u32, f32)| {
        let biases = asked.rules.bias.iter().filter(|(of, _)| *of == token);
        let mut x = f64::from(logit) + biases.map(|(_, bias)| f64::from(*bias)).sum::<f64>();
        if answer.len() < asked.min_new_tokens as usize && ends.contains(&token) {
            x = f64::NEG_INFINITY;
        }
        if text.contains(&token) {
            let factor = f64::from(repetition);
            x = if x > 0.0 { x / factor } else { x * factor };
        }
        let count = answer.iter().filter(|&&one| one == token).count();
        let once = if count > 0 { f64::from(presence) } else { 0.0 };
        x - f64::from(frequency) * count as f64 - once
    };
    (0..).zip(logits(engine, &text)).map(one).collect()
}

/// The logits of the last token of a step: tokens of a request on these pages, after those before them.
fn step(
    backend: &mut dyn Backend,
    prompt: &[u32],
    tokens: Range<u32>,
    on: &[u32],
    copies: &[PageCopy],
) -> Vec<f32> {
    let mut table = PageTable::new(PAGE_SIZE, backend.pages());
    let pages = &on[..tokens.end.div_ceil(PAGE_SIZE) as usize];
    table.push(pages, tokens.end);
    let slot = |at: u32| on[(at / PAGE_SIZE) as usize] * PAGE_SIZE + at % PAGE_SIZE;
    let inputs = StepInputs {
        batch: Batch::new(vec![0, tokens.len() as u32], table),
        slots: tokens.clone().map(slot).collect(),
        positions: tokens.clone().collect(),
        tokens: prompt[tokens.start as usize..tokens.end as usize].to_vec(),
        ..StepInputs::default()
    };
    let work = Work {
        inputs: &inputs,
        copies,
        rows: &[tokens.len() as u32 - 1],
        draws: &[Sampling::GREEDY.draw(0).expect("greedy")],
        drawn: &[],
        logits: LogitWork::default(),
    };
    backend.begin(&work).expect("a step");
    backend
        .finish(&mut Vec::new(), &mut Vec::new())
        .expect("a step");
    backend.logits().expect("a step")
}

/// A token sees the same keys and values on copied pages, one of them half full.
pub fn copied_pages_hold_the_same_bits(backend: &mut dyn Backend) {
    let (prompt, of) = (expected("llama3").prompt, backend.cache_type());
    step(backend, &prompt, 0..24, &[0, 1], &[]);
    let mut decode = |on: &[u32], copies: &[PageCopy]| step(backend, &prompt, 24..25, on, copies);
    let right = decode(&[0, 1], &[]);
    let copies = [(0, 9), (1, 4)].map(|(from, to)| PageCopy { from, to });
    assert!(right == decode(&[9, 4], &copies), "{of}");
    assert!(right == decode(&[9, 4], &[]), "{of}");
    // On pages that were not written it sees other keys.
    assert!(right != decode(&[20, 21], &[]), "{of}");
}

/// What a backend that stands around another, its field 0, has from that one: all but `begin` and limits of its own.
#[allow(unused_macros, reason = "as above")]
macro_rules! of_the_backend_within {
    () => {
        $crate::common::of_the_backend_within!(but limits);

        fn step_tokens(&self) -> u32 {
            self.0.step_tokens()
        }

        fn step_requests(&self) -> u32 {
            self.0.step_requests()
        }
    };
    (but limits) => {
        fn name(&self) -> String {
            self.0.name()
        }

        fn architecture(&self) -> &tandem_engine::Architecture {
            self.0.architecture()
        }

        fn pages(&self) -> u32 {
            self.0.pages()
        }

        fn page_size(&self) -> u32 {
            self.0.page_size()
        }

        fn cache_type(&self) -> tandem_engine::CacheType {
            self.0.cache_type()
        }

        fn is_asynchronous(&self) -> bool {
            self.0.is_asynchronous()
        }

        fn finish(
            &mut self,
            tokens: &mut Vec<u32>,
            log_probs: &mut Vec<tandem_engine::LogProb>,
        ) -> Result<tandem_engine::StepTime, tandem_engine::Error> {
            self.0.finish(tokens, log_probs)
        }

        fn logits(&mut self) -> Result<Vec<f32>, tandem_engine::Error> {
            self.0.logits()
        }

        fn plan_with(
            &mut self,
            options: tandem_attn::plan::PlanOptions,
        ) -> Result<(), tandem_engine::Error> {
            self.0.plan_with(options)
        }

        fn take_apart(&mut self, on: bool) {
            self.0.take_apart(on);
        }
    };
}
#[allow(unused_imports, reason = "as above")]
pub(crate) use of_the_backend_within;

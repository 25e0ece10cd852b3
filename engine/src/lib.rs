//! Serving language models in Rust: Llama 3, Qwen 2.5 and 3 (dense), Mistral and Gemma 3 (text).
//!
//! A model is a folder in Hugging Face's format: `config.json`, safetensors, `tokenizer.json`. An [`Engine`] takes
//! requests and returns tokens. `tandem-schedule` composes its batches (decodes, and prompt chunks in the rest of a step).
//! `tandem-attn` computes attention over a paged KV cache. Common prefixes of prompts are computed once.
//!
//! ```no_run
//! use std::path::Path;
//! use tandem_engine::{Architecture, CpuBackend, CpuOptions, Engine, Event, Generation, Limits, Text, TextStream, Weights};
//!
//! let folder = Path::new("Qwen3-0.6B");
//! let (architecture, text) = (Architecture::read(folder)?, Text::read(folder)?);
//! let weights = Weights::open(folder)?;
//! let backend = CpuBackend::load(architecture, &weights, &CpuOptions::default(), &mut |_| ())?;
//! let mut engine = Engine::new(Box::new(backend), Limits::default())?;
//!
//! let prompt = text.encode("Attention is", true)?;
//! let mut stream = TextStream::after(&text, &prompt)?;
//! engine.submit(Generation::greedy(prompt, 32))?;
//! while !engine.is_idle() {
//!     engine.step(&mut |event| {
//!         if let Event::Token { token, .. } = event {
//!             print!("{}", stream.push(&text, token).unwrap_or_default());
//!         }
//!     })?;
//! }
//! // What was held back: the bytes of a character that did not become whole.
//! print!("{}", stream.finish(&text)?);
//! # Ok::<(), tandem_engine::Error>(())
//! ```
//!
//! Model families are rows of one table (`family.rs`). Loading refuses a model that needs something not implemented. With the
//! feature `cuda` a model runs on an NVIDIA GPU, with cuBLASLt for its matrix products. The feature `serve` adds a
//! server with OpenAI's interface.

mod architecture;
mod backend;
pub mod calibrate;
mod engine;
mod error;
mod family;
pub mod replay;
mod rules;
mod sampling;
#[cfg(feature = "serve")]
pub mod serve;
mod text;
mod weights;

pub use architecture::{Architecture, AttentionKind};
pub use backend::{Backend, CpuBackend, CpuOptions, MOST_UNDER_WAY, Part, StepTime, Work};
#[cfg(feature = "cuda")]
pub use backend::{GpuBackend, GpuOptions, cublas_lt_names};
pub use engine::{Engine, Event, Finish, Generation, StepReport};
pub use error::Error;
pub use family::Family;
pub use rules::{LogProbs, LogitRules, LogitWork};
pub use sampling::{GenerationConfig, SamplingOptions};
pub use tandem_attn::step::{LogProb, Penalties, Sampling};
pub use tandem_schedule::{CacheType, Limits, RequestId};
pub use text::{ChatOptions, Message, Text, TextStream, TokenText};
pub use weights::{Weight, Weights};

//! What `tandem generate` and `tandem serve` share.

pub mod generate;
pub mod replay;
pub mod serve;

use std::path::{Path, PathBuf};

use indicatif::{ProgressBar, ProgressStyle};
use tandem_attn::{
    Error as AttentionError,
    plan::{PlanError, PlanOptions, SplitMode},
    problem::Dtype,
};
use tandem_engine::{
    Architecture, Backend, CacheType, CpuBackend, CpuOptions, Engine, Error, GenerationConfig,
    Limits, Penalties, Sampling, SamplingOptions, Text, Weights,
};
use tandem_schedule::{
    ScheduleError,
    policy::{Policy, PrefillFirst, SarathiServe},
};

use crate::{
    Failure,
    backend::{Gpu, Place},
    cache_type,
    failure::too_little_memory,
    memory,
    serve_sim::{at_least_1, page_tokens},
    table::visible,
};

/// A model, its backend, and the sizes of its cache and steps.
#[derive(Clone, Debug, clap::Args)]
pub struct ModelArgs {
    /// Folder of the model: config.json, safetensors, tokenizer.json
    model: PathBuf,
    #[command(flatten)]
    place: Place,
    /// Capacity of the KV cache in tokens, for all requests together [default: in `generate` those of the prompt and
    /// --max-new-tokens; in `serve` on a GPU 9/10 of the memory that is free after the weights, as far as the requests of a step
    /// can use it, on the CPU 4096]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_1)]
    cache: Option<u32>,
    /// Tokens in a page of the KV cache
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = page_tokens)]
    page_size: u32,
    #[command(flatten)]
    cache_type: cache_type::Flag,
    /// Maximum tokens in a step; longer prompts are computed in chunks
    #[arg(long, value_name = "TOKENS", default_value_t = 1024, value_parser = at_least_1)]
    budget: u32,
    /// Cut the keys of attention at multiples of this number, so that no part of a step depends on the other requests: texts are
    /// the same to the bit in any batch. Prompts run in steps of their own, in chunks of --budget tokens [default: attention is
    /// cut as is fastest]
    #[arg(long, value_name = "TOKENS", value_parser = at_least_1)]
    fixed_splits: Option<u32>,
    /// Random numbers instead of the weights: for measurements
    #[arg(long)]
    random_weights: bool,
    /// Whether the model's generation_config.json says how tokens are drawn where a request, or a flag, does not
    #[arg(long, value_enum, default_value = "auto")]
    generation_config: GenerationFile,
}

/// Which defaults the model's `generation_config.json` gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum GenerationFile {
    /// temperature, top_p, top_k, min_p, repetition_penalty and do_sample.
    Auto,
    /// Only eos_token_id, which ends texts.
    None,
}

impl ModelArgs {
    /// The model's folder, or an error that says what to give instead. Most users first give a model's name.
    fn folder(&self) -> Result<&Path, Failure> {
        let folder = self.model.as_path();
        let what = match (folder.is_dir(), folder.exists()) {
            (true, _) if folder.join("config.json").exists() => return Ok(folder),
            (true, _) => "has no config.json",
            (false, true) => "is no folder",
            (false, false) => "is not there",
        };
        Err(Failure::Input(format!(
            "{} {what}: give the folder of a model as Hugging Face keeps it, with config.json, *.safetensors and \
             tokenizer.json. Nothing is downloaded; `hf download Qwen/Qwen3-0.6B --local-dir Qwen3-0.6B` brings one",
            visible(&folder.display().to_string(), false)
        )))
    }

    /// The model's description. Its texts end with the tokenizer's end, too.
    fn architecture(&self, text: &Text) -> Result<Architecture, Failure> {
        let mut architecture = Architecture::read(&self.model)?;
        let end = text.end();
        let end = end.filter(|end| !architecture.ends.contains(end));
        architecture.ends.extend(end);
        Ok(architecture)
    }

    /// How the model's files say that tokens are drawn. Warns of what they ask for and is not implemented.
    fn usual_sampling(&self) -> Result<SamplingOptions, Failure> {
        if self.generation_config == GenerationFile::None {
            return Ok(SamplingOptions::default());
        }
        let file = GenerationConfig::read(&self.model)?;
        if !file.unsupported.is_empty() {
            eprintln!(
                "generation_config.json has {}, which is not implemented: texts are written without it. Remove it from the \
                 file, or give --generation-config none, which takes only eos_token_id from there",
                visible(&file.unsupported.join(", "), false)
            );
        }
        Ok(file.sampling)
    }

    /// Loads the model for so many requests in a step, and caches of `cache` tokens if the flag gives none. Shows the progress by
    /// layers.
    fn backend(
        &self,
        architecture: Architecture,
        batch: u32,
        cache: Option<u32>,
    ) -> Result<Box<dyn Backend>, Failure> {
        let weights = match self.random_weights {
            true => Weights::random(1),
            false => Weights::open(&self.model)?,
        };
        let room = Room {
            cache: self.cache.or(cache),
            page_size: self.page_size,
            cache_type: self.cache_type.into(),
            step_tokens: self.budget,
            step_requests: batch,
        };
        let planned = self.planned()?;
        let mut backend = room.backend(self.place.gpu()?, architecture, &weights)?;
        if let Some(planned) = planned {
            backend.plan_with(planned)?;
        }
        Ok(backend)
    }

    /// How attention is planned with fixed splits; they fall between pages.
    fn planned(&self) -> Result<Option<PlanOptions>, Failure> {
        let Some(tokens) = self.fixed_splits else {
            return Ok(None);
        };
        let page_size = self.page_size;
        if !tokens.is_multiple_of(page_size) {
            let error = PlanError::FixedSplit { tokens, page_size };
            return Err(Failure::Input(format!("--fixed-splits: {error}")));
        }
        let split = SplitMode::Fixed { tokens };
        Ok(Some(PlanOptions::default().with_split(split)))
    }

    /// An engine for so many requests in a step, so many that wait, and so many tokens of a request.
    fn engine(
        &self,
        backend: Box<dyn Backend>,
        batch: u32,
        waiting: usize,
        (request_tokens, prefix_cache): (u32, bool),
    ) -> Result<Engine, Failure> {
        let limits = Limits {
            step_tokens: self.budget,
            step_requests: batch,
            running: batch,
            waiting,
            request_tokens,
            prefix_cache,
            ..Limits::default()
        };
        // Chunks in the rest of a step would depend on the other requests in it.
        let policy: Box<dyn Policy> = match self.fixed_splits {
            None => Box::new(SarathiServe),
            Some(_) => Box::new(PrefillFirst),
        };
        Ok(Engine::with_policy(backend, limits, policy)?)
    }
}

/// Says what the backend warns of.
fn warn(bar: &ProgressBar, warnings: Vec<String>) {
    for what in warnings {
        bar.suspend(|| eprintln!("{what}"));
    }
}

/// Says that texts only end at their maximum length, if no file of the model names a token that ends them.
fn warn_of_no_end(architecture: &Architecture) {
    if architecture.ends.is_empty() {
        eprintln!(
            "the model's files name no token that ends a text, so that each has its maximum length: give eos_token_id in \
             config.json"
        );
    }
}

/// Sizes for which a backend is made.
struct Room {
    /// Tokens of all requests; none for the default.
    cache: Option<u32>,
    page_size: u32,
    cache_type: CacheType,
    step_tokens: u32,
    #[cfg_attr(
        not(feature = "cuda"),
        expect(dead_code, reason = "the CPU reserves nothing for each request")
    )]
    step_requests: u32,
}

impl Room {
    /// Loads a model and shows the progress by layers.
    fn backend(
        &self,
        gpu: Option<Gpu>,
        architecture: Architecture,
        weights: &Weights,
    ) -> Result<Box<dyn Backend>, Failure> {
        let style = ProgressStyle::with_template("loading [{bar:40}] layer {pos} of {len}");
        let style = style.expect("the template is sound").progress_chars("=> ");
        let bar = ProgressBar::new(architecture.layers.len() as u64).with_style(style);
        let progress = &mut |done| bar.set_position(done as u64);
        let on_gpu = gpu.is_some();
        let backend: Box<dyn Backend> = match gpu {
            #[cfg(feature = "cuda")]
            Some(gpu) => {
                let mut options = tandem_engine::GpuOptions::default();
                options.cache_tokens = self.cache;
                options.page_size = self.page_size;
                options.cache_type = self.cache_type;
                options.step_tokens = self.step_tokens;
                options.step_requests = self.step_requests;
                let backend =
                    tandem_engine::GpuBackend::load(gpu, architecture, weights, &options, progress);
                Box::new(backend?)
            }
            #[cfg(not(feature = "cuda"))]
            Some(never) => match never {},
            None => {
                let mut options = CpuOptions::default();
                options.cache_tokens = self.cache.unwrap_or(options.cache_tokens);
                options.page_size = self.page_size;
                options.cache_type = self.cache_type;
                let pages = options.cache_tokens.div_ceil(self.page_size);
                let tokens = u64::from(pages) * u64::from(self.page_size);
                let kv_bytes = architecture.kv_bytes_per_token(self.cache_type, Dtype::F32);
                memory::check(
                    &format!("the model in f32, with caches of {tokens} tokens in main memory,"),
                    (4 * architecture.weights()).saturating_add(tokens.saturating_mul(kv_bytes)),
                    "give a smaller --cache, caches of 8 bits (--cache-type e4m3-scaled), or a smaller model",
                )?;
                let backend = CpuBackend::load(architecture, weights, &options, progress);
                Box::new(backend?)
            }
        };
        bar.finish_and_clear();
        if on_gpu && self.cache.is_none() {
            let tokens = u64::from(backend.pages()) * u64::from(backend.page_size());
            eprintln!("the KV cache has room for {tokens} tokens; --cache gives it another size");
        }
        Ok(backend)
    }
}

/// Sampling parameters.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct SamplingArgs {
    /// Above 1 flattens, below 1 sharpens the distribution of the next token; 0: always the most likely token [default: that
    /// of the model's generation_config.json, else 0]
    #[arg(long)]
    temperature: Option<f32>,
    /// Sample from this number of most likely tokens; 0: from all [default: the model's, else 0]
    #[arg(long)]
    top_k: Option<u32>,
    /// Sample from the most likely tokens whose probabilities sum to this value [default: the model's, else 1]
    #[arg(long)]
    top_p: Option<f32>,
    /// Sample from tokens whose probability is at least this fraction of the most likely token's [default: the model's,
    /// else 0]
    #[arg(long)]
    min_p: Option<f32>,
    /// Divide positive logits of tokens of the prompt and the text by this number, and multiply others; 1: neither [default:
    /// the model's, else 1]
    #[arg(long)]
    repetition_penalty: Option<f32>,
    /// Equal seeds give equal texts [default: 0]
    #[arg(long)]
    seed: Option<u64>,
}

impl SamplingArgs {
    /// Options that are not given are the usual ones of the model.
    ///
    /// # Errors
    /// [`Failure::Input`] if sampling options are given although temperature 0 does not sample.
    fn sampling(self, usual: SamplingOptions) -> Result<(Sampling, Penalties), Failure> {
        let Self {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            seed,
        } = self;
        let given = [
            ("--top-k", top_k.is_some()),
            ("--top-p", top_p.is_some()),
            ("--min-p", min_p.is_some()),
            ("--seed", seed.is_some()),
        ];
        let options = SamplingOptions {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            ..SamplingOptions::default()
        };
        let options = options.or(usual);
        let sampling = options.sampling(0.0, seed.unwrap_or(0));
        let first = given.iter().find(|(_, given)| *given);
        if let Some((option, _)) = first.filter(|_| sampling.temperature == 0.0) {
            return Err(Failure::Input(format!(
                "{option} says how a token is drawn, and without --temperature none is: the likeliest is taken. Give \
                 --temperature, 1 for the model's own probabilities"
            )));
        }
        // As for the first token.
        let checked = sampling.draw(0);
        let penalties = options.penalties();
        let checked = checked.and_then(|_| penalties.check());
        checked.map_err(|error| Failure::Input(error.to_string()))?;
        Ok((sampling, penalties))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        match error {
            Error::Attention(AttentionError::OutOfMemory { bytes, free, total }) => {
                let instead = "a smaller --cache or --budget, caches of 8 bits (--cache-type e4m3-scaled), or a smaller model";
                too_little_memory([bytes, free, total], instead)
            }
            Error::Attention(error) => error.into(),
            Error::Read { .. } => Self::Input(visible(&error.to_string(), false)),
            Error::Schedule(ScheduleError::PoolTooSmall { wanted, total }) => Self::Input(format!(
                "the request needs {wanted} pages of the KV cache, which has {total}: give a larger --cache or fewer tokens"
            )),
            Error::NoCublasLt => Self::Backend(error.to_string()),
            Error::CublasLt { .. } | Error::Cuda { .. } => Self::Wrong(error.to_string()),
            _ => Self::Input(error.to_string()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_fails_is_no_wrong_input() {
        let failure = Failure::from(Error::Cuda {
            call: "cuMemcpyHtoDAsync",
            status: "CUDA_ERROR_ILLEGAL_ADDRESS".to_owned(),
        });
        assert!(matches!(failure, Failure::Wrong(_)), "{failure:?}");
    }
}

//! How tokens are drawn where a request does not say: `generation_config.json`.

use std::{fs, io, path::Path};

use serde::Deserialize;
use serde_json::{Map, Value};
use tandem_attn::step::{Penalties, Sampling};

use crate::{Error, error::damaged};

pub(crate) const FILE: &str = "generation_config.json";

/// Sampling parameters, each of which may be left open.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingOptions {
    /// See [`Sampling::temperature`].
    pub temperature: Option<f32>,
    /// See [`Sampling::top_k`].
    pub top_k: Option<u32>,
    /// See [`Sampling::top_p`].
    pub top_p: Option<f32>,
    /// See [`Sampling::min_p`].
    pub min_p: Option<f32>,
    /// See [`Penalties::presence`].
    pub presence_penalty: Option<f32>,
    /// See [`Penalties::frequency`].
    pub frequency_penalty: Option<f32>,
    /// See [`Penalties::repetition`].
    pub repetition_penalty: Option<f32>,
}

impl SamplingOptions {
    /// Whether a rule is given that is not neutral: one that keeps fewer tokens than all, or is wrong.
    #[cfg(feature = "serve")]
    pub(crate) fn has_rules(&self) -> bool {
        self.top_k.is_some_and(|k| k != 0)
            || self.top_p.is_some_and(|p| p != 1.0)
            || self.min_p.is_some_and(|p| p != 0.0)
    }

    /// Takes what it leaves open from others.
    #[must_use]
    pub fn or(self, others: Self) -> Self {
        Self {
            temperature: self.temperature.or(others.temperature),
            top_k: self.top_k.or(others.top_k),
            top_p: self.top_p.or(others.top_p),
            min_p: self.min_p.or(others.min_p),
            presence_penalty: self.presence_penalty.or(others.presence_penalty),
            frequency_penalty: self.frequency_penalty.or(others.frequency_penalty),
            repetition_penalty: self.repetition_penalty.or(others.repetition_penalty),
        }
    }

    /// Penalties. What is open is none.
    #[must_use]
    pub fn penalties(self) -> Penalties {
        let none = Penalties::NONE;
        Penalties {
            presence: self.presence_penalty.unwrap_or(none.presence),
            frequency: self.frequency_penalty.unwrap_or(none.frequency),
            repetition: self.repetition_penalty.unwrap_or(none.repetition),
        }
    }

    /// All other parameters. What is open still is neutral, and the temperature is the given one. A temperature above 0
    /// becomes at least [`Sampling::COLDEST`].
    #[must_use]
    pub fn sampling(self, temperature: f32, seed: u64) -> Sampling {
        let temperature = self.temperature.unwrap_or(temperature);
        Sampling {
            temperature: match temperature > 0.0 {
                true => temperature.max(Sampling::COLDEST),
                false => temperature,
            },
            top_k: self.top_k.unwrap_or(0),
            top_p: self.top_p.unwrap_or(1.0),
            min_p: self.min_p.unwrap_or(0.0),
            seed,
        }
    }
}

/// What a model's `generation_config.json` says about texts. The tokens that end them are in
/// [`Architecture::ends`](crate::Architecture::ends).
#[derive(Clone, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct GenerationConfig {
    /// How tokens are drawn. If `do_sample` is false, the temperature is 0, and of the file's other parameters only the repetition
    /// penalty counts.
    pub sampling: SamplingOptions,
    /// Settings that would change texts and are not implemented, each as `name = value`. The caller warns of them.
    pub unsupported: Vec<String>,
}

/// The fields that are used, and the others.
#[derive(Deserialize)]
struct Fields {
    do_sample: Option<bool>,
    temperature: Option<f32>,
    top_k: Option<i64>,
    top_p: Option<f32>,
    min_p: Option<f32>,
    repetition_penalty: Option<f32>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

/// Fields that do not change a text here.
const BESIDE_THE_TEXT: [&str; 16] = [
    "_commit_hash",
    "_from_model_config",
    "bos_token_id",
    "cache_implementation",
    "chat_format",
    "decoder_start_token_id",
    "eos_token_id",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "pad_token_id",
    "return_dict_in_generate",
    "transformers_version",
    "trust_remote_code",
    "use_cache",
];

/// Whether a value has no effect.
fn is_neutral(name: &str, value: &Value) -> bool {
    let neutral = match name {
        "encoder_repetition_penalty"
        | "length_penalty"
        | "typical_p"
        | "num_beams"
        | "num_beam_groups"
        | "num_return_sequences" => 1.0,
        // The default of `transformers`, which programs do not take for a limit.
        "max_length" => 20.0,
        _ => 0.0,
    };
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::Number(number) => number.as_f64() == Some(neutral),
        Value::Array(list) => list.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::Bool(true) | Value::String(_) => false,
    }
}

impl GenerationConfig {
    /// Reads `generation_config.json` from a model's folder. Without the file nothing is set.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Malformed`], also for a parameter out of its range.
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join(FILE);
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Error::Read { path, error }),
        };
        Self::parse(&text).map_err(|reason| Error::Malformed { path, reason })
    }

    fn parse(text: &str) -> Result<Self, String> {
        let fields: Fields = serde_json::from_str(text).map_err(|error| damaged(&error))?;
        let top_k =
            match fields.top_k {
                // All tokens.
                Some(-1) => Some(0),
                Some(top_k) => Some(u32::try_from(top_k).map_err(|_| {
                    format!("top_k is {top_k}: give a number of tokens, or 0 for all")
                })?),
                None => None,
            };
        let repetition_penalty = fields.repetition_penalty;
        let sampling = match fields.do_sample {
            Some(false) => SamplingOptions {
                temperature: Some(0.0),
                repetition_penalty,
                ..SamplingOptions::default()
            },
            _ => SamplingOptions {
                // A file that asks for sampling and gives no temperature has the model's own probabilities.
                temperature: fields.temperature.or(fields.do_sample.map(|_| 1.0)),
                top_k,
                top_p: fields.top_p,
                min_p: fields.min_p,
                repetition_penalty,
                ..SamplingOptions::default()
            },
        };
        // As for the first token of a request.
        let checked = sampling.sampling(1.0, 0).draw(0);
        checked.map_err(|error| damaged(&error))?;
        let checked = sampling.penalties().check();
        checked.map_err(|error| damaged(&error))?;
        let changing = fields.others.iter().filter(|(name, value)| {
            !BESIDE_THE_TEXT.contains(&name.as_str()) && !is_neutral(name, value)
        });
        Ok(Self {
            sampling,
            unsupported: changing
                .map(|(name, value)| format!("{name} = {value}"))
                .collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> GenerationConfig {
        GenerationConfig::parse(text).unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    /// As Qwen 3's model card recommends.
    #[test]
    fn sampling_parameters_are_defaults() {
        let read = read(
            r#"{"bos_token_id": 151643, "do_sample": true, "eos_token_id": [151645, 151643], "pad_token_id": 151643,
            "temperature": 0.6, "top_k": 20, "top_p": 0.95, "transformers_version": "4.51.0"}"#,
        );
        assert_eq!(read.unsupported, [""; 0]);
        let file = read.sampling.sampling(1.0, 7);
        let expected = Sampling {
            temperature: 0.6,
            top_k: 20,
            top_p: 0.95,
            min_p: 0.0,
            seed: 7,
        };
        assert_eq!(file, expected);
        let request = SamplingOptions {
            temperature: Some(0.0),
            top_p: Some(1.0),
            ..SamplingOptions::default()
        };
        let both = request.or(read.sampling).sampling(1.0, 7);
        assert_eq!((both.temperature, both.top_k, both.top_p), (0.0, 20, 1.0));
    }

    #[test]
    fn a_file_that_does_not_sample_is_greedy() {
        let greedy = read(r#"{"do_sample": false, "temperature": 0.6, "top_p": 0.9}"#).sampling;
        assert_eq!((greedy.temperature, greedy.top_p), (Some(0.0), None));
        assert_eq!(
            read(r#"{"do_sample": true}"#).sampling.temperature,
            Some(1.0)
        );
        // Without a word about sampling, the caller's defaults stay.
        assert_eq!(read(r#"{"eos_token_id": 2}"#), GenerationConfig::default());
        assert_eq!(read(r#"{"top_k": -1}"#).sampling.top_k, Some(0));
    }

    #[test]
    fn what_would_change_texts_is_named() {
        let named = read(
            r#"{"repetition_penalty": 1.05, "encoder_repetition_penalty": 2.0, "no_repeat_ngram_size": 3, "suppress_tokens": [7], "max_new_tokens": 64,
            "stop_strings": "x"}"#,
        );
        assert_eq!(named.sampling.penalties().repetition, 1.05);
        let mut unsupported = named.unsupported;
        unsupported.sort_unstable();
        let expected = [
            "encoder_repetition_penalty = 2.0",
            "max_new_tokens = 64",
            "no_repeat_ngram_size = 3",
            "stop_strings = \"x\"",
            "suppress_tokens = [7]",
        ];
        assert_eq!(unsupported, expected);
        let neutral = read(
            r#"{"encoder_repetition_penalty": 1.0, "num_beams": 1, "typical_p": 1, "no_repeat_ngram_size": 0, "max_length": 20,
            "suppress_tokens": null, "bad_words_ids": [], "early_stopping": false, "use_cache": true}"#,
        );
        assert_eq!(neutral, GenerationConfig::default());
    }

    #[test]
    fn a_parameter_out_of_its_range_is_refused() {
        for (text, said) in [
            (r#"{"temperature": -1.0}"#, "temperature"),
            (r#"{"top_p": 2.0}"#, "top_p"),
            (r#"{"repetition_penalty": 0}"#, "repetition_penalty"),
            (
                r#"{"top_k": -5}"#,
                "top_k is -5: give a number of tokens, or 0 for all",
            ),
        ] {
            let error = GenerationConfig::parse(text).unwrap_err();
            assert!(error.contains(said), "{error}");
        }
    }

    /// Files and requests have such temperatures to get the most probable token.
    #[test]
    fn a_temperature_above_0_is_at_least_the_smallest_one() {
        let file = read(r#"{"do_sample": true, "temperature": 1e-6}"#).sampling;
        let request = SamplingOptions {
            temperature: Some(1e-30),
            ..SamplingOptions::default()
        };
        for options in [file, request] {
            let sampling = options.sampling(1.0, 7);
            assert_eq!(sampling.temperature, Sampling::COLDEST);
            sampling.draw(0).unwrap();
        }
    }
}

//! Reads `config.json` as any version of `transformers` writes it.

mod fields;
mod refused;
mod ropes;
#[cfg(test)]
mod tests;

use std::{fs, io, path::Path};

use serde::de::DeserializeOwned;
use tandem_attn::{
    problem::Spec,
    step::{RmsNorm, RopeScaling},
};

use self::{
    fields::{Config, GenerationConfig, Ids},
    refused::refuse_unknown,
    ropes::ropes,
};
use super::{Architecture, AttentionKind};
use crate::{
    Error,
    error::damaged,
    family::{FAMILIES, Traits, Window},
    sampling::FILE as GENERATION,
};

pub(super) fn read(folder: &Path) -> Result<Architecture, Error> {
    let text = |name: &str| {
        let path = folder.join(name);
        fs::read_to_string(&path).map_err(|error| Error::Read { path, error })
    };
    let generation = match text(GENERATION) {
        Ok(text) => Some(text),
        Err(Error::Read { error, .. }) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    parse(
        &folder.join("config.json"),
        &text("config.json")?,
        generation.as_deref(),
    )
}

pub(super) fn parse(
    path: &Path,
    text: &str,
    generation: Option<&str>,
) -> Result<Architecture, Error> {
    let outer: Config = json(path, text)?;
    let ends = match generation {
        Some(text) => {
            json::<GenerationConfig>(&path.with_file_name(GENERATION), text)?.eos_token_id
        }
        None => None,
    };
    let outer_ends = outer.eos_token_id;
    let config = match outer.text_config {
        None => Config {
            eos_token_id: None,
            text_config: None,
            ..outer
        },
        Some(inner) => {
            let inner: Config =
                serde_json::from_value(inner).map_err(|error| malformed(path, &error))?;
            Config {
                tie_word_embeddings: inner.tie_word_embeddings.or(outer.tie_word_embeddings),
                quantization_config: inner.quantization_config.or(outer.quantization_config),
                ..inner
            }
        }
    };
    // An empty list names none.
    let mut named = [ends, outer_ends, config.eos_token_id]
        .into_iter()
        .flatten()
        .map(Ids::into_vec);
    let ends = named.find(|ids| !ids.is_empty()).unwrap_or_default();
    let traits = FAMILIES
        .iter()
        .find(|traits| traits.model_type == config.model_type);
    let traits = traits.ok_or_else(|| Error::Family {
        got: config.model_type.clone(),
        known: FAMILIES
            .iter()
            .map(|traits| traits.model_type)
            .collect::<Vec<_>>()
            .join(", "),
    })?;
    let config = Config {
        eos_token_id: None,
        ..config
    };
    build(&config, traits, ends)
}

fn json<T: DeserializeOwned>(path: &Path, text: &str) -> Result<T, Error> {
    serde_json::from_str(text).map_err(|error| malformed(path, &error))
}

fn malformed(path: &Path, error: &serde_json::Error) -> Error {
    Error::Malformed {
        path: path.to_owned(),
        reason: damaged(error),
    }
}

// Larger than in any real model, and small enough for products of sizes: those of heads fit 32 bits, numbers of weights
// 64 bits.
const LAYERS: usize = 1 << 10;
const HEADS: usize = 1 << 10;
const HIDDEN: usize = 1 << 20;
const INTERMEDIATE: usize = 1 << 22;
const VOCABULARY: usize = 1 << 24;

/// Checks a size that is used in an allocation or a product.
fn sized(field: &'static str, got: usize, most: usize) -> Result<usize, Error> {
    match (1..=most).contains(&got) {
        true => Ok(got),
        false => Err(Error::Unsupported {
            field,
            got: got.to_string(),
            rule: format!("supported: 1 to {most}"),
        }),
    }
}

fn build(config: &Config, traits: &Traits, ends: Vec<u32>) -> Result<Architecture, Error> {
    refuse_unknown(config, traits)?;
    let need = |field: &'static str, value: Option<usize>| {
        value.ok_or_else(|| Error::Missing {
            field,
            model_type: config.model_type.clone(),
        })
    };
    let defaults = &traits.defaults;
    let hidden = sized(
        "hidden_size",
        need("hidden_size", config.hidden_size)?,
        HIDDEN,
    )?;
    let layers = need("num_hidden_layers", config.num_hidden_layers)?;
    let layers = sized("num_hidden_layers", layers, LAYERS)?;
    let (default_q, default_kv) = defaults.heads.unzip();
    let q_heads = config.num_attention_heads.or(default_q);
    let q_heads = need("num_attention_heads", q_heads.map(|heads| heads as usize))?;
    let q_heads = sized("num_attention_heads", q_heads, HEADS)? as u32;
    let kv_heads = config.num_key_value_heads.or(default_kv).unwrap_or(q_heads);
    sized("num_key_value_heads", kv_heads as usize, HEADS)?;
    let head_dim = config.head_dim.or(defaults.head_dim);
    let head_dim = head_dim.unwrap_or_else(|| hidden as u32 / q_heads);

    let mut spec = Spec::new(q_heads, kv_heads, head_dim);
    if traits.own_scale {
        spec = spec.with_scale(config.query_pre_attn_scalar.unwrap_or(256.0).powf(-0.5));
    }
    if let Some(cap) = config.attn_logit_softcapping {
        spec = spec.with_soft_cap(cap);
    }
    spec.check().map_err(tandem_attn::Error::from)?;
    let window = config.sliding_window.unwrap_or(defaults.window);
    let slides = sliding_layers(config, traits, layers, window)?;
    let [global, local] = ropes(config, traits, head_dim)?;
    let positions = config.max_position_embeddings.or(defaults.positions);
    let positions = need(
        "max_position_embeddings",
        positions.map(|most| most as usize),
    )? as u32;
    let positions = match global.scaling {
        // Models get YaRN after their training, and `max_position_embeddings` stays as it was.
        RopeScaling::Yarn(yarn) => {
            positions.max((yarn.factor * f64::from(yarn.original_positions)) as u32)
        }
        _ => positions,
    };
    let global = AttentionKind { spec, rope: global };
    let local = window.map(|keys| AttentionKind {
        // The window counts the query's own position.
        spec: spec.with_window_left(keys.saturating_sub(1)),
        rope: local,
    });
    if let Some(local) = &local {
        local.spec.check().map_err(tandem_attn::Error::from)?;
    }
    let mut kinds = Vec::new();
    let layers = slides.iter().map(|&slides| {
        let kind = local.filter(|_| slides).unwrap_or(global);
        kinds
            .iter()
            .position(|known| *known == kind)
            .unwrap_or_else(|| {
                kinds.push(kind);
                kinds.len() - 1
            })
    });
    let layers = layers.collect();

    let eps = config.rms_norm_eps.unwrap_or(defaults.norm_eps);
    if !(0.0..=1.0).contains(&eps) {
        return Err(Error::Unsupported {
            field: "rms_norm_eps",
            got: eps.to_string(),
            rule: "give a number from 0 to 1".to_owned(),
        });
    }
    let out_bias = traits.attention_bias && config.attention_bias == Some(true);
    let vocabulary = need("vocab_size", config.vocab_size.or(defaults.vocabulary))?;
    let intermediate = need("intermediate_size", config.intermediate_size)?;
    Ok(Architecture {
        family: traits.family,
        vocabulary: sized("vocab_size", vocabulary, VOCABULARY)?,
        hidden,
        intermediate: sized("intermediate_size", intermediate, INTERMEDIATE)?,
        kinds,
        layers,
        norm: match traits.norm_adds_one {
            true => RmsNorm::gemma(eps),
            false => RmsNorm::new(eps),
        },
        qk_norm: traits.qk_norm,
        qkv_bias: traits.qkv_bias || out_bias,
        out_bias,
        norms_after: traits.norms_after,
        activation: traits.activation,
        embedding_scale: match traits.scales_embedding {
            // The model was trained with this factor rounded to bf16, the type of the embedding.
            true => half::bf16::from_f64((hidden as f64).sqrt()).to_f32(),
            false => 1.0,
        },
        tied: config.tie_word_embeddings.unwrap_or(defaults.tied),
        positions,
        ends,
    })
}

/// For each layer, whether it has a sliding window.
fn sliding_layers(
    config: &Config,
    traits: &Traits,
    layers: usize,
    window: Option<u32>,
) -> Result<Vec<bool>, Error> {
    let switched_off =
        traits.window == Window::Upper && !config.use_sliding_window.unwrap_or(false);
    if window.is_none() || switched_off {
        return Ok(vec![false; layers]);
    }
    let refuse = |rule: &str| {
        Err(Error::Unsupported {
            field: "sliding_window",
            got: window.unwrap_or_default().to_string(),
            rule: rule.to_owned(),
        })
    };
    match (traits.window, window) {
        (Window::None, _) => return refuse("this family has no windows: set it to null"),
        (_, Some(0)) => {
            return refuse("every key would be hidden: give at least 1, or null for no window");
        }
        _ => {}
    }
    let Some(types) = &config.layer_types else {
        let slides = |layer: usize| match traits.window {
            Window::None => false,
            Window::All => true,
            Window::Upper => layer >= config.max_window_layers.unwrap_or(28),
            Window::AllButEach(usual) => {
                !(layer + 1).is_multiple_of(config.sliding_window_pattern.unwrap_or(usual).max(1))
            }
        };
        return Ok((0..layers).map(slides).collect());
    };
    if types.len() != layers {
        return Err(Error::Unsupported {
            field: "layer_types",
            got: format!("{} entries", types.len()),
            rule: format!("give one for each of the {layers} layers"),
        });
    }
    let slides = |name: &String| match name.as_str() {
        "sliding_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(Error::Unsupported {
            field: "layer_types",
            got: other.to_owned(),
            rule: "supported: full_attention, sliding_attention".to_owned(),
        }),
    };
    types.iter().map(slides).collect()
}

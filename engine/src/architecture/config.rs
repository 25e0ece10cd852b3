//! Reads `config.json` as any version of `transformers` writes it.

use std::{fs, io, path::Path};

use serde::{Deserialize, Deserializer, de::DeserializeOwned};
use tandem_attn::{
    problem::Spec,
    step::{Activation, RmsNorm, Rope, RopeScaling, Yarn},
};

use super::{Architecture, AttentionKind};
use crate::{
    Error,
    family::{FAMILIES, Traits, Window},
};

/// The fields that are read, under the names in the file.
#[derive(Debug, Deserialize)]
struct Config {
    model_type: String,
    /// Multimodal models keep the configuration of their text part here.
    text_config: Option<serde_json::Value>,
    vocab_size: Option<usize>,
    hidden_size: Option<usize>,
    intermediate_size: Option<usize>,
    num_hidden_layers: Option<usize>,
    num_attention_heads: Option<u32>,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    max_position_embeddings: Option<u32>,
    rms_norm_eps: Option<f32>,
    hidden_act: Option<String>,
    /// Gemma's name of `hidden_act`. A file may have both.
    hidden_activation: Option<String>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    eos_token_id: Option<Ids>,
    // Rotary embedding: one object since `transformers` 5, several fields before.
    rope_parameters: Option<RopeParameters>,
    rope_theta: Option<f64>,
    rope_scaling: Option<RopeFields>,
    rope_local_base_freq: Option<f64>,
    partial_rotary_factor: Option<f64>,
    // Windows.
    layer_types: Option<Vec<String>>,
    /// If the field is absent, the family's value applies; `null` means no window.
    #[serde(default, deserialize_with = "named")]
    sliding_window: Option<Option<u32>>,
    use_sliding_window: Option<bool>,
    max_window_layers: Option<usize>,
    sliding_window_pattern: Option<usize>,
    // Scales and caps.
    query_pre_attn_scalar: Option<f32>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    use_bidirectional_attention: Option<bool>,
    quantization_config: Option<serde_json::Value>,
}

/// Tells a `null` field from an absent one.
fn named<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<u32>>, D::Error> {
    Option::deserialize(field).map(Some)
}

#[derive(Debug, Deserialize)]
struct GenerationConfig {
    eos_token_id: Option<Ids>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a token id or a list of them")]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
struct RopeFields {
    rope_type: Option<String>,
    /// The older name of `rope_type`. A file may have both.
    #[serde(rename = "type")]
    old_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<u32>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    attention_factor: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    partial_rotary_factor: Option<f64>,
}

/// Either one set of fields for all layers, or one for each kind of layer.
#[derive(Debug, Deserialize)]
struct RopeParameters {
    full_attention: Option<RopeFields>,
    sliding_attention: Option<RopeFields>,
    #[serde(flatten)]
    all: RopeFields,
}

const GENERATION: &str = "generation_config.json";

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
    let mut outer_ends = outer.eos_token_id;
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
    outer_ends = outer_ends.or(config.eos_token_id);
    let ends = ends.or(outer_ends).map(Ids::into_vec).unwrap_or_default();
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
        reason: error.to_string(),
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
        qkv_bias: traits.qkv_bias,
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

/// Ignoring an option that changes the result would give a wrong text, so it is refused.
fn refuse_unknown(config: &Config, traits: &Traits) -> Result<(), Error> {
    let refuse = |field, got: String, rule: &str| {
        let rule = rule.to_owned();
        Err(Error::Unsupported { field, got, rule })
    };
    if let Some(quantised) = &config.quantization_config {
        let method = quantised
            .get("quant_method")
            .map_or("something", |name| name.as_str().unwrap_or("something"));
        return refuse(
            "quantization_config",
            method.to_owned(),
            "use the model in BF16",
        );
    }
    if config.attention_bias == Some(true) && !traits.qkv_bias {
        return refuse(
            "attention_bias",
            "true".to_owned(),
            "supported: no biases, except Qwen 2's biases of Q, K and V",
        );
    }
    if config.mlp_bias == Some(true) {
        return refuse(
            "mlp_bias",
            "true".to_owned(),
            "supported: feed-forward parts without biases",
        );
    }
    if config.use_bidirectional_attention == Some(true) {
        return refuse(
            "use_bidirectional_attention",
            "true".to_owned(),
            "supported: causal models",
        );
    }
    if let Some(cap) = config.final_logit_softcapping {
        return refuse(
            "final_logit_softcapping",
            cap.to_string(),
            "supported: logits without a cap",
        );
    }
    let in_rope = config.rope_parameters.iter().flat_map(|new| {
        let kinds = [&new.full_attention, &new.sliding_attention];
        kinds.into_iter().flatten().chain([&new.all])
    });
    let turned = in_rope
        .chain(&config.rope_scaling)
        .map(|fields| fields.partial_rotary_factor);
    let mut turned = turned.chain([config.partial_rotary_factor]).flatten();
    if let Some(part) = turned.find(|&part| part != 1.0) {
        return refuse(
            "partial_rotary_factor",
            part.to_string(),
            "these families turn whole heads",
        );
    }
    let names: &[&str] = match traits.activation {
        Activation::GeluTanh => &["gelu_pytorch_tanh"],
        _ => &["silu", "swish"],
    };
    let named = [&config.hidden_act, &config.hidden_activation];
    let other = named
        .into_iter()
        .flatten()
        .find(|name| !names.contains(&name.as_str()));
    match other {
        Some(got) => refuse(
            "hidden_act",
            got.clone(),
            &format!("this family has {}", names[0]),
        ),
        None => Ok(()),
    }
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

/// The rotary embeddings of layers without and with a sliding window.
fn ropes(config: &Config, traits: &Traits, head_dim: u32) -> Result<[Rope; 2], Error> {
    let rope = |fields: &RopeFields| rope(config, traits, head_dim, fields);
    let local_theta = config.rope_local_base_freq.or(Some(10000.0));
    let theta = match traits.local_rope {
        true => [config.rope_theta, local_theta],
        false => [config.rope_theta; 2],
    };
    let usual = |kind: usize, fields: &RopeFields| RopeFields {
        rope_theta: fields.rope_theta.or(theta[kind]),
        ..fields.clone()
    };
    let of_all = |fields: &RopeFields| match traits.local_rope {
        true => [usual(0, fields), usual(1, &RopeFields::default())],
        false => [usual(0, fields), usual(1, fields)],
    };
    let Some(new) = &config.rope_parameters else {
        let old = config.rope_scaling.clone().unwrap_or_default();
        let [global, local] = of_all(&old);
        return Ok([rope(&global)?, rope(&local)?]);
    };
    let by_kind = [&new.full_attention, &new.sliding_attention];
    let [global, local] = match by_kind {
        [None, None] => of_all(&new.all),
        _ => [0, 1].map(|kind| {
            usual(
                kind,
                by_kind[kind].as_ref().unwrap_or(&RopeFields::default()),
            )
        }),
    };
    let ropes = [rope(&global)?, rope(&local)?];
    if let Some(old) = &config.rope_scaling {
        let old = RopeFields {
            rope_theta: old.rope_theta.or(global.rope_theta),
            ..old.clone()
        };
        if rope(&old)? != ropes[0] {
            let kind = old.rope_type.or(old.old_type);
            return Err(Error::Unsupported {
                field: "rope_scaling",
                got: kind.unwrap_or_else(|| "default".to_owned()),
                rule: "rope_parameters says otherwise: give one of them".to_owned(),
            });
        }
    }
    Ok(ropes)
}

fn rope(
    config: &Config,
    traits: &Traits,
    head_dim: u32,
    fields: &RopeFields,
) -> Result<Rope, Error> {
    let need = |field: &'static str, value: Option<f64>| {
        value.ok_or_else(|| Error::Missing {
            field,
            model_type: config.model_type.clone(),
        })
    };
    let factor = || need("rope_scaling.factor", fields.factor);
    let positions = fields.original_max_position_embeddings;
    let original_positions = || {
        let positions = positions.or(config.max_position_embeddings).map(f64::from);
        need("rope_scaling.original_max_position_embeddings", positions)
            .map(|positions| positions as u32)
    };
    if let (Some(kind), Some(old)) = (&fields.rope_type, &fields.old_type)
        && kind != old
    {
        return Err(Error::Unsupported {
            field: "rope_scaling.type",
            got: old.clone(),
            rule: format!("rope_type is {kind}: give one of them"),
        });
    }
    let kind = fields.rope_type.as_ref().or(fields.old_type.as_ref());
    let scaling = match kind.map(String::as_str) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor()? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: need("rope_scaling.low_freq_factor", fields.low_freq_factor)?,
            high_freq_factor: need("rope_scaling.high_freq_factor", fields.high_freq_factor)?,
            original_positions: original_positions()?,
        },
        Some("yarn") => {
            let usual = Yarn::new(factor()?, original_positions()?);
            RopeScaling::Yarn(Yarn {
                beta_fast: fields.beta_fast.unwrap_or(usual.beta_fast),
                beta_slow: fields.beta_slow.unwrap_or(usual.beta_slow),
                attention_factor: fields.attention_factor,
                mscale: fields.mscale,
                mscale_all_dim: fields.mscale_all_dim,
                truncate: fields.truncate.unwrap_or(usual.truncate),
                ..usual
            })
        }
        Some(other) => {
            return Err(Error::Unsupported {
                field: "rope_scaling.rope_type",
                got: other.to_owned(),
                rule: "supported: default, linear, llama3, yarn".to_owned(),
            });
        }
    };
    let theta = fields.rope_theta.unwrap_or(traits.defaults.rope_theta);
    Ok(Rope::new(head_dim, theta).with_scaling(scaling))
}

#[cfg(test)]
mod tests;

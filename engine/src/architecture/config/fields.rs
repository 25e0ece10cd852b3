//! The fields of `config.json` and `generation_config.json` that are read.

use serde::{Deserialize, Deserializer};

/// The fields that are read, under the names in the file.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub model_type: String,
    /// Multimodal models keep the configuration of their text part here.
    pub text_config: Option<serde_json::Value>,
    pub vocab_size: Option<usize>,
    pub hidden_size: Option<usize>,
    pub intermediate_size: Option<usize>,
    pub num_hidden_layers: Option<usize>,
    pub num_attention_heads: Option<u32>,
    pub num_key_value_heads: Option<u32>,
    pub head_dim: Option<u32>,
    pub max_position_embeddings: Option<u32>,
    pub rms_norm_eps: Option<f32>,
    pub hidden_act: Option<String>,
    /// Gemma's name of `hidden_act`. A file may have both.
    pub hidden_activation: Option<String>,
    pub tie_word_embeddings: Option<bool>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub eos_token_id: Option<Ids>,
    // Rotary embedding: one object since `transformers` 5, several fields before.
    pub rope_parameters: Option<RopeParameters>,
    pub rope_theta: Option<f64>,
    pub rope_scaling: Option<RopeFields>,
    pub rope_local_base_freq: Option<f64>,
    pub partial_rotary_factor: Option<f64>,
    /// Some files have it here instead of beside the factor.
    pub original_max_position_embeddings: Option<u32>,
    // Windows.
    pub layer_types: Option<Vec<String>>,
    /// If the field is absent, the family's value applies; `null` means no window.
    #[serde(default, deserialize_with = "named")]
    pub sliding_window: Option<Option<u32>>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<usize>,
    pub sliding_window_pattern: Option<usize>,
    // Scales and caps.
    pub query_pre_attn_scalar: Option<f32>,
    pub attn_logit_softcapping: Option<f32>,
    pub final_logit_softcapping: Option<f32>,
    pub use_bidirectional_attention: Option<bool>,
    pub quantization_config: Option<serde_json::Value>,
}

/// Tells a `null` field from an absent one.
fn named<'de, D: Deserializer<'de>>(field: D) -> Result<Option<Option<u32>>, D::Error> {
    Option::deserialize(field).map(Some)
}

#[derive(Debug, Deserialize)]
pub(super) struct GenerationConfig {
    pub eos_token_id: Option<Ids>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a token id or a list of them")]
pub(super) enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    pub fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

#[derive(Clone, Debug, Default, Deserialize)]
pub(super) struct RopeFields {
    pub rope_type: Option<String>,
    /// The older name of `rope_type`. A file may have both.
    #[serde(rename = "type")]
    pub old_type: Option<String>,
    pub rope_theta: Option<f64>,
    pub factor: Option<f64>,
    pub low_freq_factor: Option<f64>,
    pub high_freq_factor: Option<f64>,
    pub original_max_position_embeddings: Option<u32>,
    pub beta_fast: Option<f64>,
    pub beta_slow: Option<f64>,
    pub attention_factor: Option<f64>,
    pub mscale: Option<f64>,
    pub mscale_all_dim: Option<f64>,
    pub truncate: Option<bool>,
    pub partial_rotary_factor: Option<f64>,
}

/// Either one set of fields for all layers, or one for each kind of layer.
#[derive(Debug, Deserialize)]
pub(super) struct RopeParameters {
    pub full_attention: Option<RopeFields>,
    pub sliding_attention: Option<RopeFields>,
    #[serde(flatten)]
    pub all: RopeFields,
}

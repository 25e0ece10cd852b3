//! A model as data, from `config.json` and the table of families.

mod config;

use std::path::Path;

use tandem_attn::{
    problem::{Dtype, Spec},
    step::{Activation, RmsNorm, Rope},
};

use tandem_schedule::{CacheType, ModelDescription};

use crate::{Error, Family};

/// What a model computes: everything but the numbers in its weights.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Architecture {
    /// The family.
    pub family: Family,
    /// Size of the vocabulary in tokens.
    pub vocabulary: usize,
    /// Elements of the residual of a token.
    pub hidden: usize,
    /// Elements of the hidden layer of the feed-forward network.
    pub intermediate: usize,
    /// The kinds of attention of its layers, in bf16: one, or two if some layers have a sliding window.
    pub kinds: Vec<AttentionKind>,
    /// For each layer, the index of its kind.
    pub layers: Vec<usize>,
    /// All norms.
    pub norm: RmsNorm,
    /// Heads of queries and keys are normalised.
    pub qk_norm: bool,
    /// Projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// The projection after attention has a bias.
    pub out_bias: bool,
    /// Whether the outputs of attention and of the feed-forward part are normalised.
    pub norms_after: bool,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Factor of the embeddings.
    pub embedding_scale: f32,
    /// Whether the embedding matrix also computes the logits.
    pub tied: bool,
    /// Number of positions that the model supports.
    pub positions: u32,
    /// Tokens that end an answer; empty if the configuration names none. Add [`Text::end`](crate::Text::end) then.
    pub ends: Vec<u32>,
}

/// The attention of some layers.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct AttentionKind {
    /// The heads.
    pub spec: Spec,
    /// Their rotary embedding.
    pub rope: Rope,
}

impl Architecture {
    /// Reads `config.json` and, if there is one, `generation_config.json` from a model's folder.
    ///
    /// # Errors
    /// [`Error::Read`] and [`Error::Malformed`] for the files; [`Error::Family`], [`Error::Unsupported`] and
    /// [`Error::Missing`] for the configuration.
    pub fn read(folder: &Path) -> Result<Self, Error> {
        config::read(folder)
    }

    /// Like [`read`](Self::read), from the text of `config.json` alone.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn from_json(config: &str) -> Result<Self, Error> {
        config::parse(Path::new("config.json"), config, None)
    }

    /// A model of a described shape, for measurements with random weights. Its structure is that of Qwen 3 if the
    /// description has that name, else of Llama 3.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a feed-forward part that is not gated.
    pub fn described(model: &ModelDescription, positions: u32) -> Result<Self, Error> {
        if model.ffn_matrices != 3 {
            return Err(Error::Unsupported {
                field: "ffn_matrices",
                got: model.ffn_matrices.to_string(),
                rule: "supported: 3 (gate, up and down)".to_owned(),
            });
        }
        let family = match model.name.starts_with("qwen3") {
            true => "qwen3",
            false => "llama",
        };
        let config = serde_json::json!({
            "model_type": family,
            "vocab_size": model.vocab,
            "hidden_size": model.hidden,
            "intermediate_size": model.ffn,
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.q_heads,
            "num_key_value_heads": model.kv_heads,
            "head_dim": model.head_dim,
            "max_position_embeddings": positions,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "tie_word_embeddings": false,
        });
        Self::from_json(&config.to_string())
    }

    /// Its shape, as the simulator needs it.
    #[must_use]
    pub fn description(&self, name: &str) -> ModelDescription {
        let spec = self.spec();
        ModelDescription {
            name: name.to_owned(),
            layers: self.layers.len() as u32,
            hidden: self.hidden as u32,
            q_heads: spec.q_heads,
            kv_heads: spec.kv_heads,
            head_dim: spec.head_dim_qk,
            ffn: self.intermediate as u32,
            ffn_matrices: 3,
            vocab: self.vocabulary as u32,
        }
    }

    /// The heads; they are the same for all kinds.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.kinds[0].spec
    }

    /// Elements of all query heads of one token.
    #[must_use]
    pub fn q_width(&self) -> usize {
        (self.spec().q_heads * self.spec().head_dim_qk) as usize
    }

    /// Elements of the query, key and value heads of one token.
    #[must_use]
    pub fn qkv_width(&self) -> usize {
        let spec = self.spec();
        ((spec.q_heads + 2 * spec.kv_heads) * spec.head_dim_qk) as usize
    }

    /// Number of weights, each counted once.
    #[must_use]
    pub fn weights(&self) -> u64 {
        let layer = self.hidden * (self.qkv_width() + self.q_width() + 3 * self.intermediate);
        let tables = if self.tied { 1 } else { 2 } * self.vocabulary * self.hidden;
        (self.layers.len() * layer + tables) as u64
    }

    /// Bytes of the keys and values of one token in all layers, in caches of the given type. `dtype` is the type in which
    /// attention computes: F32 on the CPU, BF16 on a GPU.
    #[must_use]
    pub fn kv_bytes_per_token(&self, cache_type: CacheType, dtype: Dtype) -> u64 {
        self.layers.len() as u64 * cache_type.bytes_per_token(&self.spec().with_dtype(dtype))
    }
}

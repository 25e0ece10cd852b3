//! Shapes of models, for the scheduler.

use serde::{Deserialize, Serialize};

use super::{ScheduleError, error::embedded};
use tandem_attn::problem::Spec;

/// The shape of a dense transformer with 16-bit weights.
///
/// ```
/// use tandem_schedule::ModelDescription;
///
/// let llama = ModelDescription::named("llama-3-8b")?;
/// assert_eq!(llama.kv_bytes_per_token(), 131_072);
/// assert_eq!((llama.weight_bytes() as f64 / 1e9).round(), 16.0);
/// # Ok::<(), tandem_schedule::ScheduleError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelDescription {
    /// Short name.
    pub name: String,
    /// Transformer layers.
    pub layers: u32,
    /// Width of the residual stream.
    pub hidden: u32,
    /// Query heads.
    pub q_heads: u32,
    /// KV heads.
    pub kv_heads: u32,
    /// Head dimension.
    pub head_dim: u32,
    /// Width of the feed-forward network.
    pub ffn: u32,
    /// Number of its matrices: 3 if gated, else 2.
    pub ffn_matrices: u32,
    /// Size of the vocabulary.
    pub vocab: u32,
}

/// Models whose descriptions are part of the crate.
const EMBEDDED: [(&str, &str); 8] = [
    ("llama-3-8b", include_str!("../models/llama-3-8b.json")),
    ("llama-3-70b", include_str!("../models/llama-3-70b.json")),
    ("llama-2-7b", include_str!("../models/llama-2-7b.json")),
    ("yi-6b", include_str!("../models/yi-6b.json")),
    ("llama-13b", include_str!("../models/llama-13b.json")),
    ("llama-33b", include_str!("../models/llama-33b.json")),
    ("gpt-3", include_str!("../models/gpt-3.json")),
    ("qwen3-8b", include_str!("../models/qwen3-8b.json")),
];

impl ModelDescription {
    /// The description of a known model.
    ///
    /// # Errors
    /// [`ScheduleError::Unknown`].
    pub fn named(name: &str) -> Result<Self, ScheduleError> {
        Self::from_json(embedded("model", &EMBEDDED, name)?)
    }

    /// Names of the known models.
    pub fn names() -> impl Iterator<Item = &'static str> {
        EMBEDDED.iter().map(|(name, _)| *name)
    }

    /// Reads a description and checks it.
    ///
    /// # Errors
    /// [`ScheduleError::Description`].
    pub fn from_json(json: &str) -> Result<Self, ScheduleError> {
        let wrong = |reason| ScheduleError::Description {
            kind: "model",
            reason,
        };
        let model: Self = serde_json::from_str(json).map_err(|error| wrong(error.to_string()))?;
        let heads = u64::from(model.q_heads) * u64::from(model.head_dim);
        for (name, got) in [
            ("layers", model.layers.into()),
            ("hidden", model.hidden.into()),
            ("ffn", model.ffn.into()),
            ("ffn_matrices", model.ffn_matrices.into()),
            ("vocab", model.vocab.into()),
            ("q_heads × head_dim", heads),
        ] {
            // Products of three such numbers must fit 64 bits.
            const MOST: u64 = 1 << 20;
            if !(1..=MOST).contains(&got) {
                return Err(wrong(format!("{name} is {got}: give 1 to {MOST}")));
            }
        }
        model
            .spec(1)
            .check()
            .map_err(|error| wrong(error.to_string()))?;
        Ok(model)
    }

    /// The heads of one layer on one of `tensor_parallel` GPUs; a GPU has at least one KV head.
    #[must_use]
    pub fn spec(&self, tensor_parallel: u32) -> Spec {
        let heads = |heads: u32| (heads / tensor_parallel.max(1)).max(heads.min(1));
        Spec::new(heads(self.q_heads), heads(self.kv_heads), self.head_dim)
    }

    /// Weights of the linear layers of one transformer layer.
    #[must_use]
    pub const fn layer_weights(&self) -> u64 {
        let hidden = self.hidden as u64;
        let q = self.q_heads as u64 * self.head_dim as u64;
        let kv = self.kv_heads as u64 * self.head_dim as u64;
        hidden * (2 * q + 2 * kv) + self.ffn_matrices as u64 * hidden * self.ffn as u64
    }

    /// Weights of the output layer: as many as those of the embedding.
    #[must_use]
    pub const fn head_weights(&self) -> u64 {
        self.vocab as u64 * self.hidden as u64
    }

    /// Bytes of all weights. Embedding and output layer are counted separately.
    #[must_use]
    pub const fn weight_bytes(&self) -> u64 {
        2 * (self.layers as u64 * self.layer_weights() + 2 * self.head_weights())
    }

    /// Bytes of the keys and values of one token in all layers, of 16 bits. For caches of other types see
    /// [`CostModel::kv_bytes_per_token`](super::cost::CostModel::kv_bytes_per_token).
    #[must_use]
    pub const fn kv_bytes_per_token(&self) -> u64 {
        2 * 2 * self.layers as u64 * self.kv_heads as u64 * self.head_dim as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_embedded_models_have_their_published_sizes() {
        for (name, billions) in [
            ("llama-3-8b", 8.03),
            ("llama-3-70b", 70.6),
            ("llama-2-7b", 6.74),
            ("yi-6b", 6.06),
            ("llama-13b", 13.0),
            ("llama-33b", 32.5),
            ("gpt-3", 175.0),
            ("qwen3-8b", 8.19),
        ] {
            let model = ModelDescription::named(name).unwrap();
            assert_eq!(model.name, name);
            let got = model.weight_bytes() as f64 / 2e9;
            assert!((got / billions - 1.0).abs() < 0.01, "{name}: {got}");
        }
        assert_eq!(ModelDescription::names().count(), 8);
    }

    #[test]
    fn errors_say_what_is_wrong() {
        let unknown = ModelDescription::named("llama").unwrap_err().to_string();
        assert!(
            unknown.contains("llama-3-8b, llama-3-70b") && unknown.contains("\"llama\""),
            "{unknown}"
        );
        let json = serde_json::to_string(&ModelDescription::named("yi-6b").unwrap()).unwrap();
        let heads = json.replace("\"kv_heads\":4", "\"kv_heads\":5");
        let wrong = ModelDescription::from_json(&heads).unwrap_err().to_string();
        assert!(wrong.contains("5 KV heads"), "{wrong}");
        // The number of weights is counted in 64 bits.
        let heads = json.replace("\"q_heads\":32", "\"q_heads\":16777216");
        let wrong = ModelDescription::from_json(&heads).unwrap_err().to_string();
        assert!(
            wrong.contains("q_heads × head_dim is 2147483648: give 1 to 1048576"),
            "{wrong}"
        );
    }
}

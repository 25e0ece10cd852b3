//! The weights of a model by their places in it, on whatever memory.

use tandem_attn::problem::Spec;

use crate::{
    Architecture, Error,
    weights::{Weight, Weights},
};

/// The weights of a layer. A matrix is `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct Layer<M> {
    pub norm_attention: M,
    /// Queries, keys and values of all heads, one under the other.
    pub qkv: M,
    pub qkv_bias: Option<M>,
    /// Norms of each head of queries and of keys.
    pub qk_norm: Option<[M; 2]>,
    pub out: M,
    pub norm_attention_out: Option<M>,
    pub norm_feed: M,
    /// The gate over what it is multiplied with.
    pub gate_up: M,
    pub down: M,
    pub norm_feed_out: Option<M>,
}

#[derive(Debug)]
pub(super) struct Model<M> {
    pub embedding: M,
    pub layers: Vec<Layer<M>>,
    pub norm: M,
    /// Of the logits, where it is not the embedding.
    pub head: Option<M>,
}

impl<M> Model<M> {
    /// Reads all weights; `place` takes each tensor to where it stays, `progress` hears how many layers are done.
    pub(super) fn load<T: Weight>(
        architecture: &Architecture,
        weights: &Weights,
        mut place: impl FnMut(Vec<T>) -> Result<M, Error>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let a = architecture;
        let (hidden, vocabulary) = (a.hidden, a.vocabulary);
        let embedding = place(weights.get("model.embed_tokens.weight", &[vocabulary, hidden])?)?;
        let mut layers = Vec::with_capacity(a.layers.len());
        for index in 0..a.layers.len() {
            layers.push(Layer::load(a, weights, index, &mut place)?);
            progress(index + 1);
        }
        let norm = place(weights.get("model.norm.weight", &[hidden])?)?;
        let head = match a.tied {
            true => None,
            false => Some(place(
                weights.get("lm_head.weight", &[vocabulary, hidden])?,
            )?),
        };
        Ok(Self {
            embedding,
            layers,
            norm,
            head,
        })
    }

    /// The matrix of the logits.
    pub(super) fn head(&self) -> &M {
        self.head.as_ref().unwrap_or(&self.embedding)
    }
}

impl<M> Layer<M> {
    fn load<T: Weight>(
        a: &Architecture,
        weights: &Weights,
        index: usize,
        place: &mut impl FnMut(Vec<T>) -> Result<M, Error>,
    ) -> Result<Self, Error> {
        let &Spec {
            q_heads,
            kv_heads,
            head_dim_qk,
            ..
        } = a.spec();
        let (hidden, dim) = (a.hidden, head_dim_qk as usize);
        let (q, kv) = (q_heads as usize * dim, kv_heads as usize * dim);
        let mut stacked = |parts: &[(&str, usize)], width: Option<usize>| {
            let rows: usize = parts.iter().map(|(_, rows)| rows).sum();
            let mut all = Vec::with_capacity(rows * width.unwrap_or(1));
            for &(part, rows) in parts {
                let shape = [rows, width.unwrap_or(0)];
                let shape = &shape[..1 + usize::from(width.is_some())];
                weights.append(&format!("model.layers.{index}.{part}"), shape, &mut all)?;
            }
            place(all)
        };
        // What stands between attention and the feed-forward part has other names where there are norms behind both.
        let [norm_feed, after] = match a.norms_after {
            true => [
                "pre_feedforward_layernorm.weight",
                "post_attention_layernorm.weight",
            ],
            false => ["post_attention_layernorm.weight", ""],
        };
        Ok(Self {
            norm_attention: stacked(&[("input_layernorm.weight", hidden)], None)?,
            qkv: stacked(
                &[
                    ("self_attn.q_proj.weight", q),
                    ("self_attn.k_proj.weight", kv),
                    ("self_attn.v_proj.weight", kv),
                ],
                Some(hidden),
            )?,
            qkv_bias: match a.qkv_bias {
                false => None,
                true => Some(stacked(
                    &[
                        ("self_attn.q_proj.bias", q),
                        ("self_attn.k_proj.bias", kv),
                        ("self_attn.v_proj.bias", kv),
                    ],
                    None,
                )?),
            },
            qk_norm: match a.qk_norm {
                false => None,
                true => Some([
                    stacked(&[("self_attn.q_norm.weight", dim)], None)?,
                    stacked(&[("self_attn.k_norm.weight", dim)], None)?,
                ]),
            },
            out: stacked(&[("self_attn.o_proj.weight", hidden)], Some(q))?,
            norm_attention_out: match a.norms_after {
                false => None,
                true => Some(stacked(&[(after, hidden)], None)?),
            },
            norm_feed: stacked(&[(norm_feed, hidden)], None)?,
            gate_up: stacked(
                &[
                    ("mlp.gate_proj.weight", a.intermediate),
                    ("mlp.up_proj.weight", a.intermediate),
                ],
                Some(hidden),
            )?,
            down: stacked(&[("mlp.down_proj.weight", hidden)], Some(a.intermediate))?,
            norm_feed_out: match a.norms_after {
                false => None,
                true => Some(stacked(
                    &[("post_feedforward_layernorm.weight", hidden)],
                    None,
                )?),
            },
        })
    }
}

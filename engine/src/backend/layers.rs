//! The weights of a model by their role, in any kind of memory.

use std::collections::HashSet;

use tandem_attn::problem::Spec;

use crate::{
    Architecture, Error,
    weights::{Weight, Weights},
};

const EMBEDDING: &str = "model.embed_tokens.weight";
const HEAD: &str = "lm_head.weight";

/// Moves weights to the memory in which they stay.
pub(super) trait Store {
    /// A tensor in that memory.
    type Matrix;

    /// Concatenates tensors with the given numbers of rows: matrices of a width, or vectors.
    fn tensor(
        &mut self,
        parts: &[(String, usize)],
        width: Option<usize>,
    ) -> Result<Self::Matrix, Error>;
}

fn shape(rows: usize, width: Option<usize>) -> Vec<usize> {
    [rows].into_iter().chain(width).collect()
}

/// Concatenates tensors with the given numbers of rows in main memory.
pub(super) fn stacked<T: Weight>(
    weights: &Weights,
    parts: &[(String, usize)],
    width: Option<usize>,
) -> Result<Vec<T>, Error> {
    let mut elements = 0;
    for (part, rows) in parts {
        elements += weights.elements(part, &shape(*rows, width))?;
    }
    let mut all = Vec::with_capacity(elements);
    for (part, rows) in parts {
        weights.append(part, &shape(*rows, width), &mut all)?;
    }
    Ok(all)
}

/// Checks that all tensors of a model are there with their shapes, and keeps their names.
struct Check<'a> {
    weights: &'a Weights,
    used: HashSet<String>,
}

impl Store for Check<'_> {
    type Matrix = ();

    fn tensor(&mut self, parts: &[(String, usize)], width: Option<usize>) -> Result<(), Error> {
        for (part, rows) in parts {
            self.weights.elements(part, &shape(*rows, width))?;
            self.used.insert(part.clone());
        }
        Ok(())
    }
}

/// The weights of a layer. A matrix is `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct Layer<M> {
    pub norm_attention: M,
    /// Queries, keys and values of all heads, concatenated by rows.
    pub qkv: M,
    pub qkv_bias: Option<M>,
    /// Norm weights of the query heads and of the key heads.
    pub qk_norm: Option<[M; 2]>,
    pub out: M,
    pub out_bias: Option<M>,
    pub norm_attention_out: Option<M>,
    pub norm_feed: M,
    /// The gate's rows, then those of the values that it multiplies.
    pub gate_up: M,
    pub down: M,
    pub norm_feed_out: Option<M>,
}

#[derive(Debug)]
pub(super) struct Model<M> {
    pub embedding: M,
    pub layers: Vec<Layer<M>>,
    pub norm: M,
    /// The matrix of the logits, unless the embedding is used.
    pub head: Option<M>,
}

impl<M> Model<M> {
    /// Reads all weights. `store` moves each tensor to where it stays; `progress` receives the number of layers loaded
    /// so far. Before memory is taken, all tensors are checked. The model must use every tensor of its layers and of its
    /// head that the files have: a text without the biases or layers of a model would be wrong.
    pub(super) fn load(
        architecture: &Architecture,
        weights: &Weights,
        store: &mut impl Store<Matrix = M>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let mut check = Check {
            weights,
            used: HashSet::new(),
        };
        Model::read(architecture, &mut check, &mut |_| ())?;
        if architecture.tied && !weights.are_random() && weights.has(HEAD) {
            // Some files have a copy of the embedding.
            if !weights.are_equal(HEAD, EMBEDDING) {
                return Err(Error::Unsupported {
                    field: "tie_word_embeddings",
                    got: "true".to_owned(),
                    rule: format!(
                        "the files have a tensor {HEAD} that differs from the embedding: set the field to false to use it, or \
                         leave the tensor out of the files"
                    ),
                });
            }
            check.used.insert(HEAD.to_owned());
        }
        weights.check_used(&check.used)?;
        Self::read(architecture, store, progress)
    }

    fn read(
        a: &Architecture,
        store: &mut impl Store<Matrix = M>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self, Error> {
        let (hidden, vocabulary) = (a.hidden, a.vocabulary);
        let mut table = |name: &str| store.tensor(&[(name.to_owned(), vocabulary)], Some(hidden));
        let embedding = table(EMBEDDING)?;
        let head = match a.tied {
            true => None,
            false => Some(table(HEAD)?),
        };
        let mut layers = Vec::with_capacity(a.layers.len());
        for index in 0..a.layers.len() {
            layers.push(Layer::load(a, index, store)?);
            progress(index + 1);
        }
        let norm = store.tensor(&[("model.norm.weight".to_owned(), hidden)], None)?;
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
    fn load(
        a: &Architecture,
        index: usize,
        store: &mut impl Store<Matrix = M>,
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
            let named =
                |&(part, rows): &(&str, usize)| (format!("model.layers.{index}.{part}"), rows);
            let parts: Vec<_> = parts.iter().map(named).collect();
            store.tensor(&parts, width)
        };
        // The norm between attention and the feed-forward part has another name in families that also normalise
        // outputs.
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
            out_bias: match a.out_bias {
                false => None,
                true => Some(stacked(&[("self_attn.o_proj.bias", hidden)], None)?),
            },
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

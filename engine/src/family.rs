//! The differences between model families, in one table.
//!
//! All are decoders with pre-normalised layers, grouped-query attention and a gated feed-forward part. A new family
//! is a new row, if all of its differences have a column.

use tandem_attn::step::Activation;

/// A family of models.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Family {
    /// Llama 3, 3.1, 3.2, and other models with `model_type` `llama`.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen 2 and 2.5.
    Qwen2,
    /// Qwen 3, dense.
    Qwen3,
    /// Gemma 3, the text part.
    Gemma3,
}

/// How a family differs from the others in ways that the configuration does not state.
#[derive(Debug)]
pub(crate) struct Traits {
    pub family: Family,
    /// `model_type` in `config.json`.
    pub model_type: &'static str,
    /// Whether the projections of queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether `attention_bias` in `config.json` adds biases to all four projections of attention.
    pub attention_bias: bool,
    /// Whether each head of queries and keys has an RMSNorm.
    pub qk_norm: bool,
    /// Whether norms multiply by `1 + w` instead of `w`.
    pub norm_adds_one: bool,
    /// Whether the outputs of attention and of the feed-forward part are normalised before they are added to the
    /// residual.
    pub norms_after: bool,
    pub activation: Activation,
    /// Whether embeddings are multiplied by `√hidden`.
    pub scales_embedding: bool,
    /// Whether the softmax scale comes from `query_pre_attn_scalar` instead of the head dimension.
    pub own_scale: bool,
    /// Which layers have the sliding window of `config.json` if the file does not list them.
    pub window: Window,
    /// Whether layers with a sliding window have their own rotary embedding.
    pub local_rope: bool,
    pub defaults: Defaults,
}

/// Which layers have the sliding window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Window {
    /// None.
    None,
    /// All.
    All,
    /// From layer `max_window_layers` on, if `use_sliding_window` is true.
    Upper,
    /// All but every n-th layer (`sliding_window_pattern`).
    AllButEach(usize),
}

/// Values that `config.json` may leave out.
#[derive(Debug)]
pub(crate) struct Defaults {
    pub rope_theta: f64,
    pub norm_eps: f32,
    pub tied: bool,
    pub heads: Option<(u32, u32)>,
    pub head_dim: Option<u32>,
    pub vocabulary: Option<usize>,
    pub positions: Option<u32>,
    pub window: Option<u32>,
}

const PLAIN: Traits = Traits {
    family: Family::Llama,
    model_type: "llama",
    qkv_bias: false,
    attention_bias: true,
    qk_norm: false,
    norm_adds_one: false,
    norms_after: false,
    activation: Activation::Silu,
    scales_embedding: false,
    own_scale: false,
    window: Window::None,
    local_rope: false,
    defaults: Defaults {
        rope_theta: 10000.0,
        norm_eps: 1e-6,
        tied: false,
        heads: None,
        head_dim: None,
        vocabulary: None,
        positions: None,
        window: None,
    },
};

const WITH_WINDOW: Defaults = Defaults {
    window: Some(4096),
    ..PLAIN.defaults
};

#[rustfmt::skip]
pub(crate) const FAMILIES: &[Traits] = &[
    PLAIN,
    Traits { family: Family::Mistral, model_type: "mistral", attention_bias: false, window: Window::All, defaults: WITH_WINDOW, ..PLAIN },
    Traits {
        family: Family::Qwen2, model_type: "qwen2", qkv_bias: true, attention_bias: false, window: Window::Upper,
        defaults: WITH_WINDOW, ..PLAIN
    },
    Traits {
        family: Family::Qwen3, model_type: "qwen3", qk_norm: true, window: Window::Upper, defaults: WITH_WINDOW, ..PLAIN
    },
    Traits {
        family: Family::Gemma3, model_type: "gemma3_text", qk_norm: true, norm_adds_one: true, norms_after: true,
        activation: Activation::GeluTanh, scales_embedding: true, own_scale: true, window: Window::AllButEach(6),
        local_rope: true,
        defaults: Defaults {
            rope_theta: 1e6, tied: true, heads: Some((8, 4)), head_dim: Some(256), vocabulary: Some(262_208),
            positions: Some(131_072), ..WITH_WINDOW
        },
        ..PLAIN
    },
];

//! The heads of an attention layer: dimensions, types, scale, and what follows from them.

use std::f32::consts::LOG2_E;

use kernels_gpu::{
    Hooks, HooksName,
    abi::VariantParams,
    state::{MOST_SINK_TOKENS, sink_word},
    variants::SIGMOID,
};
use serde::{Deserialize, Serialize};

use super::{Compute, Dtype, MAX_HEAD_DIM, MAX_POSITION, ProblemError, Quantity, Variant, fits};
use crate::{kv::LATENT_656_BYTES, step::Rope};

/// The heads of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Spec {
    /// Query heads.
    pub q_heads: u32,
    /// KV heads; divides `q_heads`.
    pub kv_heads: u32,
    /// Head dimension of queries and keys.
    pub head_dim_qk: u32,
    /// Head dimension of values and outputs.
    pub head_dim_v: u32,
    /// Latent attention: a value is the first `head_dim_v` elements of its key. One pool holds both, or two hold the value and the
    /// rest of the key ([`KvView::latent_parts`](crate::kv::KvView::latent_parts)).
    #[serde(default)]
    pub latent: bool,
    /// Element type of `q`.
    pub q_dtype: Dtype,
    /// Element type of the KV pool.
    pub kv_dtype: Dtype,
    /// Element type of the output.
    pub out_dtype: Dtype,
    /// Softmax scale, usually `1/√head_dim_qk`.
    pub scale: f32,
    /// Mask and logits transform.
    pub variant: Variant,
    /// The arithmetic of prefills on a GPU.
    #[serde(default, skip_serializing_if = "Compute::is_default")]
    pub compute: Compute,
    /// If given, attention applies this rotary embedding to queries and keys, and the pool holds keys without it (`with_rotary`,
    /// feature `unstable`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rotary: Option<Rope>,
}

impl Spec {
    /// The largest head dimension (that of multi-head latent attention is 576).
    pub const MAX_HEAD_DIM: u32 = MAX_HEAD_DIM;

    /// Causal attention as in Llama: bf16 throughout, one head dimension, scale `1/√head_dim`.
    #[must_use]
    pub fn new(q_heads: u32, kv_heads: u32, head_dim: u32) -> Self {
        Self {
            q_heads,
            kv_heads,
            head_dim_qk: head_dim,
            head_dim_v: head_dim,
            latent: false,
            q_dtype: Dtype::BF16,
            kv_dtype: Dtype::BF16,
            out_dtype: Dtype::BF16,
            scale: 1.0 / (head_dim as f32).sqrt(),
            variant: Variant::CAUSAL,
            compute: Compute::F16,
            rotary: None,
        }
    }

    /// Multi-head latent attention (MLA) with the up-projections absorbed, as in the decodes of DeepSeek's models. There is
    /// one KV head. Its keys have `latent + rope` elements, and its values are the first `latent` of these. Queries are
    /// `[tokens, heads, latent + rope]`, outputs `[tokens, heads, latent]`.
    ///
    /// The scale is `1/√(128 + rope)`, for heads that have 128 elements besides the `rope` ones before absorption. For
    /// other heads use [`with_scale`](Self::with_scale).
    ///
    /// ```
    /// use tandem_attn::problem::{Dtype, Spec};
    ///
    /// let spec = Spec::latent(128, 512, 64);
    /// assert_eq!((spec.head_dim_qk, spec.head_dim_v, spec.kv_heads), (576, 512, 1));
    /// assert_eq!(spec.kv_bytes_per_token(), 2 * 576);
    /// // In rows that carry their scales: see `kv::KvView::latent_656`.
    /// assert_eq!(spec.with_kv_dtype(Dtype::F8E4M3).kv_bytes_per_token(), 656);
    /// ```
    #[must_use]
    pub fn latent(heads: u32, latent: u32, rope: u32) -> Self {
        Self {
            latent: true,
            head_dim_v: latent,
            scale: 1.0 / ((128 + rope) as f32).sqrt(),
            ..Self::new(heads, 1, latent.saturating_add(rope))
        }
    }

    /// With queries, keys, values and output of one type.
    #[must_use]
    pub const fn with_dtype(mut self, dtype: Dtype) -> Self {
        self.q_dtype = dtype;
        self.kv_dtype = dtype;
        self.out_dtype = dtype;
        self
    }

    /// With keys and values of another type than the queries.
    #[must_use]
    pub const fn with_kv_dtype(mut self, dtype: Dtype) -> Self {
        self.kv_dtype = dtype;
        self
    }

    /// With this arithmetic in prefills.
    ///
    /// ```
    /// use tandem_attn::{plan::DeviceDescription, problem::{Compute, Dtype, Spec}};
    ///
    /// let h200 = DeviceDescription::named("h200")?;
    /// let spec = Spec::new(64, 8, 128).with_compute(Compute::F8);
    /// h200.supports(&spec.with_kv_dtype(Dtype::F8E4M3))?;
    /// let error = h200.supports(&spec).unwrap_err();
    /// assert!(error.to_string().contains("no prefill kernel for h200 has products of 8 bits"));
    /// # Ok::<(), tandem_attn::plan::PlanError>(())
    /// ```
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_compute(mut self, compute: Compute) -> Self {
        self.compute = compute;
        self
    }

    /// With values (and outputs) of another head dimension than the keys; the scale stays.
    #[must_use]
    pub const fn with_head_dim_v(mut self, head_dim_v: u32) -> Self {
        self.head_dim_v = head_dim_v;
        self
    }

    /// With another softmax scale.
    #[must_use]
    pub const fn with_scale(mut self, scale: f32) -> Self {
        self.scale = scale;
        self
    }

    /// With every query seeing every key.
    #[must_use]
    pub const fn non_causal(mut self) -> Self {
        self.variant.causal = false;
        self
    }

    /// With a sliding window: a query sees its own position and `keys` to the left. The field `sliding_window` of a model's
    /// `config.json` counts the query's own key, too: give its value less one, for example 127 for 128.
    #[must_use]
    pub const fn with_window_left(mut self, keys: u32) -> Self {
        self.variant.window_left = Some(keys);
        self
    }

    /// With logits capped to `±cap` by a tanh; at most [`Variant::MOST_SOFT_CAP`].
    #[must_use]
    pub const fn with_soft_cap(mut self, cap: f32) -> Self {
        self.variant.soft_cap = Some(cap);
        self
    }

    /// With a sink for each query head. The sinks are passed to each run.
    ///
    /// ```
    /// use tandem_attn::problem::Spec;
    ///
    /// let spec = Spec::new(64, 8, 64).with_sinks();
    /// assert_eq!(spec.sinks(), 64);
    /// ```
    #[must_use]
    pub const fn with_sinks(mut self) -> Self {
        self.variant.sinks = true;
        self
    }

    /// With the hooks of a variant for which kernels were compiled, such as [`ALIBI`](crate::variants::ALIBI).
    ///
    /// ```
    /// use tandem_attn::{problem::Spec, variants::ALIBI};
    ///
    /// let spec = Spec::new(32, 8, 128).with_hooks(&ALIBI);
    /// assert_eq!(spec.variant.hooks, Some(ALIBI.name));
    /// ```
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_hooks(mut self, hooks: &Hooks) -> Self {
        self.variant.hooks = Some(hooks.name);
        self.variant.adds_up = !hooks.softmax;
        self
    }

    /// With a rotary embedding that attention applies to queries and keys before anything else, by their positions in the page
    /// table. A page can then be used at any position: if other keys are dropped, or keys are put together in a new order, they
    /// need not be written again. Programs that apply the embedding once, when they append keys, do not need this.
    ///
    /// ```
    /// use tandem_attn::{problem::Spec, step::Rope};
    ///
    /// let spec = Spec::new(32, 8, 128).with_rotary(Rope::new(128, 500_000.0));
    /// spec.check()?;
    /// let wide = Spec::new(32, 8, 128).with_rotary(Rope::new(256, 500_000.0));
    /// assert!(wide.check().is_err());
    /// # Ok::<(), tandem_attn::problem::ProblemError>(())
    /// ```
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_rotary(mut self, rope: Rope) -> Self {
        self.rotary = Some(rope);
        self
    }

    /// Query heads per KV head.
    #[must_use]
    pub const fn group(&self) -> u32 {
        self.q_heads / self.kv_heads
    }

    /// Bytes of the keys and values of one token, for all KV heads. For latent keys of 576 elements in F8E4M3 this is 656, the
    /// size of [rows that contain their scales](crate::kv::KvScales::InRow).
    #[must_use]
    pub const fn kv_bytes_per_token(&self) -> u64 {
        if self.latent && self.head_dim_qk == 576 && matches!(self.kv_dtype, Dtype::F8E4M3) {
            return LATENT_656_BYTES as u64;
        }
        let values = if self.latent { 0 } else { self.head_dim_v };
        (self.head_dim_qk + values) as u64 * self.kv_heads as u64 * self.kv_dtype.bytes() as u64
    }

    /// Whether distances between queries and keys matter, other than for the causal mask.
    pub(crate) fn counts_distances(&self) -> bool {
        // Among hooks, only sigmoid weights do not depend on the distance.
        let hooks = |hooks: HooksName| hooks != SIGMOID.name;
        let variant = &self.variant;
        variant.window_left.is_some() || self.rotary.is_some() || variant.hooks.is_some_and(hooks)
    }

    /// What keeps the KV heads of a token from being tokens of their own, in words: distances, because page lists of heads skip keys,
    /// and the data of hooks for each query head.
    pub(crate) fn not_by_head(&self) -> Option<&'static str> {
        let what = [
            (self.variant.window_left.is_some(), "a window"),
            (self.variant.hooks.is_some(), "hooks"),
            (self.rotary.is_some(), "a rotary embedding"),
        ];
        let mut there = what.into_iter().filter(|&(there, _)| there);
        there.next().map(|(_, what)| what)
    }

    /// The same heads so many times: so many tokens of the batch are one token.
    pub(crate) const fn times(self, heads: u32) -> Self {
        let mut variant = self.variant;
        if variant.sinks && heads > 1 {
            // The tokens that have sinks of their own are heads of one token now.
            variant.sink_tokens /= heads;
        }
        Self {
            q_heads: self.q_heads * heads,
            kv_heads: self.kv_heads * heads,
            variant,
            ..self
        }
    }

    /// The number of sinks that a run is given: `[q_heads]`, or of each of the [tokens that have their
    /// own](Variant::sink_tokens). 0 if there are none.
    #[must_use]
    pub const fn sinks(&self) -> usize {
        match self.variant.sinks {
            true => self.q_heads as usize * self.variant.sink_tokens as usize,
            false => 0,
        }
    }

    /// Checks that the sinks tell which head of a part a token of the batch is, if so many tokens are one token of the part.
    pub(crate) const fn check_sinks_of(&self, part: usize, heads: u32) -> Result<(), ProblemError> {
        let Variant {
            sinks, sink_tokens, ..
        } = self.variant;
        if sinks && heads > 1 && !sink_tokens.is_multiple_of(heads) {
            return Err(ProblemError::SinksOfHeads {
                part,
                heads,
                sink_tokens,
            });
        }
        Ok(())
    }

    /// The shape of the sinks, in words.
    pub(crate) const fn shape_of_sinks(&self) -> &'static str {
        match self.variant.sink_tokens {
            1 => "[q_heads]",
            _ => "[sink_tokens, q_heads]",
        }
    }

    /// Whether keys and values are copied before prefills on a GPU use them: converted to another type, or with rotary
    /// embedding.
    pub(crate) const fn converts(&self) -> bool {
        let others = self.kv_dtype.bytes() == 1 || self.rotary.is_some();
        others && !self.latent && self.head_dim_qk == self.head_dim_v
    }

    /// Bytes of an element that was [converted](Self::converts) for prefills.
    pub(crate) const fn converted_bytes(&self) -> usize {
        match self.compute {
            Compute::F16 => 2,
            Compute::F8 => 1,
        }
    }

    /// Bytes of one query token's partial state (f32 output and LSE), all query heads.
    #[must_use]
    pub const fn partial_bytes_per_token(&self) -> u64 {
        (self.head_dim_v + 1) as u64 * self.q_heads as u64 * 4
    }

    /// Floating-point operations for one query token against one key, all query heads.
    #[must_use]
    pub const fn flops_per_pair(&self) -> u64 {
        2 * (self.head_dim_qk + self.head_dim_v) as u64 * self.q_heads as u64
    }

    /// The scale and the variant as parameters of kernels.
    #[must_use]
    pub fn variant_params(&self) -> VariantParams {
        VariantParams {
            scale_log2: self.scale * LOG2_E,
            scale: self.scale,
            soft_cap: self.variant.soft_cap.unwrap_or(0.0),
            window_left: self
                .variant
                .window_left
                .map_or(i32::MAX, |keys| keys as i32),
            causal: self.variant.causal.into(),
            sink_tokens: match self.variant.sink_tokens {
                0 | 1 => 0,
                tokens => sink_word(tokens.min(MOST_SINK_TOKENS)),
            },
        }
    }

    /// Checks the description. A backend may support less; it then returns an error of its own.
    ///
    /// # Errors
    /// The first error that is found.
    pub fn check(&self) -> Result<(), ProblemError> {
        let &Self {
            q_heads,
            kv_heads,
            scale,
            ..
        } = self;
        if q_heads == 0 || kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            return Err(ProblemError::GroupSize { q_heads, kv_heads });
        }
        for (name, got) in [
            ("head_dim_qk", self.head_dim_qk),
            ("head_dim_v", self.head_dim_v),
        ] {
            if got == 0 || got > MAX_HEAD_DIM || !got.is_multiple_of(16) {
                return Err(ProblemError::HeadDim { name, got });
            }
            let width = u64::from(q_heads) * u64::from(got);
            fits(
                Quantity::Heads("query heads × head dimension"),
                width,
                u32::MAX.into(),
            )?;
        }
        if self.latent && (kv_heads != 1 || self.head_dim_v > self.head_dim_qk) {
            return Err(ProblemError::Latent {
                kv_heads,
                head_dim_qk: self.head_dim_qk,
                head_dim_v: self.head_dim_v,
            });
        }
        if matches!(self.out_dtype, Dtype::F8E4M3 | Dtype::F8E5M2) {
            return Err(ProblemError::OutputDtype {
                got: self.out_dtype,
            });
        }
        // Kernels multiply by this product.
        if !(scale > 0.0 && (scale * LOG2_E).is_finite()) {
            return Err(ProblemError::Scale { got: scale });
        }
        match self.variant.soft_cap {
            Some(got) if !(got > 0.0 && got <= Variant::MOST_SOFT_CAP) => {
                return Err(ProblemError::SoftCap { got });
            }
            _ => {}
        }
        if let (Some(hooks), Some(_)) = (self.variant.hooks, self.variant.soft_cap) {
            return Err(ProblemError::HooksAndCap { hooks });
        }
        if self.variant.adds_up && (self.variant.sinks || self.variant.hooks.is_none()) {
            return Err(ProblemError::NoSoftmax {
                what: match self.variant.hooks {
                    None => "no hooks that make the weights",
                    Some(_) => "sinks",
                },
            });
        }
        let got = self.variant.sink_tokens;
        if got == 0 || got > MOST_SINK_TOKENS || got > 1 && (self.latent || !self.variant.sinks) {
            return Err(ProblemError::SinkTokens { got });
        }
        fits(
            Quantity::Heads("sinks"),
            u64::from(q_heads) * u64::from(got),
            i32::MAX as u64,
        )?;
        if let Some(rope) = self.rotary {
            if self.latent {
                return Err(ProblemError::LatentRotary);
            }
            rope.check_heads(self.head_dim_qk)
                .map_err(ProblemError::Rotary)?;
        }
        match self.variant.window_left {
            Some(got) if got > MAX_POSITION => Err(ProblemError::Window { got }),
            _ => Ok(()),
        }
    }
}

//! What a layer says about its attention.

use candle_core::{DType, Result, Tensor, bail};
use tandem_attn::problem::{Dtype, KvLayout, Spec};

/// The scale, the mask, the sinks and the cache layout of a layer. Heads and types come from the tensors.
///
/// ```
/// use tandem_candle::{KvLayout, Layer};
///
/// // As in Gemma 2: capped logits, and windows of 4096 keys in every other layer.
/// let global = Layer::new(1.0 / 256_f32.sqrt()).with_soft_cap(50.0).with_layout(KvLayout::Hnd);
/// let local = global.clone().with_window_left(4095);
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Layer {
    /// Factor of the logits, usually `1/√head_dim`.
    pub scale: f32,
    /// Whether a query sees no key after its own position.
    pub causal: bool,
    /// Number of keys that a query sees to the left of its own; none means all.
    pub window_left: Option<u32>,
    /// If set, logits become `cap · tanh(logit / cap)`.
    pub soft_cap: Option<f32>,
    /// Layout of a block of the cache.
    pub layout: KvLayout,
    /// Factors of the keys and of the values in a cache of F8E4M3; none for other caches.
    pub kv_scales: Option<[f32; 2]>,
    /// Attention sinks, `[q_heads]` of F32: logits in the denominator of the softmax that have no value.
    pub sinks: Option<Tensor>,
}

impl Layer {
    /// Causal attention to a cache of `[blocks, block_size, kv_heads, head_dim]`.
    #[must_use]
    pub const fn new(scale: f32) -> Self {
        Self {
            scale,
            causal: true,
            window_left: None,
            soft_cap: None,
            layout: KvLayout::Nhd,
            kv_scales: None,
            sinks: None,
        }
    }

    /// Without a causal mask: every query sees every key of its request.
    #[must_use]
    pub const fn non_causal(mut self) -> Self {
        self.causal = false;
        self
    }

    /// With a window: a query sees its own position and `keys` keys to the left, which is the model's window minus one.
    #[must_use]
    pub fn with_window_left(mut self, keys: impl Into<Option<u32>>) -> Self {
        self.window_left = keys.into();
        self
    }

    /// With logits capped by a tanh.
    #[must_use]
    pub fn with_soft_cap(mut self, cap: impl Into<Option<f32>>) -> Self {
        self.soft_cap = cap.into();
        self
    }

    /// With a cache of F8E4M3. Its numbers times these scales are the keys and values.
    #[must_use]
    pub const fn with_kv_scales(mut self, k: f32, v: f32) -> Self {
        self.kv_scales = Some([k, v]);
        self
    }

    /// With attention sinks, as in gpt-oss: `[q_heads]` of F32, in natural logits. Layers that differ only in their sinks
    /// share plans.
    #[must_use]
    pub fn with_sinks(mut self, sinks: impl Into<Option<Tensor>>) -> Self {
        self.sinks = sinks.into();
        self
    }

    /// With another layout of the cache's blocks.
    #[must_use]
    pub const fn with_layout(mut self, layout: KvLayout) -> Self {
        self.layout = layout;
        self
    }

    /// The specification of this layer's attention: [`Attention::supports`](crate::Attention::supports) and
    /// [`Attention::reserve`](crate::Attention::reserve) then are about the kernels and the workspace that its calls use.
    ///
    /// `dtype` is the type of the queries, and of the cache if the layer has no scales: with scales the cache is of F8E4M3. For a
    /// cache of F8E4M3 without scales add [`Spec::with_kv_dtype`], for values of another head dimension than the keys
    /// [`Spec::with_head_dim_v`].
    ///
    /// ```
    /// use candle_core::{DType, Device};
    /// use tandem_candle::{Attention, Layer, tandem_attn::plan::BatchLimits};
    ///
    /// # fn main() -> candle_core::Result<()> {
    /// let (attention, layer) = (Attention::new(&Device::Cpu)?, Layer::new(1.0 / 128_f32.sqrt()));
    /// // 32 query heads and 8 KV heads of 128. Up to 256 requests of 8192 tokens, with prompt chunks of 4096.
    /// let spec = layer.spec(32, 8, 128, DType::BF16)?;
    /// attention.reserve(&spec, &BatchLimits::decodes(256, 8192, 16).with_query_tokens(256 + 4096))?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// If attention does not take the type.
    pub fn spec(
        &self,
        q_heads: usize,
        kv_heads: usize,
        head_dim: usize,
        dtype: DType,
    ) -> Result<Spec> {
        // Planning refuses such numbers.
        let [q_heads, kv_heads, head_dim] =
            [q_heads, kv_heads, head_dim].map(|extent| u32::try_from(extent).unwrap_or(u32::MAX));
        let mut spec = Spec::new(q_heads, kv_heads, head_dim)
            .with_dtype(attended("q", dtype)?)
            .with_scale(self.scale);
        if self.kv_scales.is_some() {
            spec.kv_dtype = Dtype::F8E4M3;
        }
        spec.variant.causal = self.causal;
        spec.variant.window_left = self.window_left;
        spec.variant.soft_cap = self.soft_cap;
        spec.variant.sinks = self.sinks.is_some();
        Ok(spec)
    }
}

/// The type of a tensor that attention reads.
pub fn attended(name: &str, dtype: DType) -> Result<Dtype> {
    Ok(match dtype {
        DType::F32 => Dtype::F32,
        DType::BF16 => Dtype::BF16,
        DType::F16 => Dtype::F16,
        DType::F8E4M3 => Dtype::F8E4M3,
        other => {
            bail!("{name} is {other:?}: attention takes F32, BF16 and F16, and caches of F8E4M3")
        }
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::{Attention, paged_attention};

    /// What is reserved for another specification is never used.
    #[test]
    fn the_specification_of_a_layer_is_that_of_its_calls() -> Result<()> {
        let zeros = |shape: &[usize], dtype| Tensor::zeros(shape, dtype, &Device::Cpu);
        let (attention, layer) = (Attention::new(&Device::Cpu)?, Layer::new(0.3));
        let sinks = zeros(&[8], DType::F32)?;
        for (layer, dtype, of_cache) in [
            (layer.clone(), DType::F32, DType::F32),
            (layer.clone(), DType::BF16, DType::BF16),
            (layer.clone().with_window_left(3), DType::F16, DType::F16),
            (
                layer.clone().non_causal().with_soft_cap(9.0),
                DType::F32,
                DType::F32,
            ),
            (layer.clone().with_sinks(sinks), DType::BF16, DType::BF16),
            (layer.with_kv_scales(0.5, 0.25), DType::BF16, DType::F8E4M3),
        ] {
            let step = attention.decode(&[vec![1_u32]], &[5_u32], 16)?;
            let spec = layer.spec(8, 2, 64, dtype)?;
            let _ = step.plan(&spec)?;
            let cache = zeros(&[2, 16, 2, 64], of_cache)?;
            let _ = paged_attention(&zeros(&[1, 8, 64], dtype)?, &cache, &cache, &step, &layer)?;
            assert_eq!(step.plans(), 1, "{layer:?}");
        }
        Ok(())
    }
}

//! Mask and logits transform, as data.

use std::ops::Range;

use kernels_gpu::HooksName;
use serde::{Deserialize, Serialize};

/// Mask and logits transform, as data; the device side is `kernels_gpu::variant`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Variant {
    /// A query sees no key after its own position.
    pub causal: bool,
    /// A query sees its own position and this many keys to the left.
    pub window_left: Option<u32>,
    /// Logits become `cap · tanh(logit / cap)`. The cap is positive and at most [`MOST_SOFT_CAP`](Self::MOST_SOFT_CAP).
    pub soft_cap: Option<f32>,
    /// Each query head has a sink: a learned logit in the softmax denominator, without a value. The sinks are passed to each run
    /// ([`HeadTensors`](crate::tensor::HeadTensors)) as natural logits, neither scaled nor capped. The LSE
    /// includes the sink. To merge results over different keys, give the sinks to one of the runs only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub sinks: bool,
    /// The [hooks](crate::variant::Variant) of this name compute logits and may hide more keys. On a GPU they need kernels that
    /// were compiled for them, and a run is given their data (`gpu::RunTensors`). The CPU and the reference are given
    /// the hooks themselves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hooks: Option<HooksName>,
    /// The weights of the hooks are not a [softmax](crate::variant::Variant::SOFTMAX): results over different keys are added, and
    /// LSEs are 0. `Spec::with_hooks` sets this field. It excludes sinks.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub adds_up: bool,
}

impl Variant {
    /// The largest soft cap. Kernels compute tanh with an absolute error of about 1e-7, which the cap multiplies: with this one, logits are
    /// off by 1e-3. Logits that are far below a larger cap hardly change: leave it out.
    pub const MOST_SOFT_CAP: f32 = 1e4;
    /// Every query sees every key.
    pub const FULL: Self = Self {
        causal: false,
        window_left: None,
        soft_cap: None,
        sinks: false,
        hooks: None,
        adds_up: false,
    };
    /// A query sees the keys up to its own position.
    pub const CAUSAL: Self = Self {
        causal: true,
        ..Self::FULL
    };

    /// The key positions below `kv_len` that a query at `position` sees.
    #[must_use]
    pub fn visible(&self, position: i32, kv_len: u32) -> Range<u32> {
        let position = i64::from(position);
        let end = if self.causal {
            (position + 1).clamp(0, i64::from(kv_len))
        } else {
            i64::from(kv_len)
        };
        let begin = self
            .window_left
            .map_or(0, |window| (position - i64::from(window)).clamp(0, end));
        begin as u32..end as u32
    }
}

impl Default for Variant {
    fn default() -> Self {
        Self::CAUSAL
    }
}

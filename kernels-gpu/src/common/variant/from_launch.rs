//! Variants that kernels of their own are compiled for: what a launch gives them, and which hooks GPUs run.

use super::Variant;
use crate::abi::VariantParams;

/// What is wrong with what a run gives a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnDefect {
    /// The number that is wrong.
    pub name: &'static str,
    /// What it is.
    pub got: u64,
    /// What it has to be.
    pub rule: &'static str,
}

/// A variant that kernels of its own are compiled for: see [`variant_kernels!`](crate::variant_kernels).
pub trait FromLaunch: Variant {
    /// What a run gives it beside the standard parameters: numbers, and device addresses of what is larger.
    type Own: bytemuck::Pod;

    /// From what a launch is given.
    fn from_launch(params: VariantParams, own: &Self::Own) -> Self;

    /// Whether a run with so many query heads can be given this. Hosts ask before anything is launched.
    ///
    /// # Errors
    /// The first thing that is wrong.
    fn check(own: &Self::Own, q_heads: u32) -> Result<(), OwnDefect> {
        let _ = (own, q_heads);
        Ok(())
    }

    /// Refuses, while it is compiled, a variant with a hook that no kernel runs.
    const RUNS_ON_GPUS: () = {
        assert!(
            Self::SOFTMAX || Self::TRANSFORMS_LOGITS,
            "weights of no softmax are what `logit` returns: set TRANSFORMS_LOGITS"
        );
        assert!(
            Self::SOFTMAX || !Self::KEEPS_UNIT,
            "weights of no softmax have no unit to keep: leave KEEPS_UNIT out"
        );
        assert!(
            !Self::TRANSFORMS_QUERY && !Self::TRANSFORMS_KEY,
            "kernels on GPUs run no hooks on queries or keys: transform them before attention, keys as they are appended"
        );
        assert!(
            !Self::TRANSFORMS_VALUE && !Self::TRANSFORMS_OUTPUT,
            "kernels on GPUs run no hooks on values or outputs: transform them before and behind attention"
        );
        assert!(
            Self::TRANSFORMS_LOGITS || !Self::KEEPS_UNIT,
            "logits of no hook keep no unit: set TRANSFORMS_LOGITS beside KEEPS_UNIT"
        );
        assert!(
            Self::KEEPS_UNIT || !Self::LINEAR,
            "what is linear is in the unit of dot products: set KEEPS_UNIT beside LINEAR"
        );
    };
}

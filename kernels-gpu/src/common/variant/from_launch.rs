//! Variants with kernels of their own: the parameters that a launch passes to them, and the hooks that GPUs support.

use super::Variant;
use crate::abi::VariantParams;

/// An invalid parameter of a variant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OwnDefect {
    /// The parameter's name.
    pub name: &'static str,
    /// Its value.
    pub got: u64,
    /// The rule that it violates.
    pub rule: &'static str,
}

/// A variant with kernels of its own: see [`variant_kernels!`](crate::variant_kernels).
pub trait FromLaunch: Variant {
    /// Parameters of a run beside the standard ones: numbers, and device addresses of larger data.
    type Own: bytemuck::Pod;

    /// Builds the variant from a launch's parameters. [`Variant::params`] must return `params` as they are: kernels also read the
    /// window and causality from the launch.
    ///
    /// # Safety
    /// - Addresses in `own` are those of what the variant's documentation says, in the memory of whoever computes, as long as the
    ///   variant is used: for kernels that of their GPU, for the CPU executor and the reference that of the program.
    /// - The variant is used only for numbers of query heads with which [`check`](Self::check) accepts `own`.
    unsafe fn from_launch(params: VariantParams, own: &Self::Own) -> Self;

    /// Checks the parameters of a run with `q_heads` query heads. The host calls this before any launch.
    ///
    /// # Errors
    /// The first invalid parameter.
    fn check(own: &Self::Own, q_heads: u32) -> Result<(), OwnDefect> {
        let _ = (own, q_heads);
        Ok(())
    }

    /// Rejects at compile time a variant with a hook that no kernel runs.
    const RUNS_ON_GPUS: () = {
        let () = Self::AGREES;
        assert!(
            !Self::TRANSFORMS_QUERY && !Self::TRANSFORMS_KEY,
            "kernels on GPUs run no hooks on queries or keys: transform them before attention, keys as they are appended"
        );
        assert!(
            !Self::TRANSFORMS_VALUE && !Self::TRANSFORMS_OUTPUT,
            "kernels on GPUs run no hooks on values or outputs: transform them before and behind attention"
        );
    };
}

//! What no kernel of a device supports, and what comes nearest.

use thiserror::Error;

use super::{Kernel, Tile};
use crate::problem::Dtype;

/// Something that a device has no kernel for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum Unsupported {
    /// An element type.
    #[error(
        "no kernel for {device} takes {tensor} in {got:?}: convert to {there}, or plan for the CPU, which takes \
         every type"
    )]
    Dtype {
        /// The device.
        device: String,
        /// Whose type it is.
        tensor: &'static str,
        /// The type asked for.
        got: Dtype,
        /// Those there are.
        there: &'static str,
    },
    /// Element types that differ.
    #[error(
        "{tensor} in {got:?} with queries in {expected:?} are not supported on {device}: use one type for all"
    )]
    DtypesDiffer {
        /// The device.
        device: String,
        /// What differs from the queries.
        tensor: &'static str,
        /// Its type.
        got: Dtype,
        /// The type of the queries.
        expected: Dtype,
    },
    /// A head dimension, or one with a soft cap or with keys and values of 8 bits.
    #[error(
        "no kernel for {device} has a head dimension of {}{}{}; supported: {there}{}",
        dims(*.head_dim_qk, *.head_dim_v),
        if *.soft_cap { " with a soft cap" } else { "" },
        match .kv_dtype.bytes() {
            1 => format!(" with keys and values in {:?}", .kv_dtype),
            _ => String::new(),
        },
        match .nearest {
            Some((qk, v)) => format!(
                "; to use {}, the nearest, pad the heads with zeros and keep the scale: Spec::with_scale(1/√{})",
                dims(*qk, *v),
                .head_dim_qk
            ),
            None => String::new(),
        }
    )]
    HeadDim {
        /// The device.
        device: String,
        /// Head dimension of queries and keys.
        head_dim_qk: u32,
        /// Head dimension of values and outputs.
        head_dim_v: u32,
        /// Whether logits are capped.
        soft_cap: bool,
        /// The type of keys and values.
        kv_dtype: Dtype,
        /// What there is.
        there: String,
        /// The smallest of them that holds such heads, if there is one.
        nearest: Option<(u32, u32)>,
    },
    /// A variant of hooks for other heads or types, or on another device.
    #[error(
        "no kernel for {device} computes the variant {hooks:?} for a head dimension of {} in {dtype:?} with keys in {kv_dtype:?}; \
         supported: {there}",
        dims(*.head_dim_qk, *.head_dim_v)
    )]
    Hooks {
        /// The device.
        device: String,
        /// The variant.
        hooks: kernels_gpu::HooksName,
        /// Head dimension of queries and keys.
        head_dim_qk: u32,
        /// Head dimension of values and outputs.
        head_dim_v: u32,
        /// The type that kernels have queries in.
        dtype: Dtype,
        /// The type of the keys.
        kv_dtype: Dtype,
        /// What there is.
        there: String,
    },
    /// Outputs in F32, with fused merges, which write 16 bits.
    #[error(
        "MergeMode::Fused on {device} cannot write outputs in F32: use MergeMode::Auto or MergeMode::Kernel"
    )]
    FusedF32 {
        /// The device.
        device: String,
    },
    /// Queries and keys that attention turns by their positions ([`Spec::rotary`](crate::problem::Spec)).
    #[error(
        "no kernel for {device} applies rotary embeddings {what}; apply them before attention (for keys when \
         appending, Gpu::qkv_step) and remove `rotary` from the Spec, or plan for the CPU"
    )]
    Rotary {
        /// The device.
        device: String,
        /// In which form, and what there is.
        what: String,
    },
    /// Latent attention.
    #[error(
        "no kernel for {device} computes latent attention {what}; plan for the CPU, or use separate pools for keys \
         and values"
    )]
    Latent {
        /// The device.
        device: String,
        /// In which form.
        what: String,
    },
    /// A number of prefill CTAs ([`PlanOptions::prefill_ctas`](super::PlanOptions)), with a kernel that takes both operations by tickets.
    #[error(
        "the CTAs of the fused kernel on {device} take prefills and decodes by tickets, so there is no number of prefill CTAs: remove \
         prefill_ctas ({got}){there}"
    )]
    PrefillCtas {
        /// The device.
        device: String,
        /// The number asked for.
        got: u32,
        /// Which other form has such a number, if any.
        there: &'static str,
    },
    /// Something that the kernels of some heads do not do.
    #[error("no kernel for {device} with a head dimension of {} {what}", dims(*.head_dim_qk, *.head_dim_v))]
    Heads {
        /// The device.
        device: String,
        /// Head dimension of queries and keys.
        head_dim_qk: u32,
        /// Head dimension of values and outputs.
        head_dim_v: u32,
        /// What it is, and what to do instead.
        what: String,
    },
    /// Products of 8 bits (`Compute::F8`).
    #[error(
        "no prefill kernel for {device} has products of 8 bits for a head dimension of {}, keys and values in \
         {kv_dtype:?} and this variant; supported: {there}; otherwise use Compute::F16",
        dims(*.head_dim_qk, *.head_dim_v)
    )]
    Compute {
        /// The device.
        device: String,
        /// Head dimension of queries and keys.
        head_dim_qk: u32,
        /// Head dimension of values and outputs.
        head_dim_v: u32,
        /// The type of keys and values.
        kv_dtype: Dtype,
        /// What there is.
        there: String,
    },
    /// A tile that the options ask for.
    #[error(
        "no {kernel:?} kernel for {device} has tiles of {got} at head dimension {}; supported: {there}; or leave \
         the choice to the planner",
        dims(*.head_dim_qk, *.head_dim_v)
    )]
    Tile {
        /// The device.
        device: String,
        /// The kernel.
        kernel: Kernel,
        /// The tile asked for.
        got: Tile,
        /// Head dimension of queries and keys.
        head_dim_qk: u32,
        /// Head dimension of values and outputs.
        head_dim_v: u32,
        /// What there is, or why it cannot be.
        there: String,
    },
}

/// Head dimensions as text: one number if they are equal.
pub fn dims(qk: u32, v: u32) -> String {
    match qk == v {
        true => qk.to_string(),
        false => format!("{qk} with values of {v}"),
    }
}

//! What a GPU launches for a plan, as far as the plan decides it: the executor follows this, and views show it.

pub(crate) mod converted;
pub(crate) mod merging;
pub(crate) mod pairs;
pub(crate) mod pieces;

use kernels_gpu::registry::{Element, KernelId};

use crate::problem::{Dtype, Padding, Spec};

/// The element of kernels for a type.
pub(crate) const fn element(dtype: Dtype) -> Element {
    match dtype {
        Dtype::BF16 => Element::Bf16,
        Dtype::F16 => Element::F16,
        Dtype::F32 => Element::F32,
        Dtype::F8E4M3 => Element::E4m3,
        Dtype::F8E5M2 => Element::E5m2,
    }
}

/// Whether a kernel was compiled for these heads, which other kernels pad.
pub(crate) fn has_own_heads(kernel: KernelId, spec: &Spec) -> bool {
    Padding::of(spec).is_some_and(|padding| kernel.info().head_dim == padding.dim)
}

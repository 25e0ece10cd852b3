//! Running plans: on threads of the CPU, on an NVIDIA GPU (feature `cuda`), or on an emulated one (`emulator`).

mod apart;
pub mod cpu;
#[cfg(feature = "emulator")]
pub mod emulated;
#[cfg(feature = "cuda")]
pub mod gpu;

pub use cpu::Cpu;
#[cfg(feature = "emulator")]
pub use emulated::Emulated;

/// Checks that states of these heads can be merged; `tensor` has them. The rule is the same on the CPU and on GPUs.
pub(crate) fn check_merged_heads(
    tensor: &'static str,
    q_heads: usize,
    head_dim: usize,
) -> Result<(), crate::Error> {
    use kernels_gpu::passes::merge::CHUNK;
    if head_dim == 0 || !head_dim.is_multiple_of(CHUNK) {
        return Err(crate::Error::HeadDim {
            tensor,
            got: head_dim,
            multiple: CHUNK,
        });
    }
    crate::checks::check_least(tensor, "query heads", q_heads, 1, "")
}

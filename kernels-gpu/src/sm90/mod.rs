//! Kernels for Hopper: TMA, wgmma, warp specialisation.

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
pub mod decode;
pub mod prefill;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod ring;
pub mod wide;

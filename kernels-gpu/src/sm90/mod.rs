//! Kernels for Hopper: TMA, wgmma, warp specialisation.

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
pub mod decode;
pub mod prefill;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod products;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod queries;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod ring;
pub mod slim;
pub mod wide;

/// A value that is the same in all lanes, told to the compiler: wgmma takes its descriptors from uniform
/// registers.
///
/// # Safety
/// - All lanes of the warp come here.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
#[inline(always)]
unsafe fn uniform(x: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuda_std::warp::warp_shuffle_idx(!0, x, 0, 32) }
}

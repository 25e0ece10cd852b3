//! Kernels for Hopper: TMA, wgmma, warp specialisation.

#[cfg(any(
    not(target_arch = "nvptx64"),
    feature = "decode_mma",
    all(feature = "hooks", target_feature = "sm_90a")
))]
pub mod decode_mma;
#[cfg(any(
    not(target_arch = "nvptx64"),
    feature = "decode_wgmma",
    all(feature = "hooks", target_feature = "sm_90a")
))]
pub mod decode_wgmma;
#[cfg(any(not(target_arch = "nvptx64"), feature = "mla"))]
pub mod mla;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod mma;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod pages;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod pipeline;
#[cfg(any(
    not(target_arch = "nvptx64"),
    feature = "prefill",
    feature = "prefill_f8",
    all(feature = "hooks", target_feature = "sm_90a")
))]
pub mod prefill;
mod unit;

/// A value that is the same in all lanes, declared to the compiler: wgmma takes its descriptors from uniform
/// registers.
///
/// # Safety
/// - All lanes of the warp come here.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
#[inline(always)]
unsafe fn uniform(x: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuda_std::warp::warp_shuffle_idx(cuda_std::warp::FULL_MASK, x, 0, 32) }
}

/// Where warps read what the others stored just before.
///
/// Two barriers, and not one: racecheck of CUDA 13.0 now and then takes a warp's arrival at a barrier to come later
/// than what another warp does behind it. A warp at the second barrier has passed the first.
///
/// # Safety
/// As [`bar_sync`](cuda_std::barrier::bar_sync)'s.
#[cfg(target_arch = "nvptx64")]
#[inline(always)]
pub unsafe fn meet(barrier: u32, warps: u32) {
    // SAFETY: the caller's promise.
    unsafe {
        cuda_std::barrier::bar_sync(barrier, warps * 32);
        cuda_std::barrier::bar_sync(barrier, warps * 32);
    }
}

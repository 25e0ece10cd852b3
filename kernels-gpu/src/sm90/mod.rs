//! Kernels for Hopper: TMA, wgmma, warp specialisation.

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod by_rows;
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

/// The number of arrivals of barrier `index`: that of the first run whose end is above the index, or else `rest`.
///
/// Comparisons, not a `match`: of that LLVM makes a table in global memory, and each launch would begin with a read of it.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
#[inline(always)]
fn arrivals<const N: usize>(index: u32, ends_and_arrivals: [(u32, u32); N], rest: u32) -> u32 {
    let mut of_index = rest;
    let mut run = N;
    while run > 0 {
        run -= 1;
        let (end, arrivals) = ends_and_arrivals[run];
        if index < end {
            of_index = arrivals;
        }
    }
    of_index
}

/// A launch that begins [`early`](crate::abi::DecodeParams::early) waits here until the launch before it is complete. Before,
/// it reads nothing but its parameters and the plan, which the host writes. Each thread waits by itself: it then sees what
/// that launch wrote. The launch after this one may begin after this point only, because it need not wait itself.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
#[inline(always)]
fn follow(early: u32) {
    if early != 0 {
        cuda_std::griddep::wait();
    }
}

/// Tells the compiler that a value is the same in all lanes: wgmma takes its descriptors from uniform registers.
///
/// # Safety
/// - All lanes of the warp come here.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
#[inline(always)]
unsafe fn uniform(x: u32) -> u32 {
    // SAFETY: the caller's promise.
    unsafe { cuda_std::warp::warp_shuffle_idx(cuda_std::warp::FULL_MASK, x, 0, 32) }
}

/// A barrier for warps that then read what the other warps have just stored.
///
/// Two `bar.sync` instead of one: racecheck of CUDA 13.0 sometimes orders a warp's arrival after another warp's
/// accesses behind the same barrier. Every warp that reaches the second barrier has passed the first.
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

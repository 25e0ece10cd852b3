//! When products may begin, and when they are done.

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn wgmma_fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn wgmma_commit_group();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn wgmma_wait_group(pending: u64);
}

/// Orders the warpgroup's accesses to registers (accumulators, A fragments) before the products
/// that follow. Needed before the first product and after the registers were written otherwise.
///
/// # Safety
/// - All threads of the warpgroup come here, the lanes of a warp together.
///
/// # PTX
/// `wgmma.fence.sync.aligned` (sm_90a)
#[inline(always)]
pub unsafe fn fence() {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { wgmma_fence() }
}

/// Closes the group of the products since the last commit.
///
/// # Safety
/// - All threads of the warpgroup come here, the lanes of a warp together.
///
/// # PTX
/// `wgmma.commit_group.sync.aligned` (sm_90a)
#[inline(always)]
pub unsafe fn commit_group() {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { wgmma_commit_group() }
}

/// Waits until at most `PENDING` of the latest groups are incomplete; then [`fence_operand`](super::fence_operand) on what
/// is complete.
///
/// # Safety
/// - All threads of the warpgroup come here, the lanes of a warp together.
///
/// # PTX
/// `wgmma.wait_group.sync.aligned PENDING` (sm_90a)
#[inline(always)]
pub unsafe fn wait_group<const PENDING: u64>() {
    const { assert!(PENDING < 8) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe { wgmma_wait_group(PENDING) }
}

/// Holds arithmetic in its place: before a [`wait_group`] that it is to overlap.
///
/// ptxas 13.0 starts a wait as early as it can, above all arithmetic that stands before it, so
/// that a softmax between two waits would begin only when the products are done. It moves nothing
/// across a fence of memory; this is the one that costs least, `MEMBAR.ALL.CTA` in machine code.
///
/// # PTX
/// `fence.acq_rel.cta`
#[inline(always)]
pub fn schedule_fence() {
    crate::fence::acq_rel_cta();
}

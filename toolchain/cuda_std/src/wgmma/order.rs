//! Fences, groups and waits of products.

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
    fn wgmma_fence();
    #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
    fn wgmma_commit_group();
    #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
    fn wgmma_wait_group(pending: u64);
}

/// Orders the warpgroup's register accesses (accumulators, A fragments) before the products that
/// follow. Needed before the first product and after other writes of these registers.
///
/// # Safety
/// - All threads of the warpgroup execute this, the lanes of a warp together.
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
/// - All threads of the warpgroup execute this, the lanes of a warp together.
///
/// # PTX
/// `wgmma.commit_group.sync.aligned` (sm_90a)
#[inline(always)]
pub unsafe fn commit_group() {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { wgmma_commit_group() }
}

/// Waits until at most `PENDING` of the latest groups are incomplete. Then call
/// [`fence_operand`](super::fence_operand) on the registers of the others.
///
/// # Safety
/// - All threads of the warpgroup execute this, the lanes of a warp together.
///
/// # PTX
/// `wgmma.wait_group.sync.aligned PENDING` (sm_90a)
#[inline(always)]
pub unsafe fn wait_group<const PENDING: u64>() {
    const { assert!(PENDING < 8) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe { wgmma_wait_group(PENDING) }
}

/// Keeps arithmetic before a [`wait_group`] that it should overlap.
///
/// ptxas 13.0 moves a wait as early as possible, above all arithmetic before it. A softmax between two
/// waits would then start only when the products are done. ptxas moves nothing across a memory fence;
/// this is the cheapest one, `MEMBAR.ALL.CTA` in machine code.
///
/// # PTX
/// `fence.acq_rel.cta`
#[inline(always)]
pub fn schedule_fence() {
    crate::fence::acq_rel_cta();
}

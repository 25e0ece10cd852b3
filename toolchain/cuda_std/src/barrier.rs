//! Named barriers: up to 16 per block, each for any multiple of 32 of its threads.
//!
//! Barrier 0 is that of [`crate::thread::sync_threads`]. `threads` counts all threads of a phase: those
//! that wait and those that only arrive.

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier.cta.sync.aligned.count"]
    fn sync_aligned(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.aligned.count"]
    fn arrive_aligned(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.red.or.aligned.count"]
    fn any_aligned(id: u32, threads: u32, vote: bool) -> bool;
    #[link_name = "llvm.nvvm.barrier.cta.sync.count"]
    fn sync_unaligned(id: u32, threads: u32);
    #[link_name = "llvm.nvvm.barrier.cta.arrive.count"]
    fn arrive_unaligned(id: u32, threads: u32);
}

/// Arrives at barrier `id` and waits until `threads` threads have arrived; orders their memory accesses.
///
/// # Safety
/// - `id < 16`; `threads` is a multiple of 32 and equal for all threads of the phase.
/// - All lanes of a warp execute this together.
/// - All warps that wait in a phase do so at one place of the code; those that only arrive may do so anywhere. The
///   hardware allows other places, but synccheck reports them. The [unaligned form](barrier_sync) may be anywhere, but
///   with it ptxas guards every later shuffle and vote.
///
/// # PTX
/// `barrier.sync.aligned id, threads` (`bar.sync`)
#[inline(always)]
pub unsafe fn bar_sync(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { sync_aligned(id, threads) }
}

/// Arrives at barrier `id` and does not wait.
///
/// # Safety
/// - As for [`bar_sync`], and some warp waits in each phase.
///
/// # PTX
/// `barrier.arrive.aligned id, threads` (`bar.arrive`)
#[inline(always)]
pub unsafe fn bar_arrive(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { arrive_aligned(id, threads) }
}

/// [`bar_sync`] that tells all threads whether any of them arrived with `vote`.
///
/// # Safety
/// - As for [`bar_sync`].
///
/// # PTX
/// `barrier.red.or.pred.aligned id, threads` (`bar.red.or.pred`)
#[inline(always)]
pub unsafe fn bar_any(id: u32, threads: u32, vote: bool) -> bool {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { any_aligned(id, threads, vote) }
}

/// [`bar_sync`] for warps whose lanes may arrive separately.
///
/// # Safety
/// - `id < 16`; `threads` is a multiple of 32 and equal for all threads of the phase.
///
/// # PTX
/// `barrier.sync id, threads`
#[inline(always)]
pub unsafe fn barrier_sync(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { sync_unaligned(id, threads) }
}

/// [`bar_arrive`] for warps whose lanes may arrive separately.
///
/// # Safety
/// - As for [`barrier_sync`], and some warp waits in each phase.
///
/// # PTX
/// `barrier.arrive id, threads`
#[inline(always)]
pub unsafe fn barrier_arrive(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { arrive_unaligned(id, threads) }
}

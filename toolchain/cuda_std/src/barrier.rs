//! Named barriers: up to 16 per block, each for any multiple of 32 of its threads.
//!
//! Barrier 0 is [`crate::thread::sync_threads`]'. `threads` counts all threads that take part in a
//! phase: those that wait and those that only arrive.

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

/// Arrives at barrier `id` and waits until `threads` threads did; orders their accesses to memory.
///
/// # Safety
/// - `id < 16`; `threads` is a multiple of 32, the same for all that take part in the phase.
/// - All lanes of a warp come here together.
/// - All warps that wait in a phase do so at one place of the code; those that only arrive may do so anywhere. The hardware
///   does not mind other places, but synccheck lists them, and the form that is [not aligned](barrier_sync), which may be
///   anywhere, has ptxas guard each shuffle and vote behind it.
///
/// # PTX
/// `barrier.sync.aligned id, threads` (`bar.sync`)
#[inline(always)]
pub unsafe fn bar_sync(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { sync_aligned(id, threads) }
}

/// Arrives at barrier `id` and goes on.
///
/// # Safety
/// - As [`bar_sync`]'s, and some warp waits in each phase.
///
/// # PTX
/// `barrier.arrive.aligned id, threads` (`bar.arrive`)
#[inline(always)]
pub unsafe fn bar_arrive(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { arrive_aligned(id, threads) }
}

/// [`bar_sync`] that tells all threads whether any of them came with `vote`.
///
/// # Safety
/// - As [`bar_sync`]'s.
///
/// # PTX
/// `barrier.red.or.pred.aligned id, threads` (`bar.red.or.pred`)
#[inline(always)]
pub unsafe fn bar_any(id: u32, threads: u32, vote: bool) -> bool {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { any_aligned(id, threads, vote) }
}

/// [`bar_sync`] for warps whose lanes may come one by one.
///
/// # Safety
/// - `id < 16`; `threads` is a multiple of 32, the same for all that take part in the phase.
///
/// # PTX
/// `barrier.sync id, threads`
#[inline(always)]
pub unsafe fn barrier_sync(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { sync_unaligned(id, threads) }
}

/// [`bar_arrive`] for warps whose lanes may come one by one.
///
/// # Safety
/// - As [`barrier_sync`]'s, and some warp waits in each phase.
///
/// # PTX
/// `barrier.arrive id, threads`
#[inline(always)]
pub unsafe fn barrier_arrive(id: u32, threads: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { arrive_unaligned(id, threads) }
}

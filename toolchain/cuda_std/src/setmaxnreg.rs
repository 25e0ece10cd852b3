//! Transfers registers between the warpgroups of a block (sm_90a).
//!
//! The pool has as many registers as the block got at launch (threads × registers per thread). One
//! warpgroup releases some with [`decrease`]; another waits in [`increase`] until there are enough. ptxas
//! honours both only in a kernel with launch bounds: `#[kernel(max_threads = …, min_blocks = …)]`.

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.setmaxnreg.inc.sync.aligned.u32"]
    fn setmaxnreg_inc(registers: u32);
    #[link_name = "llvm.nvvm.setmaxnreg.dec.sync.aligned.u32"]
    fn setmaxnreg_dec(registers: u32);
}

/// Waits until every thread of the warpgroup can have `REGISTERS` registers.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8 in `24..=256`, not below the current number.
/// - All warps of the warpgroup execute this, their lanes together; the pool will have enough registers.
///
/// # PTX
/// `setmaxnreg.inc.sync.aligned.u32 REGISTERS` (sm_90a)
#[inline(always)]
pub unsafe fn increase<const REGISTERS: u32>() {
    const { assert!(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe { setmaxnreg_inc(REGISTERS) }
}

/// Releases the registers of each thread of the warpgroup above `REGISTERS`.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8 in `24..=256`, not above the current number.
/// - All warps of the warpgroup execute this, their lanes together.
///
/// # PTX
/// `setmaxnreg.dec.sync.aligned.u32 REGISTERS` (sm_90a)
#[inline(always)]
pub unsafe fn decrease<const REGISTERS: u32>() {
    const { assert!(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe { setmaxnreg_dec(REGISTERS) }
}

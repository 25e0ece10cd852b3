//! Moving registers between the warpgroups of a block (sm_90a).
//!
//! The pool is what the block got at launch (threads × registers per thread); a warpgroup gives some
//! back with [`decrease`], another waits in [`increase`] until there are enough. ptxas heeds both
//! only in a kernel with launch bounds: `#[kernel(max_threads = …, min_blocks = …)]`.

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
/// - `REGISTERS` is a multiple of 8 in `24..=256`, not below the present number.
/// - All warps of the warpgroup come here, their lanes together; the pool will hold enough.
///
/// # PTX
/// `setmaxnreg.inc.sync.aligned.u32 REGISTERS` (sm_90a)
#[inline(always)]
pub unsafe fn increase<const REGISTERS: u32>() {
    const { assert!(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe { setmaxnreg_inc(REGISTERS) }
}

/// Gives back what every thread of the warpgroup has above `REGISTERS` registers.
///
/// # Safety
/// - `REGISTERS` is a multiple of 8 in `24..=256`, not above the present number.
/// - All warps of the warpgroup come here, their lanes together.
///
/// # PTX
/// `setmaxnreg.dec.sync.aligned.u32 REGISTERS` (sm_90a)
#[inline(always)]
pub unsafe fn decrease<const REGISTERS: u32>() {
    const { assert!(REGISTERS % 8 == 0 && REGISTERS >= 24 && REGISTERS <= 256) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe { setmaxnreg_dec(REGISTERS) }
}

//! Special registers.

use core::arch::asm;

macro_rules! constant_registers {
    ($($name:ident, $register:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`mov.u32 d, ", $register, "`")]
        #[inline(always)]
        #[must_use]
        pub fn $name() -> u32 {
            let value;
            // SAFETY: reads a special register that does not change while the thread runs.
            unsafe {
                asm!(concat!("mov.u32 {}, ", $register, ";"), out(reg32) value, options(pure, nomem, nostack));
            }
            value
        }
    )*};
}

constant_registers! {
    nsmid, "%nsmid", "One past the largest [`smid`]; ids below it may be missing.";
    nwarpid, "%nwarpid", "One past the largest [`warpid`].";
    lanemask_eq, "%lanemask_eq", "The bit of this lane.";
    lanemask_lt, "%lanemask_lt", "The bits of the lanes below this one.";
    lanemask_le, "%lanemask_le", "The bits of this lane and those below it.";
    lanemask_gt, "%lanemask_gt", "The bits of the lanes above this one.";
    lanemask_ge, "%lanemask_ge", "The bits of this lane and those above it.";
    dynamic_smem_size, "%dynamic_smem_size", "Bytes of dynamic shared memory of the block.";
    total_smem_size, "%total_smem_size", "Bytes of shared memory of the block, static and dynamic.";
}

macro_rules! volatile_registers {
    ($($name:ident, $type:ty, $class:ident, $mov:literal, $register:literal, [$($option:ident),*], $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`", $mov, " d, ", $register, "`")]
        #[inline(always)]
        #[must_use]
        pub fn $name() -> $type {
            let value;
            // SAFETY: reads a special register. Not `pure`, because it changes while the thread runs.
            unsafe {
                asm!(concat!($mov, " {}, ", $register, ";"), out($class) value, options(nostack $(, $option)*));
            }
            value
        }
    )*};
}

volatile_registers! {
    smid, u32, reg32, "mov.u32", "%smid", [nomem], "The multiprocessor the thread runs on now. It could change only when a debugger or preemption moves the block.";
    warpid, u32, reg32, "mov.u32", "%warpid", [nomem], "The warp slot of the multiprocessor; not the index of the warp in its block.";
    clock, u32, reg32, "mov.u32", "%clock", [], "The low half of [`clock64`].";
    clock64, u64, reg64, "mov.u64", "%clock64", [], "The multiprocessor's cycle counter.";
    globaltimer, u64, reg64, "mov.u64", "%globaltimer", [], "Nanoseconds of a clock that all multiprocessors share; its step may be as coarse as a microsecond.";
}

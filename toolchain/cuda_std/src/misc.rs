//! Clocks, traps and breakpoints.

use core::arch::asm;

/// The multiprocessor's cycle counter.
///
/// # PTX
/// `mov.u64 d, %clock64`
#[inline(always)]
#[must_use]
pub fn clock() -> u64 {
    let cycles;
    // SAFETY: reads a special register. Not `pure`, because two reads differ.
    unsafe { asm!("mov.u64 {}, %clock64;", out(reg64) cycles, options(nostack)) }
    cycles
}

/// Ends the launch with an error that the host sees.
///
/// # PTX
/// `trap`
#[inline(always)]
pub fn trap() -> ! {
    // SAFETY: does not return.
    unsafe { asm!("trap;", options(nostack, noreturn)) }
}

/// Stops in a debugger.
///
/// # PTX
/// `brkpt`
#[inline(always)]
pub fn breakpoint() {
    // SAFETY: only suspends the thread.
    unsafe { asm!("brkpt;", options(nostack)) }
}

/// Fires performance-monitor event `EVENT`, `0..16`.
///
/// # PTX
/// `pmevent EVENT`
#[inline(always)]
pub fn profiler_counter<const EVENT: u32>() {
    const { assert!(EVENT < 16) };
    // SAFETY: only counts.
    unsafe { asm!("pmevent {};", const EVENT, options(nostack, nomem)) }
}

/// Returns `value` such that the compiler knows nothing about it. Values computed from it are then computed
/// here, instead of being kept in registers from outside of a loop.
///
/// # PTX
/// None.
#[inline(always)]
#[must_use]
pub fn opaque(mut value: u32) -> u32 {
    // Not `pure`, because it must not be moved.
    // SAFETY: emits no instruction.
    unsafe { asm!("// {}", inout(reg32) value, options(nostack, nomem)) }
    value
}

/// [`opaque`] for 64 bits.
///
/// # PTX
/// None.
#[inline(always)]
#[must_use]
pub fn opaque_u64(mut value: u64) -> u64 {
    // SAFETY: emits no instruction.
    unsafe { asm!("// {}", inout(reg64) value, options(nostack, nomem)) }
    value
}

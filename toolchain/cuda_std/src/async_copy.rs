//! `cp.async`: each thread copies 4, 8 or 16 bytes from global to shared memory without using
//! registers (sm_80).
//!
//! [`commit_group`] closes a group of copies; [`wait_group`] waits for groups of the same thread. A
//! barrier then makes the copies visible to other threads. [`mbarrier_arrive`] is an alternative.

use core::arch::asm;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.cp.async.commit.group"]
    safe fn cp_async_commit_group();
    #[link_name = "llvm.nvvm.cp.async.wait.group"]
    safe fn cp_async_wait_group(pending: u32);
    #[link_name = "llvm.nvvm.cp.async.wait.all"]
    safe fn cp_async_wait_all();
}

/// Copies `BYTES` (4, 8 or 16) bytes through L1.
///
/// # Safety
/// - `target` is a shared address, `source` points to global memory, both aligned to `BYTES`.
/// - No thread accesses the target before the copy has been waited for.
///
/// # PTX
/// `cp.async.ca.shared.global [target], [source], BYTES`
#[inline(always)]
pub unsafe fn copy_ca<const BYTES: u32>(target: u32, source: *const u8) {
    const { assert!(BYTES == 4 || BYTES == 8 || BYTES == 16) };
    // SAFETY: the caller's promise covers the instruction's requirements.
    unsafe {
        asm!("cp.async.ca.shared.global [{}], [{}], {};", in(reg32) target, in(reg64) source, const BYTES, options(nostack));
    }
}

/// [`copy_ca`] of only the first `valid` bytes; the rest is filled with zeros. If `valid == 0`, nothing is read.
///
/// # Safety
/// - As [`copy_ca`]'s, `valid <= BYTES`.
///
/// # PTX
/// `cp.async.ca.shared.global [target], [source], BYTES, valid`
#[inline(always)]
pub unsafe fn copy_ca_zfill<const BYTES: u32>(target: u32, source: *const u8, valid: u32) {
    const { assert!(BYTES == 4 || BYTES == 8 || BYTES == 16) };
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!(
            "cp.async.ca.shared.global [{}], [{}], {}, {};",
            in(reg32) target,
            in(reg64) source,
            const BYTES,
            in(reg32) valid,
            options(nostack),
        );
    }
}

macro_rules! copies_of_16 {
    ($($name:ident, $ptx:literal, $what:literal, ($($size:ident)?), ($($policy:ident)?);)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - `target` is a shared address, `source` points to global memory, both aligned to 16.
        /// - No thread accesses the target before the copy has been waited for.
        $(#[doc = concat!("- `", stringify!($size), " <= 16`.")])?
        $(#[doc = concat!("- `", stringify!($policy), "` comes from [`crate::ptr`]'s policy functions.")])?
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, " [target], [source], 16", $(", ", stringify!($size),)? $(", ", stringify!($policy),)? "`")]
        #[inline(always)]
        pub unsafe fn $name(target: u32, source: *const u8 $(, $size: u32)? $(, $policy: u64)?) {
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!(
                        $ptx, " [{target}], [{source}], 16",
                        $(", {", stringify!($size), "}",)? $(", {", stringify!($policy), "}",)? ";"
                    ),
                    target = in(reg32) target,
                    source = in(reg64) source,
                    $($size = in(reg32) $size,)?
                    $($policy = in(reg64) $policy,)?
                    options(nostack),
                );
            }
        }
    )*};
}

copies_of_16! {
    copy_cg, "cp.async.cg.shared.global", "Copies 16 bytes, past L1.", (), ();
    copy_cg_zfill, "cp.async.cg.shared.global", "[`copy_cg`] of the first `valid` bytes; zeros fill the rest.", (valid), ();
    copy_cg_l2_128, "cp.async.cg.shared.global.L2::128B", "[`copy_cg`] that brings the whole line of 128 bytes to L2.", (), ();
    copy_cg_l2_128_zfill, "cp.async.cg.shared.global.L2::128B", "[`copy_cg_l2_128`] of the first `valid` bytes; zeros fill the rest.", (valid), ();
    copy_cg_hint, "cp.async.cg.shared.global.L2::cache_hint", "[`copy_cg`] with a cache policy for L2.", (), (policy);
    copy_cg_hint_zfill, "cp.async.cg.shared.global.L2::cache_hint", "[`copy_cg_hint`] of the first `valid` bytes; zeros fill the rest.", (valid), (policy);
    copy_cg_hint_l2_128, "cp.async.cg.shared.global.L2::cache_hint.L2::128B", "[`copy_cg_l2_128`] with a cache policy for L2.", (), (policy);
    copy_cg_hint_l2_128_zfill, "cp.async.cg.shared.global.L2::cache_hint.L2::128B", "[`copy_cg_hint_l2_128`] of the first `valid` bytes; zeros fill the rest.", (valid), (policy);
}

/// Closes the group of the thread's copies since the last commit. An empty group counts, too.
///
/// # PTX
/// `cp.async.commit_group`
#[inline(always)]
pub fn commit_group() {
    cp_async_commit_group();
}

/// Waits until at most `PENDING` of the thread's latest groups are still incomplete.
///
/// # PTX
/// `cp.async.wait_group PENDING`
#[inline(always)]
pub fn wait_group<const PENDING: u32>() {
    cp_async_wait_group(PENDING);
}

/// Waits for all of the thread's copies, committed or not.
///
/// # PTX
/// `cp.async.wait_all`
#[inline(always)]
pub fn wait_all() {
    cp_async_wait_all();
}

/// Makes this thread arrive at the barrier when its copies so far are complete. The arrival is one
/// of those that [`mbarrier::init`](crate::mbarrier::init) counted.
///
/// # Safety
/// - `barrier` is the shared address of an initialised mbarrier.
///
/// # PTX
/// `cp.async.mbarrier.arrive.noinc.shared::cta.b64 [barrier]`
#[inline(always)]
pub unsafe fn mbarrier_arrive(barrier: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [{}];", in(reg32) barrier, options(nostack));
    }
}

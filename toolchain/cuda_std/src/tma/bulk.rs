//! Copies of contiguous bytes, and the groups of copies out of shared memory.

use core::arch::asm;

unsafe extern "C" {
    #[link_name = "llvm.nvvm.cp.async.bulk.commit.group"]
    safe fn bulk_commit_group();
    #[link_name = "llvm.nvvm.cp.async.bulk.wait.group"]
    safe fn bulk_wait_group(pending: u32);
    #[link_name = "llvm.nvvm.cp.async.bulk.wait.group.read"]
    safe fn bulk_wait_group_read(pending: u32);
}

macro_rules! bulk {
    ($(
        $name:ident($($argument:ident: $type:ty = $class:ident),*), $ptx:literal, $arguments:literal, $what:literal, [$($rule:literal),*];
    )*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - `bytes` is a multiple of 16; both addresses are aligned to 16.
        $(#[doc = concat!("- ", $rule)])*
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, "` (sm_90)")]
        #[inline(always)]
        pub unsafe fn $name($($argument: $type),*) {
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(concat!($ptx, $arguments, ";"), $($argument = in($class) $argument,)* options(nostack));
            }
        }
    )*};
}

bulk! {
    load_bulk(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes", " [{target}], [{source}], {bytes}, [{barrier}]",
        "Copies bytes from global to shared memory.",
        ["`barrier` is an initialised mbarrier that expects the bytes.", "Nobody touches the target until the barrier's phase completed."];
    load_bulk_hint(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32, policy: u64 = reg64),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint", " [{target}], [{source}], {bytes}, [{barrier}], {policy}",
        "[`load_bulk`] with a cache policy for L2.",
        ["As [`load_bulk`]'s; `policy` comes from [`crate::ptr`]'s policy functions."];
    load_bulk_multicast(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32, ctas: u16 = reg16),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster", " [{target}], [{source}], {bytes}, [{barrier}], {ctas}",
        "[`load_bulk`] into every block of the cluster whose rank's bit is set in `ctas`.",
        ["As [`load_bulk`]'s, for each of these blocks."];
    load_bulk_multicast_hint(target: u32 = reg32, source: *const u8 = reg64, bytes: u32 = reg32, barrier: u32 = reg32, ctas: u16 = reg16, policy: u64 = reg64),
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint", " [{target}], [{source}], {bytes}, [{barrier}], {ctas}, {policy}",
        "[`load_bulk_multicast`] with a cache policy for L2.",
        ["As [`load_bulk_multicast`]'s; `policy` comes from [`crate::ptr`]'s policy functions."];
    copy_bulk_cluster(target: u32 = reg32, source: u32 = reg32, bytes: u32 = reg32, barrier: u32 = reg32),
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes", " [{target}], [{source}], {bytes}, [{barrier}]",
        "Copies bytes from this block's shared memory to another's of the cluster.",
        ["`target` and `barrier` are mapped addresses of the same block, the barrier expects the bytes.", "Nobody touches source and target until the barrier's phase completed."];
    store_bulk(target: *mut u8 = reg64, source: u32 = reg32, bytes: u32 = reg32),
        "cp.async.bulk.global.shared::cta.bulk_group", " [{target}], [{source}], {bytes}",
        "Copies bytes from shared to global memory.",
        ["The source stays unchanged until the group was waited for."];
    store_bulk_hint(target: *mut u8 = reg64, source: u32 = reg32, bytes: u32 = reg32, policy: u64 = reg64),
        "cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint", " [{target}], [{source}], {bytes}, {policy}",
        "[`store_bulk`] with a cache policy for L2.",
        ["As [`store_bulk`]'s; `policy` comes from [`crate::ptr`]'s policy functions."];
    reduce_add_bulk_f32(target: *mut f32 = reg64, source: u32 = reg32, bytes: u32 = reg32),
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32", " [{target}], [{source}], {bytes}",
        "Adds `f32`s in shared memory to those in global memory, each addition atomic.",
        ["The source stays unchanged until the group was waited for."];
}

/// Prefetches bytes of global memory into L2.
///
/// # Safety
/// - `source` points to `bytes` readable bytes of global memory; both are multiples of 16.
///
/// # PTX
/// `cp.async.bulk.prefetch.L2.global [source], bytes` (sm_90)
#[inline(always)]
pub unsafe fn prefetch_bulk(source: *const u8, bytes: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("cp.async.bulk.prefetch.L2.global [{}], {};", in(reg64) source, in(reg32) bytes, options(nostack));
    }
}

/// Closes the bulk group of the thread's stores and reductions since the last commit.
///
/// # PTX
/// `cp.async.bulk.commit_group` (sm_90)
#[inline(always)]
pub fn commit_group() {
    bulk_commit_group();
}

/// Waits until at most `PENDING` of the thread's latest bulk groups are incomplete. The writes of the
/// other groups are then visible to the thread.
///
/// # PTX
/// `cp.async.bulk.wait_group PENDING` (sm_90)
#[inline(always)]
pub fn wait_group<const PENDING: u32>() {
    bulk_wait_group(PENDING);
}

/// Waits until at most `PENDING` of the thread's latest bulk groups still read their source. The
/// sources of the other groups may then be overwritten.
///
/// # PTX
/// `cp.async.bulk.wait_group.read PENDING` (sm_90)
#[inline(always)]
pub fn wait_group_read<const PENDING: u32>() {
    bulk_wait_group_read(PENDING);
}

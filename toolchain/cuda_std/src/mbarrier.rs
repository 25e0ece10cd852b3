//! Barriers in shared memory that count arrivals and the bytes of asynchronous copies.
//!
//! An mbarrier is 8 bytes, aligned to 8, and identified by its shared address. A phase completes when
//! all arrivals that [`init`] set and all expected bytes have come; the next one begins at once. A waiter
//! passes the *parity* of the phase it waits for: 0 for the first, 1 for the second, 0 for the third.
//! Waiting for parity 1 of a fresh barrier returns at once, so producers can start on empty buffers.
//!
//! # Safety of all functions
//! `barrier` is the shared address of an initialised mbarrier (except for [`init`] itself), and the
//! initialisation is visible to the thread: [`init`] is followed by
//! [`fence::mbarrier_init`](crate::fence::mbarrier_init) and a barrier of the threads. No phase gets
//! more arrivals than [`init`] set, and at most 2^20 - 1 bytes are pending.

use core::arch::asm;

macro_rules! operations {
    ($($name:ident($($argument:ident),*), $ptx:literal, $arguments:literal, $arch:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - The [module's](self#safety-of-all-functions) rules.
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, "`", $arch)]
        #[inline(always)]
        pub unsafe fn $name($($argument: u32),*) {
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(concat!($ptx, $arguments, ";"), $($argument = in(reg32) $argument,)* options(nostack));
            }
        }
    )*};
}

operations! {
    init(barrier, arrivals), "mbarrier.init.shared::cta.b64", " [{barrier}], {arrivals}", " (sm_80)",
        "Starts a barrier whose phases wait for `arrivals` arrivals, at least one.";
    inval(barrier), "mbarrier.inval.shared::cta.b64", " [{barrier}]", " (sm_80)",
        "Ends a barrier; its memory may then hold other things.";
    arrive(barrier), "mbarrier.arrive.shared::cta.b64", " _, [{barrier}]", " (sm_90)",
        "Arrives once; what the thread wrote before is released.";
    arrive_count(barrier, count), "mbarrier.arrive.shared::cta.b64", " _, [{barrier}], {count}", " (sm_90)",
        "Arrives `count` times.";
    expect_tx(barrier, bytes), "mbarrier.expect_tx.relaxed.cta.shared::cta.b64", " [{barrier}], {bytes}", " (sm_90)",
        "The present phase also waits for this many bytes of asynchronous copies.";
    arrive_expect_tx(barrier, bytes), "mbarrier.arrive.expect_tx.shared::cta.b64", " _, [{barrier}], {bytes}", " (sm_90)",
        "[`expect_tx`], then [`arrive`].";
    arrive_cluster(barrier), "mbarrier.arrive.release.cluster.shared::cluster.b64", " _, [{barrier}]", " (sm_90)",
        "Arrives once at a barrier of the cluster; `barrier` comes from [`cluster::map_shared_rank`](crate::cluster::map_shared_rank).";
    arrive_count_cluster(barrier, count), "mbarrier.arrive.release.cluster.shared::cluster.b64", " _, [{barrier}], {count}", " (sm_90)",
        "Arrives `count` times at a barrier of the cluster; `barrier` comes from [`cluster::map_shared_rank`](crate::cluster::map_shared_rank).";
    arrive_expect_tx_cluster(barrier, bytes), "mbarrier.arrive.expect_tx.release.cluster.shared::cluster.b64", " _, [{barrier}], {bytes}", " (sm_90)",
        "[`arrive_expect_tx`] at a barrier of the cluster; `barrier` comes from [`cluster::map_shared_rank`](crate::cluster::map_shared_rank).";
}

/// Arrives once at the barrier with this address in the block with rank `rank` of the cluster.
///
/// # Safety
/// - The [module's](self#safety-of-all-functions) rules for the other block's barrier; that block has
///   not exited.
///
/// # PTX
/// `mapa.shared::cluster.u32 r, barrier, rank; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [r]` (sm_90)
#[inline(always)]
pub unsafe fn arrive_remote(barrier: u32, rank: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { arrive_cluster(crate::cluster::map_shared_rank(barrier, rank)) }
}

/// Arrives once and returns the state of the phase, for [`test_wait_state`].
///
/// # Safety
/// - The [module's](self#safety-of-all-functions) rules.
///
/// # PTX
/// `mbarrier.arrive.shared::cta.b64 state, [barrier]` (sm_80)
#[inline(always)]
pub unsafe fn arrive_state(barrier: u32) -> u64 {
    let state;
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("mbarrier.arrive.shared::cta.b64 {}, [{}];", out(reg64) state, in(reg32) barrier, options(nostack));
    }
    state
}

/// Whether the phase of this state is complete.
///
/// # Safety
/// - The [module's](self#safety-of-all-functions) rules; `state` belongs to the current phase or the
///   previous one.
///
/// # PTX
/// `mbarrier.test_wait.shared::cta.b64 p, [barrier], state` (sm_80)
#[inline(always)]
#[must_use]
pub unsafe fn test_wait_state(barrier: u32, state: u64) -> bool {
    let done: u32;
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!(
            "{{ .reg .pred p; mbarrier.test_wait.shared::cta.b64 p, [{}], {}; selp.u32 {}, 1, 0, p; }}",
            in(reg32) barrier,
            in(reg64) state,
            out(reg32) done,
            options(nostack),
        );
    }
    done != 0
}

macro_rules! tests {
    ($($name:ident, $ptx:literal, $arch:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - The [module's](self#safety-of-all-functions) rules.
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, " p, [barrier], parity` ", $arch)]
        #[inline(always)]
        #[must_use]
        pub unsafe fn $name(barrier: u32, parity: u32) -> bool {
            let done: u32;
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!("{{ .reg .pred p; ", $ptx, " p, [{}], {}; selp.u32 {}, 1, 0, p; }}"),
                    in(reg32) barrier,
                    in(reg32) parity,
                    out(reg32) done,
                    options(nostack),
                );
            }
            done != 0
        }
    )*};
}

tests! {
    test_wait, "mbarrier.test_wait.parity.shared::cta.b64", "(sm_80)",
        "Whether the phase of this parity is complete; does not wait.";
    try_wait, "mbarrier.try_wait.parity.shared::cta.b64", "(sm_90)",
        "Whether the phase of this parity is complete; may sleep a while before it says no.";
    try_wait_cluster, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", "(sm_90)",
        "[`try_wait`] that acquires what threads of other blocks of the cluster released.";
}

macro_rules! waits {
    ($($name:ident, $ptx:literal, $arch:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - The [module's](self#safety-of-all-functions) rules.
        ///
        /// # PTX
        #[doc = concat!("`again: ", $ptx, " p, [barrier], parity; @!p bra again` ", $arch)]
        #[inline(always)]
        pub unsafe fn $name(barrier: u32, parity: u32) {
            // The loop is inside the asm, so that the compiler sees no branch that it could copy or merge with
            // later ones. Labels in braces are local, because the block may occur several times.
            // SAFETY: the caller's promise is the instruction's.
            #[allow(named_asm_labels)]
            unsafe {
                asm!(
                    "{{ .reg .pred p;",
                    "WAIT:",
                    concat!($ptx, " p, [{barrier}], {parity};"),
                    "@p bra DONE;",
                    "bra WAIT;",
                    "DONE: }}",
                    barrier = in(reg32) barrier,
                    parity = in(reg32) parity,
                    options(nostack),
                );
            }
        }
    )*};
}

waits! {
    wait, "mbarrier.try_wait.parity.shared::cta.b64", "(sm_90)",
        "Waits for the phase of this parity; acquires what arrivals released and what copies wrote.";
    wait_cluster, "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64", "(sm_90)",
        "[`wait`] that also acquires what threads of other blocks of the cluster released.";
    wait_sm80, "mbarrier.test_wait.parity.shared::cta.b64", "(sm_80)",
        "[`wait`] for architectures before sm_90: it polls.";
}

//! Clusters: blocks that can access each other's shared memory (sm_90).

use core::arch::asm;

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.aligned"]
    fn cluster_arrive();
    #[link_name = "llvm.nvvm.barrier.cluster.arrive.relaxed.aligned"]
    fn cluster_arrive_relaxed();
    #[link_name = "llvm.nvvm.barrier.cluster.wait.aligned"]
    fn cluster_wait();
}

/// Arrives at the barrier of the cluster; releases earlier memory accesses.
///
/// # Safety
/// - All threads of the cluster arrive and then wait, alternately; all lanes of a warp together.
///
/// # PTX
/// `barrier.cluster.arrive.aligned` (sm_90)
#[inline(always)]
pub unsafe fn arrive() {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { cluster_arrive() }
}

/// [`arrive`] without memory ordering. Use it if no data is read after the barrier, as when blocks
/// wait for each other before they exit.
///
/// # Safety
/// - As for [`arrive`].
///
/// # PTX
/// `barrier.cluster.arrive.relaxed.aligned` (sm_90)
#[inline(always)]
pub unsafe fn arrive_relaxed() {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { cluster_arrive_relaxed() }
}

/// Waits until all threads of the cluster have arrived; acquires what they released.
///
/// # Safety
/// - The thread has arrived before.
///
/// # PTX
/// `barrier.cluster.wait.aligned` (sm_90)
#[inline(always)]
pub unsafe fn wait() {
    // SAFETY: the caller's promise is the instruction's.
    unsafe { cluster_wait() }
}

/// [`arrive`] and [`wait`].
///
/// # Safety
/// - All threads of the cluster execute this, all lanes of a warp together.
#[inline(always)]
pub unsafe fn sync() {
    // SAFETY: the caller's promise is the instructions'.
    unsafe {
        arrive();
        wait();
    }
}

macro_rules! registers {
    ($($name:ident, $register:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`mov.u32 d, ", $register, "` (sm_90)")]
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

registers! {
    cta_idx_x, "%cluster_ctaid.x", "Index of the block in its cluster, x.";
    cta_idx_y, "%cluster_ctaid.y", "Index of the block in its cluster, y.";
    cta_idx_z, "%cluster_ctaid.z", "Index of the block in its cluster, z.";
    cta_dim_x, "%cluster_nctaid.x", "Blocks of a cluster, x.";
    cta_dim_y, "%cluster_nctaid.y", "Blocks of a cluster, y.";
    cta_dim_z, "%cluster_nctaid.z", "Blocks of a cluster, z.";
    cta_rank, "%cluster_ctarank", "Rank of the block in its cluster.";
    cta_count, "%cluster_nctarank", "Blocks of a cluster.";
    cluster_idx_x, "%clusterid.x", "Index of the cluster in the grid, x.";
    cluster_idx_y, "%clusterid.y", "Index of the cluster in the grid, y.";
    cluster_idx_z, "%clusterid.z", "Index of the cluster in the grid, z.";
    cluster_dim_x, "%nclusterid.x", "Clusters of the grid, x.";
    cluster_dim_y, "%nclusterid.y", "Clusters of the grid, y.";
    cluster_dim_z, "%nclusterid.z", "Clusters of the grid, z.";
}

/// The address in the cluster's shared window of `address` in the block with rank `rank`.
///
/// # PTX
/// `mapa.shared::cluster.u32 d, a, rank` (sm_90)
#[inline(always)]
#[must_use]
pub fn map_shared_rank(address: u32, rank: u32) -> u32 {
    let mapped;
    // SAFETY: computes an address.
    unsafe {
        asm!(
            "mapa.shared::cluster.u32 {}, {}, {};",
            out(reg32) mapped,
            in(reg32) address,
            in(reg32) rank,
            options(pure, nomem, nostack),
        );
    }
    mapped
}

/// Reads 32 bits at an address of the cluster's shared window.
///
/// # Safety
/// - `address` comes from [`map_shared_rank`], is aligned to 4 and lies in the block's allocation.
/// - That block has started and not exited; the value was written before, with a barrier in between.
///
/// # PTX
/// `ld.shared::cluster.b32 d, [a]` (sm_90)
#[inline(always)]
#[must_use]
pub unsafe fn load(address: u32) -> u32 {
    let value;
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("ld.shared::cluster.b32 {}, [{}];", out(reg32) value, in(reg32) address, options(nostack));
    }
    value
}

/// Writes 32 bits at an address of the cluster's shared window.
///
/// # Safety
/// - As for [`load`]; no other thread accesses the word without a barrier in between.
///
/// # PTX
/// `st.shared::cluster.b32 [a], v` (sm_90)
#[inline(always)]
pub unsafe fn store(address: u32, value: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("st.shared::cluster.b32 [{}], {};", in(reg32) address, in(reg32) value, options(nostack));
    }
}

/// Writes 64 bits at an address of the cluster's shared window.
///
/// # Safety
/// - As for [`store`], aligned to 8.
///
/// # PTX
/// `st.shared::cluster.b64 [a], v` (sm_90)
#[inline(always)]
pub unsafe fn store_u64(address: u32, value: u64) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("st.shared::cluster.b64 [{}], {};", in(reg32) address, in(reg64) value, options(nostack));
    }
}

/// Writes 64 bits at an address of the cluster's shared window, and then counts 8 bytes at the mbarrier with the address
/// `barrier` in the same block. No other barrier is needed: who waits for that one sees the value.
///
/// # Safety
/// - As for [`store_u64`]; `barrier` comes from [`map_shared_rank`] with the same rank; it has been initialised, which is
///   visible to the thread.
/// - That block does not exit before the store is complete. The writing one may.
///
/// # PTX
/// `st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [a], v, [barrier]` (sm_90, PTX 8.1)
#[inline(always)]
pub unsafe fn store_u64_async(address: u32, value: u64, barrier: u32) {
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [{}], {}, [{}];",
            in(reg32) address,
            in(reg64) value,
            in(reg32) barrier,
            options(nostack),
        );
    }
}

//! Fences: the order in which other threads and asynchronous copies observe a thread's writes.

use core::arch::asm;

macro_rules! fences {
    ($($name:ident, $ptx:literal, $arch:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, "`", $arch)]
        #[inline(always)]
        pub fn $name() {
            // SAFETY: only orders accesses; the compiler assumes that the asm accesses all memory.
            unsafe { asm!(concat!($ptx, ";"), options(nostack)) }
        }
    )*};
}

fences! {
    acq_rel_cta, "fence.acq_rel.cta", "", "Acquire and release among the threads of the block.";
    acq_rel_gpu, "fence.acq_rel.gpu", "", "Acquire and release among the threads of the GPU: before a flag is raised, after it was seen.";
    acq_rel_sys, "fence.acq_rel.sys", "", "Acquire and release among the threads of the GPU, other GPUs and the host.";
    acq_rel_cluster, "fence.acq_rel.cluster", " (sm_90)", "Acquire and release among the threads of the cluster.";
    sc_cta, "fence.sc.cta", "", "Sequentially consistent fence for the block.";
    sc_gpu, "fence.sc.gpu", "", "Sequentially consistent fence for the GPU.";
    sc_sys, "fence.sc.sys", "", "Sequentially consistent fence for the system.";
    threadfence_block, "membar.cta", "", "CUDA's `__threadfence_block`.";
    threadfence, "membar.gl", "", "CUDA's `__threadfence`.";
    threadfence_system, "membar.sys", "", "CUDA's `__threadfence_system`.";
    proxy_async, "fence.proxy.async", " (sm_90)", "Orders accesses by instructions with those by asynchronous copies and wgmma, in all spaces.";
    proxy_async_shared, "fence.proxy.async.shared::cta", " (sm_90)", "[`proxy_async`] for the block's shared memory: after writing a tile with stores, before TMA or wgmma reads it.";
    proxy_async_global, "fence.proxy.async.global", " (sm_90)", "[`proxy_async`] for global memory.";
    mbarrier_init, "fence.mbarrier_init.release.cluster", " (sm_90)", "Makes [`mbarrier::init`](crate::mbarrier::init) visible to asynchronous copies and to the cluster; one barrier of the threads after it.";
}

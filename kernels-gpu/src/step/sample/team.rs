//! The CTAs of a row, and their exchange of numbers.

#[cfg(target_feature = "sm_90a")]
use cuda_std::{cluster, fence, mbarrier};
use cuda_std::{prelude::*, shared};

use super::{WARPS, at};

/// CTAs per row.
pub const CTAS: u32 = if cfg!(target_feature = "sm_90a") {
    super::CLUSTER
} else {
    1
};

/// The CTAs of a row.
pub struct Team {
    /// Address of the CTA's shared memory.
    pub memory: u32,
    /// The CTA's index in the team.
    pub rank: u32,
    /// The table that the next exchange writes.
    half: u32,
}

impl Team {
    /// # Safety
    /// All threads of all CTAs of the team call this, and each method that refers to this contract, in the same order.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        Self {
            memory: shared::dynamic_shared_address(),
            #[cfg(target_feature = "sm_90a")]
            rank: cluster::cta_rank(),
            #[cfg(not(target_feature = "sm_90a"))]
            rank: 0,
            half: 0,
        }
    }

    /// The warp's index in the team.
    #[inline(always)]
    pub fn warp(&self) -> u32 {
        self.rank * WARPS + thread::thread_idx_x() / 32
    }

    /// Tells the other CTAs that this one has started. Distributed shared memory may be accessed once all have:
    /// [`wait`](Self::wait) must follow.
    ///
    /// # Safety
    /// As [`new`](Self::new), once, before anything else.
    #[inline(always)]
    pub unsafe fn start(&self) {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise; one thread starts the barrier, before others can see it.
        unsafe {
            let arrived = self.memory + at::ARRIVED;
            let is_first = self.rank == 0 && thread::thread_idx_x() == 0;
            if is_first {
                mbarrier::init(arrived, 1);
                fence::mbarrier_init();
            }
            cluster::arrive_relaxed();
        }
    }

    /// Arrives at a barrier of all threads of the team, for which [`wait`](Self::wait) waits.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    #[inline(always)]
    pub unsafe fn arrive(&self) {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise.
        unsafe {
            cluster::arrive();
        }
    }

    /// Waits until all CTAs have started, or arrived.
    ///
    /// # Safety
    /// As [`new`](Self::new), once after [`start`](Self::start) and [`arrive`](Self::arrive), before anything else.
    #[inline(always)]
    pub unsafe fn wait(&self) {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise.
        unsafe {
            cluster::wait();
        }
    }

    /// A barrier of all threads of the team.
    #[inline(always)]
    unsafe fn sync(&self) {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise.
        unsafe {
            cluster::sync();
        }
        #[cfg(not(target_feature = "sm_90a"))]
        thread::sync_threads();
    }

    /// Sends a number of the warp to all CTAs. Also a barrier: shared memory written before it can be read after it.
    ///
    /// # Safety
    /// As [`new`](Self::new); the number is the same in all lanes.
    #[inline(always)]
    pub unsafe fn exchange(&mut self, number: u64) -> Table {
        let table = self.memory + at::TABLES + self.half * at::TABLE_BYTES;
        self.half ^= 1;
        let (mine, lane) = (table + self.warp() * 8, warp::lane_id());
        // SAFETY: each warp has its own entry. No thread reads this table any more: all have reached the exchange after
        // the one that wrote it.
        unsafe {
            if lane < CTAS {
                #[cfg(target_feature = "sm_90a")]
                cluster::store_u64(cluster::map_shared_rank(mine, lane), number);
                #[cfg(not(target_feature = "sm_90a"))]
                shared::store_u64(mine, number);
            }
            self.sync();
        }
        Table {
            first: table + lane * 8,
        }
    }

    /// Sends a number of the warp to the first CTA, which alone may read the table, after it has
    /// [waited](Self::wait_for_numbers). Nothing else follows: other CTAs may end at once. On Hopper this is an asynchronous store,
    /// since the fence that a barrier of the cluster implies takes longer than the store.
    ///
    /// # Safety
    /// As [`exchange`](Self::exchange).
    #[inline(always)]
    pub unsafe fn send_to_first(&self, number: u64) -> Table {
        let table = self.memory + at::TABLES + self.half * at::TABLE_BYTES;
        let mine = table + self.warp() * 8;
        // SAFETY: as in `exchange`.
        unsafe {
            if warp::lane_id() == 0 {
                #[cfg(target_feature = "sm_90a")]
                {
                    let arrived = cluster::map_shared_rank(self.memory + at::ARRIVED, 0);
                    cluster::store_u64_async(cluster::map_shared_rank(mine, 0), number, arrived);
                }
                #[cfg(not(target_feature = "sm_90a"))]
                shared::store_u64(mine, number);
            }
            #[cfg(not(target_feature = "sm_90a"))]
            self.sync();
        }
        Table {
            first: table + warp::lane_id() * 8,
        }
    }

    /// Waits until all numbers have arrived at the first CTA.
    ///
    /// # Safety
    /// The first warp of the first CTA calls this once, after all warps [sent](Self::send_to_first).
    #[inline(always)]
    pub unsafe fn wait_for_numbers(&self) {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise.
        unsafe {
            // Numbers may have arrived already: the phase ends with this arrival, or with the last number.
            let arrived = self.memory + at::ARRIVED;
            if thread::thread_idx_x() == 0 {
                mbarrier::arrive_expect_tx(arrived, at::TABLE_BYTES);
            }
            mbarrier::wait_cluster(arrived, 0);
        }
    }

    /// A word of another CTA's shared memory, written before the last exchange.
    ///
    /// # Safety
    /// The word exists. That CTA has not ended, because another exchange follows.
    #[inline(always)]
    pub unsafe fn load(&self, offset: u32, #[allow(unused)] rank: u32) -> u32 {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise.
        return unsafe { cluster::load(cluster::map_shared_rank(self.memory + offset, rank)) };
        // SAFETY: the caller's promise; the only CTA is this one.
        #[cfg(not(target_feature = "sm_90a"))]
        return unsafe { shared::load_u32(self.memory + offset) };
    }

    /// The sum of `x` over all threads of the team.
    ///
    /// # Safety
    /// As [`new`](Self::new).
    #[inline(always)]
    pub unsafe fn total(&mut self, x: u64) -> u64 {
        // SAFETY: the caller's promise.
        unsafe {
            let of_warp = sum_of_warp(x);
            self.exchange(of_warp).total()
        }
    }
}

/// The numbers of all warps. Lane `i` reads those of warp `i` of each CTA.
#[derive(Clone, Copy)]
pub struct Table {
    first: u32,
}

impl Table {
    /// The number of warp `lane` of a CTA; 0 if there is no such warp.
    ///
    /// # Safety
    /// The CTA exists, and at most one exchange followed that which returned this table.
    #[inline(always)]
    pub unsafe fn of(self, rank: u32) -> u64 {
        if warp::lane_id() >= WARPS {
            return 0;
        }
        // SAFETY: the caller's promise.
        unsafe { shared::load_u64(self.first + rank * (WARPS * 8)) }
    }

    /// The sum of all numbers.
    ///
    /// # Safety
    /// As [`of`](Self::of); all lanes come here.
    #[inline(always)]
    pub unsafe fn total(self) -> u64 {
        let (mut sum, mut rank) = (0, 0);
        // SAFETY: the caller's promise.
        unsafe {
            while rank < CTAS {
                sum += self.of(rank);
                rank += 1;
            }
            sum_of_warp(sum)
        }
    }
}

/// The sum over a warp of numbers below 2⁴³.
///
/// # Safety
/// All lanes come here.
#[inline(always)]
pub unsafe fn sum_of_warp(x: u64) -> u64 {
    // SAFETY: the caller's promise. Neither half overflows: 32 numbers of 16 bits, and of 27.
    unsafe {
        let low = warp::warp_reduce_add(warp::FULL_MASK, x as u32 & 0xFFFF);
        let high = warp::warp_reduce_add(warp::FULL_MASK, (x >> 16) as u32);
        (u64::from(high) << 16) + u64::from(low)
    }
}

/// The inclusive prefix sum over a warp's lanes.
///
/// # Safety
/// All lanes come here.
#[inline(always)]
pub unsafe fn sums_up_to(mut x: u64) -> u64 {
    let mut distance = 1;
    while distance < 32 {
        // SAFETY: the caller's promise.
        let (low, high) = unsafe {
            (
                warp::warp_shuffle_up(warp::FULL_MASK, x as u32, distance, 32),
                warp::warp_shuffle_up(warp::FULL_MASK, (x >> 32) as u32, distance, 32),
            )
        };
        if warp::lane_id() >= distance {
            x += u64::from(high) << 32 | u64::from(low);
        }
        distance <<= 1;
    }
    x
}

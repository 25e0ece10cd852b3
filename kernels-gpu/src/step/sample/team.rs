//! The CTAs of a row, and what they exchange.

#[cfg(target_feature = "sm_90a")]
use cuda_std::cluster;
use cuda_std::{prelude::*, shared};

use super::{WARPS, at};

/// CTAs of a row.
pub const CTAS: u32 = if cfg!(target_feature = "sm_90a") {
    super::CLUSTER
} else {
    1
};

/// The CTAs of a row.
pub struct Team {
    /// Where the CTA's shared memory begins.
    pub memory: u32,
    /// The CTA among them.
    pub rank: u32,
    /// Which table the next exchange writes.
    half: u32,
}

impl Team {
    /// # Safety
    /// All threads come here, and to each method that is marked so, in the same order in all CTAs of the team.
    #[inline(always)]
    pub unsafe fn new() -> Self {
        #[cfg(target_feature = "sm_90a")]
        let rank = {
            // SAFETY: the first exchange waits. It is to be known that the others have begun.
            unsafe { cluster::arrive_relaxed() };
            cluster::cta_rank()
        };
        #[cfg(not(target_feature = "sm_90a"))]
        let rank = 0;
        Self {
            memory: shared::dynamic_shared_address(),
            rank,
            half: 0,
        }
    }

    /// The number of the warp in the team.
    #[inline(always)]
    pub fn warp(&self) -> u32 {
        self.rank * WARPS + thread::thread_idx_x() / 32
    }

    /// Waits until all CTAs have begun.
    ///
    /// # Safety
    /// As [`new`](Self::new), once, before anything else.
    #[inline(always)]
    pub unsafe fn begun(&self) {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise; `new` arrived.
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

    /// Gives a number of the warp to all CTAs. What was written to shared memory before can be read behind it.
    ///
    /// # Safety
    /// As [`new`](Self::new); the number is the same in all lanes.
    #[inline(always)]
    pub unsafe fn exchange(&mut self, number: u64) -> Table {
        let table = self.memory + at::TABLES + self.half * at::TABLE_BYTES;
        self.half ^= 1;
        let (mine, lane) = (table + self.warp() * 8, warp::lane_id());
        // SAFETY: each warp has a place of its own. Nobody reads this table any more: all have come to the exchange
        // behind the one that wrote it.
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

    /// A word of another CTA's shared memory, written before the last exchange.
    ///
    /// # Safety
    /// There is one. That CTA has not ended: there will be another exchange.
    #[inline(always)]
    pub unsafe fn load(&self, offset: u32, #[allow(unused)] rank: u32) -> u32 {
        #[cfg(target_feature = "sm_90a")]
        // SAFETY: the caller's promise.
        return unsafe { cluster::load(cluster::map_shared_rank(self.memory + offset, rank)) };
        // SAFETY: the caller's promise; the only CTA is this one.
        #[cfg(not(target_feature = "sm_90a"))]
        return unsafe { shared::load_u32(self.memory + offset) };
    }

    /// The sum over the team of what each thread has.
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

/// The numbers of all warps: a lane has those of its index in all CTAs.
#[derive(Clone, Copy)]
pub struct Table {
    first: u32,
}

impl Table {
    /// The number of the lane's warp in a CTA, 0 where it has none.
    ///
    /// # Safety
    /// There is such a CTA; before the next exchange but one.
    #[inline(always)]
    pub unsafe fn of(self, rank: u32) -> u64 {
        if warp::lane_id() >= WARPS {
            return 0;
        }
        // SAFETY: the caller's promise.
        unsafe { shared::load_u64(self.first + rank * (WARPS * 8)) }
    }

    /// The sum.
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

/// The sums of a warp's lanes up to each of them.
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

//! 656-byte keys, copied unconverted; keys that are contiguous in the pool are loaded by one bulk copy.

use cuda_std::{fence, mbarrier, misc, ptr, shared, tma, warp};

use super::super::{keys_656::ROW_BYTES, shared::Unit};
use crate::abi::LatentParams;

const WARP: u32 = warp::FULL_MASK;

/// 32 keys, one per lane.
#[derive(Clone, Copy)]
pub(in crate::sm90::mla) struct Rows {
    /// Address of this lane's key.
    address: u64,
    /// Bytes of the run of contiguous keys that starts with this lane's key; 0 if this lane's key does not start a run.
    bytes: u32,
    /// Which keys exist, one bit per key.
    there: u32,
}

/// The page of a lane's key, and the key's place in it.
#[derive(Clone, Copy)]
pub(in crate::sm90::mla) struct Entry {
    /// An invalid id after the unit's last key.
    page: u32,
    in_page: u32,
}

impl Entry {
    /// Looks up the pages of 32 keys of a unit, from key 32 · `block` on.
    ///
    /// # Safety
    /// A whole warp; the unit is one of the launch's.
    #[inline(always)]
    pub unsafe fn look_up(p: &LatentParams, unit: &Unit, block: u32) -> Self {
        let lane = misc::opaque(warp::lane_id());
        let at = unit.first + block * 32 + lane;
        let (entry, in_page) = p.page_size.div_rem(at);
        let mut page = u32::MAX;
        if at < unit.kv_end {
            let entry = p.attention.page_ids + u64::from(unit.table + entry) * 4;
            // SAFETY: the table has an entry for each key of the item.
            page = unsafe { ptr::load_nc_u32(entry as *const u32) };
        }
        Self { page, in_page }
    }
}

impl Rows {
    /// Computes addresses and merges contiguous keys within each `GROUP` lanes into one copy.
    ///
    /// # Safety
    /// A whole warp.
    #[inline(always)]
    pub unsafe fn find<const GROUP: u32>(p: &LatentParams, entry: Entry) -> Self {
        let lane = misc::opaque(warp::lane_id());
        let exists = entry.page < p.outside;
        let strides = &p.attention.k_strides;
        let address = p.attention.k
            + u64::from(entry.page) * u64::from(strides.page)
            + u64::from(entry.in_page) * u64::from(strides.token);
        // SAFETY: a whole warp.
        unsafe {
            let there = warp::warp_vote_ballot(WARP, exists);
            let [low, high] = [address as u32, (address >> 32) as u32]
                .map(|word| warp::warp_shuffle_up(WARP, word, 1, 32));
            let before = u64::from(high) << 32 | u64::from(low);
            let follows = address == before + u64::from(ROW_BYTES)
                && there << 1 >> lane & 1 != 0
                && lane % GROUP != 0;
            let begins = exists && !follows;
            let ends = warp::warp_vote_ballot(WARP, begins) | !there;
            let behind = (ends >> lane >> 1).trailing_zeros().min(31 - lane);
            Self {
                address,
                bytes: if begins { (behind + 1) * ROW_BYTES } else { 0 },
                there,
            }
        }
    }

    /// Loads the keys of `KEYS` lanes from `first` on, and zeros for keys that do not exist. All lanes arrive at
    /// `full`, which also waits for the copies' bytes. The bits of existing keys are stored at `says`.
    ///
    /// # Safety
    /// A whole warp; the keys' place is free, and `full` is in the phase of these keys.
    #[inline(always)]
    pub unsafe fn bring<const KEYS: u32>(
        &self,
        target: u32,
        first: u32,
        full: u32,
        says: u32,
        policy: u64,
    ) {
        let all = const { u32::MAX >> (32 - KEYS) };
        let there = self.there >> first & all;
        let lane = misc::opaque(warp::lane_id());
        // SAFETY: the caller's promise.
        unsafe {
            if there != all {
                clear(target, !there & all);
            }
            if lane == first {
                shared::store_u32(says, there);
                mbarrier::expect_tx(full, there.count_ones() * ROW_BYTES);
            }
            mbarrier::arrive(full);
            let at = lane.wrapping_sub(first);
            if at < KEYS && self.bytes != 0 {
                let target = target + at * ROW_BYTES;
                tma::load_bulk_hint(target, self.address as *const u8, self.bytes, full, policy);
            }
        }
    }
}

/// Zeroes the keys whose bits are set. No row sees them, but 0 · NaN is NaN.
#[inline(always)]
unsafe fn clear(target: u32, mut which: u32) {
    while which != 0 {
        let row = target + which.trailing_zeros() * ROW_BYTES;
        let mut at = warp::lane_id() * 16;
        while at < ROW_BYTES {
            // SAFETY: only this loader accesses the place.
            unsafe { shared::store_u32x4(row + at, [0; 4]) };
            at += 512;
        }
        which &= which - 1;
    }
    // Order these stores before bulk copies to the same place.
    fence::proxy_async_shared();
}

const _: () = assert!(ROW_BYTES % 16 == 0, "copies are aligned to 16 bytes");

//! The loader warps: one bulk copy per laid-out piece.

use cuda_std::{fence, mbarrier, prelude::*, tma};

use super::{
    super::{
        super::pipeline::Pipeline, convert::converted_from, load::next_tile,
        scheduler::PREFETCH_DISTANCE, shared::Shared,
    },
    pages::image_bytes,
};
use crate::abi::{ConvertedPage, PrefillParams};

const WARP: u32 = warp::FULL_MASK;

/// Loads the blocks of all tiles, values or keys, from the last block of a tile to the first.
///
/// # Safety
/// A whole warp comes here; the launch converts what its tiles see, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<const VALUES: bool, const STAGES: u32>(p: &PrefillParams, s: Shared) {
    let a = &p.attention;
    let lane = warp::lane_id();
    let bytes = image_bytes(s.shape.head_dim);
    let images = if VALUES {
        p.convert.to_v
    } else {
        p.convert.to_k
    };
    let pieces = s.shape.stage_keys() / ConvertedPage::KEYS;
    let mine = lane < pieces;
    let mut tiles = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    // SAFETY: a whole warp; the full and free barriers order every access to a stage.
    unsafe {
        let epoch = shared::load_u32(s.epoch());
        loop {
            let tile = next_tile(s, &mut tiles);
            if tile.rows == 0 {
                return;
            }
            let mut begin = tile.end as i32;
            let mut left = 2 * tile.blocks;
            let mut converted = tile.end as i32;
            while left > 0 {
                if !VALUES
                    && left == 2 * PREFETCH_DISTANCE
                    && lane == 0
                    && s.claims_late(tiles.stage ^ 1)
                {
                    mbarrier::arrive(s.near_end());
                }
                left -= 1;
                begin -= s.shape.stage_keys() as i32;
                while begin.max(tile.lowest as i32) < converted {
                    converted = converted_from(p, epoch, &tile, converted, VALUES);
                }
                // Find this lane's piece before waiting for the stage.
                let at = begin + (lane * ConvertedPage::KEYS) as i32;
                let exists = mine && at >= tile.lowest as i32 && at < tile.kv_end as i32;
                let mut source = 0;
                if exists {
                    // A table of converted pages starts at the first visible key. If that is not key 0, it may have
                    // wrapped.
                    let entry = tile.table.wrapping_add(at as u32 / ConvertedPage::KEYS);
                    let id = ptr::load_nc_u32((a.page_ids + u64::from(entry) * 4) as *const u32);
                    source = images + u64::from(id * a.kv_heads + tile.kv_head) * u64::from(bytes);
                }
                let there = warp::warp_vote_ballot(WARP, exists);
                let (full, free, target) = s.stage_of(VALUES, blocks.stage);
                mbarrier::wait(free, blocks.parity);
                if there != (1 << pieces) - 1 {
                    // No row sees these pieces, but 0 · NaN is NaN.
                    clear(target, bytes, !there, pieces);
                }
                if lane == 0 {
                    mbarrier::arrive_expect_tx(full, there.count_ones() * bytes);
                }
                warp::sync_warp(WARP);
                if exists {
                    tma::load_bulk(target + lane * bytes, source as *const u8, bytes, full);
                }
                blocks.advance();
            }
        }
    }
}

/// Zeroes the pieces of a stage whose bits are set in `which`.
#[inline(always)]
unsafe fn clear(target: u32, bytes: u32, which: u32, pieces: u32) {
    let mut piece = 0;
    while piece < pieces {
        if which >> piece & 1 != 0 {
            let mut at = warp::lane_id() * 16;
            while at < bytes {
                // SAFETY: the stage is the loader's.
                unsafe { shared::store_u32x4(target + piece * bytes + at, [0; 4]) };
                at += 512;
            }
        }
        piece += 1;
    }
    fence::proxy_async_shared();
    // SAFETY: a whole warp. Its stores are done before one lane arrives at the barrier.
    unsafe { warp::sync_warp(WARP) };
}

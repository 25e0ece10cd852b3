//! Selection among the keys that the threads of a CTA hold, by histograms of their distance from the largest key.

use cuda_std::{atomic, prelude::*, shared};

use super::{
    THREADS, WARPS, at,
    team::{Team, sum_of_warp, sums_up_to},
};

/// Log₂ of the bins of a histogram, one per thread.
const BINS_LOG: u32 = THREADS.trailing_zeros();

/// The largest limit for which the keys from the limit to `top` have at least the needed total weight. Only keys
/// between `low` and `top` count. `needed` gives the needed weight from the sum of all weights; returns `None` if the
/// sum is less. The limit is exact to multiples of `1 << last_bit`; with `last_bit` ≥ 32 it is what a single pass
/// finds.
///
/// # Safety
/// All threads of a CTA come here; its bins are 0.
#[inline(always)]
pub unsafe fn select<const N: usize>(
    team: &Team,
    keys: &[u32; N],
    [mut top, low]: [u32; 2],
    last_bit: u32,
    weigh: impl Fn(u32) -> u32,
    needed: impl Fn(u64) -> u64,
) -> Option<u32> {
    let (me, lane) = (thread::thread_idx_x(), warp::lane_id());
    let (bins, sums) = (team.memory + at::BINS, team.memory + at::SUMS);
    let (mut reach, mut goal) = (top - low, 0);
    loop {
        let bits = 32 - reach.leading_zeros();
        let shift = if last_bit < 32 && bits <= last_bit + BINS_LOG {
            last_bit
        } else {
            bits.saturating_sub(BINS_LOG)
        };
        // SAFETY: barriers separate writes of some threads from reads by others.
        unsafe {
            let mut i = 0;
            while i < N {
                let distance = top.wrapping_sub(keys[i]);
                if keys[i] != 0 && distance <= reach {
                    let (bin, weight) = (bins + (distance >> shift) * 8, weigh(keys[i]));
                    atomic::shared::fetch_add_relaxed_u32(bin, weight & 0xFFFF);
                    if weight >> 16 != 0 {
                        atomic::shared::fetch_add_relaxed_u32(bin + 4, weight >> 16);
                    }
                }
                i += 1;
            }
            thread::sync_threads();
            let halves = shared::load_u64(bins + me * 8);
            shared::store_u64(bins + me * 8, 0);
            let mine = (halves >> 32 << 16) + (halves & 0xFFFF_FFFF);
            let up_to = sums_up_to(mine);
            if lane == 31 {
                shared::store_u64(sums + me / 32 * 8, up_to);
            }
            thread::sync_threads();
            let mut of_warp = 0;
            if lane < WARPS {
                of_warp = shared::load_u64(sums + lane * 8);
            }
            let before = sum_of_warp(if lane < me / 32 { of_warp } else { 0 }) + up_to - mine;
            if goal == 0 {
                let all = sum_of_warp(of_warp);
                goal = needed(all);
                if all < goal {
                    return None;
                }
            }
            if before < goal && goal <= before + mine {
                shared::store_u64(team.memory + at::FOUND, before);
                shared::store_u32(team.memory + at::FOUND + 8, me);
            }
            thread::sync_threads();
            goal -= shared::load_u64(team.memory + at::FOUND);
            let nearest = shared::load_u32(team.memory + at::FOUND + 8) << shift;
            let rest = (1 << shift) - 1;
            top -= nearest;
            reach = if reach - nearest < rest {
                reach - nearest
            } else {
                rest
            };
            if shift <= last_bit {
                return Some(top - reach);
            }
        }
    }
}

//! The limit of the rules `top_k` and `top_p`, as a key.
//!
//! A search over the row would take one pass per bit of a logit. So first a lower bound of the limit is computed, from
//! one logit per warp, which enough tokens reach. Every CTA loads all tokens that reach it, the *candidates*, to
//! registers and searches among them by histograms of their keys. If there are too many candidates, or their weight is
//! too small, the search runs over the whole row.

use cuda_std::{atomic, prelude::*, shared};

use super::{
    CANDIDATES, OF_THREAD, THREADS, at,
    histogram::select,
    logits::{Logits, logit_of},
    part::Part,
    share,
    team::{CTAS, Table, Team},
    weight, weights,
};
use crate::abi::DrawParams;

/// The rules of a row.
#[derive(Clone, Copy)]
pub struct Rules {
    /// 0: no such rule.
    pub top_k: u32,
    pub top_p: u32,
    pub scale: f32,
    pub last_bit: u32,
    /// The bound is a key that `lanes` lanes of each of `warps` warps reach. 0 lanes: no bound.
    lanes: u32,
    warps: u32,
}

impl Rules {
    #[inline(always)]
    pub fn new<L: Logits>(
        part: &Part<L>,
        draw: &DrawParams,
        vocabulary: u32,
        last_bit: u32,
    ) -> Self {
        let has_k = draw.top_k > 0 && draw.top_k < vocabulary;
        let full = part.full_warps();
        // Only a part of the warps: some may hold only tokens that the model never generates, with low logits.
        let [half, most] = [full / 2, full - full / 8];
        let mut rules = Self {
            top_k: if has_k { draw.top_k } else { 0 },
            top_p: draw.top_p,
            scale: draw.scale,
            last_bit,
            lanes: if full > 1 { 1 } else { 0 },
            warps: if has_k { draw.top_k } else { most },
        };
        if has_k && draw.top_k > half && full > 1 {
            let lanes = draw.top_k.div_ceil(half);
            (rules.lanes, rules.warps) = (if lanes <= 32 { lanes } else { 0 }, half);
        }
        rules
    }

    /// Whether a rule needs a limit.
    #[inline(always)]
    pub fn any(&self) -> bool {
        self.top_k > 0 || self.top_p > 0
    }

    /// A warp's contribution to the bound: the largest key that enough of its lanes reach.
    ///
    /// # Safety
    /// All lanes come here, with their largest keys.
    #[inline(always)]
    pub unsafe fn reached(&self, mut key: u32) -> u32 {
        let mut lanes = self.lanes;
        if lanes == 0 {
            return 0;
        }
        // SAFETY: the caller's promise.
        unsafe {
            loop {
                let largest = warp::warp_reduce_max(warp::FULL_MASK, key);
                lanes -= 1;
                if lanes == 0 {
                    return largest;
                }
                let have_it = warp::warp_vote_ballot(warp::FULL_MASK, key == largest);
                if warp::lane_id() == have_it.trailing_zeros() {
                    key = 0;
                }
            }
        }
    }
}

/// Zeroes the counters of [`limit`]. An exchange must follow before [`limit`] is called.
///
/// # Safety
/// All threads come here.
#[inline(always)]
pub unsafe fn clear(team: &Team) {
    let me = thread::thread_idx_x();
    // SAFETY: each thread writes its own words.
    unsafe {
        shared::store_u64(team.memory + at::BINS + me * 8, 0);
        let mut i = me;
        while i < CANDIDATES / CTAS {
            shared::store_u32(team.memory + at::LIST + i * 4, 0);
            i += THREADS;
        }
        if me == 0 {
            shared::store_u32(team.memory + at::COUNT, 0);
        }
    }
}

/// The limit: tokens below it are dropped. The lower words of `table` are the warps' [contributions](Rules::reached);
/// `top` is the largest key.
///
/// # Safety
/// As [`Team::new`]; the row exists, and [`clear`] was called.
#[inline(always)]
pub unsafe fn limit<L: Logits>(
    team: &mut Team,
    part: &Part<L>,
    rules: &Rules,
    table: Table,
    top: u32,
) -> u32 {
    let weigh = |key: u32| weight(logit_of(key), logit_of(top), rules.scale);
    // SAFETY: the caller's promise; all threads branch alike, since conditions depend only on the row.
    unsafe {
        let bound = bound(team, rules, table, top);
        let (candidates, total) = gather(team, part, rules, bound, top);
        if let Some(keys) = candidates {
            let ends = [top, bound];
            let mut least = Some(bound);
            if rules.top_k > 0 {
                least = select(
                    team,
                    &keys,
                    ends,
                    rules.last_bit,
                    |_| 1,
                    |_| rules.top_k.into(),
                );
            }
            if let (Some(of_k), true) = (least, rules.top_p > 0) {
                let stays = |key| if key >= of_k { weigh(key) } else { 0 };
                let needed = |sum| share(if rules.top_k > 0 { sum } else { total }, rules.top_p);
                least = select(team, &keys, ends, rules.last_bit, stays, needed);
            }
            if let Some(least) = least {
                return least;
            }
        }
        limit_of_row(team, part, rules, top)
    }
}

/// The bound: a key that enough tokens reach; 0 if none is known.
#[inline(always)]
unsafe fn bound(team: &Team, rules: &Rules, table: Table, top: u32) -> u32 {
    let warp = thread::thread_idx_x() / 32;
    // SAFETY: the caller's promise; warp `i` takes the numbers of CTA `i`.
    unsafe {
        let (mut mine, mut low, mut rank) = (0, u32::MAX, 0);
        while rank < CTAS {
            let key = table.of(rank) as u32;
            low = if key != 0 && key < low { key } else { low };
            mine = if rank == warp { key } else { mine };
            rank += 1;
        }
        let low = warp::warp_reduce_min(warp::FULL_MASK, low);
        if rules.lanes == 0 || low > top {
            return 0;
        }
        // One pass is precise enough.
        let ends = [top, low];
        let found = select(team, &[mine], ends, u32::MAX, |_| 1, |_| rules.warps.into());
        found.unwrap_or(0)
    }
}

/// The keys that reach the bound, distributed alike in all CTAs: `OF_THREAD` per thread, padded with 0. `None` if there
/// are too many. Also the sum of all weights, if there is no `top_k`.
#[inline(always)]
unsafe fn gather<L: Logits>(
    team: &mut Team,
    part: &Part<L>,
    rules: &Rules,
    bound: u32,
    top: u32,
) -> (Option<[u32; OF_THREAD]>, u64) {
    let (reaches, largest) = (logit_of(bound), logit_of(top));
    let room = CANDIDATES / CTAS;
    let (me, lane) = (thread::thread_idx_x(), warp::lane_id());
    // SAFETY: the caller's promise. The atomic addition gives each token its own place.
    unsafe {
        let (mut count, mut sum) = (0, 0);
        part.each(|_, x| {
            let mut i = 0;
            while i < 8 {
                count += u32::from(x[i] >= reaches);
                i += 1;
            }
            if rules.top_k == 0 {
                let [a, b, c, d, e, f, g, h] = weights(&x, largest, rules.scale);
                sum += u64::from(((a + b) + (c + d)) + ((e + f) + (g + h)));
            }
        });
        if count > 0 {
            let mut place = atomic::shared::fetch_add_relaxed_u32(team.memory + at::COUNT, count);
            part.each(|_, x| {
                let mut i = 0;
                while i < 8 {
                    if x[i] >= reaches && place < room {
                        shared::store_u32(team.memory + at::LIST + place * 4, super::key(x[i]));
                        place += 1;
                    }
                    i += 1;
                }
            });
        }
        let total = team.total(sum);
        let mut too_many = false;
        if lane < CTAS {
            too_many = team.load(at::COUNT, lane) > room;
        }
        let share = THREADS / CTAS;
        let mut keys = [0; OF_THREAD];
        let mut i = 0;
        while i < OF_THREAD {
            let place = me % share + share * i as u32;
            keys[i] = team.load(at::LIST + place * 4, me / share);
            i += 1;
        }
        let fit = !warp::warp_vote_any(warp::FULL_MASK, too_many);
        (fit.then_some(keys), total)
    }
}

/// The limit by a search over the row, bit by bit: first for `top_k`, then for `top_p`.
#[inline(always)]
unsafe fn limit_of_row<L: Logits>(team: &mut Team, part: &Part<L>, rules: &Rules, top: u32) -> u32 {
    /// Instead of a bit: the pass sums the weights of tokens that reach the limit so far.
    const SUM: u32 = 32;
    let largest = logit_of(top);
    let mut weights = rules.top_k == 0;
    let (mut least, mut limit, mut needed) = (0, 0, u64::from(rules.top_k));
    let mut bit = if weights { SUM } else { 31 };
    loop {
        let next = if bit == SUM { least } else { limit | 1 << bit };
        let (mut sum, reaches) = (0, logit_of(next));
        // SAFETY: the caller's promise.
        let sum = unsafe {
            part.each(|_, x| {
                let (mut of_round, mut i) = (0, 0);
                while i < 8 {
                    if x[i] >= reaches {
                        of_round += if weights {
                            weight(x[i], largest, rules.scale)
                        } else {
                            1
                        };
                    }
                    i += 1;
                }
                sum += u64::from(of_round);
            });
            team.total(sum)
        };
        if bit == SUM {
            needed = share(sum, rules.top_p);
        } else if sum >= needed {
            limit = next;
        }
        if bit != rules.last_bit {
            bit -= 1;
        } else if weights || rules.top_p == 0 {
            return if limit > least { limit } else { least };
        } else {
            (least, limit, weights, bit) = (limit, 0, true, SUM);
        }
    }
}

//! The kernel: finds the largest logit, applies the rules and draws the token.

use cuda_std::prelude::*;

use super::{
    THREADS, WARPS, fall, key,
    limit::{self, Rules},
    logits::{F32, Logits, logit_of},
    part::{MOST_HELD, Part},
    team::{CTAS, Table, Team, sum_of_warp, sums_up_to},
    weights,
};
use crate::{
    abi::{DrawParams, SampleParams},
    common::half::{Bf16, F16},
    step::{Vector, begin},
};

/// # Safety
/// The parameters describe memory as [`SampleParams`] says; team `i` has row `i`.
#[inline(always)]
unsafe fn sample<L: Logits>(p: &SampleParams) {
    // SAFETY: the launch's promise; all threads branch alike, since conditions depend only on the row.
    unsafe {
        let mut team = Team::new();
        let index = u64::from(thread::block_idx_x() / CTAS);
        let part = Part::<L>::load(&team, p.logits + index * p.row * L::BYTES, p.vocabulary);
        let draw = load_draw(p.draws + index * size_of::<DrawParams>() as u64);
        let id_at = (p.ids + index * 4) as *mut u32;
        let rules = Rules::new(&part, &draw, p.vocabulary, p.last_bit);
        if rules.any() {
            limit::clear(&team);
        }
        let mine = key(part.largest());
        let of_warp = warp::warp_reduce_max(warp::FULL_MASK, mine);
        if draw.scale == 0.0 {
            // Each warp finds its first token before the exchange, so that nobody searches after it.
            let mut first = u32::MAX;
            if mine == of_warp {
                first = part.first_of(logit_of(of_warp));
            }
            let first = warp::warp_reduce_min(warp::FULL_MASK, first);
            team.begun();
            let table = team.send_to_first(u64::from(of_warp) << 32 | u64::from(first));
            if team.warp() == 0 {
                write_largest(table, id_at);
            }
            return;
        }
        let reached = if rules.any() { rules.reached(mine) } else { 0 };
        team.begun();
        let table = team.exchange(u64::from(of_warp) << 32 | u64::from(reached));
        let (mut top, mut rank) = (0, 0);
        while rank < CTAS {
            let of_warp = (table.of(rank) >> 32) as u32;
            top = if of_warp > top { of_warp } else { top };
            rank += 1;
        }
        let top = warp::warp_reduce_max(warp::FULL_MASK, top);
        if logit_of(top).is_infinite() {
            if of_warp == top {
                write_first(&team, &part, table, top, id_at);
            }
            return;
        }
        let mut least = f32::NEG_INFINITY;
        if rules.any() {
            least = logit_of(limit::limit(&mut team, &part, &rules, table, top));
        }
        let rule = Rule {
            least,
            min_weight: draw.min_weight,
            top: logit_of(top),
            scale: draw.scale,
        };
        write_drawn(&mut team, &part, &rule, draw.random, id_at);
    }
}

/// Writes the first token with the largest logit, given the largest key of each warp and its first token; 0 if all are
/// NaN.
///
/// # Safety
/// All lanes of a warp of the first CTA come here.
#[inline(always)]
unsafe fn write_largest(table: Table, id_at: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut top, mut first, mut rank) = (0, u32::MAX, 0);
        while rank < CTAS {
            // Later CTAs have later tokens.
            let number = table.of(rank);
            let key = (number >> 32) as u32;
            if key > top {
                (top, first) = (key, number as u32);
            }
            rank += 1;
        }
        let largest = warp::warp_reduce_max(warp::FULL_MASK, top);
        let first = if top == largest { first } else { u32::MAX };
        let first = warp::warp_reduce_min(warp::FULL_MASK, first);
        if warp::lane_id() == 0 {
            ptr::store_u32(id_at, if first == u32::MAX { 0 } else { first });
        }
    }
}

/// Writes the first token with the largest logit; 0 if all are NaN. Called by all warps that have this logit; the first
/// of them writes.
///
/// # Safety
/// All lanes come here; the row exists.
#[inline(always)]
unsafe fn write_first<L: Logits>(
    team: &Team,
    part: &Part<L>,
    table: Table,
    top: u32,
    id_at: *mut u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut rank = 0;
        while rank <= team.rank {
            let has_it = (table.of(rank) >> 32) as u32 == top;
            let first = warp::warp_vote_ballot(warp::FULL_MASK, has_it).trailing_zeros();
            if first < 32 && rank * WARPS + first < team.warp() {
                return;
            }
            rank += 1;
        }
        let (mut first, top) = (u32::MAX, logit_of(top));
        part.each(|round, x| {
            let mut i = 8;
            while i > 0 {
                i -= 1;
                let token = part.token(round) + i as u32;
                if x[i] == top && token < first {
                    first = token;
                }
            }
        });
        let first = warp::warp_reduce_min(warp::FULL_MASK, first);
        if warp::lane_id() == 0 {
            ptr::store_u32(id_at, if first == u32::MAX { 0 } else { first });
        }
    }
}

/// Which tokens are kept, and their weights.
#[derive(Clone, Copy)]
struct Rule {
    least: f32,
    min_weight: u32,
    top: f32,
    scale: f32,
}

impl Rule {
    /// The weights of eight logits. Branchless: with branches each exponential would wait for the previous one.
    #[inline(always)]
    fn of_each(&self, x: &Vector) -> [u32; 8] {
        let (mut weights, mut i) = (weights(x, self.top, self.scale), 0);
        while i < 8 {
            let stays = (x[i] >= self.least) & (weights[i] >= self.min_weight);
            weights[i] &= u32::from(stays).wrapping_neg();
            i += 1;
        }
        weights
    }

    /// The sum of the weights of eight logits.
    #[inline(always)]
    fn weights(&self, x: &Vector) -> u32 {
        // With a limit, most vectors have no token that is kept.
        if self.least > f32::NEG_INFINITY {
            let [a, b, c, d, e, f, g, h] = *x;
            let largest = a.max(b).max(c.max(d)).max(e.max(f).max(g.max(h)));
            // False if `largest` is NaN; then no logit reaches the limit anyway.
            if largest < self.least {
                return 0;
            }
        }
        sum_of(self.of_each(x))
    }

    /// Whether no token is dropped.
    #[inline(always)]
    fn keeps_all(&self) -> bool {
        self.least == f32::NEG_INFINITY && self.min_weight == 0
    }
}

#[inline(always)]
fn sum_of([a, b, c, d, e, f, g, h]: [u32; 8]) -> u32 {
    ((a + b) + (c + d)) + ((e + f) + (g + h))
}

/// Writes the token in whose weight the random number falls.
///
/// # Safety
/// As [`Team::new`]; the row exists.
#[inline(always)]
unsafe fn write_drawn<L: Logits>(
    team: &mut Team,
    part: &Part<L>,
    rule: &Rule,
    random: u64,
    id_at: *mut u32,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut sum, mut held) = (0, [0; MOST_HELD]);
        let mut add = |round: u32, weights: u32| {
            if (round as usize) < L::HELD {
                held[round as usize] = weights;
            }
            sum += u64::from(weights);
        };
        // Two loops: most rows keep all tokens, and comparisons are a fifth of the instructions.
        if rule.keeps_all() {
            part.each(|round, x| add(round, sum_of(weights(&x, rule.top, rule.scale))));
        } else {
            part.each(|round, x| add(round, rule.weights(&x)));
        }
        let of_warp = sum_of_warp(sum);
        let table = team.exchange(of_warp);
        // Find the CTA in whose part the number falls; the other CTAs are done.
        let (mut all, mut before, mut mine, mut rank) = (0, 0, 0, 0);
        while rank < CTAS {
            let sums = table.of(rank);
            all += sums;
            before += if rank < team.rank { sums } else { 0 };
            mine = if rank == team.rank { sums } else { mine };
            rank += 1;
        }
        let left = fall(sum_of_warp(all), random);
        let me = thread::thread_idx_x() / 32;
        if warp::lane_id() < me {
            before += mine;
        }
        let before = sum_of_warp(before);
        if left < before || left - before >= of_warp {
            return;
        }
        // The number falls in this warp's part: find the round, the lane and the token.
        let (mut left, mut found) = (left - before, None);
        part.each(|round, x| {
            let weights = match held.get(round as usize) {
                Some(&weights) if (round as usize) < L::HELD => weights,
                _ => rule.weights(&x),
            };
            let of_round = sum_of_warp(weights.into());
            if found.is_none() && left < of_round {
                found = Some((round, weights));
            } else if found.is_none() {
                left -= of_round;
            }
        });
        if let Some((round, weights)) = found
            && let Some((lane, left)) = falls_in(weights.into(), left)
            && lane == warp::lane_id()
        {
            let x = L::unpack(part.again(round));
            write_one(&x, rule, left, part.token(round), id_at);
        }
    }
}

/// The lane in whose `number` `left` falls, counting over the lanes, and the rest within it; `None` if it is past their
/// sum.
///
/// # Safety
/// All lanes come here.
#[inline(always)]
unsafe fn falls_in(number: u64, left: u64) -> Option<(u32, u64)> {
    // SAFETY: the caller's promise.
    unsafe {
        let up_to = sums_up_to(number);
        let past = warp::warp_vote_ballot(warp::FULL_MASK, up_to > left);
        let lane = past.trailing_zeros();
        let before = up_to - number;
        let low = warp::warp_shuffle_idx(warp::FULL_MASK, before as u32, lane, 32);
        let high = warp::warp_shuffle_idx(warp::FULL_MASK, (before >> 32) as u32, lane, 32);
        (past != 0).then(|| {
            (
                lane,
                left.wrapping_sub(u64::from(high) << 32 | u64::from(low)),
            )
        })
    }
}

/// Writes the token, of eight, in whose weight `left` falls.
///
/// # Safety
/// `id_at` is writable.
#[inline(always)]
unsafe fn write_one(x: &Vector, rule: &Rule, left: u64, token: u32, id_at: *mut u32) {
    let (mut drawn, mut before, mut i) = (0, 0, 0);
    let weights = rule.of_each(x);
    while i < 8 {
        let weight = u64::from(weights[i]);
        if before <= left && left < before + weight {
            drawn = token + i as u32;
        }
        before += weight;
        i += 1;
    }
    // SAFETY: the caller's promise.
    unsafe { ptr::store_u32(id_at, drawn) }
}

/// # Safety
/// `from` is the address of a [`DrawParams`].
#[inline(always)]
unsafe fn load_draw(from: u64) -> DrawParams {
    // SAFETY: the caller's promise.
    unsafe {
        let [scale, top_k, top_p, min_weight] = ptr::load_u32x4(from as *const u32);
        DrawParams {
            scale: f32::from_bits(scale),
            top_k,
            top_p,
            min_weight,
            random: ptr::load_u64((from + 16) as *const u64),
            reserved: [0; 2],
        }
    }
}

macro_rules! entries {
    ($($element:ident $name:literal;)*) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// As [`sample`].
        #[kernel(name = ["sample_", $name], max_threads = THREADS, min_blocks = 2)]
        pub unsafe fn entry(params: SampleParams) {
            // SAFETY: the launch's promise.
            unsafe {
                begin();
                sample::<$element>(&params)
            }
        }
    }; )* };
}

entries! {
    Bf16 "bf16";
    F16 "f16";
    F32 "f32";
}

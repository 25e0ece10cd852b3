//! The kernel: finds the largest logit, applies the rules and draws the token.

use cuda_std::{prelude::*, shared};

use super::{
    ROUND, THREADS, WARPS, at, key, least_of,
    limit::{self, Rules},
    logits::{F32, Logits, logit_of},
    part::{MOST_HELD, Part},
    race::{Race, number, token_of},
    team::{CTAS, Table, Team},
};
use crate::{
    abi::{DrawParams, SampleParams},
    common::half::{Bf16, F16},
    step::{VECTOR, begin},
};

/// # Safety
/// The parameters describe memory as [`SampleParams`] says; team `i` has row `i`.
#[inline(always)]
unsafe fn sample<L: Logits>(p: &SampleParams) {
    // SAFETY: the launch's promise; all threads branch alike, since conditions depend only on the row.
    unsafe {
        let mut team = Team::new();
        let index = u64::from(thread::block_idx_x() / CTAS);
        // The logits are requested before anything else.
        let part = Part::<L>::load(&team, p.logits + index * p.row * L::BYTES, p.vocabulary);
        team.start();
        let draw_at = p.draws + index * size_of::<DrawParams>() as u64;
        let draw = load_draw(draw_at);
        let of_warp = if draw.scale == 0.0 {
            largest_of_warp(&part)
        } else if draw.top_k == 0 && draw.top_p == 0 && draw.min_weight == 0 {
            race::<L, false>(&team, &part, &Race::new(&draw), &Rule::NONE)
        } else {
            let rule = Rule::new(&mut team, &part, &draw, p);
            // Again, from L1, since the limit needs the registers.
            let draw = load_draw(misc::opaque_u64(draw_at));
            race::<L, true>(&team, &part, &Race::new(&draw), &rule)
        };
        team.wait();
        let table = team.send_to_first(of_warp);
        if team.warp() == 0 {
            team.wait_for_numbers();
            write_best(table, (p.ids + index * 4) as *mut u32);
        }
    }
}

/// The [number] of the warp's first token with its largest logit.
///
/// # Safety
/// All lanes come here; the row exists.
#[inline(always)]
unsafe fn largest_of_warp<L: Logits>(part: &Part<L>) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        let mine = key(part.largest());
        let of_warp = warp::warp_reduce_max(warp::FULL_MASK, mine);
        let mut first = u32::MAX;
        if mine == of_warp {
            first = part.first_of(logit_of(of_warp));
        }
        let first = warp::warp_reduce_min(warp::FULL_MASK, first);
        number(of_warp, 0, first)
    }
}

/// Writes the best token, given the best of each warp; 0 if all are NaN.
///
/// # Safety
/// All lanes of a warp of the first CTA come here.
#[inline(always)]
unsafe fn write_best(table: Table, id_at: *mut u32) {
    // SAFETY: the caller's promise.
    unsafe {
        let (mut best, mut rank) = (0, 0);
        while rank < CTAS {
            let of_warp = table.of(rank);
            best = if of_warp > best { of_warp } else { best };
            rank += 1;
        }
        let best = largest_of_lanes(best);
        if warp::lane_id() == 0 {
            ptr::store_u32(id_at, token_of(best));
        }
    }
}

/// The largest number of a warp.
///
/// # Safety
/// All lanes come here.
#[inline(always)]
pub(super) unsafe fn largest_of_lanes(x: u64) -> u64 {
    // SAFETY: the caller's promise.
    unsafe {
        let high = warp::warp_reduce_max(warp::FULL_MASK, (x >> 32) as u32);
        of_lanes(x, high)
    }
}

/// The largest number of a warp, given its upper word.
///
/// # Safety
/// All lanes come here.
#[inline(always)]
unsafe fn of_lanes(x: u64, high: u32) -> u64 {
    let has_it = (x >> 32) as u32 == high;
    let low = if has_it { x as u32 } else { 0 };
    // SAFETY: the caller's promise.
    let low = unsafe { warp::warp_reduce_max(warp::FULL_MASK, low) };
    u64::from(high) << 32 | u64::from(low)
}

/// Groups of a round.
const GROUPS: u32 = ROUND / VECTOR;

/// Which tokens of a row are kept: those with at least this logit.
#[derive(Clone, Copy)]
struct Rule {
    least: f32,
}

impl Rule {
    /// All tokens are kept.
    const NONE: Self = Self {
        least: f32::NEG_INFINITY,
    };

    /// # Safety
    /// As [`Team::new`]; the row exists; the team has [started](Team::start).
    #[inline(always)]
    unsafe fn new<L: Logits>(
        team: &mut Team,
        part: &Part<L>,
        draw: &DrawParams,
        p: &SampleParams,
    ) -> Self {
        let rules = Rules::new(part, draw, p.vocabulary, p.last_bit);
        let mut rule = Self::NONE;
        if !rules.any() && draw.min_weight == 0 {
            return rule;
        }
        // SAFETY: the caller's promise.
        unsafe {
            if rules.any() {
                limit::clear(team);
            }
            let mine = key(part.largest());
            let of_warp = warp::warp_reduce_max(warp::FULL_MASK, mine);
            let reached = if rules.any() { rules.reached(mine) } else { 0 };
            team.wait();
            let table = team.exchange(u64::from(of_warp) << 32 | u64::from(reached));
            let (mut top, mut rank) = (0, 0);
            while rank < CTAS {
                let of_warp = (table.of(rank) >> 32) as u32;
                top = if of_warp > top { of_warp } else { top };
                rank += 1;
            }
            let top = warp::warp_reduce_max(warp::FULL_MASK, top);
            let largest = logit_of(top);
            // Of infinite logits the race takes the first.
            if largest.is_finite() {
                rule.least = least_of(draw.min_weight, largest, draw.inverse_scale);
                if rules.any() {
                    let limit = logit_of(limit::limit(team, part, &rules, table, top));
                    rule.least = rule.least.max(limit);
                }
            }
            // CTAs may have read from the memory of others, which must not have ended.
            team.arrive();
        }
        rule
    }

    #[inline(always)]
    fn keeps(&self, logit: f32) -> bool {
        logit >= self.least
    }
}

/// The [number] of the warp's best token: of the group with the largest score, of those with kept tokens. 0 if there is
/// none; another one, or 0, if another warp of the CTA has a better one.
///
/// # Safety
/// All threads of the CTA come here; the row exists; nobody else uses the CTA's words [`at::REACHED`].
#[inline(always)]
unsafe fn race<L: Logits, const RULE: bool>(
    team: &Team,
    part: &Part<L>,
    race: &Race,
    rule: &Rule,
) -> u64 {
    let (mut best, mut eights, mut round) = (0, part.held, 0);
    // What the best score of the CTA reaches, as far as this warp knows, and the key of the warp's best score.
    let (mut reached, mut top) = (f32::NEG_INFINITY, 0);
    let known_at = team.memory + at::REACHED;
    let bounds_of = |round| {
        let (mut bounds, mut i) = ([[0.0; 2]; MOST_HELD], 0);
        while i < L::HELD {
            bounds[i] = race.bounds(part.token(round) / VECTOR + i as u32 * GROUPS);
            i += 1;
        }
        bounds
    };
    // SAFETY: the caller's promise.
    unsafe {
        // Before the barrier, since it waits for no logit.
        let mut bounds = bounds_of(0);
        loop {
            let first = part.token(round) / VECTOR;
            let (mut most, mut least, mut i) = ([f32::NAN; MOST_HELD], f32::NAN, 0);
            while i < L::HELD {
                let mut largest = L::largest(eights[i]);
                // The other tokens of a group are dropped if the largest is.
                if RULE && !rule.keeps(largest) {
                    largest = f32::NAN;
                }
                least = race.score(largest, bounds[i][0]).max(least);
                most[i] = race.score(largest, bounds[i][1]);
                i += 1;
            }
            let mut of_warp = warp::warp_reduce_max(warp::FULL_MASK, key(least));
            // All warps of the CTA take the best bound of their first groups, so that few compute scores. No draw depends on it.
            if round == 0 {
                let (mine, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
                if lane == 0 {
                    shared::store_u32(known_at + mine * 4, of_warp);
                }
                thread::sync_threads();
                let mut known = 0;
                if lane < WARPS {
                    known = shared::load_u32(known_at + lane * 4);
                }
                of_warp = warp::warp_reduce_max(warp::FULL_MASK, known);
            }
            reached = reached.max(logit_of(of_warp));
            // Each lane computes the score of its group with the largest bound, as long as one may be the best.
            loop {
                let (mut mine, mut i) = (most[0], 1);
                while i < L::HELD {
                    mine = mine.max(most[i]);
                    i += 1;
                }
                if !warp::warp_vote_any(warp::FULL_MASK, mine >= reached) {
                    break;
                }
                if mine >= reached {
                    let (mut eight, mut at, mut i) = (eights[0], 0, L::HELD);
                    while i > 0 {
                        i -= 1;
                        if most[i] == mine {
                            (eight, at) = (eights[i], i as u32);
                        }
                    }
                    let mut i = 0;
                    while i < L::HELD {
                        most[i] = if at == i as u32 { f32::NAN } else { most[i] };
                        i += 1;
                    }
                    let (x, largest) = (L::unpack(eight), L::largest(eight));
                    let mut weights = race.weights(&x, largest);
                    if RULE {
                        let mut i = 0;
                        while i < 8 {
                            weights[i] = if rule.keeps(x[i]) { weights[i] } else { 0.0 };
                            i += 1;
                        }
                    }
                    let group = first + at * GROUPS;
                    let scored = race.scored(group, &x, &weights, largest);
                    let token = group * VECTOR + scored.place;
                    let number = number(scored.key, scored.tie, token);
                    best = if number > best { number } else { best };
                }
                top = warp::warp_reduce_max(warp::FULL_MASK, (best >> 32) as u32);
                reached = reached.max(logit_of(top));
            }
            round += L::HELD as u32;
            if round >= part.rounds {
                break;
            }
            let mut i = 0;
            while i < L::HELD {
                eights[i] = part.vector(round + i as u32);
                i += 1;
            }
            bounds = bounds_of(round);
        }
        of_lanes(best, top)
    }
}

/// # Safety
/// `from` is the address of a [`DrawParams`].
#[inline(always)]
unsafe fn load_draw(from: u64) -> DrawParams {
    // SAFETY: the caller's promise.
    unsafe {
        let [scale, top_k, top_p, min_weight] = ptr::load_u32x4(from as *const u32);
        let [low, high, inverse_scale, reserved] = ptr::load_u32x4((from + 16) as *const u32);
        DrawParams {
            scale: f32::from_bits(scale),
            top_k,
            top_p,
            min_weight,
            random: u64::from(high) << 32 | u64::from(low),
            inverse_scale: f32::from_bits(inverse_scale),
            reserved,
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

//! Shared parts of the kernels with the operands A and B of wgmma swapped: masks, references of weights, and sums.
//!
//! A warp has the logits of 16 keys and all rows. Of each 8 rows `j` a lane has rows `2 (lane % 4) + e`, and of the
//! keys `lane / 4` and the one 8 further (`h`): element `4 j + 2 h + e`. Outputs of a tile of 64 columns have the same
//! order, with columns instead of keys.
//!
//! References are shared by both consumers and kept until a weight exceeds 2¹⁴. The consumer that finds one changes
//! the row's reference, and passes the rescale factor of outputs and sums on to the other.

use core::f32::consts::LN_2;

use cuda_std::{
    barrier,
    math::{ex2, lg2, rcp},
    misc, ptr, shared, warp,
};

use super::shared::{Unit, Units};
use crate::{
    abi::{DIRECT, LatentParams},
    common::state::{sink_of, with_sink},
    sm90::meet,
};

/// Named barriers: a consumer's weights of a block are stored (the owner arrives, the other waits); the warps of a
/// consumer; both consumers.
pub(super) const WEIGHTS_READY: u32 = 1;
pub(super) const CONSUMER: u32 = 3;
pub(super) const BOTH: u32 = 5;

/// The reference of a row that has seen no key: the weight of its first key becomes infinite, which triggers [`renew`].
pub(super) const NONE: f32 = -1e38;
/// Base-2 log of the largest weight for which a reference is kept. The largest f16 is below 2¹⁶.
pub(super) const MOST_GROWTH: f32 = 14.0;

/// Tiles of 64 columns of the values, for each consumer.
pub(super) const TILES: usize = 4;
/// A thread's part of a consumer's outputs.
pub(super) type Outputs<const N: usize> = [[f32; N]; TILES];

const WARP: u32 = warp::FULL_MASK;

/// Shared memory of such a kernel.
pub(super) trait Swapped: Units {
    /// The first and the last key that a row sees.
    fn seen(self, slot: u32, row: u32) -> u32;
    /// The reference of a row's weights.
    fn reference(self, slot: u32, row: u32) -> u32;
    /// The rescale factor, at a consumer's latest block, of earlier outputs; at the end of a unit the normalisation
    /// factor.
    fn factor(self, consumer: u32, row: u32) -> u32;
    /// A warp's number for a row: its largest logit, or its sum.
    fn said(self, slot: u32, consumer: u32, warp: u32, row: u32) -> u32;
    /// Whether a consumer's latest block changes references: one word per warp.
    fn grew(self, consumer: u32) -> u32;
}

/// A lane's first row; of each 8 rows it has this one and the next.
#[inline(always)]
pub(super) fn first_row() -> u32 {
    misc::opaque(warp::lane_id()) % 4 * 2
}

/// Sets logits of keys that a row does not see to −∞. `first` is a lane's first key; `there` says whether it and the
/// one 8 further exist.
///
/// # Safety
/// A whole warp; the rows' visible keys are stored.
#[inline(always)]
pub(super) unsafe fn hide<S: Swapped, const N: usize>(
    s: S,
    slot: u32,
    first: u32,
    there: [bool; 2],
    logits: &mut [f32; N],
) {
    let seen = misc::opaque(s.seen(slot, first_row()));
    let mut j = 0;
    while j < N / 4 {
        // SAFETY: the caller's promise.
        let of_two = unsafe { shared::load_u32x4(seen + j as u32 * 64) };
        let mut i = 0;
        while i < 4 {
            let [begin, end] = [of_two[i % 2 * 2], of_two[i % 2 * 2 + 1]];
            let key = (first + i as u32 / 2 * 8) as i32;
            if !(there[i / 2] && begin as i32 <= key && key <= end as i32) {
                logits[4 * j + i] = f32::NEG_INFINITY;
            }
            i += 1;
        }
        j += 1;
    }
}

/// Sets new references for rows with a weight that is too large. Only a row's own logits decide, so its result does not
/// depend on its neighbours. `log` gives an element's logit in base 2, by its index and its key `h`.
///
/// # Safety
/// All warps of a consumer come here; the products of outputs are waited for.
#[inline(always)]
pub(super) unsafe fn renew<S: Swapped, const N: usize>(
    s: S,
    consumer: u32,
    slot: u32,
    logits: &[f32; N],
    log: impl Fn(f32, usize) -> f32,
    thread: u32,
    barrier: u32,
) {
    let lane = misc::opaque(warp::lane_id());
    let warp = misc::opaque(thread) / 32;
    // SAFETY: the caller's promise.
    unsafe {
        let said = s.said(slot, consumer, warp, lane % 4 * 2);
        let mut j = 0;
        while j < N / 4 {
            let mut largest = [0, 1].map(|e| {
                let of = |h: usize| log(logits[4 * j + 2 * h + e], h);
                of(0).max(of(1))
            });
            let mut distance = 4;
            while distance < 32 {
                largest = largest.map(|x| x.max(warp::warp_shuffle_xor(WARP, x, distance, 32)));
                distance *= 2;
            }
            if lane < 4 {
                shared::store_f32x2(said + j as u32 * 32, largest);
            }
            j += 1;
        }
        barrier::bar_sync(barrier, 128);
        let row = misc::opaque(thread);
        if row < S::ROWS {
            let of = |warp: u32| shared::load_f32(s.said(slot, consumer, warp, row));
            let largest = of(0).max(of(1)).max(of(2).max(of(3)));
            let old = shared::load_f32(s.reference(slot, row));
            let new = if largest - old > MOST_GROWTH {
                largest
            } else {
                old
            };
            shared::store_f32(s.reference(slot, row), new);
            shared::store_f32(s.factor(consumer, row), ex2(old - new));
        }
        barrier::bar_sync(barrier, 128);
    }
}

/// Multiplies sums by the factors of a consumer's latest block.
///
/// # Safety
/// A whole warp; the factors have been stored, and a barrier completed.
#[inline(always)]
pub(super) unsafe fn adopt_sums<S: Swapped, const H: usize>(
    s: S,
    consumer: u32,
    sums: &mut [f32; H],
) {
    let factors = misc::opaque(s.factor(consumer, first_row()));
    let mut j = 0;
    while j < H / 2 {
        // SAFETY: the caller's promise.
        let factors = unsafe { shared::load_f32x2(factors + j as u32 * 32) };
        sums[2 * j] *= factors[0];
        sums[2 * j + 1] *= factors[1];
        j += 1;
    }
}

/// Multiplies outputs by these factors.
///
/// # Safety
/// A whole warp; the factors have been stored, and a barrier completed; products of outputs are waited for.
#[inline(always)]
pub(super) unsafe fn adopt<S: Swapped, const N: usize>(s: S, consumer: u32, o: &mut Outputs<N>) {
    let factors = misc::opaque(s.factor(consumer, first_row()));
    let mut j = 0;
    while j < N / 4 {
        // SAFETY: the caller's promise.
        let factors = unsafe { shared::load_f32x2(factors + j as u32 * 32) };
        let mut tile = 0;
        while tile < TILES {
            let mut i = 0;
            while i < 4 {
                o[tile][4 * j + i] *= factors[i % 2];
                i += 1;
            }
            tile += 1;
        }
        j += 1;
    }
}

/// Waits for the other consumer's weights of the previous block, and takes over its references.
///
/// # Safety
/// All warps of a consumer come here; products of outputs are waited for.
#[inline(always)]
pub(super) unsafe fn take<S: Swapped, const N: usize, const H: usize>(
    s: S,
    consumer: u32,
    o: &mut Outputs<N>,
    sums: &mut [f32; H],
) {
    let other = consumer ^ 1;
    // SAFETY: the caller's promise.
    unsafe {
        barrier::bar_sync(WEIGHTS_READY + other, 256);
        let grew = shared::load_u32x4(s.grew(other));
        if grew[0] | grew[1] | grew[2] | grew[3] != 0 {
            adopt(s, other, o);
            adopt_sums(s, other, sums);
        }
    }
}

/// Combines the sums of both consumers at the end of a unit, stores each row's normalisation factor, and writes its
/// LSE.
///
/// # Safety
/// All warps of both consumers come here for every unit, with a `thread` of their consumer; the factors of the latest
/// block are not read afterwards.
#[inline(always)]
pub(super) unsafe fn normalise<S: Swapped, const H: usize>(
    p: &LatentParams,
    s: S,
    consumer: u32,
    slot: u32,
    thread: u32,
    sums: &[f32; H],
    barrier: u32,
) {
    let a = &p.attention;
    let (warp, lane) = (thread / 32, thread % 32);
    // SAFETY: whole warps; the unit stays until this warp has arrived.
    unsafe {
        // Sum over the warp's keys: 8 lanes share each row.
        let said = s.said(slot, consumer, warp, lane % 4 * 2);
        let mut j = 0;
        while j < H / 2 {
            let mut of_two = [sums[2 * j], sums[2 * j + 1]];
            let mut distance = 4;
            while distance < 32 {
                of_two = of_two.map(|x| x + warp::warp_shuffle_xor(WARP, x, distance, 32));
                distance *= 2;
            }
            if lane < 4 {
                shared::store_f32x2(said + j as u32 * 32, of_two);
            }
            j += 1;
        }
        meet(BOTH, 8);
        if thread < S::ROWS {
            let row = thread;
            let of = |of: u32, warp: u32| shared::load_f32(s.said(slot, of, warp, row));
            let of_all =
                |of_one: u32| (of(of_one, 0) + of(of_one, 1)) + (of(of_one, 2) + of(of_one, 3));
            // The same order in both consumers, for bit-identical totals.
            let total = of_all(0) + of_all(1);
            // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
            let (mut inverse, mut lse) = if total != 0.0 {
                (
                    rcp(total),
                    shared::load_f32(s.reference(slot, row)) + lg2(total),
                )
            } else {
                (0.0, f32::NEG_INFINITY)
            };
            let unit = Unit::load(s.unit(slot));
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            if token < unit.tokens && head < a.q_heads {
                let row = s.load_row(slot, token);
                if row.slot == DIRECT {
                    if a.sinks != 0 {
                        let (factor, with) = with_sink(lse, sink_of(a.sinks, head));
                        (inverse, lse) = (inverse * factor, with);
                    }
                    if consumer == 0 && a.lse != 0 {
                        let at = u64::from(row.token) * u64::from(a.q_heads) + u64::from(head);
                        ptr::store_f32((a.lse + at * 4) as *mut f32, lse * LN_2);
                    }
                } else if consumer == 0 {
                    let state = u64::from(row.slot) * u64::from(a.q_heads) + u64::from(head);
                    ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                }
            }
            shared::store_f32(s.factor(consumer, row), inverse);
        }
        barrier::bar_sync(barrier, 128);
    }
}

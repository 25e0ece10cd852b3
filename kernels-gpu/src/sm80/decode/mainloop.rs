//! The main loop: claims units by ticket, and walks this warp's chunks of a unit.

use cuda_std::{
    async_copy,
    atomic::{self, Gpu, Relaxed},
    math,
    prelude::*,
};

use super::{
    epilogue::finish,
    load::{self, Found},
    shared::Shared,
    unit::{self, ROW_BLOCKS, Team, Unit},
};
use crate::{
    abi::GatherDecodeParams,
    common::{
        cache::{Cache, Stored},
        decode::{
            KEYS,
            tile::{Keys, LaneOffsets, Rows, ScalesOfRows},
        },
        half::Half,
        policy::Policies,
        variant::Variant,
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Works until no unit is left.
///
/// # Safety
/// The launch's parameters are valid.
#[inline(always)]
pub(super) unsafe fn work<
    T: Half,
    V: Variant,
    const CACHE: u32,
    const DIM_BLOCKS: usize,
    const PER_LANE: usize,
    const RING: usize,
>(
    p: &GatherDecodeParams,
    variant: &V,
    s: Shared,
) where
    Stored<T, CACHE>: Cache,
{
    let warps = s.shape.warps();
    let (team, teams) = if p.team != 0 {
        let first = 0;
        (Team { first, size: warps }, 1)
    } else {
        let first = s.warp;
        (Team { first, size: 1 }, warps)
    };
    // SAFETY: the caller's promise; one lane of a team claims its next unit, and each team continues until none is
    // left.
    unsafe {
        let units = p.attention.of_this_plan().units;
        let mut unit = thread::block_idx_x() * teams + team.first;
        let asks = s.warp == team.first && warp::lane_id() == 0;
        while unit < units {
            let ticket = p.attention.ticket as *mut u32;
            let mut asked = 0;
            if asks {
                asked = atomic::fetch_add::<Relaxed, Gpu, u32>(ticket, 1);
            }
            attend::<T, V, CACHE, DIM_BLOCKS, PER_LANE, RING>(p, variant, s, team, unit, || {
                if asks {
                    // One ticket is taken per unit, so whoever gets the last one resets the counter.
                    if asked + 1 == units {
                        atomic::store::<Relaxed, Gpu, u32>(ticket, 0);
                    }
                    shared::store_u32(
                        s.of(team.first).next(),
                        thread::grid_dim_x() * teams + asked,
                    );
                }
            });
            unit = shared::load_u32(s.of(team.first).next());
        }
    }
}

/// Computes this warp's part of one unit, then the team's result; `before_end` runs between two barriers of the team.
///
/// # Safety
/// Whole warps, all of the team; only its own warp accesses a ring. The unit is one of the launch's.
#[inline(always)]
pub(in super::super) unsafe fn attend<
    T: Half,
    V: Variant,
    const CACHE: u32,
    const DIM_BLOCKS: usize,
    const PER_LANE: usize,
    const RING: usize,
>(
    p: &GatherDecodeParams,
    variant: &V,
    s: Shared,
    team: Team,
    unit: u32,
    before_end: impl FnOnce(),
) where
    Stored<T, CACHE>: Cache,
{
    // Chunks whose blocks are in flight while one is computed.
    const { assert!(RING % 2 == 1 && DIM_BLOCKS as u32 * 16 == PER_LANE as u32 * 32) };
    let ahead = RING as u32 / 2;
    // Opaque: otherwise derived values occupy registers in other parts of the kernel.
    let lane = misc::opaque(warp::lane_id());
    let mut rows = Rows::<DIM_BLOCKS, ROW_BLOCKS>::EMPTY;
    // SAFETY: addresses are the plan's. Before a block is read, each lane waits for its copies, and at the warp's
    // barrier for those of the other lanes. Before it is overwritten, all lanes have read it.
    unsafe {
        let unit = Unit::read(p, variant, s, lane, unit);
        let mut left = unit.chunks().saturating_sub(s.warp - team.first);
        if team.size > 1 {
            left = math::div_u32(left + team.size - 1, team.size);
        }
        let step = team.size * KEYS;
        let mut first = unit.first_key() + (s.warp - team.first) * KEYS;
        let policy = policy(p, &unit);
        let mut ring = [0; RING];
        let mut i = 0;
        while i < RING {
            ring[i] = s.block(i as u32);
            i += 1;
        }
        let mut found = [Found::NOTHING; RING];
        i = 0;
        while i <= RING / 2 {
            found[i] = load::look_up(p, lane, &unit, first + i as u32 * step);
            i += 1;
        }
        load::queries(p, s, lane, &unit);
        i = 0;
        while i < RING / 2 {
            let (at, exists) = (first + i as u32 * step, (i as u32) < left);
            if exists {
                load::block::<false>(p, s, lane, &unit, found[i], at, ring[2 * i], policy);
                load::scales::<CACHE>(p, lane, &unit, found[i], at, s.scales(i as u32));
            }
            async_copy::commit_group();
            if exists {
                load::block::<true>(p, s, lane, &unit, found[i], at, ring[2 * i + 1], policy);
            }
            async_copy::commit_group();
            i += 1;
        }
        let mut found = found[RING / 2];
        if left > 0 {
            let scales = scales::<T, CACHE>(p, s, lane, &unit);
            wait_but::<RING>();
            start::<T, CACHE, DIM_BLOCKS>(p, s, lane, &unit, &mut rows);
            rows.take_scales_of_rows(scales);
        }
        let mut scales = 0;
        let offsets = LaneOffsets::new(lane, s.shape.row_bytes());
        let keys = Keys {
            begin: unit.begin,
            end: unit.end,
            masks: p.attention.key_masks(),
        };
        while left > 0 {
            wait_but::<RING>();
            let (next, more) = (first + ahead * step, left > ahead);
            if more {
                load::block::<false>(p, s, lane, &unit, found, next, ring[RING - 1], policy);
                // In the place of those of the chunk before.
                let place = if scales > 0 { scales - 1 } else { ahead };
                load::scales::<CACHE>(p, lane, &unit, found, next, s.scales(place));
            }
            async_copy::commit_group();
            let logits = rows.logits::<Stored<T, CACHE>>(&offsets, ring[0]);
            let chunk = [first, s.scales(scales)];
            let weights = if unit.masks(first) {
                rows.weigh::<Stored<T, CACHE>, V, true>(variant, lane, chunk, keys, logits)
            } else {
                rows.weigh::<Stored<T, CACHE>, V, false>(variant, lane, chunk, keys, logits)
            };
            scales = if scales < ahead { scales + 1 } else { 0 };
            wait_but::<RING>();
            if more {
                load::block::<true>(p, s, lane, &unit, found, next, ring[0], policy);
                found = load::look_up(p, lane, &unit, next + step);
            }
            async_copy::commit_group();
            rows.values::<Stored<T, CACHE>>(&offsets, ring[1], &weights);
            let old = ring;
            i = 0;
            while i < RING {
                ring[i] = old[(i + 2) % RING];
                i += 1;
            }
            first += step;
            left -= 1;
        }
        async_copy::wait_all();
        warp::sync_warp(WARP);
        rows.finish::<Stored<T, CACHE>>();
        finish::<T, V, Stored<T, CACHE>, DIM_BLOCKS, PER_LANE>(
            p, s, team, &unit, &rows, before_end,
        );
    }
}

/// Waits for the oldest block in flight: one block of the ring is free, the others may still be in flight.
#[inline(always)]
unsafe fn wait_but<const RING: usize>() {
    if RING == 3 {
        async_copy::wait_group::<1>();
    } else {
        async_copy::wait_group::<3>();
    }
    const { assert!(RING == 3 || RING == 5) };
    // SAFETY: whole warps.
    unsafe { warp::sync_warp(WARP) };
}

/// The query token of a row, and its head among those of the unit. Rows past the unit's end are those of its last token.
#[inline(always)]
fn place(p: &GatherDecodeParams, unit: &Unit, row: u32) -> (u32, u32) {
    let (token, in_group) = p.group.div_rem(row);
    let last = unit.tokens - 1;
    (if token < last { token } else { last }, in_group)
}

/// The factors of the products of the lane's rows with keys, and of their outputs, where keys have 8 bits: the scales, unless
/// each token has some, and the unit of the operands.
///
/// # Safety
/// The unit's rows were read.
#[inline(always)]
unsafe fn scales<T: Half, const CACHE: u32>(
    p: &GatherDecodeParams,
    s: Shared,
    lane: u32,
    unit: &Unit,
) -> ScalesOfRows<ROW_BLOCKS>
where
    Stored<T, CACHE>: Cache,
{
    let operands = <Stored<T, CACHE>>::UNIT;
    let mut scales = [[[operands; 2]; 2]; ROW_BLOCKS];
    let mut i = 0;
    while <Stored<T, CACHE>>::SCALED && !<Stored<T, CACHE>>::BY_TOKEN && i < ROW_BLOCKS * 2 {
        let row = i as u32 / 2 * 8 + 2 * (lane % 4) + i as u32 % 2;
        let (token, _) = place(p, unit, row);
        // SAFETY: the row is one of the unit's.
        let [k, v] = unsafe { (p.attention.scales).of(unit::row(s, token).token, unit.head) };
        scales[i / 2][i % 2] = [k * operands, v * operands];
        i += 1;
    }
    scales
}

/// Starts the unit's rows: loads their queries to registers.
#[inline(always)]
unsafe fn start<T: Half, const CACHE: u32, const DIM_BLOCKS: usize>(
    p: &GatherDecodeParams,
    s: Shared,
    lane: u32,
    unit: &Unit,
    rows: &mut Rows<DIM_BLOCKS, ROW_BLOCKS>,
) where
    Stored<T, CACHE>: Cache,
{
    let head = unit.head * p.attention.group;
    // SAFETY: the queries have arrived; rows past the unit's end are looked up as its last token's.
    unsafe {
        rows.start::<Stored<T, CACHE>>(s.queries(), lane, [0; 2], |row| {
            let (token, in_group) = place(p, unit, row);
            (unit::row(s, token), head + in_group)
        });
    }
}

/// The L2 policy of a unit's keys.
#[inline(always)]
unsafe fn policy(p: &GatherDecodeParams, unit: &Unit) -> u64 {
    // SAFETY: the launch's parameters are valid.
    let policies = unsafe { Policies::new(p.long, p.attention.record) };
    policies.of(unit.shared_keys)
}

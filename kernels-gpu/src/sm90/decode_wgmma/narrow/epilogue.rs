//! The epilogue of a unit: accumulators to output or partial states.

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    mbarrier, shared, warp,
};

use super::{
    config::state_pitch,
    products::{Tile, at, row_of},
    shared::{CONSUMERS, Shared, THREADS, Unit},
    softmax::Softmax,
};
use crate::{
    abi::DecodeParams,
    common::{decode::results::Results, half::Half, state::State, variant::Standard},
};

const WARP: u32 = warp::FULL_MASK;

/// Writes a unit's rows to the output or to partial states.
///
/// # Safety
/// All consumers come here for every unit; their products are done.
#[inline(always)]
pub(super) unsafe fn finish<T: Half, const SLABS: usize, const N: usize, const COLUMNS: usize>(
    p: &DecodeParams,
    s: Shared,
    slot: u32,
    unit: &Unit,
    o: &[Tile<N>; SLABS],
    softmax: &Softmax<COLUMNS>,
    lane: u32,
    warp: u32,
) {
    const { assert!(SLABS == 1 || SLABS == 2, "a row is 64 or 128 elements") };
    let pitch = state_pitch(&s.shape);
    let over_weights = s.shape.state_over_weights();
    let rows = unit.tokens * p.attention.group;
    let mut eight = 0;
    // SAFETY: all consumers come here; the state was read before the barriers of this unit's blocks, or before the last one
    // below.
    unsafe {
        if over_weights {
            // The products of all warps have read the weights.
            barrier::bar_sync(CONSUMERS, THREADS);
        }
        while eight < COLUMNS / 2 {
            let mut column = 2 * eight;
            while column < 2 * eight + 2 {
                let row = row_of(lane, column);
                // With 8-bit values a lane has neighbouring elements, otherwise elements 8 apart.
                let (lanes, apart) = if s.shape.scaled() { (8, 4) } else { (4, 32) };
                let first = s.state() + (row % 8 * pitch + warp * 16) * 4 + lane / 4 * lanes;
                let mut slab = 0;
                while slab < SLABS {
                    let at_slab = first + slab as u32 * 256;
                    shared::store_f32(at_slab, o[slab][at(0, column)]);
                    shared::store_f32(at_slab + apart, o[slab][at(1, column)]);
                    slab += 1;
                }
                let mut sum = softmax.sum[column];
                let mut stride = 4;
                while stride < 32 {
                    sum += warp::warp_shuffle_xor(WARP, sum, stride, 32);
                    stride *= 2;
                }
                if lane < 4 {
                    shared::store_f32(s.exchange(warp, row), sum);
                    if warp == 0 {
                        shared::store_f32(s.exchange(4, row), softmax.offset(column));
                    }
                }
                column += 1;
            }
            barrier::bar_sync(CONSUMERS, THREADS);
            let behind = 8 * (eight as u32 + 1);
            let behind = if rows < behind { rows } else { behind };
            let mut row = 8 * eight as u32 + warp;
            while row < behind {
                write_row::<T, SLABS>(p, s, slot, unit, row, lane);
                row += 4;
            }
            if over_weights {
                // Others take the place next: the state of more rows, or the next unit's weights.
                barrier::bar_sync(CONSUMERS, THREADS);
            }
            eight += 1;
        }
        mbarrier::arrive(s.unit_free(slot));
    }
}

/// Writes a row whose state and sums are in shared memory.
///
/// # Safety
/// A whole warp comes here; the unit has the row, and its barrier completed.
#[inline(always)]
unsafe fn write_row<T: Half, const SLABS: usize>(
    p: &DecodeParams,
    s: Shared,
    slot: u32,
    unit: &Unit,
    row: u32,
    lane: u32,
) {
    let group = p.attention.group;
    let (token, in_group) = p.group.div_rem(row);
    // SAFETY: the caller's promise.
    unsafe {
        let mut sum = 0.0;
        let mut of = 0;
        while of < 4 {
            sum += shared::load_f32(s.exchange(of, row));
            of += 1;
        }
        // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
        let (inverse, lse) = if sum != 0.0 {
            (rcp(sum), shared::load_f32(s.exchange(4, row)) + lg2(sum))
        } else {
            (0.0, f32::NEG_INFINITY)
        };
        let inverse = match s.shape.scaled() {
            true => inverse * shared::load_f32(s.factors(slot, 1, row)),
            false => inverse,
        };
        let at = s.state() + row % 8 * state_pitch(&s.shape) * 4;
        macro_rules! write {
            ($dim:literal, $per_lane:literal, $load:ident) => {{
                let results = Results::<$dim> {
                    params: &p.attention,
                    lane,
                    out_columns: $dim,
                };
                let out = shared::$load(at + lane * $per_lane * 4).map(|x| x * inverse);
                results.write::<T, Standard<false>, $per_lane>(
                    s.load_row(slot, token),
                    unit.head * group + in_group,
                    State { out, lse },
                );
            }};
        }
        match SLABS {
            1 => write!(64, 2, load_f32x2),
            _ => write!(128, 4, load_f32x4),
        }
    }
}

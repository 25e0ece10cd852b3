//! The epilogue of a unit: accumulators to output or partial states.

use cuda_std::{
    barrier,
    math::{lg2, rcp},
    mbarrier, shared, warp,
};

use super::{
    config::state_pitch,
    products::Tile,
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
pub(super) unsafe fn finish<T: Half, const SLABS: usize>(
    p: &DecodeParams,
    s: Shared,
    slot: u32,
    unit: &Unit,
    o: &[Tile; SLABS],
    softmax: &Softmax,
    lane: u32,
    warp: u32,
) {
    const { assert!(SLABS == 1 || SLABS == 2, "a row is 64 or 128 elements") };
    let pitch = state_pitch(&s.shape);
    // SAFETY: all consumers come here; the state was read before the barriers of this unit's blocks.
    unsafe {
        let mut column = 0;
        while column < 2 {
            let row = lane % 4 * 2 + column as u32;
            // With 8-bit values a lane has neighbouring elements, otherwise elements 8 apart.
            let (lanes, apart) = if s.shape.scaled() { (8, 4) } else { (4, 32) };
            let first = s.state() + (row * pitch + warp * 16) * 4 + lane / 4 * lanes;
            let mut slab = 0;
            while slab < SLABS {
                shared::store_f32(first + slab as u32 * 256, o[slab][column]);
                shared::store_f32(first + slab as u32 * 256 + apart, o[slab][2 + column]);
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
        let group = p.attention.group;
        let mut row = warp;
        while row < unit.tokens * group {
            let (token, in_group) = p.group.div_rem(row);
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
            let at = s.state() + row * pitch * 4;
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
            row += 4;
        }
        mbarrier::arrive(s.unit_free(slot));
    }
}

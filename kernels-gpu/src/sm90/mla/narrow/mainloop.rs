//! The teams that compute: logits by columns, weights by rows, outputs by columns.

use cuda_std::{barrier, mbarrier, misc, mma, ptr, shared, thread, warp};

use super::{
    config::{FEEDERS, KEYS, ROWS_OF_TILE, TEAMS, WARPS, WEIGHTS_BYTES},
    epilogue::finish,
    shared::{Shared, swizzled},
};
use crate::{
    abi::LatentParams,
    common::{
        half::{Bf16, Half},
        state::Softmax,
        variant::Variant,
    },
    sm90::mla::{
        config::{HEAD_DIM, ROW_BYTES, ROW_ROPE, ROW_SCALES, VALUE_DIM},
        convert::widen_pair,
        shared::{Unit, Units},
    },
};

const WARP: u32 = warp::FULL_MASK;

/// Groups of 8 keys in a block, and of 8 columns in what a warp has of a key.
const TILES: usize = KEYS as usize / 8;
const COLUMNS: usize = 8;

/// The outputs of a warp: of each group of 8 columns a fragment of 16 rows.
pub(super) type Outputs = [[f32; 4]; COLUMNS];

/// Named barriers of a team: all parts of the logits are there, and the weights are.
const LOGITS_READY: u32 = 1;
const WEIGHTS_READY: u32 = 1 + TEAMS;

/// A lane's place in its CTA.
#[derive(Clone, Copy)]
pub(super) struct Place {
    pub team: u32,
    /// In the team.
    pub warp: u32,
    pub lane: u32,
}

impl Place {
    /// Of a thread. Opaque: or what follows from it is computed once, and there are no registers to keep it in.
    #[inline(always)]
    fn of(thread: u32) -> Self {
        let thread = misc::opaque(thread) - FEEDERS;
        Self {
            team: thread / (WARPS * 32),
            warp: thread / 32 % WARPS,
            lane: thread % 32,
        }
    }

    /// The first of the 16 columns of values that a lane has: in every key of its warp's 64, and in the outputs. Four
    /// lanes have every other 16 of 128, so that those of two keys, which lie 656 bytes apart, are in different banks.
    #[inline(always)]
    pub fn column(self) -> u32 {
        self.warp / 2 * 128 + self.warp % 2 * 16 + self.lane % 4 * 32
    }

    /// The row whose weights this lane makes, 16 lanes for each, and which two keys of a block.
    #[inline(always)]
    pub fn row_and_pair(self) -> (u32, u32) {
        (self.warp * 2 + self.lane / 16, self.lane % 16)
    }
}

/// What a lane has of the queries: of two rows, 8 further down the second, its 16 columns. Two that only keys have are in
/// shared memory: registers are what there is least of.
struct Queries {
    columns: [[u32; 8]; 2],
}

impl Queries {
    /// Loads them; zeros stand for rows that the unit has not.
    ///
    /// # Safety
    /// The unit's rows are listed in its slot.
    #[inline(always)]
    unsafe fn load<const STAGES: u32>(
        p: &LatentParams,
        s: Shared<STAGES>,
        slot: u32,
        unit: &Unit,
        place: Place,
    ) -> Self {
        let mut queries = Self {
            columns: [[0; 8]; 2],
        };
        let mut of_rope = [0; 2];
        let mut h = 0;
        while h < 2 {
            let row = place.lane / 4 + 8 * h as u32;
            let (token, in_tile) = p.heads.div_rem(row);
            let head = unit.head + in_tile;
            if token < unit.tokens && head < p.attention.q_heads {
                // SAFETY: the row is listed; queries are 576 elements, and vectors of 16 bytes are aligned.
                unsafe {
                    let of = s.load_row(slot, token).token;
                    let query = p.attention.q
                        + (u64::from(of) * u64::from(p.attention.q_token_stride)
                            + u64::from(head * HEAD_DIM))
                            * 2;
                    let columns = query + u64::from(place.column() * 2);
                    let first = ptr::load_nc_u32x4(columns as *const u32);
                    let second = ptr::load_nc_u32x4((columns + 16) as *const u32);
                    let mut i = 0;
                    while i < 4 {
                        queries.columns[h][i] = first[i];
                        queries.columns[h][4 + i] = second[i];
                        i += 1;
                    }
                    let rope = VALUE_DIM + place.warp * 8 + place.lane % 4 * 2;
                    let rope = query + u64::from(rope * 2);
                    of_rope[h] = ptr::load_nc_u32(rope as *const u32);
                }
            }
            h += 1;
        }
        // SAFETY: nobody else reads or writes the place.
        unsafe { shared::store_u32x2(s.rope(place.team, place.warp) + place.lane * 8, of_rope) };
        queries
    }
}

/// Works through all units.
///
/// # Safety
/// All warps of both teams come here; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn consume<V: Variant, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    s: Shared<STAGES>,
) {
    const { assert!(!V::TRANSFORMS_LOGITS && !V::MASKS && V::SOFTMAX) };
    let thread = thread::thread_idx_x();
    let scale = variant.params().scale_log2;
    // Units, and blocks of all units, before.
    let (mut units, mut before) = (0, 0);
    // SAFETY: whole warps; the barriers say what has arrived and what may be written again.
    unsafe {
        loop {
            let (slot, parity) = (units % 2, units / 2 % 2);
            mbarrier::wait(s.unit_full(slot), parity);
            let unit = Unit::load(s.unit(slot));
            if unit.tokens == 0 {
                return;
            }
            mbarrier::wait(s.rows_full(slot), parity);
            let place = Place::of(thread);
            let queries = Queries::load(p, s, slot, &unit, place);
            let mut o: Outputs = [[0.0; 4]; COLUMNS];
            let mut softmax = Softmax::EMPTY;
            // Numbers of blocks are those of all units.
            let (mut number, end) = (before + place.team, before + unit.blocks);
            before = end;
            while number < end {
                let stage = number % STAGES;
                mbarrier::wait(s.full(stage), number / STAGES & 1);
                let mut keys = multiply(s, &queries, stage, Place::of(thread));
                let there = shared::load_u32(s.there(stage));
                // Each lane has read of the keys, and arrives for itself.
                mbarrier::arrive(s.free(stage));
                let place = Place::of(thread);
                barrier::bar_sync(LOGITS_READY + place.team, WARPS * 32);

                let (row, pair) = place.row_and_pair();
                let mut logits = sum(s, place.team, row, pair);
                let unit = Unit::load(s.unit(slot));
                let begin = unit.first + (number + unit.blocks - end) * KEYS;
                let seen = seen(p, variant, s, slot, &unit, row);
                let mut e = 0;
                while e < 2 {
                    let key = begin + 2 * pair + e as u32;
                    let is_there = there >> (2 * pair + e as u32) & 1 != 0;
                    let visible = is_there && seen[0] <= key as i32 && key as i32 <= seen[1];
                    logits[e] = if visible {
                        logits[e] * scale
                    } else {
                        f32::NEG_INFINITY
                    };
                    e += 1;
                }
                let factor = softmax.raise(of_row(logits[0].max(logits[1]), f32::max));
                let weights = logits.map(|logit| softmax.weight(logit));
                softmax.sum += weights[0] + weights[1];
                let packed = Bf16::pack(weights[0], weights[1]);
                shared::store_u32(s.weights(place.team, row) + pair * 4, packed);
                if pair == 0 {
                    shared::store_f32(s.factor(place.team, row), factor);
                }
                // From pairs of columns to pairs of keys.
                keys = keys.map(|keys| keys.map(|pair| mma::movmatrix_trans(pair)));
                let Place { team, lane, .. } = Place::of(thread);
                barrier::bar_sync(WEIGHTS_READY + team, WARPS * 32);
                rescale(s, &mut o, team, lane);
                add(s, &mut o, &keys, team, lane);
                number += TEAMS;
            }
            // In an order that does not depend on the block.
            softmax.sum = of_row(softmax.sum, |a, b| a + b);
            finish(p, s, slot, Place::of(thread), o, &softmax);
            mbarrier::arrive(s.unit_free(slot));
            units += 1;
        }
    }
}

/// The first and the last key that a row sees of a unit's. For each block anew: registers are what there is least of.
#[inline(always)]
unsafe fn seen<V: Variant, const STAGES: u32>(
    p: &LatentParams,
    variant: &V,
    s: Shared<STAGES>,
    slot: u32,
    unit: &Unit,
    row: u32,
) -> [i32; 2] {
    let (token, _) = p.heads.div_rem(row);
    // SAFETY: the unit and its rows are there.
    unsafe {
        let position = s.load_row(slot, token.min(unit.tokens - 1)).position;
        let (first, last) = variant.visible_keys(position);
        [
            first.max(unit.kv_begin as i32),
            last.min(unit.kv_end as i32 - 1),
        ]
    }
}

/// Combines what the 16 lanes of a row have.
#[inline(always)]
unsafe fn of_row(x: f32, combine: impl Fn(f32, f32) -> f32) -> f32 {
    let mut x = x;
    let mut distance = 1;
    while distance < 16 {
        // SAFETY: a whole warp.
        x = combine(x, unsafe { warp::warp_shuffle_xor(WARP, x, distance, 32) });
        distance *= 2;
    }
    x
}

/// Multiplies a warp's columns of the queries and of a block's keys, leaves the products where the team adds them up, and
/// returns the keys in bf16: of each 8 keys, fragments of 8 columns.
#[inline(always)]
unsafe fn multiply<const STAGES: u32>(
    s: Shared<STAGES>,
    queries: &Queries,
    stage: u32,
    place: Place,
) -> [[u32; COLUMNS]; TILES] {
    let Place { team, warp, lane } = place;
    let [upper, lower] = &queries.columns;
    // SAFETY: this lane has stored it.
    let of_rope = unsafe { shared::load_u32x2(s.rope(team, warp) + lane * 8) };
    let mut keys = [[0; COLUMNS]; TILES];
    let mut tile = 0;
    while tile < TILES {
        let key = s.key(stage, 8 * tile as u32 + lane / 4);
        let mut logits = [0.0; 4];
        // SAFETY: whole warps; the block is there.
        unsafe {
            let scale = shared::load_f32(key + ROW_SCALES + warp / 2 * 4);
            let numbers = shared::load_u32x4(key + place.column());
            let rope = shared::load_u32(key + ROW_ROPE + warp * 16 + lane % 4 * 4);
            mma::m16n8k8_bf16(&mut logits, of_rope, [rope]);
            let mut step = 0;
            while step < 4 {
                // The order of columns is the same in queries and keys: a lane's 16, four at a time.
                let (i, j) = (2 * step, 2 * step + 1);
                keys[tile][i] = widen_pair(numbers[step] as u16, scale);
                keys[tile][j] = widen_pair((numbers[step] >> 16) as u16, scale);
                let rows = [upper[i], lower[i], upper[j], lower[j]];
                Bf16::mma(&mut logits, rows, [keys[tile][i], keys[tile][j]]);
                step += 1;
            }
            let mut h = 0;
            while h < 2 {
                let row = lane / 4 + 8 * h as u32;
                let pair = swizzled(row, 4 * tile as u32 + lane % 4);
                let target = s.partial(team, warp) + row * KEYS * 4 + pair * 8;
                shared::store_f32x2(target, [logits[2 * h], logits[2 * h + 1]]);
                h += 1;
            }
        }
        tile += 1;
    }
    keys
}

/// A row's logits of two keys: the sums over the warps' columns, always in this order.
#[inline(always)]
unsafe fn sum<const STAGES: u32>(s: Shared<STAGES>, team: u32, row: u32, pair: u32) -> [f32; 2] {
    let at = row * KEYS * 4 + swizzled(row, pair) * 8;
    let mut sum = [0.0; 2];
    let mut warp = 0;
    while warp < WARPS {
        // SAFETY: all warps have stored.
        let part = unsafe { shared::load_f32x2(s.partial(team, warp) + at) };
        sum = [sum[0] + part[0], sum[1] + part[1]];
        warp += 1;
    }
    sum
}

/// Multiplies outputs by the factors of their rows, where there are any.
#[inline(always)]
unsafe fn rescale<const STAGES: u32>(s: Shared<STAGES>, o: &mut Outputs, team: u32, lane: u32) {
    // SAFETY: whole warps; the factors are there.
    unsafe {
        let factors = [0, 8].map(|h| shared::load_f32(s.factor(team, lane / 4 + h)));
        if warp::warp_vote_any(WARP, factors[0] != 1.0 || factors[1] != 1.0) {
            let mut i = 0;
            while i < COLUMNS * 4 {
                o[i / 4][i % 4] *= factors[i % 4 / 2];
                i += 1;
            }
        }
    }
}

/// O += P·V of a block, of a warp's columns.
#[inline(always)]
unsafe fn add<const STAGES: u32>(
    s: Shared<STAGES>,
    o: &mut Outputs,
    values: &[[u32; COLUMNS]; TILES],
    team: u32,
    lane: u32,
) {
    let weights = s.weights(team, lane % 16) + lane / 16 * 16;
    let mut step = 0;
    while step < TILES / 2 {
        // SAFETY: whole warps; the weights are there.
        unsafe {
            let weights = mma::ldmatrix_x4(weights + step as u32 * 32);
            let mut i = 0;
            while i < COLUMNS {
                let values = [values[2 * step][i], values[2 * step + 1][i]];
                Bf16::mma(&mut o[i], weights, values);
                i += 1;
            }
        }
        step += 1;
    }
}

const _: () = assert!(
    ROWS_OF_TILE == 16 && WEIGHTS_BYTES % 16 == 0 && ROW_BYTES % 128 == 16,
    "fragments have 16 rows, and keys lie in different banks"
);

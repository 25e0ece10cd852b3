//! The consumer teams. Warps split a block by keys for the logits, and by columns for the outputs.

use cuda_std::{barrier, convert, fence, mbarrier, misc, mma, shared, thread};

use super::{
    config::{FRAGMENT_BYTES, ROWS_OF_TILE, TEAMS, WARPS, WEIGHTS_BYTES},
    epilogue::finish,
    places::{Place, Places},
    queries::bring,
    shared::{BOTH, Outputs, Products, Shared, WEIGHTS_READY},
    weigh::{Block, Rows},
};
use crate::{
    abi::LatentParams,
    common::{
        cache::transpose_bytes,
        half::{Bf16, F16, Half},
        variant::Variant,
    },
    sm90::{
        meet,
        mla::{
            keys_656::{BLOCK, GROUPS, PARTS, ROW_BYTES},
            load::Places as _,
            shared::{Unit, Units},
            visible::seen,
        },
    },
};

/// A lane's unconverted values of 16 keys: of each 16 columns, two columns of four keys.
type Values = [[u32; 4]; 2];

/// Steps of 16 keys per block, and the number of steps by which values are read ahead.
const STEPS: usize = BLOCK as usize / 16;
const AHEAD: usize = 4;

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
    // Number of previous units, and of their blocks.
    let (mut units, mut before) = (0, 0);
    let places = Places::new(s, Place::of(thread));
    // SAFETY: whole warps; the full and free barriers order every access to a place.
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
            bring(p, s, slot, &unit, place);
            // Offset from positions in the request to key numbers over all units' blocks.
            let shift = before * BLOCK - unit.first;
            let seen = [0, 8].map(|h| {
                let (token, _) = p.heads.div_rem(place.row() + h);
                let position = s.load_row(slot, token.min(unit.tokens - 1)).position;
                seen(variant, &unit, position).map(|key| key.wrapping_add(shift as i32))
            });
            let mut rows = Rows::new(s, place, seen);
            meet(BOTH, TEAMS * WARPS);
            let scale = variant.params().scale_log2;
            rows.factors = [0, 8].map(|h| shared::load_f32(s.inverse(place.row() + h)) * scale);
            let mut o: Outputs = [[0.0; 4]; 8];
            // Blocks are numbered over all units.
            let (mut number, end) = (before + place.team, before + unit.blocks.div_ceil(PARTS));
            before = end;
            while number < end {
                // Opaque: otherwise the compiler narrows it to 16 bits.
                let of_all = misc::opaque(number);
                // The place with the warp's 8 keys, and the block's other place.
                let part = Place::of(thread).warp / (WARPS / PARTS);
                let (first, parity) = s.first_place(of_all);
                let [own, other] = [first + part, first + (part ^ 1)];
                mbarrier::wait(s.full(own), parity);
                let keys = s.block(of_all);
                let block = Block {
                    number: of_all,
                    there: shared::load_u32(s.there(own)),
                    scales: keys + places.scales(),
                    rope_factor: scale,
                };
                let place = Place::of(thread);
                let key = keys + places.key();
                let pair = [key, key.wrapping_add(place.to_partner())];
                let products = multiply(pair, place.rope(), s.queries_of(place));
                let logits = rows.logits(s, block, &products, place);
                let target = places.weights_to_write(s, of_all);
                let (sums, over) = rows.weigh(block, &logits, target);
                mbarrier::wait(s.full(other), parity);
                let source = keys + places.values();
                let mut ahead = first_values(source);
                let ready = WEIGHTS_READY - 1 + places.team();
                if barrier::bar_any(ready, WARPS * 32, over[0] || over[1]) {
                    rows.renew(s, block, &logits, thread, over, &mut o, target);
                    barrier::bar_sync(WEIGHTS_READY - 1 + places.team(), WARPS * 32);
                    // Reloaded: keeping these in registers would leave too few for the renewal.
                    ahead = first_values(source);
                } else {
                    rows.sums = sums;
                }
                let weights = places.weights_to_read(s, of_all);
                // Each lane has read keys and arrives for itself. The fence waits for its loads: a copy to the freed place may
                // overtake those in flight, and ptxas moves an arrival before the use of what was loaded.
                let read = || {
                    fence::proxy_async_shared();
                    mbarrier::arrive(s.free(s.first_place(of_all).0));
                };
                add(&mut o, ahead, source, weights, read);
                number += TEAMS;
            }
            finish(p, s, slot, Place::of(thread), o, &rows);
            mbarrier::arrive(s.unit_free(slot));
            units += 1;
        }
    }
}

/// Multiplies half of the columns of the queries and of two groups of 8 keys, so a fragment of the queries is read once
/// for 16 keys. A lane reads 16 columns of a key at a time; the RoPE columns are `rope` bytes behind.
///
/// # Safety
/// A whole warp; keys and queries have arrived.
#[inline(always)]
unsafe fn multiply(keys: [u32; 2], rope: u32, queries: u32) -> [Products; 2] {
    const OF_HALF: usize = GROUPS as usize / 2;
    let mut products = [Products {
        columns: [[0.0; 4]; OF_HALF],
        rope: [0.0; 4],
    }; 2];
    // SAFETY: the caller's promise.
    let fragment =
        |index: usize| unsafe { shared::load_u32x4(queries + index as u32 * FRAGMENT_BYTES) };
    // SAFETY: the caller's promise.
    unsafe {
        let mut part = 0;
        while part < 2 {
            let numbers = keys.map(|key| {
                [0, 128].map(|group| shared::load_u32x4(key + group + part as u32 * 16))
            });
            let mut four = 0;
            while four < 4 {
                // Alternate keys and groups, so that no product depends on the previous one.
                let mut group = 0;
                while group < OF_HALF {
                    let query = fragment(group * 8 + part * 4 + four);
                    let mut i = 0;
                    while i < 2 {
                        let word = numbers[i][group][four];
                        let pairs =
                            [word as u16, (word >> 16) as u16].map(convert::e4m3x2_to_f16x2);
                        F16::mma(&mut products[i].columns[group], query, pairs);
                        i += 1;
                    }
                    group += 1;
                }
                four += 1;
            }
            part += 1;
        }
        let last = keys.map(|key| shared::load_u32x4(key.wrapping_add(rope)));
        part = 0;
        while part < 2 {
            let query = fragment(OF_HALF * 8 + part);
            let mut i = 0;
            while i < 2 {
                let pairs = [last[i][2 * part], last[i][2 * part + 1]];
                Bf16::mma(&mut products[i].rope, query, pairs);
                i += 1;
            }
            part += 1;
        }
    }
    products
}

/// The values of 16 keys of a block.
///
/// # Safety
/// A whole warp; the keys have arrived.
#[inline(always)]
unsafe fn values(source: u32, step: usize) -> Values {
    let at = source + step as u32 * (16 * ROW_BYTES);
    // SAFETY: the caller's promise.
    unsafe { [mma::ldmatrix_x4_trans(at), mma::ldmatrix_x4_trans(at + 32)] }
}

/// The values of the first steps.
///
/// # Safety
/// As for [`values`].
#[inline(always)]
unsafe fn first_values(source: u32) -> [Values; AHEAD] {
    let mut all = [[[0; 4]; 2]; AHEAD];
    let mut step = 0;
    while step < AHEAD {
        // SAFETY: the caller's promise.
        all[step] = unsafe { values(source, step) };
        step += 1;
    }
    all
}

/// O += P·V of a block, for the warp's columns. `ahead` holds the first steps' values; `read` is called once all values
/// are in registers.
///
/// # Safety
/// A whole warp; keys and weights have arrived.
#[inline(always)]
unsafe fn add(
    o: &mut Outputs,
    mut ahead: [Values; AHEAD],
    source: u32,
    weights: u32,
    read: impl Fn(),
) {
    let mut step = 0;
    while step < STEPS {
        // SAFETY: the caller's promise.
        unsafe {
            let weights = mma::ldmatrix_x4(weights + step as u32 * 32);
            let of = ahead[step % AHEAD];
            let mut i = 0;
            while i < 4 {
                // Each word: two columns of two keys.
                let pairs = [of[i / 2][i % 2 * 2], of[i / 2][i % 2 * 2 + 1]].map(transpose_bytes);
                let even = pairs.map(|four| convert::e4m3x2_to_f16x2(four as u16));
                let odd = pairs.map(|four| convert::e4m3x2_to_f16x2((four >> 16) as u16));
                F16::mma(&mut o[2 * i], weights, even);
                F16::mma(&mut o[2 * i + 1], weights, odd);
                i += 1;
            }
            if step + AHEAD < STEPS {
                ahead[step % AHEAD] = values(source, step + AHEAD);
            }
        }
        step += 1;
    }
    read();
}

const _: () = assert!(
    ROWS_OF_TILE == 16 && WEIGHTS_BYTES % 128 == 16 && STEPS >= AHEAD && ROW_BYTES % 128 == 16,
    "fragments have 16 rows, and rows of weights and keys lie in different banks"
);

//! The producer warpgroup: the warps that gather queries and those that load keys and values.

use cuda_std::{
    async_copy, fence, mbarrier, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::super::{pages::clear, pipeline::Pipeline},
    PREFETCH_DISTANCE,
    runs::{Mode, Piece, Walk, list_runs},
    shared::{Shared, Unit},
};
use crate::{
    abi::{DecodeParams, KvStrides, WorkItem},
    common::{cache, decode::produce::Header, policy::Policies, variant::Variant},
};

const WARP: u32 = warp::FULL_MASK;

// ---- The gatherers -----------------------------------------------------------------------------

/// Claims one unit after another, each when the previous one nears its end. Publishes its description, runs and rows,
/// and gathers half of its queries.
///
/// # Safety
/// A whole warp comes here, with what [`Header::first`] found; the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn gather<V: Variant>(p: &DecodeParams, variant: &V, s: Shared, first: Header) {
    // SAFETY: the launch's parameters are valid.
    let a = &unsafe { p.attention.of_this_plan() };
    let lane = warp::lane_id();
    let ctas = thread::grid_dim_x();
    let mut unit = thread::block_idx_x();
    let mut header = first;
    let mut slots = Pipeline::<2>::PRODUCER;
    let mut ends = Pipeline::<1>::CONSUMER;
    // SAFETY: a whole warp; the full and free barriers order every access to a slot.
    unsafe {
        while unit < a.units {
            mbarrier::wait(s.unit_free(slots.stage), slots.parity);
            let described = list_runs(p, a.items, s, slots.stage, unit, &header);
            if lane == 0 {
                described.store(s.unit(slots.stage));
            }
            mbarrier::arrive(s.unit_full(slots.stage));
            list_rows(p, variant, s, slots.stage, &header);
            mbarrier::arrive(s.rows_full(slots.stage));
            s.queries_of(slots.stage, header.head, header.item.rows)
                .gather(p, 0);
            async_copy::wait_all();
            // wgmma reads these ordinary stores through the async proxy.
            fence::proxy_async_shared();
            mbarrier::arrive(s.queries_full(slots.stage));
            slots.advance();
            if described.blocks >= PREFETCH_DISTANCE {
                mbarrier::wait(s.near_end(), ends.parity);
                ends.advance();
            }
            unit = a.next_unit(lane, ctas);
            if unit < a.units {
                header = Header::load(a, p.kv_heads, unit);
            }
        }
        mbarrier::wait(s.unit_free(slots.stage), slots.parity);
        if lane == 0 {
            Unit::NONE.store(s.unit(slots.stage));
        }
        mbarrier::arrive(s.unit_full(slots.stage));
        mbarrier::arrive(s.rows_full(slots.stage));
        mbarrier::arrive(s.queries_full(slots.stage));
    }
}

/// Writes a unit's rows, and the keys that they see, to its slot.
#[inline(always)]
unsafe fn list_rows<V: Variant>(
    p: &DecodeParams,
    variant: &V,
    s: Shared,
    slot: u32,
    header: &Header,
) {
    let mut token = warp::lane_id();
    // SAFETY: a whole warp, which owns the slot; the plan has these rows.
    unsafe {
        while token < header.item.rows {
            let row = header.load_row(&p.attention, token);
            shared::store_u32x4(s.row(slot, token), row.words());
            let (first, last) = variant.visible_keys(row.position);
            shared::store_u32x2(s.seen(slot, token), [first as u32, last as u32]);
            if s.shape.converts() {
                let scales = match cache::by_token(s.shape.cache) {
                    true => [1.0; 2],
                    false => p.attention.scales.of(row.token, header.head),
                };
                shared::store_u32x2(s.scales(slot, token), scales.map(f32::to_bits));
            }
            token += 32;
        }
        warp::sync_warp(WARP);
    }
}

// ---- The loaders -------------------------------------------------------------------------------

/// A block with values outside its item, which must be zeroed: they may be anything, and 0 · NaN is NaN.
#[derive(Clone, Copy)]
struct Tail {
    target: u32,
    full: u32,
    /// The keys of this lane's piece that belong to the item.
    first: u32,
    past: u32,
}

/// Loads the blocks of all units: values or keys. The loader of keys also writes each stage's mask.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the values or keys, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn load<V: Variant, const VALUES: bool, const STAGES: u32>(
    p: &DecodeParams,
    variant: &V,
    map: *const TensorMap,
    s: Shared,
) {
    let lane = warp::lane_id();
    let (keys, row_bytes) = (s.shape.keys, s.shape.row_bytes());
    let tokens = p.piece_tokens;
    let per_block = keys >> tokens.trailing_zeros();
    let mine = lane < per_block;
    let windowed = variant.params().window_left != i32::MAX;
    // Both policies are created before the loop; each block selects one.
    // SAFETY: the launch's parameters are valid.
    let policies = unsafe { Policies::new(p.long, p.attention.record) };
    let (own, kept) = (policies.of(false), policies.of(true));
    let mut slots = Pipeline::<2>::CONSUMER;
    let mut blocks = Pipeline::<STAGES>::PRODUCER;
    let mut masks = 0;
    // Blocks with a tail use two barriers alternately: one tail is zeroed while the next block is loaded.
    let mut turns = Pipeline::<2>::CONSUMER;
    let mut waiting: Option<Tail> = None;
    loop {
        // SAFETY: the full and free barriers order every access to a slot or stage; a whole warp.
        let (unit, mut walk) = unsafe {
            mbarrier::wait(s.unit_full(slots.stage), slots.parity);
            let unit = Unit::load(s.unit(slots.stage));
            if unit.tokens == 0 {
                return;
            }
            (unit, Walk::start(s, slots.stage))
        };
        let (_, least) = variant.visible_keys(unit.position);
        let least = p.attention.seen_by_all(least);
        let mut block = 0;
        while block < unit.blocks {
            if !VALUES && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            // Find the page of this lane's piece before waiting for the stage.
            let mut piece = Piece::NONE;
            let mut corner = [0, 0, 0, 0, p.outside as i32];
            let mut page_of_piece = 0;
            // SAFETY: the unit is written.
            unsafe {
                if mine {
                    let index = block * per_block + lane;
                    piece = walk.seek(s, slots.stage, &unit, index, tokens);
                }
                if piece.past > 0 {
                    let (page, in_page) = p.page_size.div_rem(piece.at);
                    let id = walk.page(p, page);
                    page_of_piece = id;
                    corner[3] = (in_page / 8) as i32;
                    corner[4] = (id * p.page_per_page + unit.head * p.page_per_head) as i32;
                }
            }
            corner[2] = (unit.head * p.half_per_head) as i32;
            let policy = match walk.run.flags & WorkItem::SHARED_KEYS != 0 {
                true => kept,
                false => own,
            };
            let (full, free, target) = if VALUES {
                (
                    s.values_full(blocks.stage),
                    s.values_free(blocks.stage),
                    s.values(blocks.stage),
                )
            } else {
                (
                    s.keys_full(blocks.stage),
                    s.keys_free(blocks.stage),
                    s.keys(blocks.stage),
                )
            };
            let partly = piece.past > 0 && (piece.first > 0 || piece.past < tokens);
            // SAFETY: as above.
            unsafe {
                let tail = VALUES && warp::warp_vote_any(WARP, partly);
                mbarrier::wait(free, blocks.parity);
                if !VALUES {
                    let mask = s.mask(if s.shape.converts() {
                        masks
                    } else {
                        blocks.stage
                    });
                    masks = s.shape.next_mask(masks);
                    let mut mode = Mode::NONE;
                    if mine {
                        let words = mask + 16 + lane * tokens;
                        let rows = s.shape.rows();
                        mode = walk.mask(piece, tokens, rows, least, windowed, words);
                    }
                    mode.store(mask);
                    if cache::by_token(s.shape.cache) {
                        let target = mask + 16 + s.shape.keys;
                        load_scales(p, target, keys, piece, page_of_piece, unit.head);
                        async_copy::mbarrier_arrive(full);
                    }
                }
                let arrival = if tail { s.tail(turns.stage) } else { full };
                if lane == 0 {
                    mbarrier::arrive_expect_tx(arrival, keys * row_bytes);
                } else if !VALUES || s.shape.converts() && !tail {
                    // Every lane arrives, for the mask words that it wrote or the values that it may zero.
                    mbarrier::arrive(full);
                }
                warp::sync_warp(WARP);
                if mine {
                    let target = target + lane * tokens * row_bytes;
                    tma::load_tensor_hint(target, map, corner, arrival, policy);
                }
                // While this block is loaded, zero the tail of the previous one.
                if let Some(tail) = waiting.take() {
                    let before = Pipeline::<2> {
                        stage: turns.stage ^ 1,
                        parity: turns.parity ^ u32::from(turns.stage == 0),
                    };
                    zero_tail(
                        &tail,
                        s.tail(before.stage),
                        before.parity,
                        per_block,
                        tokens,
                        s,
                    );
                }
                if tail {
                    let Piece { first, past, .. } = piece;
                    waiting = Some(Tail {
                        target,
                        full,
                        first: if past > 0 { first } else { 0 },
                        past: if past > 0 { past } else { tokens },
                    });
                    turns.advance();
                }
            }
            blocks.advance();
            block += 1;
        }
        // SAFETY: as above. Zero the tail now: the next unit may only come after the end of this one.
        unsafe {
            if let Some(tail) = waiting.take() {
                let before = Pipeline::<2> {
                    stage: turns.stage ^ 1,
                    parity: turns.parity ^ u32::from(turns.stage == 0),
                };
                zero_tail(
                    &tail,
                    s.tail(before.stage),
                    before.parity,
                    per_block,
                    tokens,
                    s,
                );
            }
            mbarrier::arrive(s.unit_free(slots.stage));
        }
        slots.advance();
    }
}

/// Copies the scales of a block's keys and values to `target`. Each lane has the piece of its number, and its page; keys
/// outside of the item get scales of 1.
///
/// # Safety
/// A whole warp; only the caller accesses the target.
#[inline(always)]
unsafe fn load_scales(
    p: &DecodeParams,
    target: u32,
    keys: u32,
    piece: Piece,
    page: u32,
    head: u32,
) {
    let scales = &p.attention.scales;
    let shift = p.piece_tokens.trailing_zeros();
    let mut key = warp::lane_id();
    // SAFETY: the caller's promise; the pool has scales for each token of the item.
    unsafe {
        while key < keys {
            let (from, in_piece) = (key >> shift, key & (p.piece_tokens - 1));
            let of = |x: u32| warp::warp_shuffle_idx(WARP, x, from, 32);
            let [at, first, past, page] = [piece.at, piece.first, piece.past, page].map(of);
            let to = target + key * 4;
            if in_piece >= first && in_piece < past {
                let (_, token) = p.page_size.div_rem(at + in_piece);
                let place = |s: &KvStrides| {
                    u64::from(page) * u64::from(s.page) + u64::from(token * s.token + head * s.head)
                };
                let (k, v) = (place(&scales.k_strides), place(&scales.v_strides));
                async_copy::copy_ca::<4>(to, (scales.k + k * 4) as *const u8);
                async_copy::copy_ca::<4>(to + keys * 4, (scales.v + v * 4) as *const u8);
            } else {
                shared::store_f32(to, 1.0);
                shared::store_f32(to + keys * 4, 1.0);
            }
            key += 32;
        }
    }
}

/// Waits for a block, zeroes its values outside the item, and signals that it is full.
///
/// # Safety
/// A whole warp; the block's copies complete on `arrived`, and only the loader accesses it until it is signalled as
/// full.
#[inline(always)]
unsafe fn zero_tail(
    tail: &Tail,
    arrived: u32,
    parity: u32,
    per_block: u32,
    tokens: u32,
    s: Shared,
) {
    let row_bytes = s.shape.row_bytes();
    // SAFETY: the caller's promise.
    unsafe {
        mbarrier::wait(arrived, parity);
        let partly = tail.first > 0 || tail.past < tokens;
        let mut left = warp::warp_vote_ballot(WARP, partly && warp::lane_id() < per_block);
        while left != 0 {
            let piece = left.trailing_zeros();
            left &= left - 1;
            let target = tail.target + piece * tokens * row_bytes;
            let first = warp::warp_shuffle_idx(WARP, tail.first, piece, 32);
            let past = warp::warp_shuffle_idx(WARP, tail.past, piece, 32);
            clear(target, 0, first, row_bytes);
            clear(target, past, tokens, row_bytes);
        }
        fence::proxy_async_shared();
        warp::sync_warp(WARP);
        // Converting warps read the zeros by ordinary loads, which racecheck follows lane by lane.
        if s.shape.converts() || warp::lane_id() == 0 {
            mbarrier::arrive(tail.full);
        }
    }
}

//! The producer warpgroup: the warps that gather queries and those that load keys and values.

use cuda_std::{
    async_copy, fence, mbarrier, shared, thread,
    tma::{self, TensorMap},
    warp,
};

use super::{
    super::super::{pages::clear, pipeline::Pipeline},
    PREFETCH_DISTANCE,
    masks::Mode,
    runs::{Piece, Walk, list_runs},
    scales,
    shared::{Shared, Unit},
};
use crate::{
    abi::{DecodeParams, WorkItem},
    common::{cache, decode::produce::Header, policy::Policies, variant::Variant},
};

const WARP: u32 = warp::FULL_MASK;

// ---- The query loaders; the first is the scheduler warp -----------------------------------------

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
    /// The values of this lane's piece.
    target: u32,
    full: u32,
    /// The keys of this lane's piece that belong to the item; all of them if the piece is of another block.
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
    // Each lane looks up a piece, so pieces of several blocks are looked up at a time: one after the other, page ids would be
    // waited for in each block.
    let per_block = keys >> tokens.trailing_zeros();
    let shift = per_block.trailing_zeros();
    let at_once = if s.shape.converts() { 32 >> shift } else { 1 };
    let block_of_lane = lane >> shift;
    let in_block = (lane & (per_block - 1)) * tokens;
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
        let least = p.attention.seen_by_all(least, unit.position);
        let mut block = 0;
        let mut piece = Piece::NONE;
        let mut mode = Mode::NONE;
        let (mut page, mut in_page, mut policy) = (0, 0, own);
        while block < unit.blocks {
            if !VALUES && lane == 0 && block + PREFETCH_DISTANCE == unit.blocks {
                // SAFETY: the scheduler warp waits for it.
                unsafe { mbarrier::arrive(s.near_end()) };
            }
            let looked_up = block & (at_once - 1);
            if looked_up == 0 {
                // SAFETY: the unit is written.
                unsafe {
                    let index = (block << shift) + lane;
                    piece = walk.seek(s, slots.stage, &unit, index, tokens);
                    if piece.past > 0 {
                        let index;
                        (index, in_page) = p.page_size.div_rem(piece.at);
                        page = walk.page(p, index);
                    }
                }
                if !VALUES {
                    mode = walk.mode(piece, tokens, s.shape.rows(), least, windowed);
                }
                policy = match walk.run.flags & WorkItem::SHARED_KEYS != 0 {
                    true => kept,
                    false => own,
                };
            }
            // The pieces of this block are those of these lanes.
            let mine = block_of_lane == looked_up;
            let (eighth, page_of_box) = match piece.past > 0 {
                true => {
                    let page = page * p.page_per_page + unit.head * p.page_per_head;
                    (in_page / 8, page)
                }
                false => (0, p.outside),
            };
            let half = unit.head * p.half_per_head;
            let corner = [0, 0, half, eighth, page_of_box].map(|at| at as i32);
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
            let partly = mine && piece.past > 0 && (piece.first > 0 || piece.past < tokens);
            // SAFETY: as above.
            unsafe {
                let tail = VALUES && warp::warp_vote_any(WARP, partly);
                mbarrier::wait(free, blocks.parity);
                let arrival = if tail { s.tail(turns.stage) } else { full };
                // Keys and values come first. The lanes arrive for keys once their mask is written.
                if lane == 0 {
                    match VALUES {
                        true => mbarrier::arrive_expect_tx(arrival, keys * row_bytes),
                        false => mbarrier::expect_tx(arrival, keys * row_bytes),
                    }
                } else if VALUES && s.shape.converts() && !tail {
                    // Every lane arrives, for the values that it may zero.
                    mbarrier::arrive(full);
                }
                warp::sync_warp(WARP);
                if mine {
                    let target = target + in_block * row_bytes;
                    tma::load_tensor_hint(target, map, corner, arrival, policy);
                }
                if !VALUES {
                    let at = match s.shape.converts() {
                        true => masks,
                        false => blocks.stage,
                    };
                    let mask = s.mask(at);
                    masks = s.shape.next_mask(masks);
                    let masked = match mine {
                        true => mode,
                        false => Mode::NONE,
                    }
                    .store(mask);
                    // Otherwise consumers do not read the words.
                    if mine && (V::TRANSFORMS_LOGITS || V::MASKS || masked) {
                        walk.mask(piece, tokens, mask + 16 + in_block);
                    }
                    if cache::by_token(s.shape.cache) {
                        let first = looked_up << shift;
                        scales::load(
                            p,
                            s,
                            s.token_scales(at),
                            piece,
                            [page, in_page],
                            first,
                            unit.head,
                        );
                        async_copy::mbarrier_arrive(full);
                    }
                    mbarrier::arrive(full);
                }
                // While this block is loaded, zero the tail of the previous one.
                if let Some(tail) = waiting.take() {
                    let before = Pipeline::<2> {
                        stage: turns.stage ^ 1,
                        parity: turns.parity ^ u32::from(turns.stage == 0),
                    };
                    zero_tail(&tail, s.tail(before.stage), before.parity, tokens, s);
                }
                if tail {
                    let Piece { first, past, .. } = piece;
                    waiting = Some(Tail {
                        target: target + in_block * row_bytes,
                        full,
                        first: if partly { first } else { 0 },
                        past: if partly { past } else { tokens },
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
                zero_tail(&tail, s.tail(before.stage), before.parity, tokens, s);
            }
            mbarrier::arrive(s.unit_free(slots.stage));
        }
        slots.advance();
    }
}

/// Waits for a block, zeroes its values outside the item, and signals that it is full.
///
/// # Safety
/// A whole warp; the block's copies complete on `arrived`, and only the loader accesses it until it is signalled as
/// full.
#[inline(always)]
unsafe fn zero_tail(tail: &Tail, arrived: u32, parity: u32, tokens: u32, s: Shared) {
    let row_bytes = s.shape.row_bytes();
    // SAFETY: the caller's promise.
    unsafe {
        mbarrier::wait(arrived, parity);
        let partly = tail.first > 0 || tail.past < tokens;
        let mut left = warp::warp_vote_ballot(WARP, partly);
        while left != 0 {
            let piece = left.trailing_zeros();
            left &= left - 1;
            let of = |x: u32| warp::warp_shuffle_idx(WARP, x, piece, 32);
            let [target, first, past] = [tail.target, tail.first, tail.past].map(of);
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

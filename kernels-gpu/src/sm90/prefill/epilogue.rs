//! The epilogue: consumers normalise a tile and stage it in shared memory. The store warp stores whole tiles, the consumers
//! partial ones, except those of 8-bit products.

use core::{
    f32::consts::{LN_2, LOG2_E},
    ops::Range,
};

use cuda_std::{
    fence,
    math::{ex2, lg2, rcp},
    mbarrier, misc, mma,
    prelude::*,
    tma::{self, TensorMap},
    wgmma,
};

use super::{
    super::{mma::swap, pipeline::Pipeline},
    convert::Converter,
    shared::Shared,
    turn::turns_queries,
};
use crate::{
    abi::{DIRECT, PrefillParams},
    common::half::Half,
    common::prefill_tile::Tile,
    common::softmax::Rows,
    common::state::natural_sink,
};

const WARP: u32 = warp::FULL_MASK;

/// Normalises the warp's 16 rows. Stores them over its queries, for the [store warp](write), and, if the tile is partial,
/// from there to memory; directly to memory, with one stage of queries; or as a partial state of split-KV.
///
/// # Safety
/// A whole warp comes here, after the last product with its queries; the stage holds its tile.
#[inline(always)]
pub(super) unsafe fn finish_tile<
    T: Half,
    const EXTRAS: bool,
    const SCALED: bool,
    const O: usize,
>(
    p: &PrefillParams,
    s: Shared,
    stage: u32,
    o: &[f32; O],
    rows: &Rows,
    scale: [f32; 2],
) {
    let a = &p.attention;
    // Opaque: otherwise derived values are computed before the main loop and occupy registers there.
    let mut here = [warp::lane_id(), thread::thread_idx_x()];
    wgmma::fence_operand(&mut here);
    let [lane, thread] = here;
    let first_row = (thread - 128) / 32 * 16;
    // SAFETY: whole warps; the tile stays until this warp has arrived.
    let tile = unsafe { Tile::load(s.tile(stage)) };
    let partial = tile.rows != rows_of_whole(p, s);
    // A branch around the code of sinks: launches without sinks skip it.
    let sunk = (EXTRAS || s.shape.adds_sinks()) && a.sinks != 0 && tile.slot == DIRECT;
    // Loaded early, to hide the latency. Rows past the tile's end have a valid head, too.
    let mut sinks = [0.0; 2];
    if sunk {
        let mut h = 0;
        while h < 2 {
            let (token, head) = tile.place(&p.pack, first_row + lane / 4 + 8 * h as u32);
            let token = if EXTRAS { tile.token + token } else { 0 };
            // SAFETY: one for each query head, or with `extras` for each query head of some tokens.
            sinks[h] = unsafe { natural_sink(a, token, head) };
            h += 1;
        }
    }
    let mut totals = unsafe { rows.totals() };
    let mut references = [0, 1].map(|h| rows.reference[h] * scale[h]);
    // `!= 0.0` keeps NaN: with an LSE of −∞ a merge would drop the state.
    let mut inverse = totals.map(|total| if total != 0.0 { rcp(total) } else { 0.0 });
    if sunk {
        let mut h = 0;
        while h < 2 {
            // Opaque: otherwise the branch above would wait for the sink in order to multiply it.
            let sink = f32::from_bits(misc::opaque(sinks[h].to_bits())) * LOG2_E;
            let total = totals[h] + ex2(sink - references[h]);
            // The row saw no key, or the sink is so much larger that the output rounds to 0 in 16 bits: the weights of a
            // million keys add up to 2¹⁰⁸ at most. NaN is neither.
            let alone = totals[h] == 0.0 || total == f32::INFINITY;
            inverse[h] = if alone { 0.0 } else { rcp(total) };
            totals[h] = if alone { 1.0 } else { total };
            if alone {
                references[h] = sink;
            }
            h += 1;
        }
    }
    if SCALED && a.scales.v != 0 {
        let mut h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            // SAFETY: the tile is one of the launch's.
            inverse[h] *= unsafe { scales_of_row(p, &tile, row)[1] };
            h += 1;
        }
    }

    let packed = |i: usize| T::pack(o[i] * inverse[i / 2 % 2], o[i + 1] * inverse[i / 2 % 2]);
    if tile.slot == DIRECT && s.shape.query_stages == 1 {
        // SAFETY: whole warps; only this warp writes these rows.
        unsafe { write_fragments::<O>(p, &tile, lane, first_row, s.shape.value_dim, packed) };
    } else if tile.slot == DIRECT {
        // SAFETY: only this warp read these 16 rows of queries, and it has finished with them.
        unsafe {
            let mut j = 0;
            while j < O / 8 {
                let quarter = |i| packed(8 * j + i);
                let fragments = [quarter(0), quarter(2), quarter(4), quarter(6)];
                let at = staged(s, stage, first_row + lane % 16, 2 * j as u32 + lane / 16);
                mma::stmatrix_x4(at, fragments);
                j += 1;
            }
            if partial && !writer_stores_rows(s) {
                warp::sync_warp(WARP);
                write_rows(p, s, stage, &tile, lane, first_row..first_row + 16);
            }
        }
        // The store warp's TMA reads whole tiles through the async proxy, and TMA later writes the next queries here.
        fence::proxy_async_shared();
    }
    // SAFETY: whole warps.
    unsafe {
        mbarrier::arrive(s.tile_free(stage));
        warp::sync_warp(WARP);
        if lane == 0 || turns_queries::<EXTRAS>(p, s) {
            mbarrier::arrive(s.output_full(stage));
        }
    }

    // Other stores to global memory come last: otherwise the fence above would wait for them. It waits for the rows of
    // partial tiles, whose place in shared memory the next queries take.
    let mut h = 0;
    while h < 2 {
        let row = first_row + lane / 4 + 8 * h as u32;
        if row < tile.rows {
            let (token, head) = tile.place(&p.pack, row);
            let lse = if totals[h] != 0.0 {
                references[h] + lg2(totals[h])
            } else {
                f32::NEG_INFINITY
            };
            if tile.slot == DIRECT {
                let at = u64::from((tile.token + token) * a.q_heads + head) * 4;
                if a.lse != 0 && lane % 4 == 0 {
                    // SAFETY: only this thread writes the row's LSE.
                    unsafe { ptr::store_f32((a.lse + at) as *mut f32, lse * LN_2) };
                }
            } else {
                let state = u64::from((tile.slot + token) * a.q_heads + head);
                let first = state * u64::from(head_stride(p, s)) + u64::from(lane % 4 * 2);
                let out = a.partial_out + first * 4;
                // SAFETY: only this tile writes the slot, and only this thread its elements of the row.
                unsafe {
                    if lane % 4 == 0 {
                        ptr::store_f32((a.partial_lse + state * 4) as *mut f32, lse);
                    }
                    let mut j = 0;
                    while j < O / 4 {
                        let pair = [
                            o[4 * j + 2 * h] * inverse[h],
                            o[4 * j + 2 * h + 1] * inverse[h],
                        ];
                        let column = u64::from(moved(p, s, 8 * j as u32));
                        ptr::store_f32x2((out + 4 * column) as *mut f32, pair);
                        j += 1;
                    }
                }
            }
        }
        h += 1;
    }
}

/// Writes 16 rows from accumulator fragments. The four lanes of a row exchange words until each has 16 contiguous
/// bytes.
#[inline(always)]
unsafe fn write_fragments<const O: usize>(
    p: &PrefillParams,
    tile: &Tile,
    lane: u32,
    first_row: u32,
    head_dim: u32,
    packed: impl Fn(usize) -> u32,
) {
    let mut h = 0;
    while h < 2 {
        let row = first_row + lane / 4 + 8 * h as u32;
        let (token, head) = tile.place(&p.pack, row);
        let element = u64::from(tile.token + token) * u64::from(p.attention.out_token_stride)
            + u64::from(head * head_dim + lane % 4 * 8);
        let out = p.attention.out + element * 2;
        let mut j = 0;
        while j < O / 16 {
            let mut words = [0, 4, 8, 12].map(|i| packed(16 * j + i + 2 * h));
            // SAFETY: whole warps; the row exists in the output.
            unsafe {
                swap(&mut words, [(0, 1), (2, 3)], lane & 1 != 0, 1);
                swap(&mut words, [(0, 2), (1, 3)], lane & 2 != 0, 2);
                if row < tile.rows {
                    ptr::store_u32x4((out + 64 * j as u64) as *mut u32, words);
                }
            }
            j += 1;
        }
        h += 1;
    }
}

/// The position of a head's column in outputs and partial states. Where [other kernels of the step pad this head
/// dimension](PrefillParams::gap), columns from 64 on come after a gap.
#[inline(always)]
fn moved(p: &PrefillParams, s: Shared, column: u32) -> u32 {
    if s.shape.is_cut() && column >= 64 {
        column + p.gap
    } else {
        column
    }
}

/// Columns between consecutive heads of outputs and partial states.
#[inline(always)]
fn head_stride(p: &PrefillParams, s: Shared) -> u32 {
    if s.shape.is_cut() {
        s.shape.value_dim + p.gap
    } else {
        s.shape.value_dim
    }
}

/// Address of 16 bytes of a finished row: it takes the place of the queries, with the same swizzle.
#[inline(always)]
pub(super) fn staged(s: Shared, stage: u32, row: u32, chunk: u32) -> u32 {
    s.queries(stage) + chunk / 8 * s.shape.slab_bytes() + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
}

/// The store warp: stores whole tiles while the consumers compute the next. Partial tiles are stored already, except
/// [those of 8-bit products](writer_stores_rows). While it has nothing to write it [converts](super::convert) 8-bit pages.
///
/// # Safety
/// A whole warp comes here; `map` is the tensor map of the outputs, and the barriers are initialised.
#[inline(always)]
pub(super) unsafe fn write<T: Half, const TOGETHER: usize>(
    p: &PrefillParams,
    map: *const TensorMap,
    s: Shared,
) {
    let lane = warp::lane_id();
    let whole = rows_of_whole(p, s);
    let mut tiles = Pipeline::<2>::CONSUMER;
    // SAFETY: a whole warp.
    let mut converter = unsafe { Converter::begin(p, s) };
    // Whether the current tile's description has been read, and whether it was the end of all work.
    let (mut described, mut ended) = (false, false);
    loop {
        // SAFETY: the full and free barriers order every access to a stage; a whole warp.
        unsafe {
            let next = if described {
                s.output_full(tiles.stage)
            } else {
                s.tile_full(tiles.stage)
            };
            if !converter.is_done() {
                let there = !ended && mbarrier::test_wait(next, tiles.parity);
                if !warp::warp_vote_all(WARP, there) {
                    converter.step::<T, TOGETHER>(p, s);
                    continue;
                }
            } else if ended {
                return;
            }
            mbarrier::wait(next, tiles.parity);
            let tile = Tile::load(s.tile(tiles.stage));
            if !described {
                described = true;
                ended = tile.rows == 0;
                continue;
            }
            if s.shape.bytes == 1 {
                // Already complete, since the output is there. Waiting makes the stores of all lanes that rounded
                // queries visible here.
                mbarrier::wait(s.queries_rounded(tiles.stage), tiles.parity);
            }
            if tile.slot == DIRECT && s.shape.query_stages == 2 {
                if tile.rows != whole {
                    if writer_stores_rows(s) {
                        write_rows(p, s, tiles.stage, &tile, lane, 0..tile.rows);
                        // TMA writes the next queries to the place that these ordinary loads have read.
                        fence::proxy_async_shared();
                    }
                } else if lane == 0 {
                    write_whole(p, map, s, tiles.stage, &tile);
                }
            }
            mbarrier::arrive(s.tile_free(tiles.stage));
        }
        described = false;
        tiles.advance();
    }
}

/// The scales of keys and of values for a row of the tile.
///
/// # Safety
/// The tile is one of the launch's.
#[inline(always)]
pub(super) unsafe fn scales_of_row(p: &PrefillParams, tile: &Tile, row: u32) -> [f32; 2] {
    // Rows past the end take the last row's scales.
    let last = tile.rows - 1;
    let (token, _) = tile.place(&p.pack, if row < last { row } else { last });
    // SAFETY: the caller's promise.
    unsafe { p.attention.scales.of(tile.token + token, tile.kv_head) }
}

/// Stores a full tile by TMA, from one thread.
#[inline(always)]
unsafe fn write_whole(
    p: &PrefillParams,
    map: *const TensorMap,
    s: Shared,
    stage: u32,
    tile: &Tile,
) {
    let head = p.pack.div(tile.head) as i32;
    let mut slab = 0;
    // SAFETY: the tile's rows are in the output, and only this warp writes them. The bulk wait returns after shared
    // memory has been read.
    unsafe {
        while slab < s.shape.value_dim.div_ceil(64) {
            let column = moved(p, s, 64 * slab);
            let corner = [column as i32, 0, tile.token as i32, 0, head];
            tma::store_tensor(map, corner, s.queries(stage) + slab * s.shape.slab_bytes());
            slab += 1;
        }
        tma::commit_group();
        tma::wait_group_read::<0>();
    }
}

/// Rows of a whole tile: those of all its tokens.
#[inline(always)]
fn rows_of_whole(p: &PrefillParams, s: Shared) -> u32 {
    p.pack.div(s.shape.rows()) * p.pack.get()
}

/// Whether partial tiles are stored by the store warp and not by the consumers. It takes 4.7 µs for 100 rows, the
/// consumers compute a tile of 100 keys in 3 to 5 µs. But consumers of 8-bit products have no registers left: they would
/// spill more, and whole tiles would take 1.025 times as long.
#[inline(always)]
const fn writer_stores_rows(s: Shared) -> bool {
    s.shape.bytes == 1
}

/// Stores rows of a partial tile from shared memory, those that exist.
///
/// # Safety
/// A whole warp comes here; the rows are staged, and visible to all of its lanes.
#[inline(always)]
unsafe fn write_rows(
    p: &PrefillParams,
    s: Shared,
    stage: u32,
    tile: &Tile,
    lane: u32,
    rows: Range<u32>,
) {
    let a = &p.attention;
    let chunks = s.shape.value_dim / 8;
    let stride = head_stride(p, s);
    let mut i = lane;
    while i < (rows.end - rows.start) * chunks {
        let (row, chunk) = (rows.start + i / chunks, i % chunks);
        if row < tile.rows {
            let (token, head) = tile.place(&p.pack, row);
            let element = u64::from(tile.token + token) * u64::from(a.out_token_stride)
                + u64::from(head * stride + moved(p, s, chunk * 8));
            // SAFETY: the row is staged; only this tile writes it to the output.
            unsafe {
                let vector = shared::load_u32x4(staged(s, stage, row, chunk));
                ptr::store_u32x4((a.out + element * 2) as *mut u32, vector);
            }
        }
        i += 32;
    }
}

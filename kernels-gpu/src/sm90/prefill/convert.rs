//! Keys and values of 8 bits become pages of 16-bit ones, once for all tiles of a launch.
//!
//! The tensor cores multiply 16 bits here, and a key is read by as many tiles as there are query tiles for its head. So
//! *pieces*, 64 keys of one KV head or their values, are converted while the first tiles are computed: one by each
//! warp that computes, before its first product, and the others by the warp that writes outputs, which has nothing to
//! write until the first tile is done. Pieces are claimed from a counter of the launch, in the order in which tiles
//! need them, and a flag for each says that it is there. Loaders wait for the flags of what they are about to load. A
//! claimed piece waits for nothing, so somebody always goes on, however many CTAs of the launch are running.
//!
//! Flags hold the epoch in which a piece was converted, so that nobody has to clear them: the last CTA that finds no
//! piece left ends the epoch.

use cuda_std::{
    atomic::{self, Acquire, Gpu, Relaxed, Release},
    convert, fence,
    math::div_u32,
    prelude::*,
};

use super::{f8::lay_out, shared::Shared};
use crate::{
    abi::{ConvertParams, ConvertedPage, PrefillParams},
    common::{cache, half::Half, prefill_tile::Tile},
};

const WARP: u32 = warp::FULL_MASK;

/// Keys of a piece, and tokens of a converted page.
const PAGE: u32 = ConvertedPage::KEYS;

/// Of a token that does not exist: it becomes zeros.
pub(super) const NOWHERE: u32 = u32::MAX;

/// From where on a tile's keys, or its values, are converted; before, they were from `known` on. A whole warp asks for
/// 32 pieces at a time.
///
/// # Safety
/// A whole warp comes here; the launch converts what the tile sees; `epoch` is that of the launch.
#[inline(always)]
pub(super) unsafe fn converted_from(
    p: &PrefillParams,
    epoch: u32,
    tile: &Tile,
    known: i32,
    values: bool,
) -> i32 {
    let key = known - (PAGE * (warp::lane_id() + 1)) as i32;
    let mut there = true;
    // SAFETY: the caller's promise.
    unsafe {
        if key + PAGE as i32 > tile.lowest as i32 {
            let entry = tile.table.wrapping_add(key as u32 / PAGE);
            let entry = p.attention.page_ids + u64::from(entry) * 4;
            let page = ptr::load_nc_u32(entry as *const u32);
            let flag = (page * p.attention.kv_heads + tile.kv_head) * 2 + u32::from(values);
            let flag = p.convert.done + u64::from(flag) * 4;
            there = atomic::load::<Acquire, Gpu, _>(flag as *const u32) == epoch + 1;
        }
        let missing = !warp::warp_vote_ballot(WARP, there);
        warp::sync_warp(WARP);
        // TMA reads what ordinary stores of other CTAs wrote.
        fence::proxy_async_global();
        known - (PAGE * missing.trailing_zeros()) as i32
    }
}

/// Whether each warp that computes lays out two pieces of 8 bits before its first product: where there are more than the
/// warps of the launch, the writers alone would take longer for the others than the first tiles.
#[inline(always)]
unsafe fn takes_two(p: &PrefillParams, s: Shared) -> bool {
    // SAFETY: the launch is as the host makes it.
    let [_, pages] = unsafe { p.convert.of_this_plan(p.attention.record) };
    pieces(p, pages) > 4 * s.shape.consumers * thread::grid_dim_x()
}

/// Puts the epoch where the warps find it, and claims the pieces of the warps that compute.
///
/// # Safety
/// One thread comes here, before a barrier of the CTA.
#[inline(always)]
pub(super) unsafe fn init(p: &PrefillParams, s: Shared) {
    let control = p.convert.control;
    if p.convert.pages != 0 {
        // SAFETY: the launch is as the host makes it. Nobody ends the epoch before all CTAs have claimed.
        unsafe {
            let epoch = atomic::load::<Relaxed, Gpu, _>((control + 4) as *const u32);
            let mut claims = 4 * s.shape.consumers;
            if s.shape.bytes == 1 && takes_two(p, s) {
                claims *= 2;
            }
            let claim = atomic::fetch_add::<Relaxed, Gpu, _>(control as *mut u32, claims);
            shared::store_u32(s.epoch(), epoch);
            shared::store_u32(s.epoch() + 4, claim);
        }
    }
}

/// Converts what was claimed for a warp, one of those that compute.
///
/// # Safety
/// A whole warp comes here, behind [`init`] and a barrier; the parameters describe memory as [`ConvertParams`] says.
#[inline(always)]
pub(super) unsafe fn first<T: Half, const TOGETHER: usize>(
    p: &PrefillParams,
    s: Shared,
    warp: u32,
) {
    if !s.shape.converts() || p.convert.pages == 0 {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe {
        let [first, pages] = p.convert.of_this_plan(p.attention.record);
        let pieces = pieces(p, pages);
        let mut claimed = shared::load_u32(s.epoch() + 4) + warp;
        if s.shape.bytes == 1 {
            let mut left = if takes_two(p, s) { 2 } else { 1 };
            while claimed < pieces && left > 0 {
                lay_out(p, s, Piece::find(p, first, claimed));
                claimed += 4 * s.shape.consumers;
                left -= 1;
            }
        } else if claimed < pieces {
            let piece = Piece::find(p, first, claimed);
            let mut narrow = [[0; 4]; TOGETHER];
            piece.load(p, s, 0, &mut narrow);
            piece.convert::<T, TOGETHER>(p, s, narrow);
        }
    }
}

/// The pieces that the writer converts, one after the other.
pub(super) struct Converter {
    /// Pieces of the launch; 0: all are claimed, and the warp has converted its own.
    pieces: u32,
    /// What is converted next.
    piece: Piece,
    /// In the first lane: the claim behind it.
    claim: u32,
}

impl Converter {
    /// Claims the first pieces.
    ///
    /// # Safety
    /// A whole warp comes here, one of each CTA; the parameters describe memory as [`ConvertParams`] says.
    #[inline(always)]
    pub(super) unsafe fn begin(p: &PrefillParams, s: Shared) -> Self {
        let mut converter = Self {
            pieces: 0,
            piece: Piece::NONE,
            claim: 0,
        };
        if !s.shape.converts() || p.convert.pages == 0 {
            return converter;
        }
        // SAFETY: the caller's promise.
        unsafe {
            let [_, pages] = p.convert.of_this_plan(p.attention.record);
            converter.pieces = pieces(p, pages);
            converter.claim = claim(&p.convert);
            converter.piece = converter.next(p, s);
        }
        converter
    }

    /// Whether no piece is left to convert.
    #[inline(always)]
    pub(super) fn is_done(&self) -> bool {
        self.pieces == 0
    }

    /// Takes up the claim and makes another. Where it failed, this CTA claims no more, and the last of all leaves the
    /// counters as they were, in a new epoch.
    #[inline(always)]
    unsafe fn next(&mut self, p: &PrefillParams, s: Shared) -> Piece {
        let control = p.convert.control;
        // SAFETY: the caller's promise. A whole warp.
        unsafe {
            let claimed = warp::warp_shuffle_idx(WARP, self.claim, 0, 32);
            if claimed < self.pieces {
                self.claim = claim(&p.convert);
                let [first, _] = p.convert.of_this_plan(p.attention.record);
                return Piece::find(p, first, claimed);
            }
            if warp::lane_id() == 0 {
                let ended = atomic::fetch_add::<Relaxed, Gpu, _>((control + 8) as *mut u32, 1);
                if ended == thread::grid_dim_x() - 1 {
                    let epoch = shared::load_u32(s.epoch());
                    atomic::store::<Relaxed, Gpu, _>(control as *mut u32, 0);
                    atomic::store::<Relaxed, Gpu, _>((control + 8) as *mut u32, 0);
                    atomic::store::<Relaxed, Gpu, _>((control + 4) as *mut u32, epoch + 1);
                }
            }
            self.pieces = 0;
            Piece::NONE
        }
    }

    /// Converts a piece, and brings the next from memory to L2.
    ///
    /// # Safety
    /// As [`begin`](Self::begin); there is a piece.
    #[inline(always)]
    pub(super) unsafe fn step<T: Half, const TOGETHER: usize>(
        &mut self,
        p: &PrefillParams,
        s: Shared,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if s.shape.bytes == 1 {
                let piece = self.piece;
                self.piece = self.next(p, s);
                lay_out(p, s, piece);
                return;
            }
            let mut narrow = [[0; 4]; TOGETHER];
            self.piece.load(p, s, 0, &mut narrow);
            let piece = self.piece;
            self.piece = self.next(p, s);
            piece.convert::<T, TOGETHER>(p, s, narrow);
        }
    }
}

/// A piece: the index of its flag, and for each lane where two of its tokens are, in vectors of the pool.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) flag: u32,
    pub(super) places: [u32; 2],
}

impl Piece {
    const NONE: Self = Self {
        flag: 0,
        places: [NOWHERE; 2],
    };

    /// Of a claim: keys of all heads before their values, the last keys first, as tiles need them. Asks L2 for it.
    #[inline(always)]
    unsafe fn find(p: &PrefillParams, first: u32, claimed: u32) -> Self {
        let c = &p.convert;
        let row = div_u32(claimed, p.attention.kv_heads);
        let head = claimed - row * p.attention.kv_heads;
        let (pool, strides) = if row % 2 == 1 {
            (c.v, &c.v_strides)
        } else {
            (c.k, &c.k_strides)
        };
        let entry = c.list + u64::from(first + row / 2) * 16;
        // SAFETY: entries are those of the launch, a table has a page for each key.
        unsafe {
            let [table, key, keys, page] = ptr::load_nc_u32x4(entry as *const u32);
            let mut places = [NOWHERE; 2];
            let mut half = 0;
            while half < 2 {
                let token = half as u32 * 32 + warp::lane_id();
                if token < keys {
                    let (index, offset) = c.page_size.div_rem(key + token);
                    let id = c.page_ids + u64::from(table + index) * 4;
                    let id = ptr::load_nc_u32(id as *const u32);
                    let place = id * strides.page + offset * strides.token + head * strides.head;
                    ptr::prefetch_l2((pool + u64::from(place) * 16) as *const u32);
                    places[half] = place;
                }
                half += 1;
            }
            Self {
                flag: (page * p.attention.kv_heads + head) * 2 + row % 2,
                places,
            }
        }
    }

    /// A lane's vectors of some rounds. A round of the warp is 512 bytes, the tokens one after the other.
    #[inline(always)]
    unsafe fn load<const TOGETHER: usize>(
        &self,
        p: &PrefillParams,
        s: Shared,
        round: u32,
        narrow: &mut [[u32; 4]; TOGETHER],
    ) {
        let pool = if self.flag % 2 == 1 {
            p.convert.v
        } else {
            p.convert.k
        };
        let (lane, lanes) = (warp::lane_id(), s.shape.head_dim / 16);
        let source = pool + u64::from(lane % lanes) * 16;
        let mut i = 0;
        while i < TOGETHER {
            let round = round + i as u32;
            let places = if round < lanes {
                self.places[0]
            } else {
                self.places[1]
            };
            let token = round * (32 / lanes) + lane / lanes;
            // SAFETY: whole warps; what exists is in the pool.
            unsafe {
                let place = warp::warp_shuffle_idx(WARP, places, token % 32, 32);
                narrow[i] = [0; 4];
                if place != NOWHERE {
                    let from = source + u64::from(place) * 16;
                    narrow[i] = ptr::load_stream_u32x4(from as *const u32);
                }
            }
            i += 1;
        }
    }

    /// Converts all of it; the first rounds are loaded. Says that it is there.
    #[inline(always)]
    unsafe fn convert<T: Half, const TOGETHER: usize>(
        self,
        p: &PrefillParams,
        s: Shared,
        mut narrow: [[u32; 4]; TOGETHER],
    ) {
        let c = &p.convert;
        let lane = warp::lane_id();
        let to = if self.flag % 2 == 1 { c.to_v } else { c.to_k };
        let bytes = u64::from(PAGE * s.shape.head_dim * 2);
        let mut target = to + u64::from(self.flag / 2) * bytes + u64::from(lane * 32);
        // Opaque: unrolled, it takes more registers than there are.
        let rounds = misc::opaque(s.shape.head_dim / 8);
        let mut round = 0;
        // SAFETY: the converted page is only this launch's; whole warps.
        unsafe {
            loop {
                let mut i = 0;
                while i < TOGETHER {
                    let [a, b, c, d] = if c.format == cache::E5M2 {
                        narrow[i].map(|four| pairs(four).map(of_e5m2::<T>))
                    } else {
                        narrow[i].map(|four| pairs(four).map(of_e4m3::<T>))
                    };
                    ptr::store_u32x4(target as *mut u32, [a[0], a[1], b[0], b[1]]);
                    ptr::store_u32x4((target + 16) as *mut u32, [c[0], c[1], d[0], d[1]]);
                    target += 1024;
                    i += 1;
                }
                round += TOGETHER as u32;
                if round >= rounds {
                    break;
                }
                self.load(p, s, round, &mut narrow);
            }
            self.is_there(p, s);
        }
    }

    /// Says that it is.
    ///
    /// # Safety
    /// A whole warp comes here, behind the stores of all of it.
    #[inline(always)]
    pub(super) unsafe fn is_there(self, p: &PrefillParams, s: Shared) {
        // TMA of any CTA reads what these stores wrote.
        fence::proxy_async_global();
        // SAFETY: the caller's promise.
        unsafe {
            warp::sync_warp(WARP);
            if warp::lane_id() == 0 {
                let epoch = shared::load_u32(s.epoch());
                let flag = p.convert.done + u64::from(self.flag) * 4;
                atomic::store::<Release, Gpu, _>(flag as *mut u32, epoch + 1);
            }
        }
    }
}

/// Pieces of so many pages.
#[inline(always)]
fn pieces(p: &PrefillParams, pages: u32) -> u32 {
    pages * p.attention.kv_heads * 2
}

/// In the first lane: what it claims.
#[inline(always)]
unsafe fn claim(c: &ConvertParams) -> u32 {
    if warp::lane_id() != 0 {
        return 0;
    }
    // SAFETY: the counter is the launch's.
    unsafe { atomic::fetch_add::<Relaxed, Gpu, _>(c.control as *mut u32, 1) }
}

#[inline(always)]
fn pairs(four: u32) -> [u16; 2] {
    [four as u16, (four >> 16) as u16]
}

/// Two 8-bit numbers as 16-bit ones. Exact.
#[inline(always)]
fn of_e4m3<T: Half>(two: u16) -> u32 {
    of_f16::<T>(convert::e4m3x2_to_f16x2(two))
}

#[inline(always)]
fn of_e5m2<T: Half>(two: u16) -> u32 {
    of_f16::<T>(convert::e5m2x2_to_f16x2(two))
}

/// Exact for what 8 bits hold.
#[inline(always)]
fn of_f16<T: Half>(pair: u32) -> u32 {
    if T::WIDE {
        let [first, second] = convert::f16x2_to_f32(pair);
        T::pack(first, second)
    } else {
        pair
    }
}

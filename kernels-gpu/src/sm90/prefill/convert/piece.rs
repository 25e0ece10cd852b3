//! A piece, 64 keys of one KV head or their values: its addresses, its conversion and its flag.

use cuda_std::{
    atomic::{self, Gpu, Release},
    convert, fence,
    math::div_u32,
    prelude::*,
};

use super::{super::shared::Shared, PAGE, WARP};
use crate::{
    abi::{ConvertedPage, PrefillParams},
    common::{cache, half::Half},
};

/// The place of a token that does not exist, or that no query sees; it is filled with zeros.
pub(in crate::sm90::prefill) const NOWHERE: u32 = u32::MAX;

/// A piece: the index of its flag, and per lane the offsets of two of its tokens in the pool, in vectors of 16 bytes.
#[derive(Clone, Copy)]
pub(in crate::sm90::prefill) struct Piece {
    pub(in crate::sm90::prefill) flag: u32,
    pub(in crate::sm90::prefill) places: [u32; 2],
}

impl Piece {
    pub(super) const NONE: Self = Self {
        flag: 0,
        places: [NOWHERE; 2],
    };

    /// The piece of a claim. Tiles need the last keys first and keys before values. The list of pages is in that order,
    /// and within a page the keys of all heads come before their values. Prefetches the piece to L2.
    #[inline(always)]
    pub(super) unsafe fn find(p: &PrefillParams, first: u32, claimed: u32) -> Self {
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
            let [table, key, seen, page] = ptr::load_nc_u32x4(entry as *const u32);
            let [seen, end] = ConvertedPage::seen(seen);
            let mut places = [NOWHERE; 2];
            let mut half = 0;
            while half < 2 {
                let token = half as u32 * 32 + warp::lane_id();
                if token >= seen && token < end {
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

    /// Loads this lane's vectors of `TOGETHER` rounds. In a round the warp loads 512 bytes of consecutive tokens.
    #[inline(always)]
    pub(super) unsafe fn load<const TOGETHER: usize>(
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
            // SAFETY: whole warps; tokens that exist are in the pool.
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

    /// Converts the piece, whose first rounds are loaded, and sets its flag.
    #[inline(always)]
    pub(super) unsafe fn convert<T: Half, const TOGETHER: usize>(
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
        // Opaque: unrolled, the loop needs more registers than there are.
        let rounds = misc::opaque(s.shape.head_dim / 8);
        let mut round = 0;
        // SAFETY: only this launch writes the converted page; whole warps.
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

    /// Sets the flag: the piece is converted.
    ///
    /// # Safety
    /// A whole warp comes here, after its stores of the whole piece.
    #[inline(always)]
    pub(in crate::sm90::prefill) unsafe fn is_there(self, p: &PrefillParams, s: Shared) {
        // TMA of other CTAs will read what these ordinary stores wrote.
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

#[inline(always)]
fn pairs(four: u32) -> [u16; 2] {
    [four as u16, (four >> 16) as u16]
}

/// Two e4m3 numbers as two 16-bit floats. Exact.
#[inline(always)]
fn of_e4m3<T: Half>(two: u16) -> u32 {
    of_f16::<T>(convert::e4m3x2_to_f16x2(two))
}

#[inline(always)]
fn of_e5m2<T: Half>(two: u16) -> u32 {
    of_f16::<T>(convert::e5m2x2_to_f16x2(two))
}

/// Exact for values that came from 8 bits.
#[inline(always)]
fn of_f16<T: Half>(pair: u32) -> u32 {
    if T::WIDE {
        let [first, second] = convert::f16x2_to_f32(pair);
        T::pack(first, second)
    } else {
        pair
    }
}

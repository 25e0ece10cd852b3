//! The start of the loaders: they load chunks of the CTA's first unit before the scheduler has listed it.

use cuda_std::{mbarrier, prelude::*, tma};

use super::{
    layout::{KEYS, Layout, known_ahead},
    load::{Loader, Opening},
    unit::{Descriptor, Seen},
};
use crate::{
    abi::DecodeParams,
    common::{cache, decode::produce::Header, variant::Variant},
};

const ALL: u32 = warp::FULL_MASK;

/// The CTA's first unit; empty if it has none.
///
/// # Safety
/// The parameters are those of a launch by the host.
#[inline(always)]
pub(super) unsafe fn first_unit(p: &DecodeParams) -> Header {
    // SAFETY: the caller's promise.
    unsafe {
        let a = p.attention.of_this_plan();
        let first = thread::block_idx_x() * p.run;
        if first < a.units {
            Header::load(&a, p.kv_heads, first)
        } else {
            Header::EMPTY
        }
    }
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Loader<'_, DIM, ROWS, WARPS, CACHE>
{
    /// Chunks that this loader can open with: at most its share of the ring, those it may have under way, and one piece
    /// per lane.
    #[inline(always)]
    fn opens_with(&self) -> u32 {
        let share = self.layout.stages / Self::LOADERS;
        share
            .min(self.most_under_way())
            .min(16 >> self.pieces_log())
    }

    /// Looks up the page of the first unit's piece that this lane will load.
    ///
    /// # Safety
    /// The unit is the launch's.
    #[inline(always)]
    pub unsafe fn look_up(&self, Header { item, head }: Header) -> Opening {
        let p = self.p;
        // SAFETY: the caller's promise.
        unsafe {
            let begin = item.kv_begin & !(KEYS - 1);
            let keys = item.kv_end > item.kv_begin;
            let chunks = if keys {
                (item.kv_end - begin).div_ceil(KEYS)
            } else {
                (item.rows > 0) as u32
            };
            let log = self.pieces_log();
            let (nth, piece) = (self.lane >> (log + 1), self.lane & ((1 << log) - 1));
            let position =
                begin + (self.index + Self::LOADERS * nth) * KEYS + piece * p.piece_tokens;
            let mine = keys
                && nth < self.opens_with()
                && position < item.kv_end
                && position + p.piece_tokens > item.kv_begin;
            let page = if mine {
                let at = item.table + p.page_size.div(position);
                ptr::load_nc_u32((p.attention.page_ids + u64::from(at) * 4) as *const u32)
            } else {
                0
            };
            Opening {
                item,
                head,
                chunks,
                nth,
                page,
                mine,
            }
        }
    }

    /// Loads the first chunks of the first unit into the ring, one piece per lane. Returns how many of this loader's
    /// chunks these are.
    ///
    /// # Safety
    /// The lanes come together, each with what [`look_up`](Self::look_up) gave it; the barriers are initialised.
    #[inline(always)]
    pub unsafe fn open<V: Variant>(&self, variant: &V, opening: Opening) -> u32 {
        let (p, layout) = (self.p, self.layout);
        let Opening {
            item,
            head,
            chunks,
            nth,
            page,
            mine,
        } = opening;
        let log = self.pieces_log();
        let chunk = self.index + Self::LOADERS * nth;
        let (stage, first) = (chunk, (item.kv_begin & !(KEYS - 1)) + chunk * KEYS);
        let full = layout.stage_full(stage);
        let (values, piece) = ((self.lane >> log) & 1, self.lane & ((1 << log) - 1));
        let piece_bytes = p.piece_tokens * Layout::<DIM, ROWS, WARPS, CACHE>::KEY_BYTES;
        // SAFETY: all stages of the ring are empty at the start; the lanes are together.
        unsafe {
            let loads = warp::warp_vote_ballot(ALL, mine) >> (nth << (log + 1));
            let loads = (loads & ((1 << (2 << log)) - 1)).count_ones();
            let leads = self.lane & ((2 << log) - 1) == 0;
            if leads && nth < self.opens_with() && chunk < chunks {
                let seen = Seen::new(p, variant, item.position, item.kv_begin, item.kv_end);
                Descriptor {
                    slot: 0,
                    parity: 0,
                    chunk,
                    first,
                    masked: seen.mask(first),
                    exit: false,
                }
                .store(layout.descriptor(stage));
                mbarrier::arrive_expect_tx(full, loads * piece_bytes);
                if chunk == chunks.saturating_sub(known_ahead(CACHE)) {
                    mbarrier::arrive(layout.unit_ending(0));
                }
            }
            warp::sync_warp(ALL);
            if mine {
                let target = layout.stage(stage)
                    + values * Layout::<DIM, ROWS, WARPS, CACHE>::CHUNK
                    + piece * piece_bytes;
                let map = self.maps.add(values as usize);
                let position = first + piece * p.piece_tokens;
                let coordinates = self.coordinates(position, page, head);
                tma::load_tensor_hint(target, map, coordinates, full, self.policy(item.flags));
            }
        }
        let opened =
            ((chunks + Self::LOADERS - 1 - self.index) / Self::LOADERS).min(self.opens_with());
        if cache::by_token(CACHE) {
            let mut nth = 0;
            while nth < opened {
                let chunk = self.index + Self::LOADERS * nth;
                let first = (item.kv_begin & !(KEYS - 1)) + chunk * KEYS;
                // SAFETY: as above.
                unsafe {
                    let of = (nth << (log + 1)) + self.piece_of_key();
                    let page = warp::warp_shuffle_idx(ALL, page, of, 32);
                    let keys = [item.kv_begin, item.kv_end];
                    self.load_scales(chunk, [first, self.lane], keys, page, head);
                }
                nth += 1;
            }
        }
        opened
    }
}

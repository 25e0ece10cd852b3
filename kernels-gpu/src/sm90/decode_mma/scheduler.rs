//! The scheduler warp: claims units and lists them.

use cuda_std::{async_copy, mbarrier, prelude::*};

use super::{
    super::pipeline::LaunchPipeline,
    layout::{IDS, KEYS, Layout, known_ahead},
    unit::Unit,
};
use crate::{
    abi::{AttentionParams, DecodeParams},
    common::decode::produce::{Claims, Header},
};

const ALL: u32 = warp::FULL_MASK;

/// The scheduler warp. It runs ahead of all other warps and never waits for more than one load at a time: page ids and
/// rows are copied to shared memory asynchronously.
pub(super) struct Scheduler<'a, const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
{
    pub p: &'a DecodeParams,
    pub layout: Layout<DIM, ROWS, WARPS, CACHE>,
    pub lane: u32,
}

/// The first run of units of a CTA; `listed` has one unit per lane.
pub(super) struct First {
    claims: Claims,
    a: AttentionParams,
    length: u32,
    listed: Header,
    chunks: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Scheduler<'_, DIM, ROWS, WARPS, CACHE>
{
    /// Looks up the first run.
    ///
    /// # Safety
    /// The parameters are those of a launch by the host.
    #[inline(always)]
    pub unsafe fn look_up(&self) -> First {
        let p = self.p;
        // SAFETY: the caller's promise.
        unsafe {
            let a = p.attention.of_this_plan();
            let claims = Claims::new(&a, p.run, thread::grid_dim_x());
            let first = thread::block_idx_x() * p.run;
            let length = claims.length(first);
            First {
                listed: self.headers(&a, first, length),
                claims,
                a,
                length,
                chunks: 0,
            }
        }
    }

    /// Writes the first run to its slots, so that its loads are issued ahead of the stream of keys.
    ///
    /// # Safety
    /// The lanes come together; nobody reads slots yet.
    #[inline(always)]
    pub unsafe fn begin(&self, first: &mut First) {
        // SAFETY: the caller's promise.
        unsafe {
            first.chunks = self.describe(&first.listed, first.length, LaunchPipeline::first(0), 0);
        }
    }

    /// Lists the first unit.
    ///
    /// # Safety
    /// The lanes come together, with what [`begin`](Self::begin) found; the first barriers are initialised.
    #[inline(always)]
    pub unsafe fn list_first(&self, first: &First) {
        // SAFETY: the caller's promise.
        unsafe { self.arrive(LaunchPipeline::first(0), first.length.min(1)) };
    }

    /// Claims and lists units until none is left.
    ///
    /// # Safety
    /// The lanes come together, with what [`begin`](Self::begin) found, after
    /// [`list_first`](Self::list_first); all barriers are initialised.
    #[inline(always)]
    pub unsafe fn run(&self, first: First) {
        let (p, lane) = (self.p, self.lane);
        let First {
            claims,
            a,
            mut length,
            mut listed,
            chunks: begun,
        } = first;
        let mut slots = LaunchPipeline::first(0);
        let mut ending = LaunchPipeline::first(0);
        // Chunks listed so far, and those of units whose `unit_ending` was not waited for yet.
        let (mut sequence, mut ahead) = (0, 0);
        // Runs of several units have short ones: the next run is claimed and looked up while this one is listed.
        let early = p.run > 1;
        let most = if early {
            Layout::<DIM, ROWS, WARPS, CACHE>::UNITS
        } else {
            // A slot must not be used again before its `unit_ending` was waited for: the parity of a phase two ahead looks
            // like the awaited one's. A unit has at least one chunk.
            known_ahead(CACHE).min(Layout::<DIM, ROWS, WARPS, CACHE>::UNITS)
        };
        // SAFETY: units are the plan's; a slot is written after it is empty, and published after it is written; the
        // lanes stay together.
        unsafe {
            while length > 0 {
                let asks = claims.any_left();
                let mut asked = if early && asks { claims.ask(lane) } else { 0 };
                let chunks = if sequence == 0 {
                    self.arrive(LaunchPipeline::first(1), length - 1);
                    begun
                } else {
                    self.wait_for(slots, length);
                    let chunks = self.describe(&listed, length, slots, sequence);
                    self.arrive(slots, length);
                    chunks
                };
                sequence += chunks;
                ahead += chunks;
                slots.advance_in(length, Layout::<DIM, ROWS, WARPS, CACHE>::UNITS);
                if !asks {
                    break;
                }
                if early {
                    let first = claims.answer(lane, asked);
                    length = claims.length(first);
                    listed = self.headers(&a, first, length);
                }
                while ahead + p.run > most && ahead > 0 {
                    mbarrier::wait(self.layout.unit_ending(ending.stage), ending.parity);
                    ahead -= Unit::load(self.layout.unit(ending.stage)).chunks;
                    ending.advance_in(1, Layout::<DIM, ROWS, WARPS, CACHE>::UNITS);
                }
                if !early {
                    asked = claims.ask(lane);
                    let first = claims.answer(lane, asked);
                    length = claims.length(first);
                    listed = self.headers(&a, first, length);
                }
            }
            self.wait_for(slots, 1);
            if lane == 0 {
                Unit::NONE.store(self.layout.unit(slots.stage));
            }
            self.arrive(slots, 1);
        }
    }

    /// The units of a run, one per lane.
    ///
    /// # Safety
    /// The units are the launch's.
    #[inline(always)]
    unsafe fn headers(&self, a: &AttentionParams, first: u32, length: u32) -> Header {
        if self.lane < length {
            // SAFETY: the caller's promise.
            unsafe { Header::load(a, self.p.kv_heads, first + self.lane) }
        } else {
            Header::EMPTY
        }
    }

    /// Waits until `units` slots from `slots` on are empty.
    ///
    /// # Safety
    /// The barriers are initialised.
    #[inline(always)]
    unsafe fn wait_for(&self, mut slots: LaunchPipeline, units: u32) {
        let mut i = 0;
        while i < units {
            // SAFETY: the caller's promise.
            unsafe { mbarrier::wait(self.layout.unit_empty(slots.stage), slots.parity ^ 1) };
            slots.advance_in(1, Layout::<DIM, ROWS, WARPS, CACHE>::UNITS);
            i += 1;
        }
        // Every lane has read the chunk counts of the slots' previous units by itself: all must be done before slots
        // are overwritten.
        // SAFETY: the caller's promise.
        unsafe { warp::sync_warp(ALL) };
    }

    /// Writes the units of a run to slots from `first` on; [`arrive`](Self::arrive) must follow. Returns the sum of
    /// their chunks.
    ///
    /// # Safety
    /// The lanes come together; the slots are empty.
    #[inline(always)]
    unsafe fn describe(
        &self,
        listed: &Header,
        length: u32,
        first: LaunchPipeline,
        sequence: u32,
    ) -> u32 {
        let (p, a, layout, lane) = (self.p, &self.p.attention, &self.layout, self.lane);
        // Lanes per unit, a power of two.
        let span = 32_u32 >> (32 - (p.run - 1).leading_zeros());
        let (unit, lane) = (lane >> span.trailing_zeros(), lane & (span - 1));
        // SAFETY: the caller's promise; items, rows and pages are the plan's.
        unsafe {
            let header = listed.of_lane(unit);
            let item = &header.item;
            let mut slots = first;
            slots.advance_in(unit, Layout::<DIM, ROWS, WARPS, CACHE>::UNITS);
            let slot = slots.stage;
            let begin = item.kv_begin & !(KEYS - 1);
            let chunks = if unit >= length {
                0
            } else if item.kv_end > item.kv_begin {
                (item.kv_end - begin).div_ceil(KEYS)
            } else {
                1
            };
            // Chunks of the run's units before this one, and of all of them.
            let (mut before, mut all) = (0, 0);
            let mut i = 0;
            while i < length {
                let chunks = warp::warp_shuffle_idx(ALL, chunks, i * span, 32);
                before += if i < unit { chunks } else { 0 };
                all += chunks;
                i += 1;
            }
            if unit < length {
                let mut piece = lane;
                while piece < IDS {
                    let position = begin + piece * p.piece_tokens;
                    if position < item.kv_end && position + p.piece_tokens > item.kv_begin {
                        let page = item.table + p.page_size.div(position);
                        async_copy::copy_ca::<4>(
                            layout.ids(slot) + piece * 4,
                            (a.page_ids + u64::from(page) * 4) as *const u8,
                        );
                    }
                    piece += span;
                }
                let mut row = lane;
                while row < item.rows {
                    if item.is_gathered() {
                        let source = a.rows + u64::from(item.rows_begin + row) * 16;
                        async_copy::copy_cg(layout.token(slot, row), source as *const u8);
                    } else {
                        let words = header.load_row(a, row).words();
                        shared::store_u32x4(layout.token(slot, row), words);
                    }
                    row += span;
                }
                if lane == 0 {
                    Unit {
                        head: header.head,
                        tokens: item.rows,
                        begin: item.kv_begin,
                        end: item.kv_end,
                        chunks,
                        sequence: sequence + before,
                        position: item.position,
                        table: item.table,
                        flags: item.flags,
                    }
                    .store(layout.unit(slot));
                }
            }
            all
        }
    }

    /// Signals that `units` slots from `slots` on are filled.
    ///
    /// # Safety
    /// The lanes come together.
    #[inline(always)]
    unsafe fn arrive(&self, mut slots: LaunchPipeline, units: u32) {
        // SAFETY: the caller's promise; each lane arrives for its own copies, lane 0 also for what was stored.
        unsafe {
            let mut i = 0;
            warp::sync_warp(ALL);
            while i < units {
                let listed = self.layout.unit_listed(slots.stage);
                async_copy::mbarrier_arrive(listed);
                if self.lane == 0 {
                    mbarrier::arrive(listed);
                }
                slots.advance_in(1, Layout::<DIM, ROWS, WARPS, CACHE>::UNITS);
                i += 1;
            }
        }
    }
}

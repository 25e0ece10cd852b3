//! The loader warps: they load keys and values, and the queries of all units but the first.

use cuda_std::{async_copy, mbarrier, prelude::*, tma};

use super::{
    super::pipeline::LaunchPipeline,
    layout::{IDS, KEYS, Layout, known_ahead, loaders},
    queries::load_queries,
    unit::{Descriptor, Seen, Unit},
};
use crate::{
    abi::{DecodeParams, KvStrides, WorkItem},
    common::{cache, policy::Policies, variant::Variant},
};

const ALL: u32 = warp::FULL_MASK;

/// About how many bytes a CTA has under way at most, where that is limited: see [`Loader::most_under_way`].
const UNDER_WAY: u32 = 64 << 10;

/// A loader warp. The loaders take chunks in turn.
pub(super) struct Loader<'a, const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32> {
    pub p: &'a DecodeParams,
    /// The tensor maps of keys and of values.
    pub maps: *const tma::TensorMap,
    /// Index among the loaders.
    pub index: u32,
    /// The launch's L2 policies.
    pub policies: Policies,
    pub layout: Layout<DIM, ROWS, WARPS, CACHE>,
    pub lane: u32,
}

/// A CTA's first unit, and the piece of it that this lane loads before the unit is listed.
#[derive(Clone, Copy)]
pub(super) struct Opening {
    pub item: WorkItem,
    pub head: u32,
    /// Chunks of the unit; 0 if there is none.
    pub chunks: u32,
    /// The lane's chunk, counted among those that this loader opens with.
    pub nth: u32,
    /// The page of the lane's piece, if it has one.
    pub page: u32,
    pub mine: bool,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>
    Loader<'_, DIM, ROWS, WARPS, CACHE>
{
    pub const LOADERS: u32 = loaders(DIM, WARPS, CACHE);

    /// Chunks that a loader has under way at most. In a short launch on 8-bit keys, what all SMs have under way beyond
    /// about 64 KB each only makes their first chunks arrive later. Long launches need more to keep memory busy, and 16-bit keys
    /// were not faster with any limit.
    #[inline(always)]
    pub(super) fn most_under_way(&self) -> u32 {
        let bytes = const {
            let bytes = Self::LOADERS * 2 * Layout::<DIM, ROWS, WARPS, CACHE>::CHUNK;
            assert!(cache::is_16_bits(CACHE) || bytes <= UNDER_WAY);
            bytes
        };
        if cache::is_16_bits(CACHE) || self.policies.is_long {
            u32::MAX
        } else {
            (UNDER_WAY + bytes / 2) / bytes
        }
    }

    /// Log2 of the pieces (TMA boxes) of a chunk's keys.
    #[inline(always)]
    pub const fn pieces_log(&self) -> u32 {
        KEYS.trailing_zeros() - self.p.piece_tokens.trailing_zeros()
    }

    /// TMA coordinates of a piece.
    #[inline(always)]
    pub fn coordinates(&self, position: u32, page: u32, head: u32) -> [i32; 5] {
        let p = self.p;
        let (_, in_page) = p.page_size.div_rem(position);
        [
            0,
            0,
            (head * p.half_per_head) as i32,
            (in_page / 8) as i32,
            (page * p.page_per_page + head * p.page_per_head) as i32,
        ]
    }

    /// The L2 policy of an item's keys, by its flags.
    #[inline(always)]
    pub fn policy(&self, flags: u32) -> u64 {
        self.policies.of(flags & WorkItem::SHARED_KEYS != 0)
    }

    /// Page ids of a batch of [`IDS`] pieces of a unit, one per lane.
    ///
    /// # Safety
    /// The unit's table has a page for each key.
    #[inline(always)]
    unsafe fn page_ids(&self, unit: &Unit, batch: u32) -> u32 {
        let p = self.p;
        let position = unit.first_key() + (batch * IDS + self.lane) * p.piece_tokens;
        if position >= unit.end {
            return 0;
        }
        let page = unit.table + p.page_size.div(position);
        // SAFETY: the caller's promise.
        unsafe { ptr::load_nc_u32((p.attention.page_ids + u64::from(page) * 4) as *const u32) }
    }

    /// The piece of a chunk that contains the lane's key.
    #[inline(always)]
    pub fn piece_of_key(&self) -> u32 {
        self.lane >> self.p.piece_tokens.trailing_zeros()
    }

    /// Loads the scales of a chunk's keys and values, and arrives: each lane those of one key, counted from the chunk's
    /// `first`. The scales of a pair of KV heads are adjacent.
    ///
    /// # Safety
    /// The lanes come together; the stage is empty, and `page` is that of the lane's key if it is one of the `keys`.
    #[inline(always)]
    pub unsafe fn load_scales(
        &self,
        stage: u32,
        [first, key]: [u32; 2],
        keys: [u32; 2],
        page: u32,
        head: u32,
    ) {
        let scales = &self.p.attention.scales;
        let position = first + key;
        let bytes = const { 4 * cache::kv_heads(CACHE) };
        let head = head * cache::kv_heads(CACHE);
        let target = self.layout.scales(stage) + key * bytes;
        // SAFETY: the caller's promise.
        unsafe {
            if position >= keys[0] && position < keys[1] {
                let (_, token) = self.p.page_size.div_rem(position);
                let place = |strides: &KvStrides| {
                    u64::from(page) * u64::from(strides.page)
                        + u64::from(token * strides.token + head * strides.head)
                };
                let (k, v) = (place(&scales.k_strides), place(&scales.v_strides));
                let copy = |target, source: u64| match bytes {
                    4 => async_copy::copy_ca::<4>(target, source as *const u8),
                    _ => async_copy::copy_ca::<8>(target, source as *const u8),
                };
                copy(target, scales.k + k * 4);
                copy(target + KEYS * bytes, scales.v + v * 4);
            }
            async_copy::mbarrier_arrive(self.layout.stage_full(stage));
        }
    }

    /// Loads the chunks of listed units until no unit is left. `go_on` waits until all barriers are initialised; the
    /// first copies need only the barriers of the stages and the first slots.
    ///
    /// # Safety
    /// The lanes come together; the first barriers are initialised.
    #[inline(always)]
    pub unsafe fn run<V: Variant>(&self, variant: &V, opening: Opening, go_on: impl FnOnce()) {
        let (p, layout, lane) = (self.p, self.layout, self.lane);
        let piece_bytes = p.piece_tokens * Layout::<DIM, ROWS, WARPS, CACHE>::KEY_BYTES;
        let pieces_log = self.pieces_log();
        // Lanes 0–15 load keys, lanes 16–31 values, one piece per lane.
        let (values, piece) = (lane / 16, lane % 16);
        let has_piece = piece < 1 << pieces_log;
        // SAFETY: there are two maps.
        let map = unsafe { self.maps.add(values as usize) };
        let in_stage = values * Layout::<DIM, ROWS, WARPS, CACHE>::CHUNK + piece * piece_bytes;
        let mut stages = LaunchPipeline::first(self.index);
        let mut slots = LaunchPipeline::first(0);
        // SAFETY: units and pages are the plan's; the waits order accesses with those of the scheduler and the
        // consumers; the lanes stay together.
        unsafe {
            let by_rows = self.loads_rows();
            let mut opened = if by_rows {
                0
            } else {
                self.open(variant, opening)
            };
            go_on();
            stages.advance_in(Self::LOADERS * opened, layout.stages);
            // The oldest chunk under way, and the number of those. No other loader fills its stage: the number of stages is a
            // multiple of the loaders'.
            let (mut oldest, mut under_way) = (LaunchPipeline::first(self.index), opened);
            let most = self.most_under_way();
            let mut first_unit = true;
            loop {
                mbarrier::wait(layout.unit_listed(slots.stage), slots.parity);
                let unit = Unit::load(layout.unit(slots.stage));
                if unit.chunks == 0 {
                    break;
                }
                let mut chunk = if Self::LOADERS.is_power_of_two() {
                    self.index.wrapping_sub(unit.sequence) % Self::LOADERS
                } else {
                    (self.index + Self::LOADERS - unit.sequence % Self::LOADERS) % Self::LOADERS
                };
                if chunk == 0 && !first_unit {
                    let token = if lane < unit.tokens {
                        shared::load_u32(layout.token(slots.stage, lane))
                    } else {
                        0
                    };
                    load_queries(p, &layout, lane, slots.stage, unit.tokens, unit.head, token);
                    if lane == 0 {
                        mbarrier::arrive(layout.unit_full(slots.stage));
                    }
                }
                first_unit = false;
                chunk += Self::LOADERS * opened;
                opened = 0;
                if by_rows {
                    let seen = Seen::new(p, variant, unit.position, unit.begin, unit.end);
                    let ending = unit.chunks.saturating_sub(known_ahead(CACHE));
                    self.load_by_rows(&unit, slots, seen, [chunk, ending], &mut stages);
                } else if chunk < unit.chunks {
                    // Page ids are loaded in batches; the first batch is in the slots.
                    let mut batch = (chunk << pieces_log) / IDS;
                    let mut ids = if batch == 0 {
                        shared::load_u32(layout.ids(slots.stage) + lane * 4)
                    } else {
                        self.page_ids(&unit, batch)
                    };
                    let policy = self.policy(unit.flags);
                    let seen = Seen::new(p, variant, unit.position, unit.begin, unit.end);
                    // The chunk at which the scheduler may claim more.
                    let ending = unit.chunks.saturating_sub(known_ahead(CACHE));
                    let loads_any = has_piece && unit.begin < unit.end;
                    loop {
                        // Page ids are loaded a batch ahead: under load, their latency is as long as that of the whole
                        // ring. (`next_ids` is not moved inside the loop over chunks: the move would wait for the
                        // load.)
                        batch += 1;
                        let next_ids = self.page_ids(&unit, batch);
                        let end = unit.chunks.min((batch * IDS) >> pieces_log);
                        while chunk < end {
                            let in_batch = ((chunk << pieces_log) + piece) % IDS;
                            let id = warp::warp_shuffle_idx(ALL, ids, in_batch, 32);
                            let first = unit.first_key() + chunk * KEYS;
                            let position = first + piece * p.piece_tokens;
                            let mine = loads_any
                                && position < unit.end
                                && position + p.piece_tokens > unit.begin;
                            let loads = warp::warp_vote_ballot(ALL, mine).count_ones();
                            let coordinates = self.coordinates(position, id, unit.head);
                            if !cache::is_16_bits(CACHE) {
                                if under_way < most {
                                    under_way += 1;
                                } else {
                                    mbarrier::wait(layout.stage_full(oldest.stage), oldest.parity);
                                    oldest.advance_in(Self::LOADERS, layout.stages);
                                }
                            }
                            mbarrier::wait(layout.stage_empty(stages.stage), stages.parity ^ 1);
                            let full = layout.stage_full(stages.stage);
                            if lane == 0 {
                                Descriptor {
                                    slot: slots.stage,
                                    parity: slots.parity,
                                    chunk,
                                    first,
                                    masked: seen.mask(first),
                                    exit: false,
                                }
                                .store(layout.descriptor(stages.stage));
                                mbarrier::arrive_expect_tx(full, loads * piece_bytes);
                                if chunk == ending {
                                    mbarrier::arrive(layout.unit_ending(slots.stage));
                                }
                            }
                            if mine {
                                let target = layout.stage(stages.stage) + in_stage;
                                tma::load_tensor_hint(target, map, coordinates, full, policy);
                            }
                            if cache::by_token(CACHE) {
                                let keys = [unit.begin, unit.end];
                                let piece = (chunk << pieces_log) + self.piece_of_key();
                                let page = warp::warp_shuffle_idx(ALL, ids, piece % IDS, 32);
                                self.load_scales(
                                    stages.stage,
                                    [first, lane],
                                    keys,
                                    page,
                                    unit.head,
                                );
                            }
                            stages.advance_in(Self::LOADERS, layout.stages);
                            chunk += Self::LOADERS;
                        }
                        if chunk >= unit.chunks {
                            break;
                        }
                        ids = next_ids;
                    }
                }
                // Every loader arrives: otherwise the consumers might free the slot before a loader with no chunk of
                // the unit has read it.
                mbarrier::arrive(layout.unit_empty(slots.stage));
                slots.advance_in(1, Layout::<DIM, ROWS, WARPS, CACHE>::UNITS);
            }
            let at_a_time = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
            const {
                let at_a_time = Layout::<DIM, ROWS, WARPS, CACHE>::AT_A_TIME;
                assert!(at_a_time.is_multiple_of(loaders(DIM, WARPS, CACHE)));
            }
            let mut ended = 0;
            while ended < at_a_time {
                mbarrier::wait(layout.stage_empty(stages.stage), stages.parity ^ 1);
                if lane == 0 {
                    Descriptor::EXIT.store(layout.descriptor(stages.stage));
                    mbarrier::arrive(layout.stage_full(stages.stage));
                }
                if cache::by_token(CACHE) || by_rows {
                    mbarrier::arrive(layout.stage_full(stages.stage));
                }
                stages.advance_in(Self::LOADERS, layout.stages);
                ended += Self::LOADERS;
            }
        }
    }
}

//! Decode on Hopper: pages come by TMA, each one instruction.
//!
//! Three producer warps. The *scout* claims units and lists them, ahead of everybody, so that the latencies
//! of ticket, item, rows and page ids are not those of the stream of keys. Two *loaders* follow the list and
//! keep the ring full, each with every other chunk. The consumers are those of [`decode`](crate::decode).

use cuda_std::{async_copy, griddep, mbarrier, param_address, prelude::*, tma};

use crate::{
    abi::{DecodeParams, QueryRow, WorkItem},
    decode::{
        PRODUCER_WARPS, REGISTERS_BESIDE, WARPS_BESIDE,
        consume::Consumer,
        half::{Bf16, F16, Half},
        layout::{AHEAD, Descriptor, IDS, KEYS, Layout, Place, Unit},
        produce::{Claims, Header},
        warps,
    },
    variant::{Standard, Variant},
};

const ALL: u32 = warp::FULL_MASK;

/// Finds out what is to be done, ahead of everybody, and never waits for more than one load at a time: ids
/// and rows go to shared memory by themselves.
struct Scout<'a, const DIM: u32, const ROWS: u32, const WARPS: u32> {
    p: &'a DecodeParams,
    layout: Layout<DIM, ROWS, WARPS>,
    lane: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32> Scout<'_, DIM, ROWS, WARPS> {
    #[inline(always)]
    unsafe fn run(&self) {
        let (p, lane) = (self.p, self.lane);
        // SAFETY: as the launch is.
        let a = &unsafe { self.p.attention.of_this_plan() };
        let claims = Claims::new(a, p.run, thread::grid_dim_x());
        let mut slot = Place::first(0);
        let mut ending = Place::first(0);
        // Chunks listed, and those of them that are not yet on their way.
        let (mut sequence, mut ahead) = (0, 0);
        unsafe {
            let headers = |first: u32, length: u32| {
                if lane < length {
                    Header::load(a, p.kv_heads, first + lane)
                } else {
                    Header::EMPTY
                }
            };
            // Short units: the next run is claimed and looked up while this one is listed.
            let early = p.run > 1;
            let first = thread::block_idx_x() * p.run;
            let mut length = claims.length(first);
            let mut listed = headers(first, length);
            while length > 0 {
                let mut asked = if early { claims.ask(lane) } else { 0 };
                let mut unit = 0;
                while unit < length {
                    let chunks = self.list(&listed.broadcast(unit), slot, sequence);
                    sequence += chunks;
                    ahead += chunks;
                    slot.advance(1, Layout::<DIM, ROWS, WARPS>::UNITS);
                    unit += 1;
                }
                if early {
                    let first = claims.answer(lane, asked);
                    length = claims.length(first);
                    listed = headers(first, length);
                }
                while ahead + p.run > Layout::<DIM, ROWS, WARPS>::UNITS {
                    mbarrier::wait(self.layout.unit_ending(ending.index), ending.parity);
                    ahead -= Unit::load(self.layout.unit(ending.index)).chunks;
                    ending.advance(1, Layout::<DIM, ROWS, WARPS>::UNITS);
                }
                if !early {
                    asked = claims.ask(lane);
                    let first = claims.answer(lane, asked);
                    length = claims.length(first);
                    listed = headers(first, length);
                }
            }
            mbarrier::wait(self.layout.unit_empty(slot.index), slot.parity ^ 1);
            if lane == 0 {
                Unit::NONE.store(self.layout.unit(slot.index));
            }
            self.arrive(slot.index);
        }
    }

    #[inline(always)]
    unsafe fn list(&self, header: &Header, slot: Place, sequence: u32) -> u32 {
        let (p, a, layout, lane) = (self.p, &self.p.attention, &self.layout, self.lane);
        let (slot, parity) = (slot.index, slot.parity);
        let item = &header.item;
        unsafe {
            mbarrier::wait(layout.unit_empty(slot), parity ^ 1);
            let begin = item.kv_begin & !(KEYS - 1);
            let position = begin + lane * p.piece_tokens;
            if position < item.kv_end && position + p.piece_tokens > item.kv_begin {
                let page = item.table + p.page_size.div(position);
                async_copy::copy_ca::<4>(
                    layout.ids(slot) + lane * 4,
                    (a.page_ids + u64::from(page) * 4) as *const u8,
                );
            }
            if lane < item.rows {
                if item.is_gathered() {
                    let row = a.rows + u64::from(item.rows_begin + lane) * 16;
                    async_copy::copy_cg(layout.token(slot, lane), row as *const u8);
                } else {
                    let row = header.load_row(a, lane);
                    let QueryRow {
                        token,
                        position,
                        slot: state,
                        merge,
                    } = row;
                    let row = [token, position as u32, state, merge];
                    shared::store_u32x4(layout.token(slot, lane), row);
                }
            }
            let keys = if item.kv_end > item.kv_begin {
                item.kv_end - begin
            } else {
                1
            };
            let chunks = keys.div_ceil(KEYS);
            if lane == 0 {
                Unit {
                    head: header.head,
                    tokens: item.rows,
                    begin: item.kv_begin,
                    end: item.kv_end,
                    chunks,
                    sequence,
                    position: item.position,
                    table: item.table,
                    flags: item.flags,
                }
                .store(layout.unit(slot));
            }
            self.arrive(slot);
            chunks
        }
    }

    #[inline(always)]
    unsafe fn arrive(&self, slot: u32) {
        let listed = self.layout.unit_listed(slot);
        unsafe {
            async_copy::mbarrier_arrive(listed);
            warp::sync_warp(ALL);
            if self.lane == 0 {
                mbarrier::arrive(listed);
            }
        }
    }
}

/// Brings every other chunk, and the queries of units whose first chunk that is.
struct Loader<'a, const DIM: u32, const ROWS: u32, const WARPS: u32> {
    p: &'a DecodeParams,
    /// Of keys and values.
    maps: *const tma::TensorMap,
    /// Whether it brings the even chunks, or the odd ones.
    odd: u32,
    layout: Layout<DIM, ROWS, WARPS>,
    lane: u32,
}

impl<const DIM: u32, const ROWS: u32, const WARPS: u32> Loader<'_, DIM, ROWS, WARPS> {
    /// Page id of piece `piece` of the unit, if it is wanted: the first ones were listed.
    #[inline(always)]
    unsafe fn page_id(&self, unit: &Unit, slot: u32, piece: u32, wanted: bool) -> u32 {
        let p = self.p;
        if !wanted {
            return 0;
        }
        // SAFETY: the unit is listed; its table has a page for each key.
        unsafe {
            if piece < IDS {
                return shared::load_u32(self.layout.ids(slot) + piece * 4);
            }
            let position = unit.first_key() + piece * p.piece_tokens;
            if position >= unit.end {
                return 0;
            }
            let page = unit.table + p.page_size.div(position);
            ptr::load_nc_u32((p.attention.page_ids + u64::from(page) * 4) as *const u32)
        }
    }

    #[inline(always)]
    unsafe fn queries(&self, unit: &Unit, slot: u32) {
        let (a, layout, lane) = (&self.p.attention, &self.layout, self.lane);
        let full = layout.unit_full(slot);
        let bytes = a.group * DIM * 2;
        unsafe {
            if lane == 0 {
                mbarrier::arrive_expect_tx(full, unit.tokens * bytes);
            }
            if lane < unit.tokens {
                let token = shared::load_u32(layout.token(slot, lane));
                let element = u64::from(token) * u64::from(a.q_token_stride)
                    + u64::from(unit.head * a.group * DIM);
                let target = layout.queries(slot) + lane * bytes;
                tma::load_bulk(target, (a.q + element * 2) as *const u8, bytes, full);
            }
        }
    }

    #[inline(always)]
    unsafe fn run<V: Variant>(&self, variant: &V) {
        let (p, layout, lane) = (self.p, self.layout, self.lane);
        let piece_bytes = p.piece_tokens * DIM * 2;
        let pieces_per_chunk = cuda_std::math::div_u32(KEYS, p.piece_tokens);
        // Half the lanes bring keys, half values, a piece each.
        let (values, piece) = (lane / 16, lane % 16);
        let has_piece = piece < pieces_per_chunk;
        let map = unsafe { self.maps.add(values as usize) };
        let in_stage = values * Layout::<DIM, ROWS, WARPS>::CHUNK + piece * piece_bytes;
        let (evict_first, evict_last) = (ptr::evict_first_policy(), ptr::evict_last_policy());
        let windowed = p.attention.variant.window_left != i32::MAX;
        let mut stage = Place::first(self.odd);
        let mut slot = Place::first(0);
        unsafe {
            loop {
                mbarrier::wait(layout.unit_listed(slot.index), slot.parity);
                let unit = Unit::load(layout.unit(slot.index));
                if unit.tokens == 0 {
                    break;
                }
                let mut chunk = (unit.sequence ^ self.odd) & 1;
                if chunk < unit.chunks {
                    let id_of = |chunk: u32| {
                        let piece = chunk * pieces_per_chunk + piece;
                        self.page_id(&unit, slot.index, piece, has_piece)
                    };
                    let mut id = id_of(chunk);
                    if chunk == 0 {
                        self.queries(&unit, slot.index);
                    }
                    let policy = if unit.flags & WorkItem::SHARED_KEYS != 0 {
                        evict_last
                    } else {
                        evict_first
                    };
                    let (_, high) = variant.visible_keys(unit.position);
                    let visible_end = if windowed {
                        0
                    } else {
                        high.saturating_add(1).clamp(0, unit.end as i32) as u32
                    };
                    // Where the chunk is that lets the scout claim more.
                    let ending = unit.chunks.saturating_sub(AHEAD);
                    let loads_any = has_piece && unit.begin < unit.end;
                    while chunk < unit.chunks {
                        let first = unit.first_key() + chunk * KEYS;
                        let position = first + piece * p.piece_tokens;
                        let mine = loads_any
                            && position < unit.end
                            && position + p.piece_tokens > unit.begin;
                        let loads = warp::warp_vote_ballot(ALL, mine).count_ones();
                        let (_, in_page) = p.page_size.div_rem(position);
                        let coordinates = [
                            0,
                            0,
                            (unit.head * p.half_per_head) as i32,
                            (in_page / 8) as i32,
                            (id * p.page_per_page + unit.head * p.page_per_head) as i32,
                        ];
                        mbarrier::wait(layout.stage_empty(stage.index), stage.parity ^ 1);
                        let full = layout.stage_full(stage.index);
                        if lane == 0 {
                            Descriptor {
                                slot: slot.index,
                                parity: slot.parity,
                                chunk,
                                first,
                                masked: first < unit.begin || first + KEYS > visible_end,
                                exit: false,
                            }
                            .store(layout.descriptor(stage.index));
                            mbarrier::arrive_expect_tx(full, loads * piece_bytes);
                            if chunk == ending {
                                mbarrier::arrive(layout.unit_ending(slot.index));
                            }
                        }
                        if mine {
                            let target = layout.stage(stage.index) + in_stage;
                            tma::load_tensor_hint(target, map, coordinates, full, policy);
                        }
                        stage.advance(2, layout.stages);
                        chunk += 2;
                        if chunk < unit.chunks {
                            id = id_of(chunk);
                        }
                    }
                }
                slot.advance(1, Layout::<DIM, ROWS, WARPS>::UNITS);
            }
            const { assert!(WARPS.is_multiple_of(2)) };
            let mut warps = 0;
            while warps < WARPS {
                mbarrier::wait(layout.stage_empty(stage.index), stage.parity ^ 1);
                if lane == 0 {
                    Descriptor::EXIT.store(layout.descriptor(stage.index));
                    mbarrier::arrive(layout.stage_full(stage.index));
                }
                stage.advance(2, layout.stages);
                warps += 2;
            }
        }
    }
}

/// # Safety
/// The launch is as the host makes it.
#[inline(always)]
unsafe fn decode<
    T: Half,
    V: Variant,
    const DIM: u32,
    const ROWS: u32,
    const WARPS: u32,
    const DIM_BLOCKS: usize,
    const ROW_BLOCKS: usize,
    const PER_LANE: usize,
>(
    p: &DecodeParams,
    maps: *const tma::TensorMap,
    variant: V,
) {
    let warp_id = thread::thread_idx_x() / 32;
    let lane = warp::lane_id();
    let layout = Layout::<DIM, ROWS, WARPS>::new(p.stages);
    unsafe {
        layout.initialise(PRODUCER_WARPS);
        if warp_id == 1 && lane < 6 {
            // Address translations and descriptors, while nobody waits for them.
            let a = &p.attention;
            match lane {
                0 => tma::prefetch_tensor_map(maps),
                1 => tma::prefetch_tensor_map(maps.add(1)),
                2 => ptr::prefetch_l2(a.page_ids as *const u32),
                3 => ptr::prefetch_l2(a.rows as *const u32),
                4 => ptr::prefetch_l2(a.q as *const u32),
                _ => ptr::prefetch_l2(a.ticket as *const u32),
            }
        }
        thread::sync_threads();
        // Another tile group of the step may take over SMs as this one leaves them.
        griddep::launch_dependents();
        if warp_id == 0 {
            Scout { p, layout, lane }.run();
        } else if warp_id <= 2 {
            Loader {
                p,
                maps,
                odd: warp_id - 1,
                layout,
                lane,
            }
            .run(&variant);
        } else {
            let consumer = Consumer {
                params: &p.attention,
                group: p.group,
                layout,
                warp: warp_id - PRODUCER_WARPS,
                lane,
            };
            consumer.run::<T, V, DIM_BLOCKS, ROW_BLOCKS, PER_LANE>(&variant);
            // Whoever waits for this group waits for the one before it, too.
            griddep::wait();
        }
    }
}

macro_rules! entries {
    ($($name:ident: $half:ty, $dim:literal, $rows:literal, $variant:ty;)*) => {$(
        #[doc = concat!("Heads of ", $dim, " elements, tiles of ", $rows, " rows.")]
        ///
        /// # Safety
        /// The parameters describe memory as [`DecodeParams`] says.
        #[kernel(max_threads = (warps($dim, $rows) + PRODUCER_WARPS) * 32, min_blocks = 1, tensor_maps)]
        pub unsafe fn $name(params: DecodeParams) {
            let maps = param_address!($name, 0);
            unsafe {
                decode::<$half, $variant, $dim, $rows, { warps($dim, $rows) }, { $dim / 16 }, { $rows / 8 }, { $dim / 32 }>(
                    &params,
                    maps,
                    Standard(params.attention.variant),
                );
            }
        }
    )*};
}

entries! {
    decode_bf16_d64_m8: Bf16, 64, 8, Standard<false>;
    decode_bf16_d64_m16: Bf16, 64, 16, Standard<false>;
    decode_bf16_d128_m8: Bf16, 128, 8, Standard<false>;
    decode_bf16_d128_m16: Bf16, 128, 16, Standard<false>;
    decode_bf16_d256_m8: Bf16, 256, 8, Standard<false>;
    decode_bf16_d256_m16: Bf16, 256, 16, Standard<false>;
    decode_f16_d64_m8: F16, 64, 8, Standard<false>;
    decode_f16_d64_m16: F16, 64, 16, Standard<false>;
    decode_f16_d128_m8: F16, 128, 8, Standard<false>;
    decode_f16_d128_m16: F16, 128, 16, Standard<false>;
    decode_f16_d256_m8: F16, 256, 8, Standard<false>;
    decode_f16_d256_m16: F16, 256, 16, Standard<false>;
    decode_bf16_d64_m8_cap: Bf16, 64, 8, Standard<true>;
    decode_bf16_d64_m16_cap: Bf16, 64, 16, Standard<true>;
    decode_bf16_d128_m8_cap: Bf16, 128, 8, Standard<true>;
    decode_bf16_d128_m16_cap: Bf16, 128, 16, Standard<true>;
    decode_bf16_d256_m8_cap: Bf16, 256, 8, Standard<true>;
    decode_bf16_d256_m16_cap: Bf16, 256, 16, Standard<true>;
    decode_f16_d64_m8_cap: F16, 64, 8, Standard<true>;
    decode_f16_d64_m16_cap: F16, 64, 16, Standard<true>;
    decode_f16_d128_m8_cap: F16, 128, 8, Standard<true>;
    decode_f16_d128_m16_cap: F16, 128, 16, Standard<true>;
    decode_f16_d256_m8_cap: F16, 256, 8, Standard<true>;
    decode_f16_d256_m16_cap: F16, 256, 16, Standard<true>;
}

macro_rules! entries_beside {
    ($($name:ident: $half:ty;)*) => {$(
        /// Heads of 128 elements, tiles of 8 rows, in what a prefill leaves of an SM.
        ///
        /// # Safety
        /// The parameters describe memory as [`DecodeParams`] says.
        #[kernel(
            max_threads = (WARPS_BESIDE + PRODUCER_WARPS) * 32,
            max_registers = REGISTERS_BESIDE,
            tensor_maps
        )]
        pub unsafe fn $name(params: DecodeParams) {
            let maps = param_address!($name, 0);
            unsafe {
                decode::<$half, Standard<false>, 128, 8, WARPS_BESIDE, 8, 1, 4>(
                    &params,
                    maps,
                    Standard(params.attention.variant),
                );
            }
        }
    )*};
}

entries_beside! {
    decode_bf16_d128_m8_beside: Bf16;
    decode_f16_d128_m8_beside: F16;
}

//! Prefill on Hopper: contiguous queries against paged keys, at tensor-core speed.
//!
//! A CTA stays on its SM and works through tiles: the rows of an item for one query head (or for `pack`
//! heads that share keys). One warpgroup moves data, the others compute 64 rows each:
//!
//! - the **scheduler** (one thread) claims tiles by ticket, one ahead, and loads their queries;
//! - two **loaders** (a warp each) bring keys and values, a lane per TMA box, page ids looked up before
//!   the stage is free;
//! - the **consumers** go from the last visible keys to the first. They issue Q·Kᵀ of a block together
//!   with P·V of the block before, so that the tensor cores have work while weights are computed. A tile
//!   ends inside this rhythm: Q·Kᵀ of the next tile's first block goes with P·V of the last.
//!
//! `docs/prefill.md` has the roofline and what was tried.

/// What one instance of the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Warpgroups that compute, 64 rows each.
    pub consumers: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
    /// Blocks of keys (and as many of values) in shared memory.
    pub stages: u32,
}

impl Shape {
    /// Every instance; the entry is `prefill_<rows>x<keys>_d<head_dim>_<dtype>[_cap]`.
    pub const ALL: [Self; 5] = [
        Self::D128,
        Self::D128_CAP,
        Self::D128_WIDE,
        Self::D64,
        Self::D64_WIDE,
    ];
    /// 128 rows × 128 keys.
    pub const D128: Self = Self::new(2, 128, 128, 2);
    /// 128 rows × 96 keys: a soft cap wants registers.
    pub const D128_CAP: Self = Self::new(2, 96, 128, 3);
    /// 192 rows × 80 keys: a third fewer bytes per row, and three warpgroups to hide the exponentials.
    pub const D128_WIDE: Self = Self::new(3, 80, 128, 3);
    /// 128 rows × 128 keys.
    pub const D64: Self = Self::new(2, 128, 64, 3);
    /// 192 rows × 112 keys.
    pub const D64_WIDE: Self = Self::new(3, 112, 64, 3);

    const fn new(consumers: u32, keys: u32, head_dim: u32, stages: u32) -> Self {
        let shape = Self {
            consumers,
            keys,
            head_dim,
            stages,
        };
        assert!(shape.shared_bytes() <= 232_448, "more than a CTA can have");
        shape
    }

    /// Rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> u32 {
        64 * self.consumers
    }

    /// Threads of a CTA: the consumers and the warpgroup that feeds them.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1)
    }

    /// Bytes of 64 columns of the queries.
    const fn slab_bytes(&self) -> u32 {
        self.rows() * 128
    }

    const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    const fn block_bytes(&self) -> u32 {
        self.keys * self.head_dim * 2
    }

    /// Two tiles of queries (the finished tile's becomes its output), the stages, barriers and tiles.
    const fn keys_offset(&self) -> u32 {
        2 * self.query_bytes()
    }

    const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.block_bytes()
    }

    const fn barriers_offset(&self) -> u32 {
        self.values_offset() + self.stages * self.block_bytes()
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 256 + 2 * TILE_BYTES
    }
}

/// A tile in shared memory: four vectors of four words.
const TILE_BYTES: u32 = 64;

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod device {
    use core::f32::consts::LN_2;

    use cuda_std::{
        atomic::{self, Gpu, Relaxed},
        barrier, convert, fence,
        math::{div_u32, lg2, rcp},
        mbarrier, mma, param_address,
        prelude::*,
        setmaxnreg,
        tma::{self, TensorMap},
        wgmma::{self, Bf16, Descriptor, Element, F16, Swizzle},
    };

    use super::{
        super::{
            ring::Ring,
            softmax::{Rows, Visible, mask, transform},
        },
        Shape, TILE_BYTES,
    };
    use crate::{
        abi::{DIRECT, PrefillParams, WorkItem},
        variant::{Pair, Standard, Variant},
    };

    const WARP: u32 = !0;

    // ---- Types ---------------------------------------------------------------------------------

    /// Elements of queries, keys, values and outputs.
    trait Dtype: Element {
        fn pack(first: f32, second: f32) -> u32;
    }

    impl Dtype for Bf16 {
        #[inline(always)]
        fn pack(first: f32, second: f32) -> u32 {
            convert::f32x2_to_bf16x2(first, second)
        }
    }

    impl Dtype for F16 {
        #[inline(always)]
        fn pack(first: f32, second: f32) -> u32 {
            convert::f32x2_to_f16x2(first, second)
        }
    }

    /// What the scheduler tells the others of a tile.
    #[derive(Clone, Copy)]
    struct Tile {
        /// The first query token and its slot (or [`DIRECT`]).
        token: u32,
        slot: u32,
        /// Rows that exist; none ends the work.
        rows: u32,
        /// The first query head, and its KV head.
        head: u32,
        kv_head: u32,
        /// Position of the first row.
        position: i32,
        /// The item's keys and its page table.
        kv_begin: u32,
        kv_end: u32,
        table: u32,
        /// Keys that any row sees: `lowest ..`, in blocks that end at `end`, a multiple of a box.
        lowest: u32,
        end: u32,
        blocks: u32,
    }

    impl Tile {
        const NONE: Self = Self {
            token: 0,
            slot: 0,
            rows: 0,
            head: 0,
            kv_head: 0,
            position: 0,
            kv_begin: 0,
            kv_end: 0,
            table: 0,
            lowest: 0,
            end: 0,
            blocks: 0,
        };

        #[inline(always)]
        unsafe fn store(&self, at: u32) {
            // SAFETY: the caller owns the tile's 64 bytes.
            unsafe {
                shared::store_u32x4(at, [self.token, self.slot, self.rows, self.head]);
                shared::store_u32x4(
                    at + 16,
                    [
                        self.kv_head,
                        self.position as u32,
                        self.kv_begin,
                        self.kv_end,
                    ],
                );
                shared::store_u32x4(at + 32, [self.table, self.lowest, self.end, self.blocks]);
            }
        }

        #[inline(always)]
        unsafe fn load(at: u32) -> Self {
            // SAFETY: the tile was stored and its barrier completed.
            unsafe {
                let [token, slot, rows, head] = shared::load_u32x4(at);
                let [kv_head, position, kv_begin, kv_end] = shared::load_u32x4(at + 16);
                let [table, lowest, end, blocks] = shared::load_u32x4(at + 32);
                Self {
                    token,
                    slot,
                    rows,
                    head,
                    kv_head,
                    position: position as i32,
                    kv_begin,
                    kv_end,
                    table,
                    lowest,
                    end,
                    blocks,
                }
            }
        }
    }

    // ---- Shared memory and barriers ------------------------------------------------------------

    /// Shared addresses.
    #[derive(Clone, Copy)]
    struct Shared {
        base: u32,
        shape: Shape,
    }

    impl Shared {
        #[inline(always)]
        fn queries(self, stage: u32) -> u32 {
            self.base + stage * self.shape.query_bytes()
        }
        #[inline(always)]
        fn keys(self, stage: u32) -> u32 {
            self.base + self.shape.keys_offset() + stage * self.shape.block_bytes()
        }
        #[inline(always)]
        fn values(self, stage: u32) -> u32 {
            self.base + self.shape.values_offset() + stage * self.shape.block_bytes()
        }
        #[inline(always)]
        fn barrier(self, index: u32) -> u32 {
            self.base + self.shape.barriers_offset() + 8 * index
        }
        #[inline(always)]
        fn tile(self, stage: u32) -> u32 {
            self.barrier(32) + stage * TILE_BYTES
        }
        /// The tile is described.
        #[inline(always)]
        fn tile_full(self, stage: u32) -> u32 {
            self.barrier(stage)
        }
        /// The tile is described and its queries are there.
        #[inline(always)]
        fn queries_full(self, stage: u32) -> u32 {
            self.barrier(2 + stage)
        }
        /// The tile is done: all loaders have read it, all consumer warps have stored their output.
        #[inline(always)]
        fn tile_free(self, stage: u32) -> u32 {
            self.barrier(4 + stage)
        }
        /// Values past the end have arrived and wait for being set to zero.
        #[inline(always)]
        fn tail(self) -> u32 {
            self.barrier(6)
        }
        #[inline(always)]
        fn keys_full(self, stage: u32) -> u32 {
            self.barrier(8 + stage)
        }
        #[inline(always)]
        fn keys_free(self, stage: u32) -> u32 {
            self.barrier(12 + stage)
        }
        #[inline(always)]
        fn values_full(self, stage: u32) -> u32 {
            self.barrier(16 + stage)
        }
        #[inline(always)]
        fn values_free(self, stage: u32) -> u32 {
            self.barrier(20 + stage)
        }

        #[inline(always)]
        unsafe fn init(self) {
            let warps = 4 * self.shape.consumers;
            // SAFETY: one thread, before the barrier of the block.
            unsafe {
                let mut stage = 0;
                while stage < 2 {
                    mbarrier::init(self.tile_full(stage), 1);
                    mbarrier::init(self.queries_full(stage), 1);
                    mbarrier::init(self.tile_free(stage), warps + 2);
                    stage += 1;
                }
                mbarrier::init(self.tail(), 1);
                stage = 0;
                while stage < self.shape.stages {
                    mbarrier::init(self.keys_full(stage), 1);
                    mbarrier::init(self.values_full(stage), 1);
                    // Every warp for itself: a warp that skips a block must have seen it full before
                    // the block can be loaded anew, or it waits for a phase that is gone.
                    mbarrier::init(self.keys_free(stage), warps);
                    mbarrier::init(self.values_free(stage), warps);
                    stage += 1;
                }
            }
            fence::mbarrier_init();
        }
    }

    // ---- The scheduler -------------------------------------------------------------------------

    /// Describes unit `unit` of the launch.
    #[inline(always)]
    unsafe fn describe<V: Variant>(p: &PrefillParams, variant: &V, unit: u32, keys: u32) -> Tile {
        let a = &p.attention;
        // All heads of an item before the next one: neighbours read the same pages at the same time, and
        // the longest items of the whole launch come first.
        let per_kv_head = div_u32(a.group, p.pack);
        let heads = a.kv_heads * per_kv_head;
        let item = div_u32(unit, heads);
        let head = unit - item * heads;
        let kv_head = div_u32(head, per_kv_head);
        let in_group = head - kv_head * per_kv_head;

        let at = (a.items + u64::from(item) * size_of::<WorkItem>() as u64) as *const u32;
        // SAFETY: `item` is one of the launch's, ten words that nobody writes.
        let ([token, count], [table, kv_begin], [kv_end, position], [slot, _]) = unsafe {
            (
                ptr::load_nc_u32x2(at),
                ptr::load_nc_u32x2(at.add(2)),
                ptr::load_nc_u32x2(at.add(4)),
                ptr::load_nc_u32x2(at.add(6)),
            )
        };
        let position = position as i32;
        let first = variant.visible_keys(position).0.max(kv_begin as i32);
        let last = variant.visible_keys(position + count as i32 - 1).1;
        let past = last.saturating_add(1).max(0).min(kv_end as i32) as u32;
        let lowest = first as u32 - first as u32 % p.box_tokens;
        let end = past.next_multiple_of(p.box_tokens);
        Tile {
            token,
            slot,
            rows: count * p.pack,
            head: kv_head * a.group + in_group * p.pack,
            kv_head,
            position,
            kv_begin,
            kv_end,
            table,
            lowest,
            end,
            // A tile that sees nothing walks one block, all of it masked.
            blocks: div_u32(end.saturating_sub(lowest) + keys - 1, keys).max(1),
        }
    }

    #[inline(always)]
    unsafe fn schedule<V: Variant>(
        p: &PrefillParams,
        maps: *const TensorMap,
        variant: &V,
        s: Shared,
    ) {
        let a = &p.attention;
        let slabs = s.shape.head_dim / 64;
        let tokens = div_u32(s.shape.rows(), p.pack);
        let ctas = thread::grid_dim_x();
        let mut unit = thread::block_idx_x();
        let mut ring = Ring::<2>::PRODUCER;
        loop {
            let more = unit < a.units;
            let mut ticket = 0;
            let mut tile = Tile::NONE;
            // SAFETY: one thread; the ring's barriers say what belongs to whom.
            unsafe {
                if more {
                    ticket = atomic::fetch_add::<Relaxed, Gpu, _>(a.ticket as *mut u32, 1);
                    tile = describe(p, variant, unit, s.shape.keys);
                }
                mbarrier::wait(s.tile_free(ring.stage), ring.parity);
                tile.store(s.tile(ring.stage));
                mbarrier::arrive(s.tile_full(ring.stage));
                let full = s.queries_full(ring.stage);
                if !more {
                    mbarrier::arrive(full);
                    return;
                }
                mbarrier::arrive_expect_tx(full, slabs * 128 * p.pack * tokens);
                let mut slab = 0;
                while slab < slabs {
                    let target = s.queries(ring.stage) + slab * s.shape.slab_bytes();
                    let head = div_u32(tile.head, p.pack) as i32;
                    let corner = [0, 0, tile.token as i32, slab as i32, head];
                    tma::load_tensor(target, maps, corner, full);
                    slab += 1;
                }
                ring.advance();
                // Every unit takes one ticket: the last one tells that none will be asked for.
                if ticket == a.units - 1 {
                    ptr::store_u32(a.ticket as *mut u32, 0);
                }
            }
            unit = ctas + ticket;
        }
    }

    // ---- The loaders ---------------------------------------------------------------------------

    /// Brings the blocks of all tiles, from the last to the first of each: values or keys.
    #[inline(always)]
    unsafe fn load<const VALUES: bool, const STAGES: u32>(
        p: &PrefillParams,
        map: *const TensorMap,
        s: Shared,
    ) {
        let a = &p.attention;
        let lane = warp::lane_id();
        let (keys, row_bytes) = (s.shape.keys, s.shape.head_dim * 2);
        let mine = lane < div_u32(keys, p.box_tokens);
        let page_size = a.k_strides.page_size;
        let mut tiles = Ring::<2>::CONSUMER;
        let mut blocks = Ring::<STAGES>::PRODUCER;
        let mut tail_parity = 0;
        loop {
            // SAFETY: the ring's barriers say what belongs to whom; a whole warp.
            let tile = unsafe {
                mbarrier::wait(s.tile_full(tiles.stage), tiles.parity);
                let tile = Tile::load(s.tile(tiles.stage));
                warp::sync_warp(WARP);
                if lane == 0 {
                    mbarrier::arrive(s.tile_free(tiles.stage));
                }
                tile
            };
            tiles.advance();
            if tile.rows == 0 {
                return;
            }
            let mut begin = tile.end as i32;
            let mut left = tile.blocks;
            while left > 0 {
                left -= 1;
                begin -= keys as i32;
                // Which page this lane's box lies in: looked up before the stage is free.
                let at = begin + (lane * p.box_tokens) as i32;
                let mut corner = [0, 0, 0, 0, p.pages.outside as i32];
                if mine && at >= tile.lowest as i32 && at < tile.kv_end as i32 {
                    let page = div_u32(at as u32, page_size);
                    let entry = (a.page_ids + u64::from(tile.table + page) * 4) as *const u32;
                    // SAFETY: the table has a page for each key of the item.
                    let id = unsafe { ptr::load_nc_u32(entry) };
                    corner[3] = ((at as u32 - page * page_size) / 8) as i32;
                    corner[4] =
                        (id * p.pages.step_per_page + tile.kv_head * p.pages.step_per_head) as i32;
                }
                corner[2] = (tile.kv_head * p.pages.slab_per_head) as i32;

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
                // A box that reaches past the item's keys: those values may be anything, and their
                // weight 0 does not keep a NaN out.
                let past = tile.kv_end as i32;
                let tail = VALUES && begin + keys as i32 > past && tile.kv_end % p.box_tokens != 0;
                // SAFETY: as above.
                unsafe {
                    mbarrier::wait(free, blocks.parity);
                    let arrival = if tail { s.tail() } else { full };
                    if lane == 0 {
                        mbarrier::arrive_expect_tx(arrival, s.shape.block_bytes());
                    }
                    warp::sync_warp(WARP);
                    if mine {
                        let offset = lane * p.box_tokens * row_bytes;
                        tma::load_tensor(target + offset, map, corner, arrival);
                    }
                    if tail {
                        mbarrier::wait(s.tail(), tail_parity);
                        tail_parity ^= 1;
                        let first = (past - begin) as u32;
                        clear(
                            target,
                            first,
                            first.next_multiple_of(p.box_tokens),
                            row_bytes,
                        );
                        fence::proxy_async_shared();
                        warp::sync_warp(WARP);
                        if lane == 0 {
                            mbarrier::arrive(full);
                        }
                    }
                }
                blocks.advance();
            }
        }
    }

    /// Sets rows of a block to zero: groups of 8 tokens, in a group 64 columns after the other.
    #[inline(always)]
    unsafe fn clear(block: u32, first: u32, past: u32, row_bytes: u32) {
        let lane = warp::lane_id();
        let mut row = first;
        while row < past {
            let group = block + row / 8 * (8 * row_bytes) + row % 8 * 128;
            let mut chunk = lane;
            while chunk < row_bytes / 16 {
                // SAFETY: inside the block, which is the loader's. Swizzled or not, it is the row's.
                unsafe { shared::store_u32x4(group + chunk / 8 * 1024 + chunk % 8 * 16, [0; 4]) };
                chunk += 32;
            }
            row += 1;
        }
    }

    // ---- The consumers -------------------------------------------------------------------------

    /// S = Q·Kᵀ of 64 rows and a block, issued.
    #[inline(always)]
    unsafe fn queries_keys<T: Dtype, const S: usize>(
        s: &mut [f32; S],
        queries: u32,
        keys: u32,
        shape: Shape,
    ) where
        [f32; S]: wgmma::Accumulator,
    {
        let row_bytes = shape.head_dim * 2;
        // Both K-major in slabs of 64 columns: the slabs of a whole tile of queries follow each other,
        // those of 8 keys do.
        let q = Descriptor::new(queries, 16, 1024, Swizzle::B128);
        let k = Descriptor::new(keys, 16, 8 * row_bytes, Swizzle::B128);
        // SAFETY: the barriers of both operands completed; the accumulator is waited for.
        unsafe {
            wgmma::fence();
            wgmma::mma_ss::<T, false, false, false, _>(s, q, k);
            let mut step = 1;
            while step < shape.head_dim / 16 {
                let (slab, inner) = (step / 4, step % 4 * 32);
                wgmma::mma_ss::<T, true, false, false, _>(
                    s,
                    q.advance(slab * shape.slab_bytes() + inner),
                    k.advance(slab * 1024 + inner),
                );
                step += 1;
            }
            wgmma::commit_group();
        }
    }

    /// O += P·V of 64 rows and a block, issued.
    #[inline(always)]
    unsafe fn weights_values<T: Dtype, const O: usize, const P: usize>(
        o: &mut [f32; O],
        weights: &[u32; P],
        values: u32,
        shape: Shape,
    ) where
        [f32; O]: wgmma::Accumulator,
    {
        let row_bytes = shape.head_dim * 2;
        let v = Descriptor::new(values, 1024, 8 * row_bytes, Swizzle::B128);
        // SAFETY: the barrier of the values completed; the accumulator is waited for before it and the
        // weights are touched again.
        unsafe {
            wgmma::fence();
            let mut step = 0;
            while step < P / 4 {
                let a = [
                    weights[4 * step],
                    weights[4 * step + 1],
                    weights[4 * step + 2],
                    weights[4 * step + 3],
                ];
                wgmma::mma_rs::<T, true, true, _>(o, a, v.advance(step as u32 * 16 * row_bytes));
                step += 1;
            }
            wgmma::commit_group();
        }
    }

    /// A value that is the same in all lanes, told to the compiler.
    #[inline(always)]
    unsafe fn uniform(x: u32) -> u32 {
        // SAFETY: the caller brings whole warps.
        unsafe { warp::warp_shuffle_idx(WARP, x, 0, 32) }
    }

    /// What a consumer knows of its tile.
    struct Work {
        /// Shared address of its 64 rows of queries.
        queries: u32,
        /// First key of the block at hand, blocks left (this one included), blocks it need not look at.
        begin: i32,
        left: u32,
        skipped: u32,
        /// The first and the last key that all 64 rows see.
        all_see: (i32, i32),
    }

    /// The first and the last key of the tile that a row sees.
    #[inline(always)]
    fn sees<V: Variant>(p: &PrefillParams, variant: &V, tile: &Tile, row: u32) -> (i32, i32) {
        let position = tile.position + div_u32(row, p.pack) as i32;
        let (first, last) = variant.visible_keys(position);
        (
            first.max(tile.kv_begin as i32),
            last.min(tile.kv_end as i32 - 1),
        )
    }

    /// Whose a row is; the key is left open.
    #[inline(always)]
    fn query(p: &PrefillParams, tile: &Tile, row: u32) -> Pair {
        let token = div_u32(row, p.pack);
        Pair {
            token: tile.token + token,
            head: tile.head + row - token * p.pack,
            position: tile.position + token as i32,
            key: 0,
        }
    }

    impl Work {
        #[inline(always)]
        unsafe fn open<V: Variant>(
            p: &PrefillParams,
            variant: &V,
            s: Shared,
            stage: u32,
            consumer: u32,
        ) -> Self {
            // SAFETY: the tile's barrier completed; whole warps.
            let tile = unsafe { Tile::load(s.tile(stage)) };
            // Positions grow with the row, and what is seen with the position.
            let (_, least) = sees(p, variant, &tile, 64 * consumer);
            let (most_first, most) = sees(p, variant, &tile, 64 * consumer + 63);
            let keys = s.shape.keys as i32;
            let mut begin = tile.end as i32 - keys;
            let mut left = tile.blocks;
            let mut skipped = 0;
            while left > 1 && begin > most {
                begin -= keys;
                left -= 1;
                skipped += 1;
            }
            // SAFETY: whole warps; all 64 rows agree on these.
            unsafe {
                Self {
                    queries: s.queries(stage) + consumer * 64 * 128,
                    begin: uniform(begin as u32) as i32,
                    left: uniform(left),
                    skipped: uniform(skipped),
                    all_see: (
                        uniform(most_first as u32) as i32,
                        uniform(least as u32) as i32,
                    ),
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn consume<
        T: Dtype,
        V: Variant,
        const STAGES: u32,
        const S: usize,
        const P: usize,
        const O: usize,
    >(
        p: &PrefillParams,
        variant: &V,
        s: Shared,
    ) where
        [f32; S]: wgmma::Accumulator,
        [f32; O]: wgmma::Accumulator,
    {
        let lane = warp::lane_id();
        let thread = thread::thread_idx_x() - 128;
        // SAFETY: whole warps here and in everything below.
        let consumer = unsafe { uniform(thread / 128) };
        let first_row = thread / 32 * 16;
        let rows_of_thread = [first_row + lane / 4, first_row + lane / 4 + 8];
        let scale = if V::TRANSFORMS_LOGITS {
            1.0
        } else {
            variant.params().scale_log2
        };
        let keys = s.shape.keys as i32;

        let mut tiles = Ring::<2>::CONSUMER;
        let mut k = Ring::<STAGES>::CONSUMER;
        let mut v = Ring::<STAGES>::CONSUMER;
        let mut logits = [0.0; S];
        let mut weights = [0; P];
        let mut o = [0.0; O];
        let mut rows = Rows::EMPTY;

        macro_rules! release {
            ($barrier:expr) => {
                if lane == 0 {
                    mbarrier::arrive($barrier);
                }
            };
        }
        // The next tile, and the keys of its blocks that these rows do not see.
        macro_rules! open {
            () => {{
                let work = Work::open(p, variant, s, tiles.stage, consumer);
                let mut skipped = work.skipped;
                while skipped > 0 {
                    mbarrier::wait(s.keys_full(k.stage), k.parity);
                    release!(s.keys_free(k.stage));
                    k.advance();
                    skipped -= 1;
                }
                work
            }};
        }
        macro_rules! skip_values {
            ($work:ident) => {
                while $work.skipped > 0 {
                    mbarrier::wait(s.values_full(v.stage), v.parity);
                    release!(s.values_free(v.stage));
                    v.advance();
                    $work.skipped -= 1;
                }
            };
        }
        // From accumulators to logits: the variant's and the mask.
        macro_rules! finish_logits {
            ($work:ident) => {
                if V::TRANSFORMS_LOGITS {
                    let tile = Tile::load(s.tile(tiles.stage));
                    let of = rows_of_thread.map(|row| query(p, &tile, row));
                    transform(&mut logits, variant, $work.begin, of);
                }
                let last = $work.begin + keys - 1;
                if V::MASKS || last > $work.all_see.1 || $work.begin < $work.all_see.0 {
                    // Seldom: what the rows see is computed again rather than kept in registers.
                    let tile = Tile::load(s.tile(tiles.stage));
                    let of = rows_of_thread.map(|row| query(p, &tile, row));
                    let seen = rows_of_thread.map(|row| sees(p, variant, &tile, row));
                    let visible = Visible {
                        first: [seen[0].0, seen[1].0],
                        last: [seen[0].1, seen[1].1],
                    };
                    mask(&mut logits, variant, &visible, $work.begin, of);
                }
            };
        }

        unsafe {
            mbarrier::wait(s.queries_full(0), 0);
            let mut work = open!();
            mbarrier::wait(s.keys_full(k.stage), k.parity);
            queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), s.shape);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut logits);
            release!(s.keys_free(k.stage));
            k.advance();
            finish_logits!(work);
            rows.rescale(&logits, scale);
            rows.weigh(&logits, scale, &mut weights, T::pack);
            skip_values!(work);
            loop {
                work.left -= 1;
                work.begin -= keys;
                // The last block's P·V is still to be done: it goes with the next tile's first Q·Kᵀ.
                let turn = work.left == 0;
                let done = tiles.stage;
                if turn {
                    tiles.advance();
                    mbarrier::wait(s.queries_full(tiles.stage), tiles.parity);
                    if shared::load_u32(s.tile(tiles.stage) + 8) == 0 {
                        break;
                    }
                    work = open!();
                }
                let values = uniform(s.values(v.stage));
                mbarrier::wait(s.keys_full(k.stage), k.parity);
                queries_keys::<T, S>(&mut logits, work.queries, s.keys(k.stage), s.shape);
                mbarrier::wait(s.values_full(v.stage), v.parity);
                weights_values::<T, O, P>(&mut o, &weights, values, s.shape);
                wgmma::wait_group::<1>();
                wgmma::fence_operand(&mut logits);
                release!(s.keys_free(k.stage));
                k.advance();
                finish_logits!(work);
                let ended = rows;
                if turn {
                    rows = Rows::EMPTY;
                }
                // P·V runs beneath the maxima; by the time they are known it is done, the weights'
                // registers are free, and the exponentials run beneath the other consumers' products.
                let (grew, factors) = rows.rescale(&logits, scale);
                wgmma::wait_group::<0>();
                wgmma::fence_operand(&mut o);
                wgmma::fence_operand(&mut weights);
                release!(s.values_free(v.stage));
                v.advance();
                if turn {
                    finish_tile::<T, O>(p, s, done, &o, &ended, scale, first_row);
                    o = [0.0; O];
                    skip_values!(work);
                } else if grew {
                    let mut i = 0;
                    while i < O {
                        o[i] *= factors[i / 2 % 2];
                        i += 1;
                    }
                }
                rows.weigh(&logits, scale, &mut weights, T::pack);
            }
            mbarrier::wait(s.values_full(v.stage), v.parity);
            weights_values::<T, O, P>(&mut o, &weights, s.values(v.stage), s.shape);
            wgmma::wait_group::<0>();
            wgmma::fence_operand(&mut o);
            finish_tile::<T, O>(p, s, tiles.stage ^ 1, &o, &rows, scale, first_row);
        }
    }

    // ---- Epilogue ------------------------------------------------------------------------------

    /// Normalises 16 rows of a warp and writes them: to the output through the warp's part of the
    /// queries, which are not needed any more, or to a partial state.
    #[inline(always)]
    unsafe fn finish_tile<T: Dtype, const O: usize>(
        p: &PrefillParams,
        s: Shared,
        stage: u32,
        o: &[f32; O],
        rows: &Rows,
        scale: f32,
        first_row: u32,
    ) {
        let a = &p.attention;
        // Opaque here: or what follows from them is computed before the main loop and takes its registers.
        let mut here = [warp::lane_id(), first_row];
        wgmma::fence_operand(&mut here);
        let [lane, first_row] = here;
        // SAFETY: whole warps; the tile stays until this warp has arrived.
        let tile = unsafe { Tile::load(s.tile(stage)) };
        let totals = unsafe { rows.totals() };
        let inverse = totals.map(|total| if total > 0.0 { rcp(total) } else { 0.0 });
        let head_dim = s.shape.head_dim;
        // Token and head of a row of the tile.
        let place = |row: u32| {
            let token = div_u32(row, p.pack);
            (token, tile.head + row - token * p.pack)
        };

        let mut h = 0;
        while h < 2 {
            let row = first_row + lane / 4 + 8 * h as u32;
            if row < tile.rows {
                let lse = if totals[h] > 0.0 {
                    rows.reference[h] * scale + lg2(totals[h])
                } else {
                    f32::NEG_INFINITY
                };
                let (token, head) = place(row);
                if tile.slot == DIRECT {
                    let at = u64::from((tile.token + token) * a.q_heads + head) * 4;
                    if a.lse != 0 && lane % 4 == 0 {
                        // SAFETY: the row is this thread's alone.
                        unsafe { ptr::store_f32((a.lse + at) as *mut f32, lse * LN_2) };
                    }
                } else {
                    let state = u64::from((tile.slot + token) * a.q_heads + head);
                    let out =
                        a.partial_out + (state * u64::from(head_dim) + u64::from(lane % 4 * 2)) * 4;
                    // SAFETY: the slot is this tile's alone, its row this thread's.
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
                            ptr::store_f32x2((out + 32 * j as u64) as *mut f32, pair);
                            j += 1;
                        }
                    }
                }
            }
            h += 1;
        }

        if tile.slot == DIRECT {
            // Swizzled like the queries, so that neither the columns of 8 rows nor a row's chunks meet in
            // a bank.
            let slab = s.shape.slab_bytes();
            let staged = s.queries(stage) + first_row * 128;
            let at = |row: u32, chunk: u32| {
                staged + chunk / 8 * slab + row * 128 + ((chunk % 8) ^ (row % 8)) * 16
            };
            // SAFETY: 16 rows that only this warp reads and writes.
            unsafe {
                let mut j = 0;
                while j < O / 8 {
                    let quarter = |i: usize| {
                        T::pack(
                            o[8 * j + i] * inverse[i / 2 % 2],
                            o[8 * j + i + 1] * inverse[i / 2 % 2],
                        )
                    };
                    let fragments = [quarter(0), quarter(2), quarter(4), quarter(6)];
                    mma::stmatrix_x4(at(lane % 16, 2 * j as u32 + lane / 16), fragments);
                    j += 1;
                }
                warp::sync_warp(WARP);
                let chunks = head_dim / 8;
                let mut i = lane;
                while i < 16 * chunks {
                    let (row, chunk) = (i / chunks, i % chunks);
                    let vector = shared::load_u32x4(at(row, chunk));
                    if first_row + row < tile.rows {
                        let (token, head) = place(first_row + row);
                        let element = u64::from(tile.token + token) * u64::from(a.out_token_stride)
                            + u64::from(head * head_dim + chunk * 8);
                        ptr::store_u32x4((a.out + element * 2) as *mut u32, vector);
                    }
                    i += 32;
                }
            }
            // The next queries come by TMA to where ordinary stores went.
            fence::proxy_async_shared();
        }
        // SAFETY: whole warps.
        unsafe {
            warp::sync_warp(WARP);
            if lane == 0 {
                mbarrier::arrive(s.tile_free(stage));
            }
        }
    }

    // ---- Entries -------------------------------------------------------------------------------

    macro_rules! entries {
        ($($name:ident: $shape:ident, $dtype:ty, $cap:literal, [$s:literal, $p:literal, $o:literal], $registers:literal;)*) => {$(
            /// See the module; all sizes are the shape's.
            ///
            /// # Safety
            /// The parameters describe memory as [`PrefillParams`] says; the grid has at most as many CTAs
            /// as there are units.
            #[kernel(max_threads = Shape::$shape.threads(), min_blocks = 1, tensor_maps)]
            pub unsafe fn $name(p: PrefillParams) {
                const SHAPE: Shape = Shape::$shape;
                const {
                    assert!($s == SHAPE.keys / 2 && $p == SHAPE.keys / 4 && $o == SHAPE.head_dim / 2);
                }
                let maps: *const TensorMap = param_address!($name, 0);
                let variant = Standard::<$cap>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                let thread = thread::thread_idx_x();
                unsafe {
                    if thread == 0 {
                        s.init();
                    }
                    barrier::bar_sync(0, SHAPE.threads());
                    if thread < 128 {
                        setmaxnreg::decrease::<{ if SHAPE.consumers == 2 { 40 } else { 32 } }>();
                        match thread / 32 {
                            0 => load::<false, { SHAPE.stages }>(&p, maps.add(1), s),
                            1 => load::<true, { SHAPE.stages }>(&p, maps.add(2), s),
                            2 if thread == 64 => schedule(&p, maps, &variant, s),
                            _ => {}
                        }
                    } else {
                        setmaxnreg::increase::<$registers>();
                        consume::<$dtype, _, { SHAPE.stages }, $s, $p, $o>(&p, &variant, s);
                    }
                }
            }
        )*};
    }

    entries! {
        prefill_128x128_d128_bf16: D128, Bf16, false, [64, 32, 64], 232;
        prefill_128x96_d128_bf16_cap: D128_CAP, Bf16, true, [48, 24, 64], 232;
        prefill_192x80_d128_bf16: D128_WIDE, Bf16, false, [40, 20, 64], 160;
        prefill_128x128_d64_bf16: D64, Bf16, false, [64, 32, 32], 232;
        prefill_128x128_d64_bf16_cap: D64, Bf16, true, [64, 32, 32], 232;
        prefill_192x112_d64_bf16: D64_WIDE, Bf16, false, [56, 28, 32], 160;
        prefill_128x128_d128_f16: D128, F16, false, [64, 32, 64], 232;
        prefill_128x96_d128_f16_cap: D128_CAP, F16, true, [48, 24, 64], 232;
        prefill_192x80_d128_f16: D128_WIDE, F16, false, [40, 20, 64], 160;
        prefill_128x128_d64_f16: D64, F16, false, [64, 32, 32], 232;
        prefill_128x128_d64_f16_cap: D64, F16, true, [64, 32, 32], 232;
        prefill_192x112_d64_f16: D64_WIDE, F16, false, [56, 28, 32], 160;
    }
}

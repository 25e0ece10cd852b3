//! Gathers a unit's queries, whose rows may lie anywhere, to shared memory in wgmma's swizzled layout; and the addresses
//! that kernels which do so have in common.

use cuda_std::{async_copy, ptr, shared, warp};

use crate::{
    abi::DecodeParams,
    common::cache::{fit_f16, fitted, larger},
};

/// A unit's queries, and their target.
#[derive(Clone, Copy)]
pub(super) struct Queries {
    /// Shared address of the slabs of 64 columns, `slab_bytes` each.
    pub target: u32,
    pub slab_bytes: u32,
    /// Shared address of the unit's rows, 16 bytes each, and their number.
    pub rows: u32,
    pub tokens: u32,
    /// The KV head, and the head dimension.
    pub head: u32,
    pub head_dim: u32,
    /// Where queries are bf16 and products f16: the shared address of a factor for each row, which undoes its
    /// conversion.
    pub unfit: Option<u32>,
    /// Whether these are copied to shared memory before they are converted: then a unit waits for memory once, not once for
    /// each few rows. Where loaders have few registers, that made the main loop 4 % slower.
    pub copied_first: bool,
}

impl Queries {
    /// Copies half of the queries, swizzled. Two warps share the work; `half` is 0 or 1.
    ///
    /// # Safety
    /// A whole warp; the rows are written, and only these warps access the target.
    #[inline(always)]
    pub unsafe fn gather(self, p: &DecodeParams, half: u32) {
        /// Copies whose addresses are computed together, so that none waits for another's.
        const AT_ONCE: usize = 4;
        if let (Some(unfit), false) = (self.unfit, self.copied_first) {
            // SAFETY: the caller's promise.
            return unsafe { self.fit(p, half, unfit) };
        }
        let Self {
            target,
            slab_bytes,
            rows: listed,
            tokens,
            head,
            head_dim,
            ..
        } = self;
        let a = &p.attention;
        let lane = warp::lane_id();
        // A vector is 8 elements; neighbouring lanes take neighbouring vectors.
        let vectors = head_dim / 8;
        let step = 2 * (32 / vectors);
        let (vector, mut row) = (lane % vectors, lane / vectors + half * (32 / vectors));
        let target = target + vector / 8 * slab_bytes;
        let source = a.q + u64::from(head * a.group * head_dim + vector * 8) * 2;
        let rows = tokens * a.group;
        // SAFETY: a whole warp; the rows are written, and the plan has these queries.
        unsafe {
            while row < rows {
                let mut elements = [0; AT_ONCE];
                let mut i = 0;
                while i < AT_ONCE {
                    // Past the last row: the last token again, which is not copied.
                    let (token, in_group) = p.group.div_rem(row + i as u32 * step);
                    let token = shared::load_u32(listed + token.min(tokens - 1) * 16);
                    elements[i] = u64::from(token) * u64::from(a.q_token_stride)
                        + u64::from(in_group * head_dim);
                    i += 1;
                }
                i = 0;
                while i < AT_ONCE {
                    let row = row + i as u32 * step;
                    if row < rows {
                        let at = target + row * 128 + ((vector % 8) ^ (row % 8)) * 16;
                        async_copy::copy_cg(at, (source + elements[i] * 2) as *const u8);
                    }
                    i += 1;
                }
                row += AT_ONCE as u32 * step;
            }
            if let Some(unfit) = self.unfit {
                async_copy::wait_all();
                self.fit(p, half, unfit);
            }
        }
    }

    /// For queries in bf16 and products in f16: multiplies each row by a power of two that brings it into the range of f16.
    ///
    /// # Safety
    /// As [`gather`](Self::gather); what this lane copied first has arrived.
    #[inline(always)]
    unsafe fn fit(self, p: &DecodeParams, half: u32, unfit_at: u32) {
        /// Rows at once.
        const AT_ONCE: usize = 4;
        let a = &p.attention;
        let lane = warp::lane_id();
        let vectors = self.head_dim / 8;
        let step = 2 * (32 / vectors);
        let (vector, mut row) = (lane % vectors, lane / vectors + half * (32 / vectors));
        let target = self.target + vector / 8 * self.slab_bytes;
        let source = a.q + u64::from(self.head * a.group * self.head_dim + vector * 8) * 2;
        let rows = self.tokens * a.group;
        let at = |row: u32| target + row * 128 + ((vector % 8) ^ (row % 8)) * 16;
        // SAFETY: a whole warp; the rows are written, the plan has these queries, and each lane has the vectors that it copied.
        unsafe {
            // All lanes take part in the shuffles.
            while warp::warp_vote_any(warp::FULL_MASK, row < rows) {
                let mut words = [[0; 4]; AT_ONCE];
                let mut i = 0;
                while i < AT_ONCE {
                    let row = row + i as u32 * step;
                    if self.copied_first {
                        if row < rows {
                            words[i] = shared::load_u32x4(at(row));
                        }
                    } else {
                        // Past the last row: the last token again, which is not stored.
                        let (token, in_group) = p.group.div_rem(row);
                        let token = shared::load_u32(self.rows + token.min(self.tokens - 1) * 16);
                        let element = u64::from(token) * u64::from(a.q_token_stride)
                            + u64::from(in_group * self.head_dim);
                        words[i] = ptr::load_u32x4((source + element * 2) as *const u32);
                    }
                    i += 1;
                }
                i = 0;
                while i < AT_ONCE {
                    let mut largest = words[i].into_iter().fold(0, larger);
                    let mut apart = 1;
                    while apart < vectors {
                        let other = warp::warp_shuffle_xor(warp::FULL_MASK, largest, apart, 32);
                        largest = largest.max(other);
                        apart *= 2;
                    }
                    let [fit, unfit] = fit_f16(largest);
                    let row = row + i as u32 * step;
                    if row < rows {
                        shared::store_u32x4(at(row), words[i].map(|pair| fitted(pair, fit)));
                        if vector == 0 {
                            shared::store_f32(unfit_at + row * 4, unfit);
                        }
                    }
                    i += 1;
                }
                row += AT_ONCE as u32 * step;
            }
        }
    }
}

/// The type `Shared` of [`wide`](super::wide) and [`narrow`](super::narrow) tiles, with the addresses that both have, and
/// the warp that helps to gather queries. It expects in scope `Shape`, `Unit` and `UNIT_BYTES`, and the addresses `row`
/// and `rows_full` of `Shared`. A macro, because offsets are const functions of a `Shape`, and traits have none.
macro_rules! shared_with_queries {
    () => {
        /// The base address and the layout.
        #[derive(Clone, Copy)]
        pub(super) struct Shared {
            pub base: u32,
            pub shape: Shape,
        }

        impl Shared {
            #[inline(always)]
            pub fn queries(self, slot: u32) -> u32 {
                self.base + slot * self.shape.query_bytes()
            }
            /// The queries of a slot's unit.
            #[inline(always)]
            pub fn queries_of(
                self,
                slot: u32,
                head: u32,
                tokens: u32,
            ) -> $crate::sm90::decode_wgmma::rows::Queries {
                $crate::sm90::decode_wgmma::rows::Queries {
                    target: self.queries(slot),
                    slab_bytes: self.shape.slab_bytes(),
                    rows: self.row(slot, 0),
                    tokens,
                    head,
                    head_dim: self.shape.head_dim,
                    unfit: self.unfitted(slot),
                    copied_first: self.copies_queries_first(),
                }
            }
            #[inline(always)]
            pub fn keys(self, stage: u32) -> u32 {
                self.base + self.shape.keys_offset() + stage * self.shape.block_bytes()
            }
            #[inline(always)]
            pub fn values(self, stage: u32) -> u32 {
                self.base + self.shape.values_offset() + stage * self.shape.block_bytes()
            }
            /// Reads a row of a unit.
            ///
            /// # Safety
            /// The unit has the token, and its barrier completed.
            #[inline(always)]
            pub unsafe fn load_row(self, slot: u32, token: u32) -> $crate::abi::QueryRow {
                // SAFETY: the unit has the token, and its barrier completed.
                let words = unsafe { ::cuda_std::shared::load_u32x4(self.row(slot, token)) };
                $crate::abi::QueryRow::from_words(words)
            }
            #[inline(always)]
            pub fn unit(self, slot: u32) -> u32 {
                self.base + self.shape.units_offset() + slot * UNIT_BYTES
            }
            #[inline(always)]
            fn barrier(self, index: u32) -> u32 {
                self.base + self.shape.barriers_offset() + 8 * index
            }
            /// The unit's description is written.
            #[inline(always)]
            pub fn unit_full(self, slot: u32) -> u32 {
                self.barrier(slot)
            }
            /// The unit's rows and queries have arrived.
            #[inline(always)]
            pub fn queries_full(self, slot: u32) -> u32 {
                self.barrier(2 + slot)
            }
            /// The slot is free: both loaders have read the unit, and all consumer warps have written its results.
            #[inline(always)]
            pub fn unit_free(self, slot: u32) -> u32 {
                self.barrier(4 + slot)
            }
        }

        /// Gathers the other half of each unit's queries.
        ///
        /// # Safety
        /// A whole warp comes here; the barriers are initialised.
        #[inline(always)]
        pub(super) unsafe fn help_gather(p: &$crate::abi::DecodeParams, s: Shared) {
            use ::cuda_std::{async_copy, fence, mbarrier};
            use $crate::sm90::pipeline::Pipeline;
            let mut slots = Pipeline::<2>::CONSUMER;
            // SAFETY: a whole warp; the rows are written, and their slot is not freed before the queries have arrived.
            unsafe {
                loop {
                    mbarrier::wait(s.rows_full(slots.stage), slots.parity);
                    let unit = Unit::load(s.unit(slots.stage));
                    if unit.tokens > 0 {
                        s.queries_of(slots.stage, unit.head, unit.tokens)
                            .gather(p, 1);
                        async_copy::wait_all();
                        fence::proxy_async_shared();
                    }
                    mbarrier::arrive(s.queries_full(slots.stage));
                    if unit.tokens == 0 {
                        return;
                    }
                    slots.advance();
                }
            }
        }
    };
}
pub(super) use shared_with_queries;

//! Decode of many rows on Hopper: a prefix that many queries share is read once for 64 or 128 rows of them.
//!
//! Units are items × KV heads; a row is a query token and a query head of the KV head's group. With so many
//! rows the products fill a `wgmma`, queries on its 64-wide side. A CTA stays on its SM:
//!
//! - two **gatherers** (a warp each) bring the rows of a unit, which may lie anywhere in `q`; the first of them
//!   claims units by ticket, shortly before the one before is done;
//! - two **loaders** (a warp each) bring keys and values, a lane per TMA box;
//! - **consumers** (a warpgroup for 64 rows) work as those of [`prefill`](super::prefill) do: Q·Kᵀ of a block
//!   is issued together with P·V of the block before, across units.
//!
//! The keys of a unit are *runs*: of one table for all rows, or, in a [joint](crate::abi::WorkItem::JOINT) item, of
//! several tables for some of the rows each. Blocks are filled with the pieces (TMA boxes) of all runs, one after
//! the other, and masked by rows. That costs products that nobody needs, but tensor cores have them to spare:
//! 64 rows are 64 FLOPs a byte. It saves partial states, which cost bytes.

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod consume;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod feed;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod finish;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod runs;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod shared;

use crate::abi::WorkItem;

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
    /// CTAs that share an SM: each works while the other waits.
    pub ctas_per_sm: u32,
}

/// Shared memory of an SM, and what the system takes of it for each CTA.
const SM_SHARED: u32 = 233_472;
const RESERVED: u32 = 1024;

impl Shape {
    /// Every instance; the entry is `decode_<dtype>_d<head_dim>_m<rows>[_cap]`.
    pub const ALL: [Self; 7] = [
        Self::D64_M64,
        Self::D64_M128,
        Self::D128_M64,
        Self::D128_M128,
        Self::D128_M128_CAP,
        Self::D256_M64,
        Self::D256_M128,
    ];
    /// Heads of 64, 64 rows.
    pub const D64_M64: Self = Self::new(1, 128, 64, 2, 2);
    /// Heads of 64, 128 rows.
    pub const D64_M128: Self = Self::new(2, 128, 64, 4, 1);
    /// Heads of 128, 64 rows.
    pub const D128_M64: Self = Self::new(1, 64, 128, 2, 2);
    /// Heads of 128, 128 rows.
    pub const D128_M128: Self = Self::new(2, 128, 128, 2, 1);
    /// A soft cap wants registers.
    pub const D128_M128_CAP: Self = Self::new(2, 64, 128, 4, 1);
    /// Heads of 256, 64 rows.
    pub const D256_M64: Self = Self::new(1, 64, 256, 2, 1);
    /// Heads of 256, 128 rows.
    pub const D256_M128: Self = Self::new(2, 32, 256, 2, 1);

    const fn new(consumers: u32, keys: u32, head_dim: u32, stages: u32, ctas_per_sm: u32) -> Self {
        let shape = Self {
            consumers,
            keys,
            head_dim,
            stages,
            ctas_per_sm,
        };
        assert!(
            (shape.shared_bytes() + RESERVED) * ctas_per_sm <= SM_SHARED,
            "more than an SM has"
        );
        shape
    }

    /// The instance for a head dimension and at most `rows` rows; `None` where there is none.
    #[must_use]
    pub const fn find(head_dim: u32, rows: u32, cap: bool) -> Option<Self> {
        match (head_dim, rows, cap) {
            (64, 17..=64, _) => Some(Self::D64_M64),
            (64, 65..=128, _) => Some(Self::D64_M128),
            (128, 17..=64, _) => Some(Self::D128_M64),
            (128, 65..=128, false) => Some(Self::D128_M128),
            (128, 65..=128, true) => Some(Self::D128_M128_CAP),
            (256, 17..=64, _) => Some(Self::D256_M64),
            (256, 65..=128, _) => Some(Self::D256_M128),
            _ => None,
        }
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

    /// Registers of a feeding and of a computing thread; they sum up to what the CTA gets at launch.
    #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
    const fn registers(&self) -> (u32, u32) {
        match (self.consumers, self.ctas_per_sm) {
            (1, 2) => (56, 200),
            (2, 1) => (56, 224),
            // All that a thread can have is there from the start.
            _ => (248, 248),
        }
    }

    const fn block_bytes(&self) -> u32 {
        self.keys * self.head_dim * 2
    }

    /// Bytes of 64 columns of the queries.
    const fn slab_bytes(&self) -> u32 {
        self.rows() * 128
    }

    const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    /// Two units' queries, the stages, the units' rows, the keys that these see, what is known of the units, their runs, the stages' masks,
    /// barriers.
    const fn keys_offset(&self) -> u32 {
        2 * self.query_bytes()
    }

    const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.block_bytes()
    }

    const fn rows_offset(&self) -> u32 {
        self.values_offset() + self.stages * self.block_bytes()
    }

    const fn seen_offset(&self) -> u32 {
        self.rows_offset() + 2 * self.rows() * 16
    }

    const fn units_offset(&self) -> u32 {
        self.seen_offset() + 2 * self.rows() * 8
    }

    const fn runs_offset(&self) -> u32 {
        self.units_offset() + 2 * UNIT_BYTES
    }

    const fn masks_offset(&self) -> u32 {
        self.runs_offset() + 2 * WorkItem::MAX_RUNS * RUN_BYTES
    }

    /// A vector of four words, and two words for 8 keys.
    const fn mask_bytes(&self) -> u32 {
        16 + self.keys
    }

    const fn barriers_offset(&self) -> u32 {
        self.masks_offset() + self.stages * self.mask_bytes()
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 8 * (BARRIERS + 4 * self.stages)
    }
}

/// A unit in shared memory: two vectors of four words.
const UNIT_BYTES: u32 = 32;

/// A run in shared memory, likewise.
const RUN_BYTES: u32 = 32;

/// Blocks of a unit's keys that have not been asked for when the next unit is claimed. Who claims early may claim
/// what another CTA could have begun; who claims late waits for ticket, item, runs and queries.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
const CLAIM_AHEAD: u32 = 8;

/// Barriers beside those of the stages.
const BARRIERS: u32 = 11;

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod entries {
    use cuda_std::{
        barrier, griddep, param_address, prelude::*, setmaxnreg, shared, thread, tma::TensorMap,
        wgmma,
    };

    use super::{
        Shape,
        consume::consume,
        feed::{gather, help_gather, load},
        shared::Shared,
    };
    use crate::{
        abi::DecodeParams,
        decode::half::{Bf16, F16},
        variant::Standard,
    };

    macro_rules! entries {
        ($($name:ident: $shape:ident, $dtype:ident, $cap:literal, [$s:literal, $p:literal, $o:literal];)*) => {$(
            /// See the module; all sizes are the shape's.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(max_threads = Shape::$shape.threads(), min_blocks = Shape::$shape.ctas_per_sm, tensor_maps)]
            pub unsafe fn $name(p: DecodeParams) {
                const SHAPE: Shape = Shape::$shape;
                const {
                    assert!($s == SHAPE.keys / 2 && $p == SHAPE.keys / 4 && $o == SHAPE.head_dim / 2);
                }
                let maps: *const TensorMap = param_address!($name, 0);
                let variant = Standard::<$cap>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                let thread = thread::thread_idx_x();
                // SAFETY: the launch vouches for the parameters; warps and warpgroups have their roles as a whole.
                unsafe {
                    s.init();
                    barrier::bar_sync(0, SHAPE.threads());
                    // Another tile group of the step may take over SMs as this one leaves them.
                    griddep::launch_dependents();
                    if thread < 128 {
                        if SHAPE.registers().0 < 128 {
                            setmaxnreg::decrease::<{ SHAPE.registers().0 }>();
                        }
                        match thread / 32 {
                            0 => load::<_, false, { SHAPE.stages }>(&p, &variant, maps, s),
                            1 => load::<_, true, { SHAPE.stages }>(&p, &variant, maps.add(1), s),
                            2 => gather(&p, &variant, s),
                            _ => help_gather(&p, s),
                        }
                    } else {
                        if SHAPE.registers().0 < 128 {
                            setmaxnreg::increase::<{ SHAPE.registers().1 }>();
                        }
                        consume::<wgmma::$dtype, $dtype, _, { SHAPE.stages }, { SHAPE.head_dim }, { SHAPE.head_dim as usize / 32 }, $s, $p, $o>(
                            &p, &variant, s,
                        );
                        // Whoever waits for this group waits for the one before it, too.
                        griddep::wait();
                    }
                }
            }
        )*};
    }

    entries! {
        decode_bf16_d64_m64: D64_M64, Bf16, false, [64, 32, 32];
        decode_bf16_d64_m128: D64_M128, Bf16, false, [64, 32, 32];
        decode_bf16_d128_m64: D128_M64, Bf16, false, [32, 16, 64];
        decode_bf16_d128_m128: D128_M128, Bf16, false, [64, 32, 64];
        decode_bf16_d256_m64: D256_M64, Bf16, false, [32, 16, 128];
        decode_bf16_d256_m128: D256_M128, Bf16, false, [16, 8, 128];
        decode_f16_d64_m64: D64_M64, F16, false, [64, 32, 32];
        decode_f16_d64_m128: D64_M128, F16, false, [64, 32, 32];
        decode_f16_d128_m64: D128_M64, F16, false, [32, 16, 64];
        decode_f16_d128_m128: D128_M128, F16, false, [64, 32, 64];
        decode_f16_d256_m64: D256_M64, F16, false, [32, 16, 128];
        decode_f16_d256_m128: D256_M128, F16, false, [16, 8, 128];
        decode_bf16_d64_m64_cap: D64_M64, Bf16, true, [64, 32, 32];
        decode_bf16_d64_m128_cap: D64_M128, Bf16, true, [64, 32, 32];
        decode_bf16_d128_m64_cap: D128_M64, Bf16, true, [32, 16, 64];
        decode_bf16_d128_m128_cap: D128_M128_CAP, Bf16, true, [32, 16, 64];
        decode_bf16_d256_m64_cap: D256_M64, Bf16, true, [32, 16, 128];
        decode_bf16_d256_m128_cap: D256_M128, Bf16, true, [16, 8, 128];
        decode_f16_d64_m64_cap: D64_M64, F16, true, [64, 32, 32];
        decode_f16_d64_m128_cap: D64_M128, F16, true, [64, 32, 32];
        decode_f16_d128_m64_cap: D128_M64, F16, true, [32, 16, 64];
        decode_f16_d128_m128_cap: D128_M128_CAP, F16, true, [32, 16, 64];
        decode_f16_d256_m64_cap: D256_M64, F16, true, [32, 16, 128];
        decode_f16_d256_m128_cap: D256_M128, F16, true, [16, 8, 128];
    }
}

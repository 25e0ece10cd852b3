//! Prefill on Hopper: contiguous queries against paged keys, at tensor-core speed.
//!
//! A CTA stays on its SM and works through tiles: the rows of an item for one query head (or for `pack`
//! heads that share keys). One warpgroup moves data, the others compute 64 rows each:
//!
//! - the **scheduler** (one thread) claims tiles by ticket, the last ones shortly before the one before is
//!   done, and loads their queries;
//! - two **loaders** (a warp each) bring keys and values, a lane per TMA box, page ids looked up before
//!   the stage is free;
//! - the **writer** (a warp) brings finished tiles from shared memory to the output;
//! - the **consumers** go from the last visible keys to the first. They issue Q·Kᵀ of a block together
//!   with P·V of the block before, so that the tensor cores have work while weights are computed. A tile
//!   ends inside this rhythm: Q·Kᵀ of the next tile's first block goes with P·V of the last.
//!
//! `docs/prefill.md` has the roofline and what was tried.

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod consume;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod feed;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod finish;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod gather;
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod tile;

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
pub(super) use feed::clear;

/// What one instance of the kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Warpgroups that compute, 64 rows each.
    pub consumers: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries and keys.
    pub head_dim: u32,
    /// Head dimension of values and outputs.
    pub value_dim: u32,
    /// Tiles of queries in shared memory. With two, a tile's last step is the next one's first.
    pub query_stages: u32,
    /// Blocks of keys.
    pub stages: u32,
    /// Blocks of values: they stay longer, until P·V is done.
    pub value_stages: u32,
    /// Leaves room on the SM for a CTA of another kernel.
    pub beside: bool,
}

impl Shape {
    /// Every instance; the entry is `prefill_<rows>x<keys>_d<head_dim>_<dtype>[_cap][_beside]`.
    pub const ALL: [Self; 10] = [
        Self::D128,
        Self::D128_CAP,
        Self::D128_WIDE,
        Self::D128_BESIDE,
        Self::D128_GENTLE,
        Self::D64,
        Self::D64_WIDE,
        Self::D192,
        Self::D256,
        Self::D256_CAP,
    ];
    /// 128 rows × 128 keys.
    pub const D128: Self = Self::new(2, 128, [128, 128], [2, 2, 3]);
    /// 128 rows × 96 keys: a soft cap wants registers.
    pub const D128_CAP: Self = Self::new(2, 96, [128, 128], [2, 3, 3]);
    /// 192 rows × 80 keys: a third fewer bytes per row, and three warpgroups to hide the exponentials.
    pub const D128_WIDE: Self = Self::new(3, 80, [128, 128], [2, 3, 3]);
    /// 128 rows × 80 keys and two tiles of queries in more than half of an SM: decodes ([`slim`](super::slim)) run in
    /// the rest of it.
    pub const D128_BESIDE: Self = Self {
        beside: true,
        ..Self::new(2, 80, [128, 128], [2, 2, 2])
    };
    /// 128 rows × 64 keys in less than half of an SM: slower, and the decodes beside it are faster.
    pub const D128_GENTLE: Self = Self {
        beside: true,
        ..Self::new(2, 64, [128, 128], [1, 2, 2])
    };
    /// 128 rows × 128 keys.
    pub const D64: Self = Self::new(2, 128, [64, 64], [2, 3, 3]);
    /// 192 rows × 112 keys.
    pub const D64_WIDE: Self = Self::new(3, 112, [64, 64], [2, 3, 3]);
    /// 128 rows × 128 keys of 192, values of 128.
    pub const D192: Self = Self::new(2, 128, [192, 128], [1, 2, 2]);
    /// 128 rows × 80 keys: two tiles of queries would take more than half of the memory.
    pub const D256: Self = Self::new(2, 80, [256, 256], [1, 2, 2]);
    /// 128 rows × 64 keys.
    pub const D256_CAP: Self = Self::new(2, 64, [256, 256], [1, 2, 3]);

    /// Head dimensions of queries and keys, and of values; stages of queries, keys and values.
    const fn new(consumers: u32, keys: u32, dims: [u32; 2], stages: [u32; 3]) -> Self {
        let shape = Self {
            consumers,
            keys,
            head_dim: dims[0],
            value_dim: dims[1],
            query_stages: stages[0],
            stages: stages[1],
            value_stages: stages[2],
            beside: false,
        };
        assert!(shape.shared_bytes() <= 232_448, "more than a CTA can have");
        assert!(dims[1] <= dims[0], "outputs take the place of queries");
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

    /// Registers of a thread: at launch, and then of the warpgroup that feeds and of those that compute,
    /// which share out anew what the CTA was launched with.
    #[must_use]
    pub const fn registers(&self) -> [u32; 3] {
        match (self.consumers, self.beside) {
            (2, false) => [168, 40, 232],
            (2, true) => [128, 32, 176],
            (3, false) => [128, 32, 160],
            _ => panic!("two or three warpgroups compute"),
        }
    }

    /// Whether a thread's registers hold the weights of two blocks, so that those of the next are computed
    /// while P·V of the last is under way.
    #[must_use]
    pub const fn two_weights(&self) -> bool {
        self.consumers == 2 && self.value_dim <= 128
    }

    /// Bytes of 64 columns of the queries.
    const fn slab_bytes(&self) -> u32 {
        self.rows() * 128
    }

    const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    /// Bytes of a value, or of a key.
    const fn row_bytes(&self, values: bool) -> u32 {
        2 * if values {
            self.value_dim
        } else {
            self.head_dim
        }
    }

    const fn key_bytes(&self) -> u32 {
        self.keys * self.row_bytes(false)
    }

    const fn value_bytes(&self) -> u32 {
        self.keys * self.row_bytes(true)
    }

    /// The tiles of queries (a finished tile's becomes its output), the stages, barriers and tiles.
    const fn keys_offset(&self) -> u32 {
        self.query_stages * self.query_bytes()
    }

    const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.key_bytes()
    }

    const fn barriers_offset(&self) -> u32 {
        self.values_offset() + self.value_stages * self.value_bytes()
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 256 + 2 * TILE_BYTES
    }
}

/// A tile in shared memory: four vectors of four words.
const TILE_BYTES: u32 = 64;

/// Blocks of a tile's keys that have not been asked for when the next tile is claimed. Who claims early may claim
/// what another CTA could have begun; who claims late waits for ticket, tile and queries, about 3 µs.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
const CLAIM_AHEAD: u32 = 4;

/// Claims are late in so many last rounds of tiles. Before that there are enough left for everybody.
#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
const LATE_ROUNDS: u32 = 3;

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod entries {
    use cuda_std::{
        barrier, param_address,
        prelude::*,
        setmaxnreg,
        tma::TensorMap,
        wgmma::{Bf16, F16},
    };

    use super::{
        Shape,
        consume::consume,
        feed::{load, schedule},
        finish::write,
        gather::gather,
        tile::Shared,
    };
    use crate::{abi::PrefillParams, variant::Standard};

    macro_rules! entries {
        ($($name:ident: $shape:ident, $dtype:ty, $cap:literal, [$s:literal, $p:literal, $o:literal];)*) => {$(
            /// See the module; all sizes are the shape's.
            ///
            /// # Safety
            /// The parameters describe memory as [`PrefillParams`] says.
            #[kernel(max_threads = Shape::$shape.threads(), max_registers = Shape::$shape.registers()[0], tensor_maps)]
            pub unsafe fn $name(p: PrefillParams) {
                const SHAPE: Shape = Shape::$shape;
                const {
                    assert!($s == SHAPE.keys / 2 && $p == SHAPE.keys / 4 && $o == SHAPE.value_dim / 2);
                }
                let maps: *const TensorMap = param_address!($name, 0);
                let variant = Standard::<$cap>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                let thread = thread::thread_idx_x();
                let gathered = p.box_tokens == 1;
                // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
                unsafe {
                    if thread == 0 {
                        s.init(gathered);
                    }
                    barrier::bar_sync(0, SHAPE.threads());
                    if thread < 128 {
                        setmaxnreg::decrease::<{ SHAPE.registers()[1] }>();
                        match thread / 32 {
                            0 if gathered => gather::<false, { SHAPE.stages }>(&p, s),
                            1 if gathered => gather::<true, { SHAPE.value_stages }>(&p, s),
                            0 => load::<false, { SHAPE.stages }>(&p, maps.add(1), s),
                            1 => load::<true, { SHAPE.value_stages }>(&p, maps.add(2), s),
                            2 if thread == 64 => schedule(&p, maps, &variant, s),
                            3 => write(&p, maps.add(3), s),
                            _ => {}
                        }
                    } else {
                        setmaxnreg::increase::<{ SHAPE.registers()[2] }>();
                        consume::<$dtype, _, { SHAPE.stages }, { SHAPE.value_stages }, $s, $p, $o>(&p, &variant, s);
                    }
                }
            }
        )*};
    }

    entries! {
        prefill_128x128_d128_bf16: D128, Bf16, false, [64, 32, 64];
        prefill_128x96_d128_bf16_cap: D128_CAP, Bf16, true, [48, 24, 64];
        prefill_192x80_d128_bf16: D128_WIDE, Bf16, false, [40, 20, 64];
        prefill_128x80_d128_bf16_beside: D128_BESIDE, Bf16, false, [40, 20, 64];
        prefill_128x64_d128_bf16_beside: D128_GENTLE, Bf16, false, [32, 16, 64];
        prefill_128x128_d64_bf16: D64, Bf16, false, [64, 32, 32];
        prefill_128x128_d64_bf16_cap: D64, Bf16, true, [64, 32, 32];
        prefill_192x112_d64_bf16: D64_WIDE, Bf16, false, [56, 28, 32];
        prefill_128x128_d192_bf16: D192, Bf16, false, [64, 32, 64];
        prefill_128x80_d256_bf16: D256, Bf16, false, [40, 20, 128];
        prefill_128x64_d256_bf16_cap: D256_CAP, Bf16, true, [32, 16, 128];
        prefill_128x128_d128_f16: D128, F16, false, [64, 32, 64];
        prefill_128x96_d128_f16_cap: D128_CAP, F16, true, [48, 24, 64];
        prefill_192x80_d128_f16: D128_WIDE, F16, false, [40, 20, 64];
        prefill_128x80_d128_f16_beside: D128_BESIDE, F16, false, [40, 20, 64];
        prefill_128x64_d128_f16_beside: D128_GENTLE, F16, false, [32, 16, 64];
        prefill_128x128_d64_f16: D64, F16, false, [64, 32, 32];
        prefill_128x128_d64_f16_cap: D64, F16, true, [64, 32, 32];
        prefill_192x112_d64_f16: D64_WIDE, F16, false, [56, 28, 32];
        prefill_128x128_d192_f16: D192, F16, false, [64, 32, 64];
        prefill_128x80_d256_f16: D256, F16, false, [40, 20, 128];
        prefill_128x64_d256_f16_cap: D256_CAP, F16, true, [32, 16, 128];
    }
}

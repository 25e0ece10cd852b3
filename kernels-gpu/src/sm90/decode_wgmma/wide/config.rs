//! The table of these kernels, and the shared memory, threads and registers of each row.

use crate::{abi::WorkItem, common::cache, has};

/// The kernels, one per row and 16-bit float type: `decode_<rows>x<keys>_d<head dimension>_<element>[_cap]`.
#[doc(hidden)]
#[macro_export]
macro_rules! decode_wide_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension, flags, stages of keys and of values, CTAs per SM.
             64 x 128,  64, [],    2, 2;
             64 x 128,  64, [cap], 2, 2;
            128 x 128,  64, [],    4, 1;
            128 x 128,  64, [cap], 4, 1;
             64 x  64, 128, [],    2, 2;
             64 x  64, 128, [cap], 2, 2;
            128 x 128, 128, [],    2, 1;
            // A smaller block than without the soft cap, which needs registers.
            128 x  64, 128, [cap], 4, 1;
             64 x  64, 256, [],    2, 1;
             64 x  64, 256, [cap], 2, 1;
            128 x  32, 256, [],    2, 1;
            128 x  32, 256, [cap], 2, 1;
        }}
    };
}

/// Those for 8-bit keys and values: `decode_<rows>x<keys>_d<head dimension>_<element>_e4m3[_cap|_tok]`, and `…_e5m2`.
#[doc(hidden)]
#[macro_export]
macro_rules! decode_wide_8_bit_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension, flags, stages of keys and of values, CTAs per SM.
             64 x  64,  64, [e4m3],      3, 2;
             64 x  64,  64, [e4m3, cap], 3, 2;
             64 x  64,  64, [e4m3, tok], 3, 2;
             64 x  64,  64, [e5m2],      3, 2;
             64 x  64, 128, [e4m3],      2, 2;
             64 x  64, 128, [e4m3, cap], 2, 2;
             64 x  64, 128, [e4m3, tok], 2, 2;
             64 x  64, 128, [e5m2],      2, 2;
            128 x  64, 128, [e4m3],      4, 1;
            128 x  64, 128, [e4m3, cap], 4, 1;
            128 x  64, 128, [e4m3, tok], 4, 1;
            128 x  64, 128, [e5m2],      4, 1;
             64 x  64, 256, [e4m3],      2, 1;
             64 x  64, 256, [e4m3, cap], 2, 1;
             64 x  64, 256, [e4m3, tok], 2, 1;
             64 x  64, 256, [e5m2],      2, 1;
        }}
    };
}

/// The cache of a row of the tables.
#[must_use]
pub const fn of_flags(flags: &[&str]) -> u32 {
    if has(flags, "tok") {
        cache::E4M3_BY_TOKEN
    } else if has(flags, "e4m3") {
        cache::E4M3
    } else if has(flags, "e5m2") {
        cache::E5M2
    } else {
        cache::BITS16
    }
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{Shape, of_flags};
    use crate::{
        common::cache,
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal, $ctas:literal;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cap: has(&[$(stringify!($flag)),*], "cap"),
                ..row(
                    concat!("decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    Shape::of(of_flags(&[$(stringify!($flag)),*]), $rows, $keys, $dim, $stages, $ctas),
                )
            }),*]
        };
    }

    /// See the macro `decode_wide_table`.
    pub const ROWS: &[&[KernelInfo]] = crate::decode_wide_table!(list rows);
    /// See the macro `decode_wide_8_bit_table`.
    pub const ROWS_8_BIT: &[&[KernelInfo]] = crate::decode_wide_8_bit_table!(list rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            cache: cache::element(shape.cache),
            by_token: cache::by_token(shape.cache),
            loads: Loads::PagesOrRows,
            rows: shape.rows(),
            keys: shape.keys,
            head_dim: shape.head_dim,
            value_dim: shape.head_dim,
            multi_table: true,
            stages: shape.stages,
            threads: shape.threads(),
            registers: registers(shape.threads(), shape.ctas_per_sm),
            shared_bytes: shape.shared_bytes(),
            ctas_per_sm: shape.ctas_per_sm,
            ..KernelInfo::new(name, Family::DecodeWgmma, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::{ROWS, ROWS_8_BIT};

/// The compile-time configuration of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// What keys and values are: one of [`cache`]'s constants.
    pub cache: u32,
    /// Whether queries are converted from bf16 to f16, the type of the products.
    pub fits: bool,
    /// Consumer warpgroups, 64 rows each.
    pub consumers: u32,
    /// Keys in a block.
    pub keys: u32,
    /// Head dimension of queries, keys and values.
    pub head_dim: u32,
    /// Stages of keys, and as many of values.
    pub stages: u32,
    /// CTAs per SM. With two, one computes while the other waits.
    pub ctas_per_sm: u32,
}

impl Shape {
    /// A row of the table for 16-bit keys.
    #[cfg(target_arch = "nvptx64")]
    #[must_use]
    pub const fn new(rows: u32, keys: u32, head_dim: u32, stages: u32, ctas_per_sm: u32) -> Self {
        Self::of(cache::BITS16, rows, keys, head_dim, stages, ctas_per_sm)
    }

    /// A row of a table.
    #[must_use]
    pub const fn of(
        cache: u32,
        rows: u32,
        keys: u32,
        head_dim: u32,
        stages: u32,
        ctas_per_sm: u32,
    ) -> Self {
        Self {
            cache,
            fits: false,
            consumers: rows / 64,
            keys,
            head_dim,
            stages,
            ctas_per_sm,
        }
    }

    /// Rows of a tile.
    #[must_use]
    pub const fn rows(&self) -> u32 {
        64 * self.consumers
    }

    /// Threads of a CTA: the producer warpgroup, the consumers and, for 8-bit keys, the converting warpgroup.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        128 * (self.consumers + 1 + self.converts() as u32)
    }

    /// Registers of a producer thread, a converting thread and a consumer thread. Their total is at most what the CTA
    /// gets at launch.
    #[cfg(target_arch = "nvptx64")]
    #[must_use]
    pub const fn registers(&self) -> [u32; 3] {
        match (self.converts(), self.consumers, self.ctas_per_sm) {
            (false, 1, 2) => [56, 24, 200],
            (false, 2, 1) => [56, 24, 224],
            (true, 1, 2) => [48, 40, 152],
            (true, 1, 1) => [88, 88, 240],
            (true, 2, 1) => [64, 48, 200],
            // No `setmaxnreg`: every thread gets the maximum at launch.
            _ => [248; 3],
        }
    }

    /// Whether keys and values have 8 bits: a warpgroup converts each block to 16 bits before its products.
    #[must_use]
    pub const fn converts(&self) -> bool {
        !cache::is_16_bits(self.cache)
    }

    /// Converted blocks of keys, and as many of values. Two warpgroups of consumers share them: with one block, the
    /// conversion of the next would wait for both.
    pub(super) const fn converted_stages(&self) -> u32 {
        self.converts() as u32 * self.consumers
    }

    /// Threads that convert a block: the whole converting warpgroup or, with two converted blocks, half of it, for keys or
    /// for values. The fence after each block takes longer than its conversion, and the halves wait for theirs at the same
    /// time.
    #[cfg(target_arch = "nvptx64")]
    pub(super) const fn converting_threads(&self) -> u32 {
        128 / self.converted_stages()
    }

    /// Bytes of a key of one head.
    pub(super) const fn row_bytes(&self) -> u32 {
        self.head_dim * cache::bytes(self.cache)
    }

    /// Bytes of a stage.
    pub(super) const fn block_bytes(&self) -> u32 {
        self.keys * self.row_bytes()
    }

    /// Bytes of a converted block; 0 if there is none.
    pub(super) const fn converted_bytes(&self) -> u32 {
        if self.converts() {
            self.keys * self.head_dim * 2
        } else {
            0
        }
    }

    /// Bytes of a slab of queries, 64 columns.
    pub(super) const fn slab_bytes(&self) -> u32 {
        self.rows() * 128
    }

    pub(super) const fn query_bytes(&self) -> u32 {
        self.head_dim / 64 * self.slab_bytes()
    }

    /// Order in shared memory: queries of two units, converted keys and values, key stages, value stages, rows of the
    /// units, their visible keys, their factors, units, runs, masks, barriers.
    pub(super) const fn converted_offset(&self) -> u32 {
        2 * self.query_bytes()
    }

    pub(super) const fn keys_offset(&self) -> u32 {
        self.converted_offset() + 2 * self.converted_stages() * self.converted_bytes()
    }

    pub(super) const fn values_offset(&self) -> u32 {
        self.keys_offset() + self.stages * self.block_bytes()
    }

    pub(super) const fn rows_offset(&self) -> u32 {
        self.values_offset() + self.stages * self.block_bytes()
    }

    pub(super) const fn seen_offset(&self) -> u32 {
        self.rows_offset() + 2 * self.rows() * 16
    }

    pub(super) const fn factors_offset(&self) -> u32 {
        self.seen_offset() + 2 * self.rows() * 8
    }

    /// Bytes of a unit's factors: for each token the scales of keys and of values, and for each row the factor that
    /// undoes its conversion to f16.
    pub(super) const fn factor_bytes(&self) -> u32 {
        if self.converts() { self.rows() * 12 } else { 0 }
    }

    pub(super) const fn units_offset(&self) -> u32 {
        self.factors_offset() + 2 * self.factor_bytes()
    }

    pub(super) const fn runs_offset(&self) -> u32 {
        self.units_offset() + 2 * UNIT_BYTES
    }

    pub(super) const fn masks_offset(&self) -> u32 {
        self.runs_offset() + 2 * WorkItem::MAX_RUNS * RUN_BYTES
    }

    /// Bytes of a block's mask: a vector of four words, two words per 8 keys and, where each token has scales,
    /// three numbers for each key.
    pub(super) const fn mask_bytes(&self) -> u32 {
        16 + self.keys + self.keys * 12 * cache::by_token(self.cache) as u32
    }

    /// Masks: one for each stage of keys. A stage of 8-bit keys is free as soon as they are converted, which tells that the
    /// products of the block that was converted to the same place are done: the consumers may still need the masks from that
    /// block on.
    pub(super) const fn masks(&self) -> u32 {
        self.stages + self.converted_stages() + self.converts() as u32
    }

    /// The mask after this one.
    #[cfg(target_arch = "nvptx64")]
    pub(super) const fn next_mask(&self, mask: u32) -> u32 {
        if mask + 1 == self.masks() {
            0
        } else {
            mask + 1
        }
    }

    pub(super) const fn barriers_offset(&self) -> u32 {
        self.masks_offset() + self.masks() * self.mask_bytes()
    }

    /// Dynamic shared memory.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.barriers_offset() + 8 * self.barriers()
    }

    /// Barriers: those of the CTA, of each stage, and of the converted keys and values.
    pub(super) const fn barriers(&self) -> u32 {
        BARRIERS + 4 * self.stages + 4 * self.converted_stages()
    }
}

/// Bytes of a unit in shared memory: two vectors of four words.
pub(super) const UNIT_BYTES: u32 = 32;

/// Bytes of a run in shared memory, likewise.
pub(super) const RUN_BYTES: u32 = 32;

/// Barriers beside those of the stages.
pub(super) const BARRIERS: u32 = 11;

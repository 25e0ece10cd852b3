//! One compilation of the kernels for each instruction set, chosen at run time.

use std::ops::Range;

use kernels_gpu::{state::Softmax, variant::Variant};

#[cfg(target_arch = "x86_64")]
use super::simd::{Avx2, Avx512};
use super::{
    narrow::inner::{self as narrow, Logits},
    simd::{Portable, Simd},
    tile::{KEYS, TileRows},
    unit::{PoolRows, Unit},
    wide::inner::{self as wide, Block},
};

/// An instruction set for which the kernels are compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isa {
    /// Vectors of 16.
    #[cfg(target_arch = "x86_64")]
    Avx512,
    /// Vectors of 8.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// The baseline of the target. On AArch64 that is vectors of 4 with fused multiply-add.
    Portable,
}

/// The kernels that do not depend on the variant.
pub(super) struct Kernels {
    /// Rows of a pool as f32.
    pub(super) load: fn(&PoolRows<'_>, &mut [f32]),
    /// Ascending by the number of rows that they are for.
    pub(super) narrow: [Narrow; 4],
    /// Ascending by the rows of their blocks.
    pub(super) wide: [Wide; 2],
}

/// Kernels for up to `rows` rows. See [`narrow`](super::narrow).
pub(super) struct Narrow {
    pub(super) rows: usize,
    /// Queries, keys, products.
    pub(super) products: fn(&[f32], &TileRows<'_>, &mut Logits),
    /// The state of a row, its logits.
    pub(super) weigh: fn(&mut Softmax, &mut [f32; KEYS]) -> f32,
    /// Weights, factors of the outputs, values, outputs.
    #[allow(clippy::type_complexity, reason = "a name for it would say less")]
    pub(super) accumulate: fn(&Logits, &[f32; narrow::MAX_ROWS], &TileRows<'_>, &mut [f32]),
}

/// Kernels for blocks of `rows` rows. See [`wide`](super::wide).
pub(super) struct Wide {
    pub(super) rows: usize,
    /// Keys, head dimension, queries, products.
    pub(super) products: fn(&[f32], usize, &[f32], &mut [f32]),
    /// Rows and their states, keys, products, values, head dimension, outputs.
    #[allow(clippy::type_complexity, reason = "a name for it would say less")]
    pub(super) absorb: fn(&mut Block<'_>, Range<u32>, &mut [f32], &[f32], usize, &mut [f32]),
}

/// Compiles all kernels for an instruction set. For 1, 2, 4 and 8 rows, registers hold the products of `narrow` keys
/// and `outputs` vectors of each output. For a block of rows in `$vectors` vectors, they hold the products of `$wide`
/// keys.
macro_rules! compile {
    ($kernels:ident, $module:ident, $(features = $features:literal,)? simd = $simd:ident, new = $new:expr,
     narrow = [$k1:literal, $k2:literal, $k4:literal, $k8:literal],
     outputs = [$n1:literal, $n2:literal, $n4:literal, $n8:literal], wide = $wide:literal,
     vectors = [$small:literal, $large:literal]) => {
        mod $module {
            use super::*;

            $(#[target_feature(enable = $features)])?
            pub(super) fn load(rows: &PoolRows<'_>, to: &mut [f32]) {
                rows.load(to);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn narrow_products<const R: usize, const K: usize>(
                queries: &[f32], rows: &TileRows<'_>, logits: &mut Logits,
            ) {
                narrow::products::<_, R, K>($new, queries, rows, logits);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn narrow_weigh(softmax: &mut Softmax, logits: &mut [f32; KEYS]) -> f32 {
                narrow::weigh($new, softmax, logits)
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn narrow_accumulate<const R: usize, const N: usize>(
                weights: &Logits, factor: &[f32; narrow::MAX_ROWS], rows: &TileRows<'_>, outputs: &mut [f32],
            ) {
                narrow::accumulate::<_, R, N>($new, weights, factor, rows, outputs);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn wide_products<const N: usize>(
                keys: &[f32], dim: usize, queries: &[f32], logits: &mut [f32],
            ) {
                wide::products::<_, N, $wide>($new, keys, dim, queries, logits);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn wide_absorb<const N: usize>(
                block: &mut Block<'_>, keys: Range<u32>, logits: &mut [f32], values: &[f32], dim: usize,
                outputs: &mut [f32],
            ) {
                wide::absorb::<_, N, $wide>($new, block, keys, logits, values, dim, outputs);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn narrow_hooks<V: Variant>(
                unit: &Unit<'_, V>, kv_head: u32, keys: Range<u32>, logits: &mut Logits,
            ) {
                narrow::hooks(unit, kv_head, keys, logits);
            }

            $(#[target_feature(enable = $features)])?
            pub(super) fn wide_hooks<V: Variant>(
                unit: &Unit<'_, V>, kv_head: u32, block: &Block<'_>, keys: Range<u32>, logits: &mut [f32],
            ) {
                wide::hooks(unit, kv_head, block, keys, logits);
            }
        }

        // SAFETY (of all blocks): the table is reached through `Isa::kernels` only, and `Isa::detect` saw
        // every feature that the functions are compiled for. The portable ones need none.
        #[allow(unused_unsafe, reason = "without target features the functions are safe")]
        static $kernels: Kernels = Kernels {
            load: |rows, to| unsafe { $module::load(rows, to) },
            narrow: [
                compile!(@narrow $module, 1, $k1, $n1),
                compile!(@narrow $module, 2, $k2, $n2),
                compile!(@narrow $module, 4, $k4, $n4),
                compile!(@narrow $module, 8, $k8, $n8),
            ],
            wide: [compile!(@wide $module, $simd, $small), compile!(@wide $module, $simd, $large)],
        };
    };
    (@narrow $module:ident, $rows:literal, $keys:literal, $outputs:literal) => {
        Narrow {
            rows: $rows,
            products: |q, keys, logits| unsafe {
                $module::narrow_products::<$rows, $keys>(q, keys, logits)
            },
            weigh: |softmax, logits| unsafe { $module::narrow_weigh(softmax, logits) },
            accumulate: |weights, factor, values, out| unsafe {
                $module::narrow_accumulate::<$rows, $outputs>(weights, factor, values, out)
            },
        }
    };
    (@wide $module:ident, $simd:ident, $vectors:literal) => {
        Wide {
            rows: $vectors * $simd::LANES,
            products: |k, dim, q, to| unsafe { $module::wide_products::<$vectors>(k, dim, q, to) },
            absorb: |block, keys, logits, v, dim, out| unsafe {
                $module::wide_absorb::<$vectors>(block, keys, logits, v, dim, out)
            },
        }
    };
}

// SAFETY (of `new`): called in functions that are compiled for the features.
#[cfg(target_arch = "x86_64")]
compile!(
    AVX512,
    avx512,
    features = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
    simd = Avx512,
    new = unsafe { Avx512::new() },
    narrow = [8, 4, 4, 2],
    outputs = [8, 8, 4, 2],
    wide = 8,
    vectors = [1, 2]
);
#[cfg(target_arch = "x86_64")]
compile!(
    AVX2,
    avx2,
    features = "avx2,fma",
    simd = Avx2,
    new = unsafe { Avx2::new() },
    narrow = [8, 4, 2, 1],
    outputs = [4, 4, 2, 1],
    wide = 4,
    vectors = [1, 2]
);
compile!(
    PORTABLE,
    portable,
    simd = Portable,
    new = Portable,
    narrow = [4, 2, 1, 1],
    outputs = [2, 2, 2, 2],
    wide = 4,
    vectors = [1, 2]
);

impl Isa {
    pub(super) fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            let avx2 = has!("avx2") && has!("fma");
            if avx2 && has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                return Self::Avx512;
            }
            if avx2 {
                return Self::Avx2;
            }
        }
        Self::Portable
    }

    pub(super) const fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => "AVX-512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => "AVX2",
            Self::Portable => "portable",
        }
    }

    pub(super) fn kernels(self) -> &'static Kernels {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => &AVX512,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => &AVX2,
            Self::Portable => &PORTABLE,
        }
    }

    /// Calls a variant's hooks on the products of a few rows with some keys.
    pub(super) fn narrow_hooks<V: Variant>(
        self,
        unit: &Unit<'_, V>,
        kv_head: u32,
        keys: Range<u32>,
        logits: &mut Logits,
    ) {
        match self {
            // SAFETY: `detect` saw every feature that the function is compiled for.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::narrow_hooks(unit, kv_head, keys, logits) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::narrow_hooks(unit, kv_head, keys, logits) },
            Self::Portable => portable::narrow_hooks(unit, kv_head, keys, logits),
        }
    }

    /// Calls a variant's hooks on the products of a block of rows with some keys.
    pub(super) fn wide_hooks<V: Variant>(
        self,
        unit: &Unit<'_, V>,
        kv_head: u32,
        block: &Block<'_>,
        keys: Range<u32>,
        logits: &mut [f32],
    ) {
        match self {
            // SAFETY: `detect` saw every feature that the function is compiled for.
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => unsafe { avx512::wide_hooks(unit, kv_head, block, keys, logits) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => unsafe { avx2::wide_hooks(unit, kv_head, block, keys, logits) },
            Self::Portable => portable::wide_hooks(unit, kv_head, block, keys, logits),
        }
    }
}

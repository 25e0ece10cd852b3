//! The table of `mma` decode kernels, and the shared memory and threads of each row.

use super::layout::Layout;
use crate::{common::cache, has};

/// The kernels, one per row and 16-bit float type of queries and outputs:
/// `decode_<rows>x<keys>_d<head dimension>_<element>[_e4m3|_e5m2][_pair][_cap][_tok][_turn]`.
///
/// - Rows are those of one KV head.
/// - `pair` kernels process two KV heads at a time. Head dimensions 80 and 96 have no others; where pairs cannot be
///   read, the kernels of head dimension 128 run them padded.
/// - `cap` kernels have a soft cap.
/// - `tok` kernels have scales per token.
/// - `turn` kernels apply rotary embeddings to keys and queries.
#[doc(hidden)]
#[macro_export]
macro_rules! decode_mma_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension, flags.
             8 x 32,  64, [];
            16 x 32,  64, [];
             8 x 32,  64, [cap];
            16 x 32,  64, [cap];
             8 x 32,  64, [turn];
             8 x 32,  64, [e4m3];
             8 x 32,  64, [e4m3, pair];
             8 x 32,  64, [e4m3, pair, tok];
            16 x 32,  64, [e4m3];
             8 x 32,  64, [e4m3, cap];
            16 x 32,  64, [e4m3, cap];
             8 x 32,  64, [e4m3, tok];
            16 x 32,  64, [e4m3, tok];
             8 x 32,  64, [e5m2];
            16 x 32,  64, [e5m2];
             8 x 32,  80, [pair];
             8 x 32,  96, [pair];
             8 x 32, 128, [];
            16 x 32, 128, [];
             8 x 32, 128, [cap];
            16 x 32, 128, [cap];
             8 x 32, 128, [turn];
             8 x 32, 128, [e4m3];
            16 x 32, 128, [e4m3];
             8 x 32, 128, [e4m3, cap];
            16 x 32, 128, [e4m3, cap];
             8 x 32, 128, [e4m3, tok];
            16 x 32, 128, [e4m3, tok];
             8 x 32, 128, [e5m2];
            16 x 32, 128, [e5m2];
             8 x 32, 256, [];
             8 x 32, 256, [cap];
             8 x 32, 256, [e4m3];
            16 x 32, 256, [e4m3];
             8 x 32, 256, [e4m3, cap];
            16 x 32, 256, [e4m3, cap];
             8 x 32, 256, [e4m3, tok];
            16 x 32, 256, [e4m3, tok];
             8 x 32, 256, [e5m2];
            16 x 32, 256, [e5m2];
        }}
    };
}
#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{super::layout::KEYS, Shape, of_flags, shape, warps};
    use crate::{
        common::cache,
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op, Sm, registers},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cache: cache::element(of_flags(&[$(stringify!($flag)),*])),
                by_token: cache::by_token(of_flags(&[$(stringify!($flag)),*])),
                kv_heads: cache::kv_heads(of_flags(&[$(stringify!($flag)),*])),
                cap: has(&[$(stringify!($flag)),*], "cap"),
                turns: has(&[$(stringify!($flag)),*], "turn"),
                ..row(
                    concat!("decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    $rows,
                    $keys,
                    $dim,
                    of_flags(&[$(stringify!($flag)),*]),
                    shape::<
                        $dim,
                        { $rows * cache::kv_heads(of_flags(&[$(stringify!($flag)),*])) },
                        { warps($dim, $rows, of_flags(&[$(stringify!($flag)),*])) },
                        { of_flags(&[$(stringify!($flag)),*]) },
                    >(Sm::HOPPER_CTA),
                )
            }),*]
        };
    }

    /// See the macro `decode_mma_table`.
    pub const ROWS: &[&[KernelInfo]] = crate::decode_mma_table!(list rows);

    const fn row(
        name: &'static str,
        rows: u32,
        keys: u32,
        dim: u32,
        cache: u32,
        shape: Option<Shape>,
    ) -> KernelInfo {
        assert!(keys == KEYS, "all have chunks of one size");
        let Some(shape) = shape else {
            panic!("no CTA of this shape fits an SM");
        };
        KernelInfo {
            loads: match cache::kv_heads(cache) {
                1 => Loads::PagesOrRows,
                _ => Loads::Pages,
            },
            rows,
            keys,
            head_dim: dim,
            value_dim: dim,
            stages: shape.stages,
            run: shape.units / 2,
            threads: shape.threads,
            registers: registers(shape.threads, 1),
            shared_bytes: shape.shared_bytes,
            ctas_per_sm: 1,
            stands_in: cache::kv_heads(cache) > 1,
            ..KernelInfo::new(name, Family::DecodeMma, Arch::Sm90a, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

/// The producer warps of a CTA: the scheduler and the loaders.
#[must_use]
pub const fn producers(dim: u32, rows: u32, cache: u32) -> u32 {
    1 + super::layout::loaders(dim, warps(dim, rows, cache), cache)
}

/// The CTA for a head dimension and a row tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Threads.
    pub threads: u32,
    /// Stages of the ring.
    pub stages: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
    /// Units that can be in flight.
    pub units: u32,
}

/// The cache of a row of the table.
pub(super) const fn of_flags(flags: &[&str]) -> u32 {
    if has(flags, "turn") {
        cache::BITS16_TURNED
    } else if has(flags, "pair") && !has(flags, "e4m3") {
        cache::BITS16_PAIRS
    } else if has(flags, "pair") && has(flags, "tok") {
        cache::E4M3_PAIRS_BY_TOKEN
    } else if has(flags, "tok") {
        cache::E4M3_BY_TOKEN
    } else if has(flags, "pair") {
        cache::E4M3_PAIRS
    } else if has(flags, "e4m3") {
        cache::E4M3
    } else if has(flags, "e5m2") {
        cache::E5M2
    } else {
        cache::BITS16
    }
}

/// Consumer warps: as many as the registers allow, and no more than memory keeps busy.
#[must_use]
pub const fn warps(dim: u32, rows: u32, cache: u32) -> u32 {
    match (dim, rows, cache) {
        (_, _, cache::E4M3_PAIRS | cache::E4M3_PAIRS_BY_TOKEN) => 8,
        // Six stages fit beside the states of six warps, one stage per warp.
        (_, _, cache::BITS16_PAIRS) => 6,
        (64, _, cache::E4M3 | cache::E4M3_BY_TOKEN | cache::E5M2) => 12,
        (128, 16, cache::E4M3 | cache::E4M3_BY_TOKEN | cache::E5M2) => 12,
        (64 | 128, _, _) => 8,
        _ => 4,
    }
}

/// Blocks of 8 rows of a consumer warp: one of each KV head. (If a tile has 16 rows of a head, two warps share a chunk. One
/// warp for both would be half as many warps, because of its registers, and each waits for its own latencies.)
#[must_use]
pub const fn row_blocks(cache: u32) -> usize {
    cache::kv_heads(cache) as usize
}

/// Elements of a row that a lane writes. If the head dimension is no multiple of 64, the last lanes have none.
#[must_use]
pub const fn per_lane(dim: u32) -> usize {
    if dim.is_multiple_of(64) {
        dim as usize / 32
    } else {
        4
    }
}

/// The shape of a CTA with up to `bytes` of shared memory, for tiles of `ROWS` rows of all KV heads that it reads at a time; `None` if
/// that is too little memory.
#[must_use]
pub const fn shape<const DIM: u32, const ROWS: u32, const WARPS: u32, const CACHE: u32>(
    bytes: u32,
) -> Option<Shape> {
    let stages = Layout::<DIM, ROWS, WARPS, CACHE>::stages(bytes);
    if stages == 0 {
        return None;
    }
    Some(Shape {
        threads: (WARPS + super::layout::loaders(DIM, WARPS, CACHE) + 1) * 32,
        stages,
        shared_bytes: Layout::<DIM, ROWS, WARPS, CACHE>::bytes(stages),
        units: Layout::<DIM, ROWS, WARPS, CACHE>::UNITS,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const H200: u32 = crate::registry::Sm::HOPPER_CTA;

    #[test]
    fn kernels_fill_an_sm_of_hopper_and_no_more() {
        for row in ROWS.iter().copied().flatten() {
            let shared_bytes = row.shared_bytes;
            assert!(shared_bytes <= H200, "{}: {shared_bytes}", row.name);
            let cache = match (row.cache, row.kv_heads) {
                (None, 1) => cache::BITS16,
                (None, _) => cache::BITS16_PAIRS,
                (Some(_), 1) => cache::E4M3,
                (Some(_), _) => cache::E4M3_PAIRS,
            };
            let at_a_time = warps(row.head_dim, row.rows, cache) / (row.rows / 8);
            assert!(row.stages.is_multiple_of(at_a_time), "{}", row.name);
            let key = row.head_dim * cache::bytes(cache) * row.kv_heads;
            let in_flight = row.stages * super::super::layout::KEYS * 2 * key;
            let least = if row.head_dim == 80 { 120 } else { 128 };
            let said = format!("{}: {in_flight} bytes in flight", row.name);
            assert!(in_flight >= least << 10, "{said}");
        }
        assert_eq!(shape::<128, 8, 8, { cache::BITS16 }>(48 << 10), None);
    }
}

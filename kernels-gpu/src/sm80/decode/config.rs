//! The table of these kernels, and the shared memory and threads of each row.

use crate::{
    common::{cache, decode::KEYS},
    has,
};

/// The kernels, one per row and 16-bit float type of queries and outputs:
/// `sm80_decode_<rows>x<keys>_d<head dimension>_<element>[_e4m3|_e5m2][_cap][_tok][_one]`.
///
/// - `tok` kernels have scales per token.
/// - `one` kernels have one warp, for GPUs whose CTAs have too little shared memory for the others.
#[doc(hidden)]
#[macro_export]
macro_rules! sm80_decode_table {
    ($as:ident $then:ident $($arguments:tt)?) => {
        $crate::each_half! { $as $then $($arguments)? {
            // Rows × keys, head dimension, flags.
            16 x 32,  64, [];
            16 x 32,  64, [cap];
            16 x 32,  64, [e4m3];
            16 x 32,  64, [e4m3, cap];
            16 x 32,  64, [e4m3, tok];
            16 x 32,  64, [e5m2];
            16 x 32, 128, [];
            16 x 32, 128, [cap];
            16 x 32, 128, [e4m3];
            16 x 32, 128, [e4m3, cap];
            16 x 32, 128, [e4m3, tok];
            16 x 32, 128, [e5m2];
            16 x 32, 256, [];
            16 x 32, 256, [cap];
            16 x 32, 256, [one];
            16 x 32, 256, [cap, one];
            16 x 32, 256, [e4m3];
            16 x 32, 256, [e4m3, cap];
            16 x 32, 256, [e4m3, tok];
            16 x 32, 256, [e5m2];
        }}
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{KEYS, ROWS as TILE_ROWS, Shape, of_flags};
    use crate::{
        common::cache,
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op, registers},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cache: cache::element(of_flags(&[$(stringify!($flag)),*])),
                by_token: cache::by_token(of_flags(&[$(stringify!($flag)),*])),
                cap: has(&[$(stringify!($flag)),*], "cap"),
                ..row(
                    concat!("sm80_decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", stringify!($flag))*),
                    [$rows, $keys],
                    Shape {
                        head_dim: $dim,
                        cache: of_flags(&[$(stringify!($flag)),*]),
                        one_warp: has(&[$(stringify!($flag)),*], "one"),
                    },
                )
            }),*]
        };
    }

    /// See the macro `sm80_decode_table`.
    pub const TABLE: &[&[KernelInfo]] = crate::sm80_decode_table!(list rows);

    const fn row(name: &'static str, tile: [u32; 2], shape: Shape) -> KernelInfo {
        assert!(tile[0] == TILE_ROWS && tile[1] == KEYS, "all have one tile");
        KernelInfo {
            loads: Loads::Rows,
            rows: tile[0],
            keys: tile[1],
            head_dim: shape.head_dim,
            value_dim: shape.head_dim,
            takes_prompts: shape.head_dim == 256,
            smaller: shape.one_warp,
            threads: shape.threads(),
            registers: registers(shape.threads(), 2),
            shared_bytes: shape.shared_bytes(),
            ..KernelInfo::new(name, Family::Sm80Decode, Arch::Sm80, Op::Decode)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::TABLE;

/// The cache of a row of the table.
pub(super) const fn of_flags(flags: &[&str]) -> u32 {
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

/// Rows of a tile. Fewer would only save arithmetic, which is not the bottleneck.
pub const ROWS: u32 = 16;

/// The compile-time configuration of one kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Head dimension.
    pub head_dim: u32,
    /// The [cache].
    pub cache: u32,
    /// Whether a CTA has a single warp: of heads of 256 and 16 bits, two do not fit the 99 KiB that a CTA of Ada can have.
    pub one_warp: bool,
}

impl Shape {
    /// Warps of a CTA. With heads of 256 and 8 bits, three fit the 99 KiB that a CTA of Ada can have.
    #[must_use]
    pub const fn warps(&self) -> u32 {
        if self.one_warp {
            return 1;
        }
        match (self.head_dim, cache::is_16_bits(self.cache)) {
            (256, true) => 2,
            (256, false) => 3,
            _ => 4,
        }
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        self.warps() * 32
    }

    /// Blocks in a warp's ring: an odd number, of which all but one are in flight. Short rows need more blocks to have
    /// enough bytes in flight.
    #[must_use]
    pub const fn ring(&self) -> u32 {
        if self.row_bytes() <= 128 { 5 } else { 3 }
    }

    /// Bytes of a key or a value.
    pub(super) const fn row_bytes(&self) -> u32 {
        self.head_dim * cache::bytes(self.cache)
    }

    /// Bytes of a block: the keys of a chunk, or its values.
    pub(super) const fn block_bytes(&self) -> u32 {
        KEYS * self.row_bytes()
    }

    /// Bytes of the scales of a chunk's keys and values.
    pub(super) const fn scale_bytes(&self) -> u32 {
        if cache::by_token(self.cache) {
            2 * KEYS * 4
        } else {
            0
        }
    }

    /// Chunks whose scales are in shared memory: those in flight, and the one that is computed.
    pub(super) const fn scaled_chunks(&self) -> u32 {
        self.ring() / 2 + 1
    }

    pub(super) const fn query_bytes(&self) -> u32 {
        ROWS * self.head_dim * 2
    }

    /// Whether the queries stay in shared memory. Otherwise they are loaded to registers, through the last block of the
    /// ring.
    pub(super) const fn queries_stay(&self) -> bool {
        self.head_dim == 256
    }

    /// Shared memory of a warp: ring, queries if they stay, scales if tokens have some, and a
    /// [`QueryRow`](crate::abi::QueryRow) per row.
    pub(in crate::sm80) const fn warp_bytes(&self) -> u32 {
        let queries = if self.queries_stay() {
            self.query_bytes()
        } else {
            0
        };
        let scales = self.scaled_chunks() * self.scale_bytes();
        self.ring() * self.block_bytes() + queries + scales + ROWS * 16
    }

    /// Dynamic shared memory: that of the warps, and the next unit of each.
    #[must_use]
    pub const fn shared_bytes(&self) -> u32 {
        self.warps() * self.warp_bytes() + 16
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shapes() -> impl Iterator<Item = Shape> {
        let caches = [
            cache::BITS16,
            cache::E4M3,
            cache::E4M3_BY_TOKEN,
            cache::E5M2,
        ];
        let of = move |head_dim| {
            caches.map(|cache| Shape {
                head_dim,
                cache,
                one_warp: false,
            })
        };
        let one_warp = Shape {
            head_dim: 256,
            cache: cache::BITS16,
            one_warp: true,
        };
        let all = [64, 128, 256].into_iter().flat_map(of);
        all.chain([one_warp])
    }

    #[test]
    fn every_gpu_from_ampere_on_holds_the_kernels() {
        for shape in shapes() {
            // Two CTAs fit on an SM of Hopper, one on Ada.
            assert!(2 * (shape.shared_bytes() + 1024) <= 228 << 10, "{shape:?}");
            let on_ada = shape.shared_bytes() <= 99 << 10;
            assert_eq!(
                on_ada,
                shape.row_bytes() < 512 || shape.one_warp,
                "{shape:?}"
            );
        }
    }

    #[test]
    fn a_state_fits_the_ring() {
        for shape in shapes() {
            let state = ROWS * (shape.head_dim + 4) * 4 + ROWS * 4;
            assert!(state <= shape.ring() * shape.block_bytes());
            assert!(shape.queries_stay() || shape.query_bytes() <= shape.block_bytes());
            assert!(shape.warp_bytes().is_multiple_of(128));
        }
    }
}

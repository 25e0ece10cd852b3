//! The kernel entry points.

use cuda_std::prelude::*;

use super::{
    config::{of_flags, per_lane, producers, row_blocks, warps},
    roles::run,
};
use crate::{
    abi::DecodeParams,
    common::{cache::kv_heads, half, variant::Standard},
    has,
};

macro_rules! entries {
    ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*];)* }) => { $( const _: () = {
        /// See [`run`].
        ///
        /// # Safety
        /// The parameters describe memory as [`DecodeParams`] says.
        #[kernel(
            name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
            max_threads = (warps($dim, $rows, of_flags(&[$(stringify!($flag)),*])) + producers($dim, $rows, of_flags(&[$(stringify!($flag)),*]))) * 32,
            min_blocks = 1,
            tensor_maps = maps
        )]
        pub unsafe fn entry(params: DecodeParams) {
            const CAP: bool = has(&[$(stringify!($flag)),*], "cap");
            const CACHE: u32 = of_flags(&[$(stringify!($flag)),*]);
            // SAFETY: the caller's promise.
            unsafe {
                run::<
                    half::$half, Standard<CAP>, $dim, { $rows * kv_heads(CACHE) }, { warps($dim, $rows, CACHE) }, CACHE,
                    { $dim / 16 }, { row_blocks(CACHE) }, { per_lane($dim) },
                >(&params, maps, Standard(params.attention.variant));
            }
        }
    }; )* };
}

crate::decode_mma_table!(items entries);

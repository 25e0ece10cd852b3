//! Shared parts of the kernels for 656-byte keys: the layout of a key, the loader warps, table rows and entries.

use super::config::VALUE_DIM;
#[cfg(not(target_arch = "nvptx64"))]
use crate::registry::{Element, KernelInfo, Loads};

/// Bytes of a key with its scales: 512 e4m3 numbers, 4 f32 scales, 64 bf16 elements (the RoPE part).
pub(super) const ROW_BYTES: u32 = 656;
/// Groups of 128 columns, with one scale each.
pub(super) const GROUPS: u32 = VALUE_DIM / 128;
/// Offsets in a key of the scales and of the 16-bit elements.
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_SCALES: u32 = VALUE_DIM;
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_ROPE: u32 = ROW_SCALES + GROUPS * 4;

/// Keys that a loader brings at a time, to one place (stage).
pub(super) const KEYS: u32 = 32;
/// Places per block, and keys per block.
pub(super) const PARTS: u32 = 2;
pub(super) const BLOCK: u32 = PARTS * KEYS;

/// Loader warps, which take 32 keys in turn; with the scheduler warp they form the producer warpgroup.
#[cfg(target_arch = "nvptx64")]
pub(super) const LOADERS: u32 = 3;

/// A registry table of such kernels, from the `Offsets` and `THREADS` in scope.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! rows {
    ($($rows:literal x $keys:literal in $stages:literal;)*) => {
        &[$($crate::registry::KernelInfo {
            rows: $rows,
            keys: $keys,
            stages: $stages,
            shared_bytes: Offsets::new($stages).end,
            ..$crate::sm90::mla::keys_656::row(
                concat!("mla_656_", $rows, "x", $keys, "_bf16"),
                THREADS,
            )
        }),*]
    };
}
#[cfg(not(target_arch = "nvptx64"))]
pub(super) use rows;

/// The fields that all rows of the tables share.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) const fn row(name: &'static str, threads: u32) -> KernelInfo {
    KernelInfo {
        loads: Loads::Rows,
        element: Element::Bf16,
        cache: Some(Element::E4m3),
        ..super::config::row(name, threads)
    }
}

/// Entries of such kernels. In the producer warpgroup one warp claims units and three load keys; all other warps
/// consume. A macro, because a function taking these parts as closures was not inlined, and its data went through local
/// memory. It expects in scope: `Shared`, `THREADS`, `REGISTERS`, and the functions `prefetch` (run first by all
/// threads), `claim` and `consume`.
#[cfg(target_arch = "nvptx64")]
macro_rules! entries {
    ($($rows:literal x $keys:literal in $stages:literal;)*) => { $( const _: () = {
        /// See the module's documentation.
        ///
        /// # Safety
        /// The parameters describe memory as [`LatentParams`](crate::abi::LatentParams) says.
        #[::cuda_std::prelude::kernel(
            name = ["mla_656_", $rows, "x", $keys, "_bf16"],
            max_threads = THREADS,
            min_blocks = 1,
            tensor_maps = maps
        )]
        pub unsafe fn entry(p: $crate::abi::LatentParams) {
            use ::cuda_std::{barrier, griddep, setmaxnreg, shared, thread};
            use $crate::{
                common::{decode::produce::Header, variant::Standard},
                sm90::{follow, mla::{config::FEEDERS, load::load_656}},
            };
            let variant = Standard::<false>(p.attention.variant);
            let s = Shared::<$stages> { base: shared::dynamic_shared_address() };
            let warp = thread::thread_idx_x() / 32;
            // SAFETY: the launch guarantees the parameters; roles are assigned to whole warps and warpgroups.
            unsafe {
                let first = match warp {
                    0 => Header::first(&p.attention, p.tiles),
                    _ => Header::EMPTY,
                };
                prefetch(maps);
                s.init();
                barrier::bar_sync(0, THREADS);
                follow(p.early);
                // Dependent launch: CTAs of the merge kernel may already wait on SMs that this grid has left.
                griddep::launch_dependents();
                if warp < FEEDERS / 32 {
                    setmaxnreg::decrease::<{ REGISTERS[0] }>();
                    match warp {
                        0 => claim(&p, maps, s, first),
                        _ => load_656(&p, s, warp - 1),
                    }
                } else {
                    setmaxnreg::increase::<{ REGISTERS[1] }>();
                    consume(&p, &variant, s);
                    // A grid that waits for the end of this one also relies on the end of the grid before it.
                    griddep::wait();
                }
            }
        }
    }; )* };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use entries;

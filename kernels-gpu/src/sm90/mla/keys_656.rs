//! What the kernels of keys of 656 bytes have in common: how a key is stored, which warps bring keys, rows of the tables and
//! entries.

use super::config::VALUE_DIM;
#[cfg(not(target_arch = "nvptx64"))]
use crate::registry::{Element, KernelInfo, Loads};

/// Bytes of a key that carries its scales: numbers of 8 bits, scales, elements of 16.
pub(super) const ROW_BYTES: u32 = 656;
/// Groups of columns that have a scale each.
pub(super) const GROUPS: u32 = VALUE_DIM / 128;
/// Where the scales and the elements of 16 bits begin.
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_SCALES: u32 = VALUE_DIM;
#[cfg(target_arch = "nvptx64")]
pub(super) const ROW_ROPE: u32 = ROW_SCALES + GROUPS * 4;

/// Keys that a loader brings together, to one place.
pub(super) const KEYS: u32 = 32;
/// Places of a block, and its keys.
pub(super) const PARTS: u32 = 2;
pub(super) const BLOCK: u32 = PARTS * KEYS;

/// Warps that bring keys, which take 32 keys in turn; with the one that claims units they are the warpgroup that feeds.
#[cfg(target_arch = "nvptx64")]
pub(super) const LOADERS: u32 = 3;
/// Threads that feed.
pub(super) const FEEDERS: u32 = 128;

/// A table of such kernels for the registry, by the `Offsets` and `THREADS` that are in scope.
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

/// What all rows of the tables have in common.
#[cfg(not(target_arch = "nvptx64"))]
pub(super) const fn row(name: &'static str, threads: u32) -> KernelInfo {
    KernelInfo {
        loads: Loads::Rows,
        element: Element::Bf16,
        cache: Some(Element::E4m3),
        ..super::config::row(name, threads)
    }
}

/// Entries of such kernels: of the warpgroup that feeds, a warp claims units and the others bring keys; all other warps compute.
/// It is a macro because a function that takes these parts as closures was not inlined: what is computed went through local
/// memory. In scope are `Shared`, `THREADS`, `REGISTERS`, and the functions `prefetch`, which all threads run first, `claim`
/// and `consume`.
#[cfg(target_arch = "nvptx64")]
macro_rules! entries {
    ($($rows:literal x $keys:literal in $stages:literal;)*) => { $( const _: () = {
        /// See the module.
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
                common::variant::Standard,
                sm90::mla::{keys_656::FEEDERS, load::load_656},
            };
            let variant = Standard::<false>(p.attention.variant);
            let s = Shared::<$stages> { base: shared::dynamic_shared_address() };
            let warp = thread::thread_idx_x() / 32;
            // SAFETY: the launch vouches for the parameters; warps and warpgroups have their roles as a whole.
            unsafe {
                prefetch(maps);
                s.init();
                barrier::bar_sync(0, THREADS);
                // The merging kernel may wait on SMs that this one has left.
                griddep::launch_dependents();
                if warp < FEEDERS / 32 {
                    setmaxnreg::decrease::<{ REGISTERS[0] }>();
                    match warp {
                        0 => claim(&p, maps, s),
                        _ => load_656(&p, s, warp - 1),
                    }
                } else {
                    setmaxnreg::increase::<{ REGISTERS[1] }>();
                    consume(&p, &variant, s);
                    // A grid that waits for the end of this one relies on the end of the one before it, too.
                    griddep::wait();
                }
            }
        }
    }; )* };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use entries;

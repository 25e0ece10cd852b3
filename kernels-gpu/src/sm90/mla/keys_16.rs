//! Shared parts of the kernels for 16-bit keys: table rows and entries.

/// How keys are loaded.
#[cfg(target_arch = "nvptx64")]
#[derive(Clone, Copy)]
pub(super) enum Keys {
    /// By TMA, with tensor maps.
    Pages,
    /// Key by key, with `cp.async`.
    Rows,
}

/// A registry table of such kernels. It expects in scope a function `own_row`: the fields that depend on the table, from
/// a kernel's name, rows, keys and stages.
#[cfg(not(target_arch = "nvptx64"))]
macro_rules! rows {
    ($half:ident $element:literal {
        $($kind:literal $rows:literal x $keys:literal in $stages:literal $loads:ident $($pieces:ident)?;)*
    }) => {
        &[$($crate::registry::KernelInfo {
            loads: $crate::registry::Loads::$loads,
            stands_in: matches!($crate::registry::Loads::$loads, $crate::registry::Loads::Rows)
                || !concat!($(stringify!($pieces))?).is_empty(),
            merges_pieces: !concat!($(stringify!($pieces))?).is_empty(),
            element: $crate::registry::Element::$half,
            rows: $rows,
            keys: $keys,
            stages: $stages,
            ..own_row(
                concat!("mla_", $kind, $rows, "x", $keys, "_", $element),
                [$rows, $keys, $stages],
            )
        }),*]
    };
}
#[cfg(not(target_arch = "nvptx64"))]
pub(super) use rows;

/// Entries of such kernels. It expects in scope: `SharedOf`, the type of shared memory by rows, keys and stages;
/// `THREADS`; `SCHEDULER`, the warp that claims units; the functions `maps_of` (the number of tensor maps) and `consume`;
/// and the macro `produce` for the roles of the other warps. With a function for these the machine code is longer.
#[cfg(target_arch = "nvptx64")]
macro_rules! entries {
    ($half:ident $element:literal {
        $($kind:literal $rows:literal x $keys:literal in $stages:literal $loads:ident $($pieces:ident)?;)*
    }) => { $( const _: () = {
        /// Logits per consumer thread and block.
        const LOGITS: usize = $rows * $keys / 128;
        const KEYS: $crate::sm90::mla::keys_16::Keys = $crate::sm90::mla::keys_16::Keys::$loads;
        const PIECES: bool = !concat!($(stringify!($pieces))?).is_empty();
        const BY_ROWS: bool = matches!(KEYS, $crate::sm90::mla::keys_16::Keys::Rows);
        /// See the module's documentation.
        ///
        /// # Safety
        /// The parameters describe memory as [`LatentParams`](crate::abi::LatentParams) says.
        #[::cuda_std::prelude::kernel(
            name = ["mla_", $kind, $rows, "x", $keys, "_", $element],
            max_threads = THREADS,
            min_blocks = 1,
            tensor_maps = maps
        )]
        pub unsafe fn entry(p: $crate::abi::LatentParams) {
            use ::cuda_std::{barrier, griddep, shared, thread, tma};
            use $crate::{
                common::{decode::produce::Header, half, variant::Standard},
                sm90::{follow, mla::config::FEEDERS},
            };
            let variant = Standard::<false>(p.attention.variant);
            let s = SharedOf::<$rows, $keys, $stages> { base: shared::dynamic_shared_address() };
            let thread = thread::thread_idx_x();
            // SAFETY: the launch guarantees the parameters; roles are assigned to whole warps and warpgroups.
            unsafe {
                let first = match thread / 32 {
                    SCHEDULER => Header::first(&p.attention, p.tiles),
                    _ => Header::EMPTY,
                };
                if thread < maps_of(&p) {
                    tma::prefetch_tensor_map(maps.add(thread as usize));
                }
                s.init(KEYS);
                barrier::bar_sync(0, THREADS);
                follow(p.early);
                // Dependent launch: CTAs of the merge kernel may already wait on SMs that this grid has left.
                griddep::launch_dependents();
                if thread < FEEDERS {
                    produce!(thread / 32, KEYS, $keys; p, variant, maps, s, first);
                } else {
                    consume::<half::$half, _, _, _, LOGITS, { LOGITS / 2 }, BY_ROWS, PIECES>(
                        &p, &variant, s,
                    );
                    // A grid that waits for the end of this one also relies on the end of the grid before it.
                    griddep::wait();
                }
            }
        }
    }; )* };
}
#[cfg(target_arch = "nvptx64")]
pub(super) use entries;

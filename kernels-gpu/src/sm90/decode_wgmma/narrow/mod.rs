//! Decode of few rows, co-resident with a prefill on the same SM: little shared memory, 64 registers per thread.
//!
//! Both products are transposed (`swap_ab`): Sᵀ = K·Qᵀ and Oᵀ += Vᵀ·Pᵀ. Keys and elements of the head are on the
//! 64-wide M side of `wgmma`, the 8 or 16 rows on the N side, which goes down to 8. The tensor cores read keys and values
//! directly from shared memory, and a thread holds 12 accumulators for 8 rows. So one warpgroup keeps up with memory
//! while the prefill's products take most of the tensor cores' time.
//!
//! 8-bit keys and values (`products_8`) are the operand in registers: a lane reads its part of a fragment from shared
//! memory and converts it to f16.
//!
//! Units, rows, keys and values are loaded much as for [`wide`](super::wide) tiles, but all rows of a unit see one page
//! table: there are too few registers and too little shared memory for more.

#[cfg(target_arch = "nvptx64")]
mod by_rows;
mod config;
#[cfg(target_arch = "nvptx64")]
mod epilogue;
#[cfg(target_arch = "nvptx64")]
mod load;
#[cfg(target_arch = "nvptx64")]
mod mainloop;
#[cfg(target_arch = "nvptx64")]
mod products;
#[cfg(target_arch = "nvptx64")]
mod products_8;
#[cfg(target_arch = "nvptx64")]
mod queries_8;
#[cfg(target_arch = "nvptx64")]
mod scales;
#[cfg(target_arch = "nvptx64")]
mod shared;
#[cfg(target_arch = "nvptx64")]
mod softmax;

#[cfg(not(target_arch = "nvptx64"))]
pub use config::ROWS;

#[cfg(target_arch = "nvptx64")]
/// Bytes of a unit's keys still to be loaded when the next unit is claimed. A CTA that claims too early may take a
/// unit that another CTA could have started sooner; one that claims too late waits for ticket, item and queries, which
/// takes long as memory is busy here.
const PREFETCH_BYTES: u32 = 8 * (16 << 10);

#[cfg(all(target_arch = "nvptx64", feature = "decode_wgmma"))]
mod entries {
    use cuda_std::{barrier, griddep, prelude::*, setmaxnreg, shared, thread};

    use super::{
        super::super::follow,
        by_rows,
        config::{self, Config, REGISTERS_8, Shape, shape, table},
        load::{gather, gather_8, load},
        mainloop::consume,
        scales::load_scales,
        shared::{Shared, help_gather},
    };
    use crate::{
        abi::DecodeParams,
        common::{decode::produce::Header, half, variant::Standard},
    };

    macro_rules! entries {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $stages:literal;
        )* }) => { $( const _: () = {
            const REGISTERS: [u32; 3] = if SHAPE.scaled() { REGISTERS_8 } else { config::REGISTERS };
            const SHAPE: Shape = shape!($rows $keys $dim [$($flag)*] $stages);
            struct This;
            impl Config for This {
                type Half = half::$half;
                type Product = <[half::$half; SHAPE.bytes as usize] as super::config::Operand>::Product;
                const SHAPE: Shape = SHAPE;
            }

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`DecodeParams`] says.
            #[kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element $(, "_", $flag)*],
                max_threads = SHAPE.threads(),
                max_registers = REGISTERS[0],
                tensor_maps = maps
            )]
            pub unsafe fn entry(p: DecodeParams) {
                let variant = Standard::<false>(p.attention.variant);
                let s = Shared { base: shared::dynamic_shared_address(), shape: SHAPE };
                let thread = thread::thread_idx_x();
                // SAFETY: the caller's promise; every warp has one role, begun once the barriers are initialised.
                unsafe {
                    let first = match thread / 32 {
                        2 => Header::first(&p.attention, p.kv_heads),
                        _ => Header::EMPTY,
                    };
                    s.init(p.loads_rows());
                    barrier::bar_sync(0, SHAPE.threads());
                    follow(p.early);
                    // Dependent launch: CTAs of the merge kernel may already wait on SMs that this grid has left.
                    griddep::launch_dependents();
                    if thread < 128 {
                        setmaxnreg::decrease::<{ REGISTERS[1] }>();
                        match thread / 32 {
                            0 if p.loads_rows() => by_rows::load::<false, { SHAPE.stages }>(&p, s),
                            1 if p.loads_rows() => by_rows::load::<true, { SHAPE.value_stages }>(&p, s),
                            0 => load::<false, { SHAPE.stages }>(&p, maps, s),
                            1 => load::<true, { SHAPE.value_stages }>(&p, maps.add(1), s),
                            2 if SHAPE.scaled() => gather_8::<half::$half>(&p, s, first),
                            2 => gather(&p, s, first),
                            _ if SHAPE.by_token => load_scales(&p, s),
                            _ if SHAPE.scaled() => {}
                            _ => help_gather(&p, s),
                        }
                    } else {
                        setmaxnreg::increase::<{ REGISTERS[2] }>();
                        consume::<
                            This, _, { SHAPE.stages }, { SHAPE.value_stages }, { $keys / 64 }, { $dim / 64 }, { $rows / 2 },
                            { $rows / 4 },
                        >(&p, &variant, s);
                    }
                }
            }
        }; )* };
    }

    table!(items entries);
}

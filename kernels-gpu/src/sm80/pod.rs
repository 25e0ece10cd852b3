//! Prefill and decode in one kernel, as in the POD-Attention paper.
//!
//! A CTA is bound to an operation at run time. It takes a ticket from its SM's counter; the ticket selects prefill or
//! decode, so every SM runs both in proportion to the work. A counter per operation then selects the tile or unit. If
//! one operation has run out, the CTA takes the other.
//!
//! For a prefill all warps of the CTA compute one tile. For a decode the CTA runs several *virtual* CTAs of one warp
//! each, which use warp barriers only. CTAs take tickets until no work is left.
//!
//! Counters are zero before a launch, and the last CTA to leave zeroes them again: nothing has to be reset between
//! launches, also in a captured graph.

use super::{decode, prefill};
use crate::common::cache;

/// Words of a launch's counters: started CTAs of prefill and of decode, CTAs that have left, and tickets per SM.
pub const COUNTERS: u32 = 4 + SMS;

/// The number of ticket counters.
const SMS: u32 = 256;

/// Indices into the counters.
#[cfg(target_arch = "nvptx64")]
const LEFT: usize = 2;
#[cfg(target_arch = "nvptx64")]
const TICKETS: usize = 4;

/// Whether a ticket is for prefill, in a mix of `prefill` and `decode` CTAs. As in Bresenham's line algorithm, of the
/// first `t` tickets `⌈t · prefill / (prefill + decode)⌉` are, for every `t`.
#[must_use]
pub const fn is_prefill(prefill: u32, decode: u32, ticket: u32) -> bool {
    let (prefill, all) = (prefill as u64, prefill as u64 + decode as u64);
    if all == 0 {
        return false;
    }
    // Only the position within a period matters; the product then fits 64 bits.
    let ticket = ticket as u64 % all;
    ((ticket + 1) * prefill).div_ceil(all) > (ticket * prefill).div_ceil(all)
}

/// Bytes at the beginning of shared memory that hold a CTA's assignment: its operation and its index.
const ASSIGNMENT: u32 = 128;

/// The shapes of prefill and decode in one CTA; both have the same number of warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Shape of the prefill.
    pub prefill: prefill::Shape,
    /// Shape of the decode.
    pub decode: decode::Shape,
    /// CTAs that share an SM.
    pub ctas_per_sm: u32,
}

impl Shape {
    /// For a head dimension, and the number of keys in a block of the prefill.
    #[must_use]
    pub const fn new(head_dim: u32, keys: u32) -> Self {
        Self {
            prefill: prefill::Shape { keys, head_dim },
            decode: decode::Shape {
                head_dim,
                cache: cache::BITS16,
                one_warp: false,
            },
            ctas_per_sm: 2,
        }
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        self.prefill.threads()
    }

    /// The number of virtual decodes that a CTA with this much shared memory can run; `None` if the prefill needs more
    /// memory.
    #[must_use]
    pub const fn virtual_decodes(&self, shared_bytes: u32) -> Option<u32> {
        if shared_bytes < self.shared_bytes(0) {
            return None;
        }
        let fit = (shared_bytes - ASSIGNMENT) / self.decode.warp_bytes();
        let warps = self.decode.warps();
        Some(if fit < warps { fit } else { warps })
    }

    /// Dynamic shared memory with this many virtual decodes.
    #[must_use]
    pub const fn shared_bytes(&self, virtual_decodes: u32) -> u32 {
        let prefill = self.prefill.shared_bytes();
        let decode = virtual_decodes * self.decode.warp_bytes();
        ASSIGNMENT + if prefill > decode { prefill } else { decode }
    }
}

/// The kernels, one per row and 16-bit float type: `sm80_pod_<rows>x<keys>_d<head dimension>_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Rows × keys of the prefill, head dimension.
            128 x 128,  64;
            128 x  64, 128;
        }}
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::Shape;
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal;)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                ..row(concat!("sm80_pod_", $rows, "x", $keys, "_d", $dim, "_", $element), Shape::new($dim, $keys))
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);

    /// Shared memory is that of one prefill; a launch may ask for more, to run more virtual decodes.
    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            rows: shape.prefill.rows(),
            keys: shape.prefill.keys,
            head_dim: shape.prefill.head_dim,
            value_dim: shape.prefill.head_dim,
            threads: shape.threads(),
            registers: registers(shape.threads(), shape.ctas_per_sm),
            shared_bytes: shape.shared_bytes(0),
            ctas_per_sm: shape.ctas_per_sm,
            ..KernelInfo::new(name, Family::Pod, Arch::Sm80, Op::Pod)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{
        atomic::{self, AcqRel, Gpu, Relaxed},
        math,
        prelude::*,
        special,
    };

    use super::{ASSIGNMENT, LEFT, SMS, Shape, TICKETS, decode, is_prefill, prefill};
    use crate::{
        abi::PodParams,
        common::{
            cache,
            half::{self, Half},
            tile_counter,
            variant::{Standard, Variant},
        },
    };

    /// The operation of a CTA.
    const PREFILL: u32 = 0;
    const DECODE: u32 = 1;
    const NOTHING: u32 = 2;

    /// # Safety
    /// The counters are the launch's.
    #[inline(always)]
    unsafe fn count(p: &PodParams, counter: usize) -> u32 {
        // SAFETY: the caller's promise.
        unsafe { atomic::fetch_add::<Relaxed, Gpu, u32>((p.counters as *mut u32).add(counter), 1) }
    }

    /// Run by one thread: the CTA's next operation, and the index of its work.
    ///
    /// # Safety
    /// The parameters are the launch's.
    #[inline(always)]
    unsafe fn bind(p: &PodParams) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            // CTAs of each operation, and the first unit of the prefill.
            let (mut prefills, mut first) = (p.prefill.attention.units, 0);
            if p.prefill.attention.record != 0 {
                let [item, items] = tile_counter::load(p.prefill.attention.record);
                first = item * prefills;
                prefills *= items;
            }
            let decodes = p.decode.attention.of_this_plan().units;
            let decodes = math::div_u32(decodes + p.virtual_decodes - 1, p.virtual_decodes);
            let [mut part, mut other] = p.tickets;
            if part + other == 0 {
                [part, other] = [prefills, decodes];
            }
            let ticket = count(p, TICKETS + (special::smid() % SMS) as usize);
            let prefers_prefill = is_prefill(part, other, ticket);
            let mut turn = 0;
            while turn < 2 {
                let prefill = prefers_prefill == (turn == 0);
                let (op, most) = if prefill {
                    (PREFILL, prefills)
                } else {
                    (DECODE, decodes)
                };
                let index = if most > 0 { count(p, op as usize) } else { 0 };
                if index < most {
                    return [op, if prefill { first + index } else { index }];
                }
                turn += 1;
            }
            [NOTHING, 0]
        }
    }

    /// Zeroes the counters if this CTA is the last to leave.
    ///
    /// # Safety
    /// One thread of each CTA comes here, once.
    #[inline(always)]
    unsafe fn leave(p: &PodParams) {
        let counters = p.counters as *mut u32;
        // SAFETY: the last CTA's acquiring increment comes after all other CTAs have finished with the counters.
        unsafe {
            let before = atomic::fetch_add::<AcqRel, Gpu, u32>(counters.add(LEFT), 1);
            if before + 1 == thread::grid_dim_x() {
                let mut i = 0;
                while i < super::COUNTERS as usize {
                    ptr::store_u32(counters.add(i), 0);
                    i += 1;
                }
            }
        }
    }

    /// # Safety
    /// The launch's parameters are valid.
    #[inline(always)]
    unsafe fn pod<
        T: Half,
        V: Variant,
        const S: usize,
        const O: usize,
        const DIM_BLOCKS: usize,
        const PER_LANE: usize,
        const RING: usize,
    >(
        p: &PodParams,
        variant: &V,
        shape: Shape,
    ) {
        // Recomputed for each part of the work, to save a register.
        let base = || misc::opaque(shared::dynamic_shared_address());
        // SAFETY: the caller's promise; one thread takes the ticket for the CTA.
        unsafe {
            loop {
                if misc::opaque(thread::thread_idx_x()) == 0 {
                    let [op, index] = bind(p);
                    let assignment = base();
                    shared::store_u32(assignment, op);
                    shared::store_u32(assignment + 4, index);
                }
                thread::sync_threads();
                let assignment = base();
                let (op, index) = (
                    shared::load_u32(assignment),
                    shared::load_u32(assignment + 4),
                );
                if warp::warp_vote_any(warp::FULL_MASK, op == NOTHING) {
                    break;
                }
                // A vote tells ptxas that all lanes branch the same way.
                if warp::warp_vote_any(warp::FULL_MASK, op == DECODE) {
                    let warp = misc::opaque(thread::thread_idx_x()) / 32;
                    let s = decode::Shared {
                        base: base() + ASSIGNMENT,
                        shape: shape.decode,
                        warp,
                    };
                    let alone = decode::unit::Team {
                        first: warp,
                        size: 1,
                    };
                    let unit = index * p.virtual_decodes + warp;
                    if warp < p.virtual_decodes && unit < p.decode.attention.of_this_plan().units {
                        decode::mainloop::attend::<
                            T,
                            V,
                            { cache::BITS16 },
                            DIM_BLOCKS,
                            PER_LANE,
                            RING,
                        >(&p.decode, variant, s, alone, unit, || ());
                    }
                } else {
                    let s = prefill::tile::Shared {
                        base: base() + ASSIGNMENT,
                        shape: shape.prefill,
                    };
                    prefill::mainloop::attend::<T, V, S, O>(&p.prefill, variant, s, index, || ());
                }
                thread::sync_threads();
            }
            if misc::opaque(thread::thread_idx_x()) == 0 {
                leave(p);
            }
        }
    }

    macro_rules! entries {
        ($half:ident $element:literal { $($rows:literal x $keys:literal, $dim:literal;)* }) => { $( const _: () = {
            const SHAPE: Shape = Shape::new($dim, $keys);

            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`PodParams`] says.
            #[kernel(
                name = ["sm80_pod_", $rows, "x", $keys, "_d", $dim, "_", $element],
                max_threads = SHAPE.threads(),
                min_blocks = SHAPE.ctas_per_sm
            )]
            pub unsafe fn entry(p: PodParams) {
                let variant = Standard::<false>(p.prefill.attention.variant);
                // SAFETY: all threads; the launch guarantees the parameters.
                unsafe {
                    pod::<
                        half::$half, _, { $keys / 2 }, { $dim / 2 }, { $dim / 16 }, { $dim / 32 },
                        { SHAPE.decode.ring() as usize },
                    >(&p, &variant, SHAPE);
                }
            }
        }; )* };
    }

    table!(items entries);
}

#[cfg(test)]
mod tests;

//! Prefill and decode in one kernel: the paper's form of POD-Attention.
//!
//! A CTA does not know what it is for until it runs. It takes a ticket of the SM that it finds itself on, and the
//! ticket says prefill or decode, so that every SM has both in the proportion in which there is work; a counter
//! of the operation then says which part of it. Where one operation has run out, the CTA takes the other.
//!
//! A CTA of the prefill is a tile by all its warps. A CTA of the decode is several *virtual* ones, a warp each,
//! which have barriers of their warp only. CTAs take tickets until nothing is left.
//!
//! The counters are zero before a launch, and the CTA that leaves last makes them so again: nothing needs to be reset
//! between launches, in a captured graph or out of it.

use super::{decode, prefill};

/// Counters of a launch: CTAs begun of prefill and of decode, CTAs that have left, and tickets of each SM.
pub const COUNTERS: u32 = 4 + SMS;

/// SMs that have tickets of their own.
const SMS: u32 = 256;

/// The place of a [`COUNTERS`] word.
#[cfg(target_arch = "nvptx64")]
const LEFT: usize = 2;
#[cfg(target_arch = "nvptx64")]
const TICKETS: usize = 4;

/// Whether a ticket is for prefill, in a mix of `prefill` and `decode` CTAs. A line of Bresenham's: of the first
/// `t` tickets `⌈t · prefill / (prefill + decode)⌉` are, whatever `t`.
#[must_use]
pub const fn is_prefill(prefill: u32, decode: u32, ticket: u32) -> bool {
    let (prefill, all) = (prefill as u64, prefill as u64 + decode as u64);
    if all == 0 {
        return false;
    }
    // Only the place within a period matters; the product then fits 64 bits.
    let ticket = ticket as u64 % all;
    ((ticket + 1) * prefill).div_ceil(all) > (ticket * prefill).div_ceil(all)
}

/// Bytes at the beginning of shared memory that hold a CTA's assignment: its operation and its index.
const ASSIGNMENT: u32 = 128;

/// Shapes of the two in one CTA; they have the same number of warps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Of the prefill.
    pub prefill: prefill::Shape,
    /// Of the decode.
    pub decode: decode::Shape,
    /// CTAs that share an SM.
    pub ctas_per_sm: u32,
}

impl Shape {
    /// For heads of so many elements, and blocks of so many keys in the prefill.
    #[must_use]
    pub const fn new(head_dim: u32, keys: u32) -> Self {
        Self {
            prefill: prefill::Shape { keys, head_dim },
            decode: decode::Shape { head_dim },
            ctas_per_sm: 2,
        }
    }

    /// Threads of a CTA.
    #[must_use]
    pub const fn threads(&self) -> u32 {
        self.prefill.threads()
    }

    /// Decodes that a CTA with so many bytes of shared memory can run side by side; `None` where the prefill needs
    /// more.
    #[must_use]
    pub const fn virtual_decodes(&self, shared_bytes: u32) -> Option<u32> {
        if shared_bytes < self.shared_bytes(0) {
            return None;
        }
        let fit = (shared_bytes - ASSIGNMENT) / self.decode.warp_bytes();
        let warps = self.decode.warps();
        Some(if fit < warps { fit } else { warps })
    }

    /// Dynamic shared memory with so many of them.
    #[must_use]
    pub const fn shared_bytes(&self, virtual_decodes: u32) -> u32 {
        let prefill = self.prefill.shared_bytes();
        let decode = virtual_decodes * self.decode.warp_bytes();
        ASSIGNMENT + if prefill > decode { prefill } else { decode }
    }
}

/// The kernels, each of them for each 16-bit float: `sm80_pod_<rows>x<keys>_d<head dimension>_<element>`.
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

    /// Shared memory is what one prefill takes: a launch may ask for more, to run more decodes side by side.
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
            half::{self, Half},
            tile_counter,
            variant::{Standard, Variant},
        },
    };

    /// What a CTA is for.
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

    /// By one thread: what the CTA does next, and which part of it.
    ///
    /// # Safety
    /// The parameters are the launch's.
    #[inline(always)]
    unsafe fn bind(p: &PodParams) -> [u32; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            // CTAs of each operation; where the prefill's units begin.
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

    /// Makes the counters zero again, if the CTA is the last to leave.
    ///
    /// # Safety
    /// One thread of each CTA comes here, once.
    #[inline(always)]
    unsafe fn leave(p: &PodParams) {
        let counters = p.counters as *mut u32;
        // SAFETY: the last one's acquiring count comes after all others were done with the counters.
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
    /// The launch is as the host makes it.
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
        // Found anew for each part of the work: none of them has a register for it.
        let base = || misc::opaque(shared::dynamic_shared_address());
        // SAFETY: the caller's promise; one thread asks for all.
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
                // By a vote, so that ptxas knows all lanes to go the same way.
                if warp::warp_vote_any(warp::FULL_MASK, op == DECODE) {
                    let warp = misc::opaque(thread::thread_idx_x()) / 32;
                    let s = decode::Shared {
                        base: base() + ASSIGNMENT,
                        shape: shape.decode,
                        warp,
                    };
                    let alone = decode::mainloop::Team {
                        first: warp,
                        size: 1,
                    };
                    let unit = index * p.virtual_decodes + warp;
                    if warp < p.virtual_decodes && unit < p.decode.attention.of_this_plan().units {
                        decode::mainloop::attend::<T, V, DIM_BLOCKS, PER_LANE, RING>(
                            &p.decode,
                            variant,
                            s,
                            alone,
                            unit,
                            || (),
                        );
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

            /// See the module.
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
                // SAFETY: all threads; the launch vouches for the parameters.
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

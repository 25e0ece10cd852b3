//! A memory-bound and a compute-bound loop, alone or in one launch: the micro-benchmark of figure 7 in the
//! POD-Attention paper. How much of the shorter loop is hidden by the other depends on which blocks share an SM.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Bytes of shared memory of a block.
pub const SHARED: u32 = 8;

/// How the blocks of a launch are bound to the loops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Binding {
    /// All of them run the memory-bound loop.
    Memory = 0,
    /// All of them run the compute-bound loop.
    Compute = 1,
    /// Even blocks run the memory-bound loop, odd blocks the other; the hardware decides their placement.
    ByBlock = 2,
    /// A block reads its SM's id and takes the loop that the previous block on that SM did not take.
    BySm = 3,
}

/// The name of the kernel.
macro_rules! overlap {
    ($then:ident) => {
        $then! { "overlap_loops" }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{SHARED, THREADS};
    use crate::registry::{Arch, Family, KernelInfo, Op, registers};

    macro_rules! name {
        ($name:literal) => {
            $name
        };
    }

    /// The one kernel.
    pub const ROWS: &[KernelInfo] = &[KernelInfo {
        threads: THREADS,
        registers: registers(THREADS, 1),
        shared_bytes: SHARED,
        ..KernelInfo::new(
            overlap!(name),
            Family::Measure,
            Arch::Sm80,
            Op::MeasureOverlap,
        )
    }];
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{
        atomic::{self, Gpu, Relaxed},
        prelude::*,
        special,
    };

    use super::{Binding, THREADS};
    use crate::abi::LoopsParams;

    /// One block of one of the loops.
    ///
    /// # Safety
    /// The parameters describe memory as [`LoopsParams`] says; the launch has as many blocks as the binding
    /// needs.
    #[inline(always)]
    unsafe fn run(p: &LoopsParams) {
        let block = thread::block_idx_x();
        // SAFETY: the caller's promise.
        unsafe {
            let (compute, block) = match p.binding {
                b if b == Binding::Memory as u32 => (false, block),
                b if b == Binding::Compute as u32 => (true, block),
                b if b == Binding::ByBlock as u32 => (block % 2 == 1, block / 2),
                _ => bind(p),
            };
            if compute {
                multiply(p, block);
            } else {
                add(p, block);
            }
        }
    }

    /// Alternates on the SM while both loops have blocks left.
    #[inline(always)]
    unsafe fn bind(p: &LoopsParams) -> (bool, u32) {
        let assignment = shared::dynamic_shared_address();
        let counters = p.counters as *mut u32;
        // SAFETY: the launch's parameters are valid; one thread takes the ticket for the block.
        unsafe {
            if thread::thread_idx_x() == 0 {
                let on_sm = counters.add(2 + special::smid() as usize);
                let mut op = atomic::fetch_add::<Relaxed, Gpu, u32>(on_sm, 1) % 2;
                let mut block =
                    atomic::fetch_add::<Relaxed, Gpu, u32>(counters.add(op as usize), 1);
                if block >= p.blocks {
                    op ^= 1;
                    block = atomic::fetch_add::<Relaxed, Gpu, u32>(counters.add(op as usize), 1);
                }
                shared::store_u32(assignment, op);
                shared::store_u32(assignment + 4, block);
            }
            thread::sync_threads();
            (
                shared::load_u32(assignment) == 1,
                shared::load_u32(assignment + 4),
            )
        }
    }

    /// A thread's first element of its block's part of a loop, and the end of that part.
    #[inline(always)]
    fn part(p: &LoopsParams, elements: u32, block: u32) -> (u32, u32) {
        let each = elements.div_ceil(p.blocks);
        let begin = (block * each).min(elements);
        (begin + thread::thread_idx_x(), (begin + each).min(elements))
    }

    #[inline(always)]
    unsafe fn add(p: &LoopsParams, block: u32) {
        let [a, b, c] = p.memory;
        let (mut i, end) = part(p, p.elements, block);
        while i < end {
            let at = u64::from(i) * 4;
            // SAFETY: inside the arrays; only this thread accesses the element.
            unsafe {
                let sum = ptr::load_f32((a + at) as *const f32)
                    + ptr::load_f32((b + at) as *const f32)
                    + ptr::load_f32((c + at) as *const f32);
                ptr::store_f32((c + at) as *mut f32, sum);
            }
            i += THREADS;
        }
    }

    #[inline(always)]
    unsafe fn multiply(p: &LoopsParams, block: u32) {
        let (mut i, end) = part(p, p.products, block);
        while i < end {
            let at = (p.compute + u64::from(i) * 4) as *mut f32;
            // SAFETY: inside the array; only this thread accesses the element.
            unsafe {
                let mut x = ptr::load_f32(at);
                let mut round = 0;
                while round < p.rounds {
                    x *= p.factor;
                    round += 1;
                }
                ptr::store_f32(at, x);
            }
            i += THREADS;
        }
    }

    macro_rules! entry {
        ($name:literal) => {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`LoopsParams`] says; the launch has as many blocks as the binding
            /// needs.
            #[kernel(name = [$name], max_threads = THREADS)]
            pub unsafe fn entry(p: LoopsParams) {
                // SAFETY: the caller's promise.
                unsafe { run(&p) }
            }
        };
    }

    overlap!(entry);
}

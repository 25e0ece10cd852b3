//! Measures the hardware's attainable limits: the bandwidth of reading memory, and the rate of wgmma with operands in
//! shared memory. All published percentages of a limit refer to these.

/// Threads of a reading block.
pub const READERS: u32 = 512;

/// Bytes that a block reads at a time: 8 vectors per thread, all in flight at once.
pub const READ_TILE: u32 = READERS * 8 * 16;

/// Threads of a multiplying block: two warpgroups, enough to keep the tensor cores busy.
pub const MULTIPLIERS: u32 = 256;

/// Shared memory of a multiplying block: 128 × 64 and 256 × 64 numbers of 16 bits.
pub const MULTIPLY_SHARED: u32 = (128 + 256) * 128;

/// Operations per block and round: a product of 64 × 256 × 64 in each warpgroup.
pub const MULTIPLY_FLOPS: u64 = 2 * 2 * 64 * 256 * 64;

/// The names of the reading kernel and, below, of the multiplying one.
macro_rules! read {
    ($then:ident) => {
        $then! { "ceiling_read" }
    };
}
#[cfg(any(not(target_arch = "nvptx64"), target_feature = "sm_90a"))]
macro_rules! multiply {
    ($then:ident) => {
        $then! { "ceiling_multiply" }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{MULTIPLIERS, MULTIPLY_SHARED, READERS};
    use crate::registry::{Arch, Family, KernelInfo, Op, registers};

    macro_rules! name {
        ($name:literal) => {
            $name
        };
    }

    /// Both kernels.
    pub const ROWS: &[KernelInfo] = &[
        KernelInfo {
            threads: READERS,
            registers: registers(READERS, 1),
            ..KernelInfo::new(read!(name), Family::Measure, Arch::Sm80, Op::MeasureRead)
        },
        KernelInfo {
            threads: MULTIPLIERS,
            registers: registers(MULTIPLIERS, 1),
            shared_bytes: MULTIPLY_SHARED,
            ctas_per_sm: 1,
            ..KernelInfo::new(
                multiply!(name),
                Family::Measure,
                Arch::Sm90a,
                Op::MeasureProducts,
            )
        },
    ];
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{READ_TILE, READERS};
    use crate::abi::CeilingParams;

    /// Reads `count` tiles.
    ///
    /// # Safety
    /// `source` is readable, `sink` has four bytes to write.
    #[inline(always)]
    unsafe fn read_tiles(p: &CeilingParams) {
        let mut tile = thread::block_idx_x();
        let mut seen = 0;
        while tile < p.count {
            let first = p.source
                + u64::from(tile) * u64::from(READ_TILE)
                + u64::from(thread::thread_idx_x()) * 16;
            let mut vectors = [[0; 4]; 8];
            let mut i = 0;
            while i < 8 {
                let at = first + i as u64 * u64::from(READERS) * 16;
                // SAFETY: inside the tile.
                vectors[i] = unsafe { ptr::load_nc_u32x4(at as *const u32) };
                i += 1;
            }
            i = 0;
            while i < 8 {
                let [a, b, c, d] = vectors[i];
                seen ^= a ^ b ^ c ^ d;
                i += 1;
            }
            tile += thread::grid_dim_x();
        }
        // Practically never true; it keeps the compiler from removing the reads.
        if seen == 0x9E37_79B9 {
            // SAFETY: the caller's promise.
            unsafe { ptr::store_u32(p.sink as *mut u32, seen) };
        }
    }

    macro_rules! entry {
        ($name:literal) => {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`CeilingParams`] says.
            #[kernel(name = [$name], max_threads = READERS)]
            pub unsafe fn entry(p: CeilingParams) {
                // SAFETY: the caller's promise.
                unsafe { read_tiles(&p) }
            }
        };
    }

    read!(entry);
}

#[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
mod hopper {
    use cuda_std::{
        fence,
        prelude::*,
        wgmma::{self, Bf16, Descriptor, Swizzle},
    };

    use super::{MULTIPLIERS, MULTIPLY_SHARED};
    use crate::abi::CeilingParams;

    /// `count` rounds of products of the same matrices.
    ///
    /// # Safety
    /// `sink` has four bytes to write; the launch has the shared memory.
    #[inline(always)]
    unsafe fn rounds(p: &CeilingParams) {
        let base = shared::dynamic_shared_address();
        let thread = thread::thread_idx_x();
        // Numbers of both signs between ½ and 1: zeros would draw less power, and so run at higher clocks.
        let mut random = thread.wrapping_mul(0x9E37_79B9) | 1;
        let mut at = thread * 4;
        while at < MULTIPLY_SHARED {
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            // SAFETY: inside the shared memory.
            unsafe { shared::store_u32(base + at, random & 0x807F_807F | 0x3F00_3F00) };
            at += MULTIPLIERS * 4;
        }
        fence::proxy_async_shared();
        // SAFETY: all threads; the operands are written before the barrier and never change.
        unsafe {
            thread::sync_threads();
            let warpgroup = warp::warp_shuffle_idx(warp::FULL_MASK, thread / 128, 0, 32);
            let a = Descriptor::new(base + warpgroup * 64 * 128, 16, 1024, Swizzle::B128);
            let b = Descriptor::new(base + 128 * 128, 16, 1024, Swizzle::B128);
            let mut sums = [0.0_f32; 128];
            let mut round = 0;
            while round < p.count {
                wgmma::fence();
                wgmma::mma_ss::<Bf16, true, false, false, _>(&mut sums, a, b);
                wgmma::mma_ss::<Bf16, true, false, false, _>(
                    &mut sums,
                    a.advance(32),
                    b.advance(32),
                );
                wgmma::mma_ss::<Bf16, true, false, false, _>(
                    &mut sums,
                    a.advance(64),
                    b.advance(64),
                );
                wgmma::mma_ss::<Bf16, true, false, false, _>(
                    &mut sums,
                    a.advance(96),
                    b.advance(96),
                );
                wgmma::commit_group();
                wgmma::wait_group::<0>();
                wgmma::fence_operand(&mut sums);
                round += 1;
            }
            let mut sum = 0.0;
            let mut i = 0;
            while i < 128 {
                sum += sums[i];
                i += 1;
            }
            // Never true; it keeps the compiler from removing the products.
            if sum == 12345.678 {
                ptr::store_f32(p.sink as *mut f32, sum);
            }
        }
    }

    macro_rules! entry {
        ($name:literal) => {
            /// See the module's documentation.
            ///
            /// # Safety
            /// The parameters describe memory as [`CeilingParams`] says; the launch has the shared memory.
            #[kernel(name = [$name], max_threads = MULTIPLIERS, min_blocks = 1)]
            pub unsafe fn entry(p: CeilingParams) {
                // SAFETY: the caller's promise.
                unsafe { rounds(&p) }
            }
        };
    }

    multiply!(entry);
}

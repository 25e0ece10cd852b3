//! `rms_norm`: RMS norm of rows, with an optional residual added first.
//!
//! Memory-bound. A CTA keeps one row in registers between the sum of squares and the result, so each row is read once.
//! Threads have one vector of 16 bytes each, or more if rows are long or many: then fewer threads meet at the barrier,
//! and an SM has more rows in flight.

/// The largest number of threads of a block.
pub const MOST: u32 = 1024;

/// Shared memory of a block: one sum per warp.
pub const SHARED_BYTES: u32 = MOST / 32 * 4;

/// The kernels, one per row and 16-bit float type: `rms_norm_<vectors of a thread>_<element>`.
macro_rules! table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            1;
            2;
            4;
        }}
    };
}

/// The supported numbers of vectors per thread.
pub const VECTORS: [u32; 3] = [1, 2, 4];

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{MOST, SHARED_BYTES};
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal { $($vectors:literal;)* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                threads: MOST,
                registers: registers(MOST, 1),
                shared_bytes: SHARED_BYTES,
                ..KernelInfo::new(
                    concat!("rms_norm_", $vectors, "_", $element),
                    Family::Step,
                    Arch::Sm80,
                    Op::RmsNorm { vectors: $vectors },
                )
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[&[KernelInfo]] = table!(list rows);
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{math, prelude::*, shared};

    use super::MOST;
    use crate::{
        abi::NormParams,
        common::half::{self, Half},
        step::{at, begin, pack, squares, sum_of_lanes, unpack},
    };

    /// # Safety
    /// The parameters describe memory as [`NormParams`] says; each block has one row, and threads for all of its
    /// vectors.
    #[inline(always)]
    unsafe fn norm<T: Half, const VECTORS: usize>(p: &NormParams) {
        let (row, threads) = (u64::from(thread::block_idx_x()), thread::block_dim_x());
        let x_row = row * u64::from(p.x_token);
        let residual_row = row * u64::from(p.residual_token);
        let out_row = row * u64::from(p.out_token);
        let me = thread::thread_idx_x();
        let mut words = [[0; 4]; VECTORS];
        let mut weights = [[0; 4]; VECTORS];
        let mut i = 0;
        // SAFETY: vectors of the row; only this thread accesses each.
        unsafe {
            while i < VECTORS {
                let vector = me + i as u32 * threads;
                if vector < p.vectors {
                    words[i] = ptr::load_u32x4(at(p.x, x_row + u64::from(vector)) as *const u32);
                    weights[i] = ptr::load_nc_u32x4(at(p.weight, vector.into()) as *const u32);
                }
                i += 1;
            }
            if p.residual != 0 {
                let mut before = [[0; 4]; VECTORS];
                i = 0;
                while i < VECTORS {
                    let vector = me + i as u32 * threads;
                    if vector < p.vectors {
                        let from = at(p.residual, residual_row + u64::from(vector));
                        before[i] = ptr::load_u32x4(from as *const u32);
                    }
                    i += 1;
                }
                i = 0;
                while i < VECTORS {
                    let vector = me + i as u32 * threads;
                    let (mut sum, residual) = (unpack::<T>(words[i]), unpack::<T>(before[i]));
                    let mut j = 0;
                    while j < 8 {
                        sum[j] += residual[j];
                        j += 1;
                    }
                    words[i] = pack::<T>(sum);
                    if vector < p.vectors {
                        let to = at(p.residual, residual_row + u64::from(vector));
                        ptr::store_u32x4(to as *mut u32, words[i]);
                    }
                    i += 1;
                }
            }
            let mut sum = 0.0;
            i = 0;
            while i < VECTORS {
                sum += squares(&unpack::<T>(words[i]));
                i += 1;
            }
            let sum = sum_of_block(sum, threads);
            let inverse = math::rsqrt(sum * p.inverse_width + p.eps);
            i = 0;
            while i < VECTORS {
                let vector = me + i as u32 * threads;
                let (mut x, weight) = (unpack::<T>(words[i]), unpack::<T>(weights[i]));
                let mut j = 0;
                while j < 8 {
                    x[j] *= inverse * (p.offset + weight[j]);
                    j += 1;
                }
                if vector < p.vectors {
                    let to = at(p.out, out_row + u64::from(vector));
                    ptr::store_u32x4(to as *mut u32, pack::<T>(x));
                }
                i += 1;
            }
        }
    }

    /// The sum over all threads of the block, bit-identical in all threads.
    ///
    /// # Safety
    /// All threads come here, once; they are whole warps.
    #[inline(always)]
    unsafe fn sum_of_block(x: f32, threads: u32) -> f32 {
        // SAFETY: all lanes come here; each warp writes its sum before the barrier.
        unsafe {
            let sum = sum_of_lanes(x, 32);
            if threads <= 32 {
                return sum;
            }
            let sums = shared::dynamic_shared_address();
            let (warp, lane) = (thread::thread_idx_x() / 32, warp::lane_id());
            if lane == 0 {
                shared::store_f32(sums + warp * 4, sum);
            }
            thread::sync_threads();
            let of_warp = if lane < threads / 32 {
                shared::load_f32(sums + lane * 4)
            } else {
                0.0
            };
            sum_of_lanes(of_warp, 32)
        }
    }

    macro_rules! entries {
        ($half:ident $element:literal { $($vectors:literal;)* }) => { $( const _: () = {
            /// See the module's documentation.
            ///
            /// # Safety
            /// As [`norm`].
            #[kernel(name = ["rms_norm_", $vectors, "_", $element], max_threads = MOST, min_blocks = 1)]
            pub unsafe fn entry(params: NormParams) {
                // SAFETY: the launch's promise.
                unsafe {
                    begin();
                    norm::<half::$half, $vectors>(&params)
                }
            }
        }; )* };
    }

    table!(items entries);
}

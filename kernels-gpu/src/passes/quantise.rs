//! `append_quantised`: appends new 16-bit keys and values to 8-bit pages.
//!
//! A row is one head of a token. A thread converts 8 numbers, neighbouring threads the rest of the row. If scales are
//! computed, shuffles find the row's largest magnitude. Numbers are divided by their scale, rounded to nearest even and
//! saturated to the largest finite value; NaN stays NaN. Grid y selects keys or values.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
const BLOCKS: u32 = 6;

/// Numbers per thread.
pub const NUMBERS: u32 = 8;

/// The largest e4m3 number, to which a row's largest magnitude is scaled if scales are computed.
pub const LARGEST: f32 = 448.0;

/// The same for e5m2.
pub const LARGEST_E5M2: f32 = 57_344.0;

/// The smallest computed scale; its inverse is finite. A row of zeros has scale 1.
pub const SMALLEST: f32 = 1e-30;

/// Scales are given, for all tokens or per request.
pub const GIVEN: u32 = 0;
/// Scales are given per token and head.
pub const GIVEN_BY_TOKEN: u32 = 1;
/// Scales are computed per token and head, and stored.
pub const COMPUTED: u32 = 2;

/// The kernels: `append_quantised_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "append_quantised_", Quantise Sm80 Quantise, THREADS, BLOCKS, E4m3 } }
};

#[cfg(target_arch = "nvptx64")]
pub(crate) use device::largest_finite;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, COMPUTED, GIVEN, LARGEST, LARGEST_E5M2, NUMBERS, SMALLEST, THREADS};
    use crate::{
        abi::QuantiseParams,
        common::{
            cache,
            eight_bits::{f32x2_to_e4m3x2, f32x2_to_e5m2x2},
            half::{Half, half_entry},
        },
    };

    const WARP: u32 = warp::FULL_MASK;

    /// The largest finite magnitude of `count` numbers: NaN and infinity are ignored, as the scale must be finite.
    #[inline(always)]
    pub(crate) fn largest_finite(count: usize, number: impl Fn(usize) -> f32) -> f32 {
        let mut largest = 0.0_f32;
        let mut i = 0;
        while i < count {
            // A single instruction, which ignores NaN.
            largest = largest.max(number(i).abs());
            i += 1;
        }
        if largest == f32::INFINITY {
            largest = 0.0;
            i = 0;
            while i < count {
                let magnitude = number(i).abs();
                if magnitude > largest && magnitude < f32::INFINITY {
                    largest = magnitude;
                }
                i += 1;
            }
        }
        largest
    }

    /// Converts and stores the block's numbers.
    ///
    /// # Safety
    /// The parameters describe memory as [`QuantiseParams`] says.
    #[inline(always)]
    unsafe fn quantise<T: Half>(p: &QuantiseParams) {
        let tensor = if thread::block_idx_y() == 0 { p.k } else { p.v };
        let index = thread::block_idx_x() * THREADS + thread::thread_idx_x();
        let (row, vector) = (
            index >> tensor.lanes_log,
            index & ((1 << tensor.lanes_log) - 1),
        );
        let (token, head) = p.kv_heads.div_rem(row);
        let exists = row < p.rows && vector < tensor.vectors;
        let wide_range = p.format == cache::E5M2;
        // SAFETY: rows that exist are in the source; a slot below `pool_slots` is in the pool; all lanes reach the
        // shuffles.
        unsafe {
            let (mut slot, mut words) = (u32::MAX, [0; 4]);
            if exists {
                slot = ptr::load_nc_u32((p.slots + u64::from(token) * 4) as *const u32);
                let from = u64::from(token) * u64::from(tensor.source_token)
                    + u64::from(head) * u64::from(tensor.source_head)
                    + u64::from(vector);
                words = ptr::load_stream_u32x4((tensor.source + from * 16) as *const u32);
            }
            let mut numbers = [0.0; NUMBERS as usize];
            let mut i = 0;
            while i < 4 {
                let [first, second] = T::unpack(words[i]);
                numbers[2 * i] = first;
                numbers[2 * i + 1] = second;
                i += 1;
            }
            let exists = exists && slot < p.pool_slots;
            let (page, offset) = p.page_size.div_rem(if exists { slot } else { 0 });
            let strides = &tensor.scale_strides;
            let of_token = u64::from(page) * u64::from(strides.page)
                + u64::from(offset) * u64::from(strides.token)
                + u64::from(head) * u64::from(strides.head);
            let mut scale = 1.0;
            if p.mode == COMPUTED {
                let mut largest = largest_finite(NUMBERS as usize, |i| numbers[i]);
                let mut distance = 1 << tensor.lanes_log >> 1;
                while distance > 0 {
                    let other = warp::warp_shuffle_xor(WARP, largest, distance, 32);
                    largest = if other > largest { other } else { largest };
                    distance >>= 1;
                }
                if largest > 0.0 {
                    scale = largest / if wide_range { LARGEST_E5M2 } else { LARGEST };
                    scale = if scale > SMALLEST { scale } else { SMALLEST };
                }
                if exists && vector == 0 {
                    ptr::store_f32((tensor.scales + of_token * 4) as *mut f32, scale);
                }
            } else if exists && tensor.scales != 0 {
                let mut at = of_token;
                if p.mode == GIVEN {
                    let request = if p.of_token != 0 {
                        ptr::load_nc_u32((p.of_token + u64::from(token) * 4) as *const u32)
                    } else {
                        0
                    };
                    at = u64::from(request) * u64::from(strides.page)
                        + u64::from(head) * u64::from(strides.head);
                }
                scale = ptr::load_nc_f32((tensor.scales + at * 4) as *const f32);
            }
            if exists {
                let inverse = 1.0 / scale;
                let pair = |i: usize| {
                    let (first, second) = (numbers[i] * inverse, numbers[i + 1] * inverse);
                    u32::from(if wide_range {
                        f32x2_to_e5m2x2(first, second)
                    } else {
                        f32x2_to_e4m3x2(first, second)
                    })
                };
                let narrow = [pair(0) | pair(2) << 16, pair(4) | pair(6) << 16];
                let to = u64::from(page) * u64::from(tensor.page)
                    + u64::from(offset) * u64::from(tensor.token)
                    + u64::from(head) * u64::from(tensor.head)
                    + u64::from(vector);
                ptr::store_stream_u32x2((tensor.pool + to * 8) as *mut u32, narrow);
            }
        }
    }

    crate::each_half! { items half_entry { "append_quantised_", THREADS, BLOCKS, quantise(QuantiseParams) } }
}

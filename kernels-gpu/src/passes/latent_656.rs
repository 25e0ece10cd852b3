//! `append_latent_656`: appends new MLA keys as rows of 656 bytes.
//!
//! A row is 512 e4m3 numbers, four f32 scales and 64 bf16 elements. A warp converts one key; each half-warp handles the
//! 128 numbers of a scale and finds their largest magnitude by shuffles. The scale is the smallest power of two for
//! which the largest magnitude divided by it is at most 448; it is 1 if all numbers are zero.

/// Threads of a block.
pub const THREADS: u32 = 128;

/// Resident blocks per SM.
const BLOCKS: u32 = 8;
/// Keys of a block, one per warp.
pub const KEYS: u32 = THREADS / 32;

/// 8-bit numbers of a key.
pub const NUMBERS: u32 = 512;
/// All elements of a key.
pub const ELEMENTS: u32 = 576;

/// The kernels: `append_latent_656_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "append_latent_656_", Quantise Sm90a QuantiseLatent, THREADS, BLOCKS, E4m3 } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{convert, prelude::*};

    use super::{BLOCKS, ELEMENTS, KEYS, NUMBERS, THREADS};
    use crate::{
        abi::QuantiseParams,
        common::half::{Half, half_entry},
        passes::quantise::LARGEST,
    };

    const WARP: u32 = warp::FULL_MASK;
    /// The smallest computed scale, 2⁻¹⁰⁰; its inverse is finite.
    const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);
    /// Elements that a lane loads at a time.
    const VECTOR: u32 = 8;

    /// The scale for numbers with this largest finite magnitude.
    #[inline(always)]
    fn scale_of(largest: f32) -> f32 {
        if largest == 0.0 {
            return 1.0;
        }
        let least = largest / LARGEST;
        let bits = if least > SMALLEST { least } else { SMALLEST }.to_bits();
        // Rounds up to a power of two: the exponent grows by 1 if any mantissa bit is set.
        f32::from_bits((bits + 0x007f_ffff) >> 23 << 23)
    }

    /// Converts and stores the warp's key.
    ///
    /// # Safety
    /// The parameters describe memory as [`QuantiseParams`] says: `k` has keys of 576 and a pool of rows of 656 bytes.
    #[inline(always)]
    unsafe fn narrow<T: Half>(p: &QuantiseParams) {
        let (tensor, lane) = (&p.k, warp::lane_id());
        let token = thread::block_idx_x() * KEYS + thread::thread_idx_x() / 32;
        if token >= p.rows {
            return;
        }
        // SAFETY: the token is in the source, a slot below `pool_slots` is in the pool, and whole warps reach the
        // shuffles.
        unsafe {
            let slot = ptr::load_nc_u32((p.slots + u64::from(token) * 4) as *const u32);
            if slot >= p.pool_slots {
                return;
            }
            let (page, offset) = p.page_size.div_rem(slot);
            let place = u64::from(page) * u64::from(tensor.page)
                + u64::from(offset) * u64::from(tensor.token);
            let to = tensor.pool + place * u64::from(VECTOR);
            let from = tensor.source + u64::from(token) * u64::from(tensor.source_token) * 16;
            let load =
                |vector: u32| ptr::load_stream_u32x4((from + u64::from(vector) * 16) as *const u32);
            let mut vector = lane;
            while vector < NUMBERS / VECTOR {
                let words = load(vector);
                let (mut numbers, mut largest) = ([0.0_f32; VECTOR as usize], 0.0_f32);
                let mut i = 0;
                while i < VECTOR as usize {
                    numbers[i] = T::unpack(words[i / 2])[i % 2];
                    // Ignore NaN and infinity: the scale must be finite.
                    let magnitude = f32::from_bits(numbers[i].to_bits() & 0x7fff_ffff);
                    if magnitude > largest && magnitude < f32::INFINITY {
                        largest = magnitude;
                    }
                    i += 1;
                }
                let mut distance = 8;
                while distance > 0 {
                    let other = warp::warp_shuffle_xor(WARP, largest, distance, 32);
                    largest = if other > largest { other } else { largest };
                    distance >>= 1;
                }
                let scale = scale_of(largest);
                let inverse = 1.0 / scale;
                let pair = |i: usize| {
                    u32::from(convert::f32x2_to_e4m3x2(
                        numbers[i] * inverse,
                        numbers[i + 1] * inverse,
                    ))
                };
                let narrow = [pair(0) | pair(2) << 16, pair(4) | pair(6) << 16];
                ptr::store_stream_u32x2((to + u64::from(vector) * 8) as *mut u32, narrow);
                if lane % 16 == 0 {
                    let scales = to + u64::from(NUMBERS + vector / 16 * 4);
                    ptr::store_f32(scales as *mut f32, scale);
                }
                vector += 32;
            }
            if lane < (ELEMENTS - NUMBERS) / VECTOR {
                let words = load(NUMBERS / VECTOR + lane).map(|word| {
                    let [first, second] = T::unpack(word);
                    convert::f32x2_to_bf16x2(first, second)
                });
                let rope = to + u64::from(NUMBERS + NUMBERS / 128 * 4 + lane * 16);
                ptr::store_u32x4(rope as *mut u32, words);
            }
        }
    }

    crate::each_half! { items half_entry { "append_latent_656_", THREADS, BLOCKS, narrow(QuantiseParams) } }
}

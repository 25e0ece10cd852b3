//! `append_latent_656`: new keys of latent attention into rows of 656 bytes.
//!
//! A row is 512 numbers in e4m3, four scales in f32 and 64 elements in bf16. A warp brings a key; half of it has the 128
//! numbers of a scale, whose largest magnitude is found by shuffles. The scale is the smallest power of two by which that
//! is at most 448, and 1 where all are zero.

/// Threads of a block, and its keys: a warp each.
pub const THREADS: u32 = 128;
/// Keys of a block.
pub const KEYS: u32 = THREADS / 32;

/// Numbers of 8 bits, and elements of a key.
pub const NUMBERS: u32 = 512;
/// Elements of a key.
pub const ELEMENTS: u32 = 576;

/// The kernels: `append_latent_656_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::THREADS;
    use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($half:ident $element:literal {}) => {
            KernelInfo {
                element: Element::$half,
                cache: Some(Element::E4m3),
                threads: THREADS,
                registers: registers(THREADS, 8),
                ..KernelInfo::new(
                    concat!("append_latent_656_", $element),
                    Family::Quantise,
                    Arch::Sm90a,
                    Op::QuantiseLatent,
                )
            }
        };
    }

    /// One for each 16-bit float.
    pub const ROWS: &[KernelInfo] = crate::each_half! { list rows {} };
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{convert, prelude::*};

    use super::{ELEMENTS, KEYS, NUMBERS, THREADS};
    use crate::{
        abi::QuantiseParams,
        common::half::{self, Half},
        passes::quantise::LARGEST,
    };

    const WARP: u32 = warp::FULL_MASK;
    /// The smallest scale that is computed, 2⁻¹⁰⁰: its inverse is finite, too.
    const SMALLEST: f32 = f32::from_bits((127 - 100) << 23);
    /// Elements of a lane.
    const VECTOR: u32 = 8;

    /// The scale of numbers whose largest finite magnitude this is.
    #[inline(always)]
    fn scale_of(largest: f32) -> f32 {
        if largest == 0.0 {
            return 1.0;
        }
        let least = largest / LARGEST;
        let bits = if least > SMALLEST { least } else { SMALLEST }.to_bits();
        // The next power of two, by the exponent: one more where there is any mantissa.
        f32::from_bits((bits + 0x007f_ffff) >> 23 << 23)
    }

    /// Brings the warp's key.
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
        // SAFETY: the token is in the source, and a slot in the pool is a place in it; whole warps come to the shuffles.
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
                    // Neither NaN nor infinity is a magnitude to scale by.
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

    macro_rules! entries {
        ($half:ident $element:literal {}) => { const _: () = {
            /// See the module.
            ///
            /// # Safety
            /// As [`narrow`].
            #[kernel(name = ["append_latent_656_", $element], max_threads = THREADS, min_blocks = 8)]
            pub unsafe fn entry(params: QuantiseParams) {
                // SAFETY: the launch's promise.
                unsafe { narrow::<half::$half>(&params) }
            }
        }; };
    }

    crate::each_half! { items entries {} }
}

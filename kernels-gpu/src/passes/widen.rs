//! `widen`: converts 8-bit keys and values to 16-bit pages, each multiplied by the scale of its token if tokens have scales.
//!
//! Hopper's prefill converts 8-bit keys while it computes (`sm90/prefill/convert/`), and applies scales per row of queries
//! if they are the same for all keys of the row. A scale per key would cost a multiplication per logit. So such keys are
//! widened once, by a launch before the prefill, which then reads 16 bits. So are keys that few rows of queries see: their
//! products take less time than converting beside them. Prefills with Ampere's instructions read widened keys only.
//!
//! Blocks process *pieces*, 64 keys of one KV head or their values; a thread widens 16 numbers.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
const BLOCKS: u32 = 6;

/// Numbers per thread.
pub const NUMBERS: u32 = 16;

/// The kernels: `widen_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "widen_", Quantise Sm80 Widen, THREADS, BLOCKS, E4m3 } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, THREADS};
    use crate::{
        abi::{ConvertedPage, KvStrides, WidenParams},
        common::{
            cache,
            eight_bits::{e4m3x2_to_f32, e5m2x2_to_f32},
            half::{Half, half_entry},
        },
    };

    /// Widens the pieces of a block.
    ///
    /// # Safety
    /// The parameters describe memory as [`WidenParams`] says.
    #[inline(always)]
    unsafe fn widen<T: Half>(p: &WidenParams) {
        let c = &p.convert;
        let heads = p.kv_heads.get();
        // SAFETY: the caller's promise.
        unsafe {
            let [first, pages] = c.of_this_plan(p.record);
            // A page has two pieces per head: keys and values.
            let pieces = pages * heads * 2;
            let mut piece = thread::block_idx_x();
            while piece < pieces {
                let (row, head) = p.kv_heads.div_rem(piece);
                let entry = c.list + u64::from(first + row / 2) * 16;
                let [table, key, seen, page] = ptr::load_nc_u32x4(entry as *const u32);
                let values = row % 2 == 1;
                let side = Side {
                    pool: pick(values, c.k, c.v),
                    to: pick(values, c.to_k, c.to_v),
                    strides: pick_strides(values, &c.k_strides, &c.v_strides),
                    scales: pick(values, p.scales.k, p.scales.v),
                    scale_strides: pick_strides(values, &p.scales.k_strides, &p.scales.v_strides),
                };
                let to = (page * heads + head) * ConvertedPage::KEYS;
                let mut vector = thread::thread_idx_x();
                while vector >> p.vectors_log < ConvertedPage::KEYS {
                    let token = vector >> p.vectors_log;
                    let in_row = vector & ((1 << p.vectors_log) - 1);
                    if in_row >= p.vectors {
                        vector += THREADS;
                        continue;
                    }
                    let mut wide = [[0; 4]; 2];
                    // Rows before the first key that is seen and past the last become zeros.
                    // Opaque: kept apart through the loop, both numbers take two registers.
                    let [first, end] = ConvertedPage::seen(misc::opaque(seen));
                    if token >= first && token < end {
                        let (index, offset) = c.page_size.div_rem(key + token);
                        let id = c.page_ids + u64::from(table + index) * 4;
                        let at = [ptr::load_nc_u32(id as *const u32), offset, head];
                        wide = side.load::<T>(at, in_row, c.format);
                    }
                    let to = u64::from(to + token) * u64::from(p.vectors) + u64::from(in_row);
                    let to = side.to + to * 32;
                    ptr::store_u32x4(to as *mut u32, wide[0]);
                    ptr::store_u32x4((to + 16) as *mut u32, wide[1]);
                    vector += THREADS;
                }
                piece += thread::grid_dim_x();
            }
        }
    }

    /// Selects between two loaded values. Selecting between addresses of two parameters would copy all parameters to
    /// the stack.
    #[inline(always)]
    fn pick<T: Copy>(second: bool, a: T, b: T) -> T {
        if second { b } else { a }
    }

    #[inline(always)]
    fn pick_strides(second: bool, a: &KvStrides, b: &KvStrides) -> [u32; 3] {
        [
            pick(second, a.page, b.page),
            pick(second, a.token, b.token),
            pick(second, a.head, b.head),
        ]
    }

    /// Keys or values.
    struct Side {
        pool: u64,
        to: u64,
        /// Strides between pages, tokens and heads, in vectors of 16 bytes.
        strides: [u32; 3],
        /// 0: tokens have no scales.
        scales: u64,
        /// Likewise, in numbers of scales.
        scale_strides: [u32; 3],
    }

    impl Side {
        /// 16 numbers of a page, token and head, as 16-bit floats.
        ///
        /// # Safety
        /// The numbers are in the pool.
        #[inline(always)]
        unsafe fn load<T: Half>(&self, at: [u32; 3], vector: u32, format: u32) -> [[u32; 4]; 2] {
            let place = |strides: [u32; 3]| {
                u64::from(at[0]) * u64::from(strides[0])
                    + u64::from(at[1]) * u64::from(strides[1])
                    + u64::from(at[2]) * u64::from(strides[2])
            };
            let from = self.pool + (place(self.strides) + u64::from(vector)) * 16;
            // SAFETY: the caller's promise.
            let narrow = unsafe { ptr::load_stream_u32x4(from as *const u32) };
            let scaled = self.scales != 0;
            let mut scale = 1.0;
            if scaled {
                let at = self.scales + place(self.scale_strides) * 4;
                // SAFETY: as above.
                scale = unsafe { ptr::load_nc_f32(at as *const f32) };
            }
            let mut wide = [[0; 4]; 2];
            let mut i = 0;
            while i < 8 {
                let two = (narrow[i / 2] >> (i % 2 * 16)) as u16;
                let [first, second] = if format == cache::E5M2 {
                    e5m2x2_to_f32(two)
                } else {
                    e4m3x2_to_f32(two)
                };
                wide[i / 4][i % 4] = if scaled {
                    T::pack(fit::<T>(first * scale), fit::<T>(second * scale))
                } else {
                    T::pack(first, second)
                };
                i += 1;
            }
            wide
        }
    }

    /// Saturates to the largest f16, if the target is f16. NaN stays NaN.
    #[inline(always)]
    fn fit<T: Half>(x: f32) -> f32 {
        const LARGEST: f32 = 65_504.0;
        if T::WIDE || !(x > LARGEST || x < -LARGEST) {
            x
        } else if x > 0.0 {
            LARGEST
        } else {
            -LARGEST
        }
    }

    crate::each_half! { items half_entry { "widen_", THREADS, BLOCKS, widen(WidenParams) } }
}

//! `embed`: looks up rows of a table and multiplies them by a scale.
//!
//! A copy with a scattered source: a thread moves vectors of 16 bytes, one block width apart.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Vectors per thread.
pub const PER_THREAD: u32 = 2;

/// Resident blocks per SM.
const BLOCKS: u32 = 8;

/// The kernels: `embed_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "embed_", Step Sm80 Embed, THREADS, BLOCKS } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, PER_THREAD, THREADS};
    use crate::{
        abi::EmbedParams,
        common::half::{Half, half_entry},
        step::{at, begin, pack, unpack},
    };

    const N: usize = PER_THREAD as usize;

    /// # Safety
    /// The parameters describe memory as [`EmbedParams`] says.
    #[inline(always)]
    unsafe fn embed<T: Half>(p: &EmbedParams) {
        begin();
        let first = thread::block_idx_x() * (THREADS * PER_THREAD) + thread::thread_idx_x();
        let (mut words, mut to) = ([[0; 4]; N], [0; N]);
        let mut i = 0;
        while i < N {
            let vector = first + i as u32 * THREADS;
            if vector < p.vectors {
                let (token, in_row) = p.per_token.div_rem(vector);
                to[i] = at(
                    p.out,
                    u64::from(token) * u64::from(p.out_token) + u64::from(in_row),
                );
                // SAFETY: the token has an id; a row is read only if the id is in the table.
                unsafe {
                    let id = ptr::load_u32((p.ids + u64::from(token) * 4) as *const u32);
                    if id < p.vocabulary {
                        let from = u64::from(id) * u64::from(p.table_row) + u64::from(in_row);
                        words[i] = ptr::load_nc_u32x4(at(p.table, from) as *const u32);
                    }
                }
            }
            i += 1;
        }
        i = 0;
        while i < N {
            let mut word = words[i];
            if p.scale != 1.0 {
                let mut x = unpack::<T>(word);
                let mut j = 0;
                while j < 8 {
                    x[j] *= p.scale;
                    j += 1;
                }
                word = pack::<T>(x);
            }
            if first + (i as u32 * THREADS) < p.vectors {
                // SAFETY: a vector of the output that only this thread writes.
                unsafe { ptr::store_u32x4(to[i] as *mut u32, word) };
            }
            i += 1;
        }
    }

    crate::each_half! { items half_entry { "embed_", THREADS, BLOCKS, embed(EmbedParams) } }
}

//! `narrow_rows`: rounds f32 queries to the 16-bit type of the attention kernels, to nearest.
//!
//! A thread converts 8 elements: it reads 32 bytes and writes 16.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
const BLOCKS: u32 = 4;

/// Elements per thread.
pub const CHUNK: u32 = 8;

/// The kernels: `narrow_rows_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "narrow_rows_", Passes Sm80 Narrow, THREADS, BLOCKS } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, CHUNK, THREADS};
    use crate::{
        abi::NarrowParams,
        common::half::{Half, half_entry},
    };

    /// # Safety
    /// The parameters describe memory as [`NarrowParams`] says; the target has the type.
    #[inline(always)]
    unsafe fn narrow<T: Half>(p: &NarrowParams) {
        let chunk = thread::index_1d();
        if chunk >= p.chunks {
            return;
        }
        let (token, at) = p.chunks_per_token.div_rem(chunk);
        let element = u64::from(token) * u64::from(p.from_token) + u64::from(at * CHUNK);
        let from = (p.from + element * 4) as *const f32;
        let to = (p.to + u64::from(chunk) * u64::from(CHUNK) * 2) as *mut u32;
        // SAFETY: inside the tensors, 8 elements aligned to 16 bytes; only this thread writes them.
        unsafe {
            let [a, b, c, d] = ptr::load_f32x4(from);
            let [e, f, g, h] = ptr::load_f32x4(from.add(4));
            ptr::store_u32x4(
                to,
                [T::pack(a, b), T::pack(c, d), T::pack(e, f), T::pack(g, h)],
            );
        }
    }

    crate::each_half! { items half_entry { "narrow_rows_", THREADS, BLOCKS, narrow(NarrowParams) } }
}

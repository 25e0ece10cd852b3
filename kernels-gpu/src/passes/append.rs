//! `append_paged_kv`: appends new keys and values to their pages.
//!
//! A copy with a scattered target. It moves *vectors* of 16 bytes (8 if rows are only aligned to 8), so the element
//! type is irrelevant. Vectors are numbered continuously over tokens and heads, so warps access neighbouring bytes for
//! any number and size of heads; if heads are contiguous on both sides, a whole token is one row. A thread moves four
//! vectors, one block width apart: four loads are in flight before the first store. Grid y selects keys or values.

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Vectors per thread.
const PER_THREAD: u32 = 4;

/// Vectors per block.
pub const VECTORS_PER_BLOCK: u32 = THREADS * PER_THREAD;

/// Resident blocks per SM.
const BLOCKS: u32 = 6;

/// The kernels, by the bytes of a vector: `append_paged_kv_<bytes>`.
macro_rules! table {
    ($then:ident) => {
        $then! {
            16: [u32; 4];
            8: [u32; 2];
        }
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::{BLOCKS, THREADS};
    use crate::registry::{Arch, Family, KernelInfo, Op, registers};

    macro_rules! rows {
        ($($bytes:literal: $vector:ty;)*) => {
            &[$(KernelInfo {
                threads: THREADS,
                registers: registers(THREADS, BLOCKS),
                ..KernelInfo::new(
                    concat!("append_paged_kv_", $bytes),
                    Family::Passes,
                    Arch::Sm80,
                    Op::Append { vector_bytes: $bytes },
                )
            }),*]
        };
    }

    /// See the macro `table`.
    pub const ROWS: &[KernelInfo] = table!(rows);
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::prelude::*;

    use super::{BLOCKS, PER_THREAD, THREADS, VECTORS_PER_BLOCK};
    use crate::abi::{AppendParams, AppendTensor};

    /// The data of one load or store.
    trait Vector: Copy {
        const ZERO: Self;
        const BYTES: u64;
        /// # Safety
        /// `source` is readable global memory, aligned to the vector, that no thread writes meanwhile.
        unsafe fn load(source: u64) -> Self;
        /// # Safety
        /// `target` is global memory, aligned to the vector, that no other thread accesses.
        unsafe fn store(self, target: u64);
    }

    impl Vector for [u32; 4] {
        const ZERO: Self = [0; 4];
        const BYTES: u64 = 16;
        #[inline(always)]
        unsafe fn load(source: u64) -> Self {
            // SAFETY: the caller's promise.
            unsafe { ptr::load_stream_u32x4(source as *const u32) }
        }
        #[inline(always)]
        unsafe fn store(self, target: u64) {
            // SAFETY: the caller's promise.
            unsafe { ptr::store_stream_u32x4(target as *mut u32, self) }
        }
    }

    impl Vector for [u32; 2] {
        const ZERO: Self = [0; 2];
        const BYTES: u64 = 8;
        #[inline(always)]
        unsafe fn load(source: u64) -> Self {
            // SAFETY: the caller's promise.
            unsafe { ptr::load_stream_u32x2(source as *const u32) }
        }
        #[inline(always)]
        unsafe fn store(self, target: u64) {
            // SAFETY: the caller's promise.
            unsafe { ptr::store_stream_u32x2(target as *mut u32, self) }
        }
    }

    /// Moves `N` vectors from `first` on, one block width apart.
    ///
    /// # Safety
    /// The parameters describe memory as [`AppendParams`] says; all `N` vectors are below `tensor.vectors`.
    #[inline(always)]
    unsafe fn copy<V: Vector, const N: usize>(
        params: &AppendParams,
        tensor: &AppendTensor,
        first: u32,
    ) {
        let mut values = [V::ZERO; N];
        let mut slots = [0; N];
        // Offset of the vector in its token on the target side, in vectors.
        let mut places = [0_u64; N];
        let mut i = 0;
        while i < N {
            let vector = first + i as u32 * THREADS;
            let (token, in_token) = tensor.vectors_per_token.div_rem(vector);
            let (head, in_head) = tensor.vectors_per_head.div_rem(in_token);
            let from = u64::from(token) * u64::from(tensor.source_token)
                + u64::from(head) * u64::from(tensor.source_head)
                + u64::from(in_head);
            places[i] = u64::from(head) * u64::from(tensor.head) + u64::from(in_head);
            // SAFETY: the vector is one of the source, its token has a slot.
            unsafe {
                slots[i] = ptr::load_nc_u32((params.slots + u64::from(token) * 4) as *const u32);
                values[i] = V::load(tensor.source + from * V::BYTES);
            }
            i += 1;
        }
        i = 0;
        while i < N {
            if slots[i] < params.pool_slots {
                let (page, offset) = params.page_size.div_rem(slots[i]);
                let to = u64::from(page) * u64::from(tensor.page)
                    + u64::from(offset) * u64::from(tensor.token)
                    + places[i];
                // SAFETY: inside the pool, since the slot is; no two tokens share a slot.
                unsafe { values[i].store(tensor.pool + to * V::BYTES) };
            }
            i += 1;
        }
    }

    /// # Safety
    /// The parameters describe memory as [`AppendParams`] says, in vectors of the type `V`.
    #[inline(always)]
    unsafe fn append<V: Vector>(params: &AppendParams) {
        let tensor = if thread::block_idx_y() == 0 {
            params.k
        } else {
            params.v
        };
        let block = thread::block_idx_x() * VECTORS_PER_BLOCK;
        let first = block + thread::thread_idx_x();
        if block + VECTORS_PER_BLOCK <= tensor.vectors {
            // SAFETY: all vectors of the block exist.
            unsafe { copy::<V, { PER_THREAD as usize }>(params, &tensor, first) };
            return;
        }
        let mut vector = first;
        while vector < tensor.vectors {
            // SAFETY: the loop condition.
            unsafe { copy::<V, 1>(params, &tensor, vector) };
            vector += THREADS;
        }
    }

    macro_rules! entries {
        ($($bytes:literal: $vector:ty;)*) => { $( const _: () = {
            /// See the module's documentation.
            ///
            /// # Safety
            /// As [`append`].
            #[kernel(name = ["append_paged_kv_", $bytes], max_threads = THREADS, min_blocks = BLOCKS)]
            pub unsafe fn entry(params: AppendParams) {
                // SAFETY: the launch's promise.
                unsafe { append::<$vector>(&params) }
            }
        }; )* };
    }

    table!(entries);
}

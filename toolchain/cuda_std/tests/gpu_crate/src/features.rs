//! `#[kernel]`, shared arrays and parameters.

use cuda_std::{kernel, param_address, shared_array, thread, tma::TensorMap};

const THREADS: u32 = 128;

/// A slice becomes a pointer and a length.
#[kernel]
pub unsafe fn slices(input: &[f32], scale: f32, output: &mut [f32]) {
    let i = thread::index_1d() as usize;
    if i < input.len() && i < output.len() {
        // SAFETY: the index was compared above.
        unsafe { *output.get_unchecked_mut(i) = scale * *input.get_unchecked(i) }
    }
}

macro_rules! per_type {
    ($($name:ident: $type:ty;)*) => {$(
        /// An entry that calls a generic function.
        #[kernel(max_threads = THREADS * 2, min_blocks = 2)]
        pub unsafe fn $name(value: $type, output: &mut [$type]) {
            // SAFETY: the launch has as many threads as the slice has elements.
            unsafe { fill(value, output) }
        }
    )*};
}

per_type! {
    fill_u32: u32;
    fill_f32: f32;
}

#[inline(always)]
unsafe fn fill<T: Copy>(value: T, output: &mut [T]) {
    // SAFETY: the caller's promise.
    unsafe { *output.get_unchecked_mut(thread::index_1d() as usize) = value }
}

/// Two arrays of equal type and length are distinct.
#[kernel(max_threads = THREADS)]
pub unsafe fn shared_arrays(output: *mut u32) {
    let first = shared_array![u32; THREADS as usize];
    let second = shared_array![u32; THREADS as usize];
    let t = thread::thread_idx_x() as usize;
    // SAFETY: a block has at most `THREADS` threads; a barrier separates writes and reads.
    unsafe {
        *first.add(t) = t as u32;
        *second.add(t) = 2 * t as u32;
        thread::sync_threads();
        let other = THREADS as usize - 1 - t;
        *output.add(t) = *first.add(other) + *second.add(other);
    }
}

/// The parameters of a kernel that copies by TMA.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Params {
    map: TensorMap,
    scale: f32,
}

/// The map is read from where the launch put it.
#[kernel(max_threads = THREADS, tensor_maps)]
pub unsafe fn tensor_maps(params: Params, output: *mut u64) {
    let maps: *const TensorMap = param_address!(tensor_maps, 0);
    // SAFETY: the launch passes memory for one value.
    unsafe { *output = maps as u64 + params.scale as u64 }
}

/// A panic is a trap, not a message.
#[kernel]
pub unsafe fn panics(input: &[u32], output: *mut u32) {
    // SAFETY: the launch passes memory for one value.
    unsafe { *output = input[thread::index_1d() as usize] }
}

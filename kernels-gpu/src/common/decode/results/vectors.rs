//! Loads and stores of a lane's elements, as wide as their number allows.

use cuda_std::ptr;

use crate::common::half::Half;

/// Loads `N` floats.
///
/// # Safety
/// `source` has `N` floats in device memory, aligned to the widest load.
#[inline(always)]
pub(super) unsafe fn load_f32<const N: usize>(source: *const f32) -> [f32; N] {
    let mut values = [0.0; N];
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 4 <= N {
            let four = ptr::load_f32x4(source.add(i));
            values[i] = four[0];
            values[i + 1] = four[1];
            values[i + 2] = four[2];
            values[i + 3] = four[3];
            i += 4;
        }
        if i + 2 <= N {
            let two = ptr::load_f32x2(source.add(i));
            values[i] = two[0];
            values[i + 1] = two[1];
        }
    }
    values
}

/// Stores `N` floats.
///
/// # Safety
/// `target` has room for `N` floats in device memory, aligned to the widest store.
#[inline(always)]
pub(super) unsafe fn store_f32<const N: usize>(target: *mut f32, values: [f32; N]) {
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 4 <= N {
            let four = [values[i], values[i + 1], values[i + 2], values[i + 3]];
            ptr::store_f32x4(target.add(i), four);
            i += 4;
        }
        if i + 2 <= N {
            ptr::store_f32x2(target.add(i), [values[i], values[i + 1]]);
        }
    }
}

/// Stores `N` 16-bit floats.
///
/// # Safety
/// As [`store_f32`], for 16-bit floats.
#[inline(always)]
pub(super) unsafe fn store_half<T: Half, const N: usize>(target: u64, values: [f32; N]) {
    let target = target as *mut u32;
    let mut i = 0;
    // SAFETY: the caller's promise.
    unsafe {
        while i + 8 <= N {
            let pairs = [
                T::pack(values[i], values[i + 1]),
                T::pack(values[i + 2], values[i + 3]),
                T::pack(values[i + 4], values[i + 5]),
                T::pack(values[i + 6], values[i + 7]),
            ];
            ptr::store_u32x4(target.add(i / 2), pairs);
            i += 8;
        }
        if i + 4 <= N {
            let pairs = [
                T::pack(values[i], values[i + 1]),
                T::pack(values[i + 2], values[i + 3]),
            ];
            ptr::store_u32x2(target.add(i / 2), pairs);
            i += 4;
        }
        if i + 2 <= N {
            ptr::store_u32(target.add(i / 2), T::pack(values[i], values[i + 1]));
        }
    }
}

//! Shared memory: addresses, static and dynamic allocation, loads and stores.
//!
//! An *address* here is a `u32` in the block's shared window, as PTX takes it after `ld.shared`. A
//! *pointer* is a generic 64-bit pointer, which plain Rust can read and write through.

#[cfg(target_arch = "nvptx64")]
pub use device::*;

/// Allocates uninitialised shared memory for an array and returns a `*mut` to its first element.
///
/// Each use of the macro has its own array and returns the same one every time. Type and length may use
/// names of the enclosing module, but not those of the function.
///
/// ```text
/// let partial_sums = shared_array![f32; 32]; // *mut f32
/// ```
///
/// # Safety
/// Reading through the pointer is valid only after a write, with a barrier in between if another
/// thread wrote; the kernel must ensure this.
#[macro_export]
macro_rules! shared_array {
    ($type:ty; $len:expr) => {
        $crate::shared::pointer_to::<$type>($crate::__shared_array!($type, $len))
    };
}

#[cfg(target_arch = "nvptx64")]
mod device {
    use core::arch::{asm, global_asm};

    // A tile with a 128-byte swizzle needs an alignment of 1024. The window starts at such an address unless static
    // shared memory precedes it.
    global_asm!(".extern .shared .align 1024 .b8 cuda_std_dynamic_shared[];");

    /// Pointer to the dynamic shared memory of the launch, aligned to 1024; equal at every call.
    ///
    /// # PTX
    /// `mov.u32 a, dynamic_shared; cvta.shared.u64 d, a`
    #[inline(always)]
    #[must_use]
    pub fn dynamic_shared_mem<T>() -> *mut T {
        pointer_to(dynamic_shared_address())
    }

    /// Address of the dynamic shared memory of the launch, aligned to 1024.
    ///
    /// # PTX
    /// `mov.u32 d, dynamic_shared`
    #[inline(always)]
    #[must_use]
    pub fn dynamic_shared_address() -> u32 {
        let address;
        // SAFETY: computes an address.
        unsafe {
            asm!("mov.u32 {}, cuda_std_dynamic_shared;", out(reg32) address, options(pure, nomem, nostack));
        }
        address
    }

    /// The shared address of a generic pointer.
    ///
    /// # Safety
    /// - `pointer` points into shared memory.
    ///
    /// # PTX
    /// `cvta.to.shared.u64 d, a`
    #[inline(always)]
    #[must_use]
    pub unsafe fn address_of<T>(pointer: *const T) -> u32 {
        let address: u64;
        // SAFETY: computes an address.
        unsafe {
            asm!("cvta.to.shared.u64 {}, {};", out(reg64) address, in(reg64) pointer, options(pure, nomem, nostack));
        }
        address as u32
    }

    /// The generic pointer to a shared address.
    ///
    /// # PTX
    /// `cvta.shared.u64 d, a`
    #[inline(always)]
    #[must_use]
    pub fn pointer_to<T>(address: u32) -> *mut T {
        let pointer;
        // SAFETY: computes an address.
        unsafe {
            asm!("cvta.shared.u64 {}, {};", out(reg64) pointer, in(reg64) u64::from(address), options(pure, nomem, nostack));
        }
        pointer
    }

    macro_rules! accesses {
        ($(
            $load:ident, $store:ident, $type:ty, $element:ty, $class:ident, $suffix:literal, $align:literal,
            $list:literal, [$($i:tt),*];
        )*) => {$(
            #[doc = concat!("Reads a `", stringify!($type), "` at a shared address.")]
            ///
            /// # Safety
            #[doc = concat!("- `address` is aligned to ", $align, " and lies in the block's shared memory.")]
            /// - It was written before; if by another thread, with a barrier in between.
            ///
            /// # PTX
            #[doc = concat!("`ld.shared.", $suffix, "`")]
            #[inline(always)]
            #[must_use]
            pub unsafe fn $load(address: u32) -> $type {
                let mut value = [<$element>::default(); [$($i),*].len()];
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    asm!(
                        concat!("ld.shared.", $suffix, " ", $list, ", [{address}];"),
                        $(out($class) value[$i],)*
                        address = in(reg32) address,
                        options(readonly, nostack),
                    );
                }
                accesses!(@unwrap value, [$($i),*])
            }

            #[doc = concat!("Writes a `", stringify!($type), "` at a shared address.")]
            ///
            /// # Safety
            #[doc = concat!("- `address` is aligned to ", $align, " and lies in the block's shared memory.")]
            /// - No other thread accesses it without a barrier in between.
            ///
            /// # PTX
            #[doc = concat!("`st.shared.", $suffix, "`")]
            #[inline(always)]
            pub unsafe fn $store(address: u32, value: $type) {
                let value = accesses!(@wrap value, [$($i),*]);
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    asm!(
                        concat!("st.shared.", $suffix, " [{address}], ", $list, ";"),
                        $(in($class) value[$i],)*
                        address = in(reg32) address,
                        options(nostack),
                    );
                }
            }
        )*};
        (@wrap $value:ident, [0]) => { [$value] };
        (@wrap $value:ident, [$($i:tt),*]) => { $value };
        (@unwrap $value:ident, [0]) => { $value[0] };
        (@unwrap $value:ident, [$($i:tt),*]) => { $value };
    }

    accesses! {
        load_u16, store_u16, u16, u16, reg16, "b16", "2", "{}", [0];
        load_u32, store_u32, u32, u32, reg32, "b32", "4", "{}", [0];
        load_u32x2, store_u32x2, [u32; 2], u32, reg32, "v2.b32", "8", "{{{}, {}}}", [0, 1];
        load_u32x4, store_u32x4, [u32; 4], u32, reg32, "v4.b32", "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
        load_f32, store_f32, f32, f32, reg32, "f32", "4", "{}", [0];
        load_f32x2, store_f32x2, [f32; 2], f32, reg32, "v2.f32", "8", "{{{}, {}}}", [0, 1];
        load_f32x4, store_f32x4, [f32; 4], f32, reg32, "v4.f32", "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
        load_u64, store_u64, u64, u64, reg64, "b64", "8", "{}", [0];
    }
}

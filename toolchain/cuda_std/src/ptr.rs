//! Address spaces, and loads and stores of global memory with cache hints.
//!
//! There are several kinds of loads, each for 16, 32, 64 (as `u32x2`) and 128 bits (`u32x4`), and for `f32`:
//!
//! | prefix | PTX | use |
//! |---|---|---|
//! | `load_` | `ld.global` | data the kernel may also write |
//! | `load_nc_` | `ld.global.nc` | data that no thread writes during the launch |
//! | `load_stream_` | `ld.global.nc.L1::no_allocate` | the same, read once |
//! | `load_hint_` | `ld.global.nc.L1::no_allocate.L2::cache_hint` | the same, with a [policy](evict_first_policy) for L2 |
//! | `load_volatile_` | `ld.volatile.global` | polling |

use core::arch::asm;

/// A memory space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AddressSpace {
    /// Memory of the device.
    Global,
    /// Memory of the block.
    Shared,
    /// Read-only memory.
    Constant,
    /// Memory of the thread.
    Local,
}

macro_rules! convert {
    ($space:expr, $pointer:expr, $prefix:literal) => {{
        let converted;
        // SAFETY: only computes an address; the caller vouches for its space.
        unsafe {
            match $space {
                AddressSpace::Global => {
                    asm!(concat!($prefix, ".global.u64 {}, {};"), out(reg64) converted, in(reg64) $pointer, options(pure, nomem, nostack))
                }
                AddressSpace::Shared => {
                    asm!(concat!($prefix, ".shared.u64 {}, {};"), out(reg64) converted, in(reg64) $pointer, options(pure, nomem, nostack))
                }
                AddressSpace::Constant => {
                    asm!(concat!($prefix, ".const.u64 {}, {};"), out(reg64) converted, in(reg64) $pointer, options(pure, nomem, nostack))
                }
                AddressSpace::Local => {
                    asm!(concat!($prefix, ".local.u64 {}, {};"), out(reg64) converted, in(reg64) $pointer, options(pure, nomem, nostack))
                }
            }
        }
        converted
    }};
}

/// The address in `space` of a generic pointer.
///
/// # Safety
/// - `pointer` points into that space. The result is not a generic pointer: only instructions of that
///   space may use it.
///
/// # PTX
/// `cvta.to.<space>.u64 d, a`
#[inline(always)]
#[must_use]
pub unsafe fn convert_generic_to_specific_address_space<T>(
    pointer: *const T,
    space: AddressSpace,
) -> *const T {
    convert!(space, pointer, "cvta.to")
}

/// The generic pointer to an address in `space`.
///
/// # Safety
/// - `pointer` is an address in that space.
///
/// # PTX
/// `cvta.<space>.u64 d, a`
#[inline(always)]
#[must_use]
pub unsafe fn convert_specific_address_space_to_generic<T>(
    pointer: *const T,
    space: AddressSpace,
) -> *const T {
    convert!(space, pointer, "cvta")
}

macro_rules! is_in {
    ($pointer:ident, $space:literal) => {{
        let inside: u32;
        // SAFETY: only examines the bits of the pointer.
        unsafe {
            asm!(
                concat!("{{ .reg .pred p; isspacep.", $space, " p, {}; selp.u32 {}, 1, 0, p; }}"),
                in(reg64) $pointer,
                out(reg32) inside,
                options(pure, nomem, nostack),
            );
        }
        inside != 0
    }};
}

/// Whether a generic pointer points into `space`.
///
/// # PTX
/// `isspacep.<space> p, a`
#[inline(always)]
#[must_use]
pub fn is_in_address_space<T>(pointer: *const T, space: AddressSpace) -> bool {
    match space {
        AddressSpace::Global => is_in!(pointer, "global"),
        AddressSpace::Shared => is_in!(pointer, "shared"),
        AddressSpace::Constant => is_in!(pointer, "const"),
        AddressSpace::Local => is_in!(pointer, "local"),
    }
}

macro_rules! policies {
    ($($name:ident, $priority:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`createpolicy.fractional.", $priority, ".b64 d, 1.0`")]
        #[inline(always)]
        #[must_use]
        pub fn $name() -> u64 {
            let policy;
            // SAFETY: only computes a value.
            unsafe {
                asm!(
                    concat!("createpolicy.fractional.", $priority, ".b64 {}, 1.0;"),
                    out(reg64) policy,
                    options(pure, nomem, nostack),
                );
            }
            policy
        }
    )*};
}

policies! {
    evict_first_policy, "L2::evict_first", "Cache policy: these lines leave L2 first. For what is read once.";
    evict_last_policy, "L2::evict_last", "Cache policy: these lines leave L2 last. For what many blocks read.";
    evict_unchanged_policy, "L2::evict_unchanged", "Cache policy: an access does not change a line's priority in L2.";
}

/// The compiler may move and merge a `constant` load; it executes an `ordered` load in place, every time.
macro_rules! load_options {
    (constant, $($asm:tt)*) => { asm!($($asm)* options(pure, readonly, nostack)) };
    (ordered, $($asm:tt)*) => { asm!($($asm)* options(readonly, nostack)) };
}

macro_rules! loads {
    ($(
        $name:ident, $kind:ident, $ptx:literal, $type:ty, $element:ty, $class:ident, $align:literal,
        $list:literal, [$($i:tt),*] $(, $policy:ident)?;
    )*) => {$(
        #[doc = concat!("Reads a `", stringify!($type), "` of global memory.")]
        ///
        /// # Safety
        #[doc = concat!("- `source` points to readable global memory and is aligned to ", $align, ".")]
        #[doc = loads!(@rule $kind)]
        $(#[doc = concat!("- `", stringify!($policy), "` comes from one of this module's policy functions.")])?
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, "`")]
        #[inline(always)]
        #[must_use]
        pub unsafe fn $name(source: *const $element $(, $policy: u64)?) -> $type {
            let mut value = [<$element>::default(); [$($i),*].len()];
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                load_options!(
                    $kind,
                    concat!($ptx, " ", $list, ", [{source}]", $(", {", stringify!($policy), "}",)? ";"),
                    $(out($class) value[$i],)*
                    source = in(reg64) source,
                    $($policy = in(reg64) $policy,)?
                );
            }
            loads!(@unwrap value, [$($i),*])
        }
    )*};
    (@rule constant) => { "- Nobody writes it while the kernel runs." };
    (@rule ordered) => { "- No other thread writes it without synchronisation (polling excepted)." };
    (@unwrap $value:ident, [0]) => { $value[0] };
    (@unwrap $value:ident, [$($i:tt),*]) => { $value };
}

loads! {
    load_u16, ordered, "ld.global.b16", u16, u16, reg16, "2", "{}", [0];
    load_u32, ordered, "ld.global.b32", u32, u32, reg32, "4", "{}", [0];
    load_u32x2, ordered, "ld.global.v2.b32", [u32; 2], u32, reg32, "8", "{{{}, {}}}", [0, 1];
    load_u32x4, ordered, "ld.global.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    load_u64, ordered, "ld.global.b64", u64, u64, reg64, "8", "{}", [0];
    load_f32, ordered, "ld.global.f32", f32, f32, reg32, "4", "{}", [0];
    load_f32x2, ordered, "ld.global.v2.f32", [f32; 2], f32, reg32, "8", "{{{}, {}}}", [0, 1];
    load_f32x4, ordered, "ld.global.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    load_volatile_u32, ordered, "ld.volatile.global.u32", u32, u32, reg32, "4", "{}", [0];
    load_nc_u16, constant, "ld.global.nc.b16", u16, u16, reg16, "2", "{}", [0];
    load_nc_u32, constant, "ld.global.nc.b32", u32, u32, reg32, "4", "{}", [0];
    load_nc_u32x2, constant, "ld.global.nc.v2.b32", [u32; 2], u32, reg32, "8", "{{{}, {}}}", [0, 1];
    load_nc_u32x4, constant, "ld.global.nc.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    load_nc_u64, constant, "ld.global.nc.b64", u64, u64, reg64, "8", "{}", [0];
    load_nc_f32, constant, "ld.global.nc.f32", f32, f32, reg32, "4", "{}", [0];
    load_nc_f32x2, constant, "ld.global.nc.v2.f32", [f32; 2], f32, reg32, "8", "{{{}, {}}}", [0, 1];
    load_nc_f32x4, constant, "ld.global.nc.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    load_stream_u32, constant, "ld.global.nc.L1::no_allocate.b32", u32, u32, reg32, "4", "{}", [0];
    load_stream_u32x2, constant, "ld.global.nc.L1::no_allocate.v2.b32", [u32; 2], u32, reg32, "8", "{{{}, {}}}", [0, 1];
    load_stream_u32x4, constant, "ld.global.nc.L1::no_allocate.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    load_stream_f32, constant, "ld.global.nc.L1::no_allocate.f32", f32, f32, reg32, "4", "{}", [0];
    load_stream_f32x2, constant, "ld.global.nc.L1::no_allocate.v2.f32", [f32; 2], f32, reg32, "8", "{{{}, {}}}", [0, 1];
    load_stream_f32x4, constant, "ld.global.nc.L1::no_allocate.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    load_hint_u32, constant, "ld.global.nc.L1::no_allocate.L2::cache_hint.b32", u32, u32, reg32, "4", "{}", [0], policy;
    load_hint_u32x2, constant, "ld.global.nc.L1::no_allocate.L2::cache_hint.v2.b32", [u32; 2], u32, reg32, "8", "{{{}, {}}}", [0, 1], policy;
    load_hint_u32x4, constant, "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3], policy;
    load_hint_f32x4, constant, "ld.global.nc.L1::no_allocate.L2::cache_hint.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3], policy;
}

macro_rules! stores {
    ($(
        $name:ident, $ptx:literal, $type:ty, $element:ty, $class:ident, $align:literal, $list:literal,
        [$($i:tt),*] $(, $policy:ident)?;
    )*) => {$(
        #[doc = concat!("Writes a `", stringify!($type), "` to global memory.")]
        ///
        /// # Safety
        #[doc = concat!("- `target` points to writable global memory and is aligned to ", $align, ".")]
        /// - No other thread accesses it without synchronisation.
        $(#[doc = concat!("- `", stringify!($policy), "` comes from one of this module's policy functions.")])?
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, "`")]
        #[inline(always)]
        pub unsafe fn $name(target: *mut $element, value: $type $(, $policy: u64)?) {
            let value = stores!(@wrap value, [$($i),*]);
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!($ptx, " [{target}], ", $list, $(", {", stringify!($policy), "}",)? ";"),
                    $(in($class) value[$i],)*
                    target = in(reg64) target,
                    $($policy = in(reg64) $policy,)?
                    options(nostack),
                );
            }
        }
    )*};
    (@wrap $value:ident, [0]) => { [$value] };
    (@wrap $value:ident, [$($i:tt),*]) => { $value };
}

stores! {
    store_u16, "st.global.b16", u16, u16, reg16, "2", "{}", [0];
    store_u32, "st.global.b32", u32, u32, reg32, "4", "{}", [0];
    store_u32x2, "st.global.v2.b32", [u32; 2], u32, reg32, "8", "{{{}, {}}}", [0, 1];
    store_u32x4, "st.global.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    store_u64, "st.global.b64", u64, u64, reg64, "8", "{}", [0];
    store_f32, "st.global.f32", f32, f32, reg32, "4", "{}", [0];
    store_f32x2, "st.global.v2.f32", [f32; 2], f32, reg32, "8", "{{{}, {}}}", [0, 1];
    store_f32x4, "st.global.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    store_stream_u32, "st.global.cs.b32", u32, u32, reg32, "4", "{}", [0];
    store_stream_u32x2, "st.global.cs.v2.b32", [u32; 2], u32, reg32, "8", "{{{}, {}}}", [0, 1];
    store_stream_u32x4, "st.global.cs.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    store_stream_f32x2, "st.global.cs.v2.f32", [f32; 2], f32, reg32, "8", "{{{}, {}}}", [0, 1];
    store_stream_f32x4, "st.global.cs.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3];
    store_hint_u32x4, "st.global.L2::cache_hint.v4.b32", [u32; 4], u32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3], policy;
    store_hint_f32x4, "st.global.L2::cache_hint.v4.f32", [f32; 4], f32, reg32, "16", "{{{}, {}, {}, {}}}", [0, 1, 2, 3], policy;
}

macro_rules! prefetches {
    ($($name:ident, $ptx:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # Safety
        /// - `source` points to global memory.
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, " [a]`")]
        #[inline(always)]
        pub unsafe fn $name<T>(source: *const T) {
            // SAFETY: the caller's promise is the instruction's.
            unsafe { asm!(concat!($ptx, " [{}];"), in(reg64) source, options(nostack, readonly)) }
        }
    )*};
}

prefetches! {
    prefetch_l1, "prefetch.global.L1", "Asks for the line in L1.";
    prefetch_l2, "prefetch.global.L2", "Asks for the line in L2.";
    prefetch_l2_evict_last, "prefetch.global.L2::evict_last", "Asks for the line in L2, where it leaves last.";
}

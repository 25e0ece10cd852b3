//! Atomic operations that keep their memory ordering in machine code.
//!
//! On this target, rustc 1.96 drops the ordering of `AtomicU32::fetch_add` and `swap`. These wrappers
//! put it into the instruction. Ordering and scope are types: `fetch_add::<AcqRel, Gpu, _>(p, 1)`.
//!
//! Functions here take pointers to global memory; those in [`shared`] take shared addresses.

use core::arch::asm;

mod sealed {
    pub trait Sealed {}
}

/// How an atomic operation orders other memory accesses of the thread.
pub trait Ordering: sealed::Sealed {
    #[doc(hidden)]
    const INDEX: u32;
}

/// The set of threads among which an operation is atomic and ordered.
pub trait Scope: sealed::Sealed {
    #[doc(hidden)]
    const INDEX: u32;
}

macro_rules! markers {
    ($($trait:ident { $($name:ident = $index:literal, $what:literal;)* })*) => {$($(
        #[doc = $what]
        #[derive(Debug, Clone, Copy)]
        pub struct $name;
        impl sealed::Sealed for $name {}
        impl $trait for $name {
            const INDEX: u32 = $index;
        }
    )*)*};
}

markers! {
    Ordering {
        Relaxed = 0, "Atomic, orders nothing else.";
        Acquire = 1, "Accesses behind it stay behind it.";
        Release = 2, "Accesses before it stay before it.";
        AcqRel = 3, "Acquire and release.";
    }
    Scope {
        Cta = 0, "The threads of the block.";
        Gpu = 1, "The threads of the GPU.";
        Sys = 2, "All threads, other GPUs' and the host's too.";
    }
}

/// One arm per ordering and scope, because the template of an `asm!` must be a literal.
macro_rules! by_order_and_scope {
    ($order:ident, $scope:ident, $before:expr, $after:expr, ($($operands:tt)*)) => {
        match ($order::INDEX, $scope::INDEX) {
            (0, 0) => asm!(concat!($before, ".relaxed.cta", $after), $($operands)*),
            (0, 1) => asm!(concat!($before, ".relaxed.gpu", $after), $($operands)*),
            (0, _) => asm!(concat!($before, ".relaxed.sys", $after), $($operands)*),
            (1, 0) => asm!(concat!($before, ".acquire.cta", $after), $($operands)*),
            (1, 1) => asm!(concat!($before, ".acquire.gpu", $after), $($operands)*),
            (1, _) => asm!(concat!($before, ".acquire.sys", $after), $($operands)*),
            (2, 0) => asm!(concat!($before, ".release.cta", $after), $($operands)*),
            (2, 1) => asm!(concat!($before, ".release.gpu", $after), $($operands)*),
            (2, _) => asm!(concat!($before, ".release.sys", $after), $($operands)*),
            (_, 0) => asm!(concat!($before, ".acq_rel.cta", $after), $($operands)*),
            (_, 1) => asm!(concat!($before, ".acq_rel.gpu", $after), $($operands)*),
            (_, _) => asm!(concat!($before, ".acq_rel.sys", $after), $($operands)*),
        }
    };
}

macro_rules! exchanges {
    ($($trait:ident, $name:ident, $operation:literal, [$($type:ty = $class:ident $suffix:literal),*], $what:literal;)*) => {$(
        #[doc = concat!("Types that [`", stringify!($name), "`] knows.")]
        pub trait $trait: Copy {
            #[doc(hidden)]
            unsafe fn perform<O: Ordering, S: Scope>(target: *mut Self, value: Self) -> Self;
        }

        $(impl $trait for $type {
            #[inline(always)]
            unsafe fn perform<O: Ordering, S: Scope>(target: *mut Self, value: Self) -> Self {
                let previous;
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    by_order_and_scope!(
                        O, S, "atom", concat!(".global.", $operation, ".", $suffix, " {}, [{}], {};"),
                        (out($class) previous, in(reg64) target, in($class) value, options(nostack))
                    );
                }
                previous
            }
        })*

        #[doc = $what]
        ///
        /// # Safety
        /// - `target` points to readable and writable global memory, aligned to its size.
        /// - Concurrent accesses are atomic.
        ///
        /// # PTX
        #[doc = concat!("`atom.<order>.<scope>.global.", $operation, ".<type>`")]
        #[inline(always)]
        pub unsafe fn $name<O: Ordering, S: Scope, T: $trait>(target: *mut T, value: T) -> T {
            // SAFETY: the caller's promise.
            unsafe { T::perform::<O, S>(target, value) }
        }
    )*};
}

exchanges! {
    Add, fetch_add, "add", [u32 = reg32 "u32", u64 = reg64 "u64", f32 = reg32 "f32"],
        "Adds and gives what was there before; integers wrap.";
    Min, fetch_min, "min", [u32 = reg32 "u32", i32 = reg32 "s32", u64 = reg64 "u64"],
        "Keeps the smaller value and gives what was there before.";
    Max, fetch_max, "max", [u32 = reg32 "u32", i32 = reg32 "s32", u64 = reg64 "u64"],
        "Keeps the larger value and gives what was there before.";
    And, fetch_and, "and", [u32 = reg32 "b32", u64 = reg64 "b64"],
        "Keeps the bits that both have and gives what was there before.";
    Or, fetch_or, "or", [u32 = reg32 "b32", u64 = reg64 "b64"],
        "Keeps the bits that either has and gives what was there before.";
    Xor, fetch_xor, "xor", [u32 = reg32 "b32", u64 = reg64 "b64"],
        "Keeps the bits that one of both has and gives what was there before.";
    Exchange, exchange, "exch", [u32 = reg32 "b32", u64 = reg64 "b64"],
        "Puts the value there and gives what was there before.";
    IncrementWrapping, fetch_inc, "inc", [u32 = reg32 "u32"],
        "Adds one, or starts at 0 again where `value` was reached; gives what was there before.";
}

/// Types that [`compare_exchange`] supports.
pub trait CompareExchange: Copy {
    #[doc(hidden)]
    unsafe fn perform<O: Ordering, S: Scope>(target: *mut Self, expected: Self, new: Self) -> Self;
}

macro_rules! compare_exchanges {
    ($($type:ty = $class:ident $suffix:literal),*) => {$(
        impl CompareExchange for $type {
            #[inline(always)]
            unsafe fn perform<O: Ordering, S: Scope>(target: *mut Self, expected: Self, new: Self) -> Self {
                let previous;
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    by_order_and_scope!(
                        O, S, "atom", concat!(".global.cas.", $suffix, " {}, [{}], {}, {};"),
                        (out($class) previous, in(reg64) target, in($class) expected, in($class) new, options(nostack))
                    );
                }
                previous
            }
        }
    )*};
}

compare_exchanges!(u32 = reg32 "b32", u64 = reg64 "b64");

/// Replaces the value by `new` if it equals `expected`. Returns the old value; if that is `expected`, it was replaced.
///
/// # Safety
/// - `target` points to readable and writable global memory, aligned to its size.
/// - Concurrent accesses are atomic.
///
/// # PTX
/// `atom.<order>.<scope>.global.cas.<type>`
#[inline(always)]
pub unsafe fn compare_exchange<O: Ordering, S: Scope, T: CompareExchange>(
    target: *mut T,
    expected: T,
    new: T,
) -> T {
    // SAFETY: the caller's promise.
    unsafe { T::perform::<O, S>(target, expected, new) }
}

macro_rules! reductions {
    ($($trait:ident, $name:ident, $operation:literal, [$($type:ty = $class:ident $suffix:literal),*], $what:literal;)*) => {$(
        #[doc = concat!("Types that [`", stringify!($name), "`] knows.")]
        pub trait $trait: Copy {
            #[doc(hidden)]
            unsafe fn perform<O: Ordering, S: Scope>(target: *mut Self, value: Self);
        }

        $(impl $trait for $type {
            #[inline(always)]
            unsafe fn perform<O: Ordering, S: Scope>(target: *mut Self, value: Self) {
                const {
                    assert!(O::INDEX == Relaxed::INDEX || O::INDEX == Release::INDEX, "red is relaxed or release")
                };
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    match (O::INDEX, S::INDEX) {
                        (0, 0) => asm!(concat!("red.relaxed.cta.global.", $operation, ".", $suffix, " [{}], {};"), in(reg64) target, in($class) value, options(nostack)),
                        (0, 1) => asm!(concat!("red.relaxed.gpu.global.", $operation, ".", $suffix, " [{}], {};"), in(reg64) target, in($class) value, options(nostack)),
                        (0, _) => asm!(concat!("red.relaxed.sys.global.", $operation, ".", $suffix, " [{}], {};"), in(reg64) target, in($class) value, options(nostack)),
                        (_, 0) => asm!(concat!("red.release.cta.global.", $operation, ".", $suffix, " [{}], {};"), in(reg64) target, in($class) value, options(nostack)),
                        (_, 1) => asm!(concat!("red.release.gpu.global.", $operation, ".", $suffix, " [{}], {};"), in(reg64) target, in($class) value, options(nostack)),
                        (_, _) => asm!(concat!("red.release.sys.global.", $operation, ".", $suffix, " [{}], {};"), in(reg64) target, in($class) value, options(nostack)),
                    }
                }
            }
        })*

        #[doc = $what]
        ///
        /// # Safety
        /// - `target` points to readable and writable global memory, aligned to its size.
        /// - Concurrent accesses are atomic.
        ///
        /// # PTX
        #[doc = concat!("`red.<order>.<scope>.global.", $operation, ".<type>` with `Relaxed` or `Release`")]
        #[inline(always)]
        pub unsafe fn $name<O: Ordering, S: Scope, T: $trait>(target: *mut T, value: T) {
            // SAFETY: the caller's promise.
            unsafe { T::perform::<O, S>(target, value) }
        }
    )*};
}

reductions! {
    ReduceAdd, reduce_add, "add", [u32 = reg32 "u32", u64 = reg64 "u64", f32 = reg32 "f32"],
        "Adds and gives nothing back.";
    ReduceMin, reduce_min, "min", [u32 = reg32 "u32", i32 = reg32 "s32"],
        "Keeps the smaller value and gives nothing back.";
    ReduceMax, reduce_max, "max", [u32 = reg32 "u32", i32 = reg32 "s32"],
        "Keeps the larger value and gives nothing back.";
    ReduceOr, reduce_or, "or", [u32 = reg32 "b32", u64 = reg64 "b64"],
        "Keeps the bits that either has and gives nothing back.";
}

/// Types that [`load`] and [`store`] support.
pub trait Atomic: Copy {
    #[doc(hidden)]
    unsafe fn load<O: Ordering, S: Scope>(source: *const Self) -> Self;
    #[doc(hidden)]
    unsafe fn store<O: Ordering, S: Scope>(target: *mut Self, value: Self);
}

macro_rules! by_scope {
    ($scope:ident, $before:expr, $after:expr, ($($operands:tt)*)) => {
        match $scope::INDEX {
            0 => asm!(concat!($before, ".cta", $after), $($operands)*),
            1 => asm!(concat!($before, ".gpu", $after), $($operands)*),
            _ => asm!(concat!($before, ".sys", $after), $($operands)*),
        }
    };
}

macro_rules! loads_and_stores {
    ($($type:ty = $class:ident $suffix:literal),*) => {$(
        impl Atomic for $type {
            #[inline(always)]
            unsafe fn load<O: Ordering, S: Scope>(source: *const Self) -> Self {
                const {
                    assert!(O::INDEX == Relaxed::INDEX || O::INDEX == Acquire::INDEX, "a load is relaxed or acquire")
                };
                let value;
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    if O::INDEX == Relaxed::INDEX {
                        by_scope!(S, "ld.relaxed", concat!(".global.", $suffix, " {}, [{}];"), (out($class) value, in(reg64) source, options(nostack)));
                    } else {
                        by_scope!(S, "ld.acquire", concat!(".global.", $suffix, " {}, [{}];"), (out($class) value, in(reg64) source, options(nostack)));
                    }
                }
                value
            }

            #[inline(always)]
            unsafe fn store<O: Ordering, S: Scope>(target: *mut Self, value: Self) {
                const {
                    assert!(O::INDEX == Relaxed::INDEX || O::INDEX == Release::INDEX, "a store is relaxed or release")
                };
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    if O::INDEX == Relaxed::INDEX {
                        by_scope!(S, "st.relaxed", concat!(".global.", $suffix, " [{}], {};"), (in(reg64) target, in($class) value, options(nostack)));
                    } else {
                        by_scope!(S, "st.release", concat!(".global.", $suffix, " [{}], {};"), (in(reg64) target, in($class) value, options(nostack)));
                    }
                }
            }
        }
    )*};
}

loads_and_stores!(u32 = reg32 "b32", u64 = reg64 "b64", f32 = reg32 "f32");

/// Reads atomically, `Relaxed` or `Acquire`.
///
/// # Safety
/// - `source` points to readable global memory, aligned to its size.
/// - Concurrent accesses are atomic.
///
/// # PTX
/// `ld.<order>.<scope>.global.<type>`
#[inline(always)]
#[must_use]
pub unsafe fn load<O: Ordering, S: Scope, T: Atomic>(source: *const T) -> T {
    // SAFETY: the caller's promise.
    unsafe { T::load::<O, S>(source) }
}

/// Writes atomically, `Relaxed` or `Release`.
///
/// # Safety
/// - `target` points to writable global memory, aligned to its size.
/// - Concurrent accesses are atomic.
///
/// # PTX
/// `st.<order>.<scope>.global.<type>`
#[inline(always)]
pub unsafe fn store<O: Ordering, S: Scope, T: Atomic>(target: *mut T, value: T) {
    // SAFETY: the caller's promise.
    unsafe { T::store::<O, S>(target, value) }
}

/// Atomic operations on shared addresses, among the threads of the block.
pub mod shared {
    use core::arch::asm;

    macro_rules! operations {
        ($($name:ident, $order:literal, $operation:literal, $suffix:literal, $type:ty, $what:literal;)*) => {$(
            #[doc = $what]
            ///
            /// # Safety
            /// - `address` is aligned to 4 and lies in the block's shared memory.
            /// - Concurrent accesses are atomic.
            ///
            /// # PTX
            #[doc = concat!("`atom.", $order, ".cta.shared.", $operation, ".", $suffix, "`")]
            #[inline(always)]
            pub unsafe fn $name(address: u32, value: $type) -> $type {
                let previous;
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    asm!(
                        concat!("atom.", $order, ".cta.shared.", $operation, ".", $suffix, " {}, [{}], {};"),
                        out(reg32) previous,
                        in(reg32) address,
                        in(reg32) value,
                        options(nostack),
                    );
                }
                previous
            }
        )*};
    }

    operations! {
        fetch_add_u32, "acq_rel", "add", "u32", u32, "Adds and gives what was there before.";
        fetch_add_f32, "acq_rel", "add", "f32", f32, "Adds and gives what was there before.";
        fetch_add_relaxed_u32, "relaxed", "add", "u32", u32, "[`fetch_add_u32`] that orders nothing else.";
        fetch_max_u32, "acq_rel", "max", "u32", u32, "Keeps the larger value and gives what was there before.";
        fetch_max_relaxed_u32, "relaxed", "max", "u32", u32, "[`fetch_max_u32`] that orders nothing else.";
        fetch_max_i32, "acq_rel", "max", "s32", i32, "Keeps the larger value and gives what was there before.";
        fetch_min_u32, "acq_rel", "min", "u32", u32, "Keeps the smaller value and gives what was there before.";
        fetch_and_u32, "acq_rel", "and", "b32", u32, "Keeps the bits that both have and gives what was there before.";
        fetch_or_u32, "acq_rel", "or", "b32", u32, "Keeps the bits that either has and gives what was there before.";
        exchange_u32, "acq_rel", "exch", "b32", u32, "Puts the value there and gives what was there before.";
    }

    /// Reads a value that other threads may change at the same time, by atomic operations.
    ///
    /// # Safety
    /// - `address` is aligned to 4 and lies in the block's shared memory.
    ///
    /// # PTX
    /// `ld.relaxed.cta.shared.u32`
    #[inline(always)]
    pub unsafe fn load_relaxed_u32(address: u32) -> u32 {
        let value;
        // SAFETY: the caller's promise is the instruction's.
        unsafe {
            asm!("ld.relaxed.cta.shared.u32 {}, [{}];", out(reg32) value, in(reg32) address, options(nostack));
        }
        value
    }

    /// Replaces the value by `new` if it equals `expected`. Returns the old value.
    ///
    /// # Safety
    /// - `address` is aligned to 4 and lies in the block's shared memory.
    /// - Concurrent accesses are atomic.
    ///
    /// # PTX
    /// `atom.acq_rel.cta.shared.cas.b32`
    #[inline(always)]
    pub unsafe fn compare_exchange_u32(address: u32, expected: u32, new: u32) -> u32 {
        let previous;
        // SAFETY: the caller's promise is the instruction's.
        unsafe {
            asm!(
                "atom.acq_rel.cta.shared.cas.b32 {}, [{}], {}, {};",
                out(reg32) previous,
                in(reg32) address,
                in(reg32) expected,
                in(reg32) new,
                options(nostack),
            );
        }
        previous
    }
}

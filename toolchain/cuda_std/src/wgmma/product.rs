//! The matrix products.

use core::arch::asm;

use super::Descriptor;

mod sealed {
    pub trait Sealed {}
}

/// A 16-bit type of A and B: [`Bf16`] or [`F16`].
pub trait Element: sealed::Sealed {
    #[doc(hidden)]
    const IS_BF16: bool;
}

/// bfloat16 operands.
#[derive(Clone, Copy, Debug)]
pub struct Bf16;
impl sealed::Sealed for Bf16 {}
impl Element for Bf16 {
    const IS_BF16: bool = true;
}

/// Half-precision operands.
#[derive(Clone, Copy, Debug)]
pub struct F16;
impl sealed::Sealed for F16 {}
impl Element for F16 {
    const IS_BF16: bool = false;
}

/// The accumulator of a 64 × N product: `[f32; N / 2]`.
pub trait Accumulator {
    /// Columns of the product.
    const N: usize;
    #[doc(hidden)]
    unsafe fn ss<T: Element, const ADD: bool, const TRANS_A: bool, const TRANS_B: bool>(
        &mut self,
        a: Descriptor,
        b: Descriptor,
    );
    #[doc(hidden)]
    unsafe fn ss_if<T: Element, const TRANS_A: bool, const TRANS_B: bool>(
        &mut self,
        a: Descriptor,
        b: Descriptor,
        add: bool,
    );
    #[doc(hidden)]
    unsafe fn rs<T: Element, const ADD: bool, const TRANS_B: bool>(
        &mut self,
        a: [u32; 4],
        b: Descriptor,
    );
    #[doc(hidden)]
    unsafe fn rs_if<T: Element, const TRANS_B: bool>(
        &mut self,
        a: [u32; 4],
        b: Descriptor,
        add: bool,
    );
    #[doc(hidden)]
    unsafe fn ss_e4m3<const ADD: bool>(&mut self, a: Descriptor, b: Descriptor);
    #[doc(hidden)]
    unsafe fn rs_e4m3<const ADD: bool>(&mut self, a: [u32; 4], b: Descriptor);
}

/// One instruction: `$d` is `out` (D = A·B) or `inout` (D += A·B); the literals are the `scale-d` operand
/// and the code that sets and ends its use.
macro_rules! instruction {
    (ss, $n:literal, $type:literal, $mode:ident, ($before:literal, $scale:literal, $after:literal), $self:ident, $a:ident, $b:ident, $trans_a:ident, $trans_b:ident, [$($i:tt)*] $($add:tt)*) => {
        asm!(
            concat!(
                $before, "wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.", $type, ".", $type,
                " {{", instruction!(@list $($i)*), "}}, {a}, {b}, ", $scale, ", 1, 1, {trans_a}, {trans_b};", $after
            ),
            $($mode(reg32) $self[$i],)*
            a = in(reg64) $a.0,
            b = in(reg64) $b.0,
            trans_a = const $trans_a as u32,
            trans_b = const $trans_b as u32,
            $($add)*
            options(nostack),
        )
    };
    (rs, $n:literal, $type:literal, $mode:ident, ($before:literal, $scale:literal, $after:literal), $self:ident, $a:ident, $b:ident, $trans_b:ident, [$($i:tt)*] $($add:tt)*) => {
        asm!(
            concat!(
                $before, "wgmma.mma_async.sync.aligned.m64n", $n, "k16.f32.", $type, ".", $type,
                " {{", instruction!(@list $($i)*), "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, ", $scale, ", 1, 1, {trans_b};", $after
            ),
            $($mode(reg32) $self[$i],)*
            a0 = in(reg32) $a[0],
            a1 = in(reg32) $a[1],
            a2 = in(reg32) $a[2],
            a3 = in(reg32) $a[3],
            b = in(reg64) $b.0,
            trans_b = const $trans_b as u32,
            $($add)*
            options(nostack),
        )
    };
    (ss_e4m3, $n:literal, $mode:ident, $scale:literal, $self:ident, $a:ident, $b:ident, [$($i:tt)*]) => {
        asm!(
            concat!(
                "wgmma.mma_async.sync.aligned.m64n", $n, "k32.f32.e4m3.e4m3 {{",
                instruction!(@list $($i)*), "}}, {a}, {b}, ", $scale, ", 1, 1;"
            ),
            $($mode(reg32) $self[$i],)*
            a = in(reg64) $a.0,
            b = in(reg64) $b.0,
            options(nostack),
        )
    };
    (rs_e4m3, $n:literal, $mode:ident, $scale:literal, $self:ident, $a:ident, $b:ident, [$($i:tt)*]) => {
        asm!(
            concat!(
                "wgmma.mma_async.sync.aligned.m64n", $n, "k32.f32.e4m3.e4m3 {{",
                instruction!(@list $($i)*), "}}, {{{a0}, {a1}, {a2}, {a3}}}, {b}, ", $scale, ", 1, 1;"
            ),
            $($mode(reg32) $self[$i],)*
            a0 = in(reg32) $a[0],
            a1 = in(reg32) $a[1],
            a2 = in(reg32) $a[2],
            a3 = in(reg32) $a[3],
            b = in(reg64) $b.0,
            options(nostack),
        )
    };
    (@list $first:tt $($i:tt)*) => { concat!("{", $first, "}" $(, ", {", $i, "}")*) };
}

/// Implements [`Accumulator`] for `$n` columns with the listed registers.
macro_rules! accumulator {
    ($n:literal [$($i:tt)*]) => {
        impl Accumulator for [f32; $n / 2] {
            const N: usize = $n;
            #[inline(always)]
            unsafe fn ss<T: Element, const ADD: bool, const TRANS_A: bool, const TRANS_B: bool>(
                &mut self,
                a: Descriptor,
                b: Descriptor,
            ) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    match (T::IS_BF16, ADD) {
                        (true, true) => instruction!(ss, $n, "bf16", inout, ("", "1", ""), self, a, b, TRANS_A, TRANS_B, [$($i)*]),
                        (true, false) => instruction!(ss, $n, "bf16", out, ("", "0", ""), self, a, b, TRANS_A, TRANS_B, [$($i)*]),
                        (false, true) => instruction!(ss, $n, "f16", inout, ("", "1", ""), self, a, b, TRANS_A, TRANS_B, [$($i)*]),
                        (false, false) => instruction!(ss, $n, "f16", out, ("", "0", ""), self, a, b, TRANS_A, TRANS_B, [$($i)*]),
                    }
                }
            }
            #[inline(always)]
            unsafe fn ss_if<T: Element, const TRANS_A: bool, const TRANS_B: bool>(
                &mut self,
                a: Descriptor,
                b: Descriptor,
                add: bool,
            ) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    if T::IS_BF16 {
                        instruction!(ss, $n, "bf16", inout, ("{{ .reg .pred p; setp.ne.b32 p, {add}, 0; ", "p", " }}"), self, a, b, TRANS_A, TRANS_B, [$($i)*] add = in(reg32) add as u32,)
                    } else {
                        instruction!(ss, $n, "f16", inout, ("{{ .reg .pred p; setp.ne.b32 p, {add}, 0; ", "p", " }}"), self, a, b, TRANS_A, TRANS_B, [$($i)*] add = in(reg32) add as u32,)
                    }
                }
            }
            #[inline(always)]
            unsafe fn rs<T: Element, const ADD: bool, const TRANS_B: bool>(&mut self, a: [u32; 4], b: Descriptor) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    match (T::IS_BF16, ADD) {
                        (true, true) => instruction!(rs, $n, "bf16", inout, ("", "1", ""), self, a, b, TRANS_B, [$($i)*]),
                        (true, false) => instruction!(rs, $n, "bf16", out, ("", "0", ""), self, a, b, TRANS_B, [$($i)*]),
                        (false, true) => instruction!(rs, $n, "f16", inout, ("", "1", ""), self, a, b, TRANS_B, [$($i)*]),
                        (false, false) => instruction!(rs, $n, "f16", out, ("", "0", ""), self, a, b, TRANS_B, [$($i)*]),
                    }
                }
            }
            #[inline(always)]
            unsafe fn rs_if<T: Element, const TRANS_B: bool>(&mut self, a: [u32; 4], b: Descriptor, add: bool) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    if T::IS_BF16 {
                        instruction!(rs, $n, "bf16", inout, ("{{ .reg .pred p; setp.ne.b32 p, {add}, 0; ", "p", " }}"), self, a, b, TRANS_B, [$($i)*] add = in(reg32) add as u32,)
                    } else {
                        instruction!(rs, $n, "f16", inout, ("{{ .reg .pred p; setp.ne.b32 p, {add}, 0; ", "p", " }}"), self, a, b, TRANS_B, [$($i)*] add = in(reg32) add as u32,)
                    }
                }
            }
            #[inline(always)]
            unsafe fn ss_e4m3<const ADD: bool>(&mut self, a: Descriptor, b: Descriptor) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    if ADD {
                        instruction!(ss_e4m3, $n, inout, "1", self, a, b, [$($i)*])
                    } else {
                        instruction!(ss_e4m3, $n, out, "0", self, a, b, [$($i)*])
                    }
                }
            }
            #[inline(always)]
            unsafe fn rs_e4m3<const ADD: bool>(&mut self, a: [u32; 4], b: Descriptor) {
                // SAFETY: the caller's promise is the instruction's.
                unsafe {
                    if ADD {
                        instruction!(rs_e4m3, $n, inout, "1", self, a, b, [$($i)*])
                    } else {
                        instruction!(rs_e4m3, $n, out, "0", self, a, b, [$($i)*])
                    }
                }
            }
        }
    };
}

/// Each accumulator has the registers of the previous one and four more.
macro_rules! accumulators {
    ([$($before:tt)*]) => {};
    ([$($before:tt)*] $n:literal [$($more:tt)*] $($rest:tt)*) => {
        accumulator!($n [$($before)* $($more)*]);
        accumulators!([$($before)* $($more)*] $($rest)*);
    };
}

#[rustfmt::skip]
accumulators! { []
    8 [0 1 2 3]  16 [4 5 6 7]  24 [8 9 10 11]  32 [12 13 14 15]
    40 [16 17 18 19]  48 [20 21 22 23]  56 [24 25 26 27]  64 [28 29 30 31]
    72 [32 33 34 35]  80 [36 37 38 39]  88 [40 41 42 43]  96 [44 45 46 47]
    104 [48 49 50 51]  112 [52 53 54 55]  120 [56 57 58 59]  128 [60 61 62 63]
    136 [64 65 66 67]  144 [68 69 70 71]  152 [72 73 74 75]  160 [76 77 78 79]
    168 [80 81 82 83]  176 [84 85 86 87]  184 [88 89 90 91]  192 [92 93 94 95]
    200 [96 97 98 99]  208 [100 101 102 103]  216 [104 105 106 107]  224 [108 109 110 111]
    232 [112 113 114 115]  240 [116 117 118 119]  248 [120 121 122 123]  256 [124 125 126 127]
}

/// D = A·B, or D += A·B if `ADD`, both operands in shared memory.
///
/// Without transposition an operand is K-major (rows of A, columns of B contiguous along K), with it M-
/// or N-major.
///
/// # Safety
/// - All threads of the warpgroup execute this, the lanes of a warp together.
/// - [`fence`](super::fence) was called after the last other access to the accumulator, and
///   [`fence::proxy_async_shared`](crate::fence::proxy_async_shared) after ordinary stores to A
///   and B.
/// - The descriptors refer to readable shared memory. It stays unchanged, and the accumulator
///   untouched, until [`wait_group`](super::wait_group).
///
/// # PTX
/// `wgmma.mma_async.sync.aligned.m64n<N>k16.f32.<T>.<T>` (sm_90a)
#[inline(always)]
pub unsafe fn mma_ss<
    T: Element,
    const ADD: bool,
    const TRANS_A: bool,
    const TRANS_B: bool,
    D: Accumulator,
>(
    d: &mut D,
    a: Descriptor,
    b: Descriptor,
) {
    // SAFETY: the caller's promise.
    unsafe { d.ss::<T, ADD, TRANS_A, TRANS_B>(a, b) }
}

/// [`mma_ss`] that adds only if `add` is true (the accumulator must be initialised in any case).
///
/// # Safety
/// - As for [`mma_ss`]; `add` is equal in all threads of the warpgroup.
///
/// # PTX
/// `wgmma.mma_async.sync.aligned.m64n<N>k16.f32.<T>.<T>` with a predicate for `scale-d` (sm_90a)
#[inline(always)]
pub unsafe fn mma_ss_if<T: Element, const TRANS_A: bool, const TRANS_B: bool, D: Accumulator>(
    d: &mut D,
    a: Descriptor,
    b: Descriptor,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe { d.ss_if::<T, TRANS_A, TRANS_B>(a, b, add) }
}

/// [`mma_ss`] with A in registers, which stay unchanged until [`wait_group`](super::wait_group).
///
/// # Safety
/// - As for [`mma_ss`]; [`fence`](super::fence) was also called after the writes to A's registers.
///
/// # PTX
/// `wgmma.mma_async.sync.aligned.m64n<N>k16.f32.<T>.<T>` (sm_90a)
#[inline(always)]
pub unsafe fn mma_rs<T: Element, const ADD: bool, const TRANS_B: bool, D: Accumulator>(
    d: &mut D,
    a: [u32; 4],
    b: Descriptor,
) {
    // SAFETY: the caller's promise.
    unsafe { d.rs::<T, ADD, TRANS_B>(a, b) }
}

/// [`mma_rs`] that adds only if `add` is true (the accumulator must be initialised in any case).
///
/// # Safety
/// - As for [`mma_rs`]; `add` is equal in all threads of the warpgroup.
///
/// # PTX
/// `wgmma.mma_async.sync.aligned.m64n<N>k16.f32.<T>.<T>` with a predicate for `scale-d` (sm_90a)
#[inline(always)]
pub unsafe fn mma_rs_if<T: Element, const TRANS_B: bool, D: Accumulator>(
    d: &mut D,
    a: [u32; 4],
    b: Descriptor,
    add: bool,
) {
    // SAFETY: the caller's promise.
    unsafe { d.rs_if::<T, TRANS_B>(a, b, add) }
}

/// D = A·B, or D += A·B if `ADD`, with e4m3 in shared memory: 32 columns of A per product, instead of 16 with
/// 16-bit types. Both operands are K-major, as for all 8-bit types.
///
/// # Safety
/// - As for [`mma_ss`].
///
/// # PTX
/// `wgmma.mma_async.sync.aligned.m64n<N>k32.f32.e4m3.e4m3` (sm_90a)
#[inline(always)]
pub unsafe fn mma_ss_e4m3<const ADD: bool, D: Accumulator>(
    d: &mut D,
    a: Descriptor,
    b: Descriptor,
) {
    // SAFETY: the caller's promise.
    unsafe { d.ss_e4m3::<ADD>(a, b) }
}

/// [`mma_ss_e4m3`] with A in registers, which stay unchanged until [`wait_group`](super::wait_group). With
/// `g = lane / 4`, `t = lane % 4`, its words are columns 4t … 4t + 3 of rows g and g + 8, then columns 16 + 4t … of both.
///
/// # Safety
/// - As for [`mma_rs`].
///
/// # PTX
/// `wgmma.mma_async.sync.aligned.m64n<N>k32.f32.e4m3.e4m3` (sm_90a)
#[inline(always)]
pub unsafe fn mma_rs_e4m3<const ADD: bool, D: Accumulator>(d: &mut D, a: [u32; 4], b: Descriptor) {
    // SAFETY: the caller's promise.
    unsafe { d.rs_e4m3::<ADD>(a, b) }
}

//! Arithmetic in single instructions: approximations by the special function unit, fused operations
//! on pairs of 16-bit floats.
//!
//! Errors are those that the PTX manual states.

use core::arch::asm;

#[allow(improper_ctypes)]
unsafe extern "C" {
    #[link_name = "llvm.nvvm.ex2.approx.ftz.f32"]
    safe fn ex2_approx_ftz(x: f32) -> f32;
    #[link_name = "llvm.nvvm.rsqrt.approx.ftz.f"]
    safe fn rsqrt_approx_ftz(x: f32) -> f32;
    #[link_name = "llvm.nvvm.sqrt.approx.ftz.f"]
    safe fn sqrt_approx_ftz(x: f32) -> f32;
    #[link_name = "llvm.nvvm.sin.approx.ftz.f"]
    safe fn sin_approx_ftz(x: f32) -> f32;
    #[link_name = "llvm.nvvm.cos.approx.ftz.f"]
    safe fn cos_approx_ftz(x: f32) -> f32;
    #[link_name = "llvm.fma.f32"]
    safe fn fma_f32(a: f32, b: f32, c: f32) -> f32;
}

macro_rules! unary {
    ($($name:ident = $intrinsic:ident, $ptx:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, " d, a`")]
        #[inline(always)]
        #[must_use]
        pub fn $name(x: f32) -> f32 {
            $intrinsic(x)
        }
    )*};
}

unary! {
    ex2 = ex2_approx_ftz, "ex2.approx.ftz.f32", "2^x, relative error below 2^-22; -inf gives 0.";
    rsqrt = rsqrt_approx_ftz, "rsqrt.approx.ftz.f32", "1 / sqrt x, relative error below 2^-22.9.";
    sqrt = sqrt_approx_ftz, "sqrt.approx.ftz.f32", "sqrt x, relative error below 2^-23.";
    sin = sin_approx_ftz, "sin.approx.ftz.f32", "sin x, absolute error below 2^-20.5 in -pi..pi.";
    cos = cos_approx_ftz, "cos.approx.ftz.f32", "cos x, absolute error below 2^-20.5 in -pi..pi.";
}

macro_rules! unary_asm {
    ($($name:ident, $ptx:literal, $arch:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, " d, a`", $arch)]
        #[inline(always)]
        #[must_use]
        pub fn $name(x: f32) -> f32 {
            let y;
            // SAFETY: arithmetic.
            unsafe {
                asm!(concat!($ptx, " {}, {};"), out(reg32) y, in(reg32) x, options(pure, nomem, nostack))
            }
            y
        }
    )*};
}

// lg2 and rcp have intrinsics, too. But ptxas schedules the code around inline asm differently, and the speed was
// measured with that machine code.
unary_asm! {
    lg2, "lg2.approx.ftz.f32", "", "log2 x, absolute error below 2^-22 near 1; 0 gives -inf.";
    rcp, "rcp.approx.ftz.f32", "", "1 / x, at most 1 ulp off; 0 gives inf.";
    tanh, "tanh.approx.f32", " (sm_75)", "tanh x, relative error below 2^-11.";
}

/// a·b + c, rounded once.
///
/// # PTX
/// `fma.rn.f32 d, a, b, c`
#[inline(always)]
#[must_use]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    fma_f32(a, b, c)
}

macro_rules! pairs {
    ($($name:ident($($argument:ident),*), $ptx:literal, $arch:literal, $what:literal;)*) => {$(
        #[doc = $what]
        ///
        /// # PTX
        #[doc = concat!("`", $ptx, "` (", $arch, ")")]
        #[inline(always)]
        #[must_use]
        pub fn $name($($argument: u32),*) -> u32 {
            let pair;
            // SAFETY: arithmetic.
            unsafe {
                asm!(
                    concat!($ptx, " {pair}", $(", {", stringify!($argument), "}",)* ";"),
                    pair = out(reg32) pair,
                    $($argument = in(reg32) $argument,)*
                    options(pure, nomem, nostack),
                );
            }
            pair
        }
    )*};
}

pairs! {
    ex2_f16x2(x), "ex2.approx.f16x2", "sm_75", "2^x of two f16.";
    ex2_bf16x2(x), "ex2.approx.ftz.bf16x2", "sm_90", "2^x of two bf16.";
    tanh_f16x2(x), "tanh.approx.f16x2", "sm_75", "tanh x of two f16.";
    tanh_bf16x2(x), "tanh.approx.bf16x2", "sm_90", "tanh x of two bf16.";
    add_f16x2(a, b), "add.rn.f16x2", "sm_53", "a + b of two f16.";
    add_bf16x2(a, b), "add.rn.bf16x2", "sm_90", "a + b of two bf16.";
    mul_f16x2(a, b), "mul.rn.f16x2", "sm_53", "a·b of two f16.";
    mul_bf16x2(a, b), "mul.rn.bf16x2", "sm_90", "a·b of two bf16.";
    fma_f16x2(a, b, c), "fma.rn.f16x2", "sm_53", "a·b + c of two f16, rounded once.";
    fma_bf16x2(a, b, c), "fma.rn.bf16x2", "sm_80", "a·b + c of two bf16, rounded once.";
    max_f16x2(a, b), "max.f16x2", "sm_80", "The larger of a and b, of two f16.";
    max_bf16x2(a, b), "max.bf16x2", "sm_80", "The larger of a and b, of two bf16.";
}

/// Integer a / b without the zero check of Rust's operator. The result is unspecified if b is 0.
///
/// # PTX
/// `div.u32 d, a, b`
#[inline(always)]
#[must_use]
pub fn div_u32(a: u32, b: u32) -> u32 {
    let quotient;
    // SAFETY: arithmetic.
    unsafe {
        asm!("div.u32 {}, {}, {};", out(reg32) quotient, in(reg32) a, in(reg32) b, options(pure, nomem, nostack))
    }
    quotient
}

/// `a` shifted right by `places`; 0 if `places` is 32 or more. Rust's operator takes `places` modulo 32.
///
/// # PTX
/// `shr.u32 d, a, places`
#[inline(always)]
#[must_use]
pub fn shift_right(a: u32, places: u32) -> u32 {
    let shifted;
    // SAFETY: arithmetic.
    unsafe {
        asm!("shr.u32 {}, {}, {};", out(reg32) shifted, in(reg32) a, in(reg32) places, options(pure, nomem, nostack))
    }
    shifted
}

/// Selects four of the eight bytes of `a` (0 to 3) and `b` (4 to 7). The `i`th hexadecimal digit of `selector`
/// selects byte `i`.
///
/// # PTX
/// `prmt.b32 d, a, b, selector`
#[inline(always)]
#[must_use]
pub fn permute_bytes(a: u32, b: u32, selector: u32) -> u32 {
    let bytes;
    // SAFETY: arithmetic.
    unsafe {
        asm!(
            "prmt.b32 {}, {}, {}, {};",
            out(reg32) bytes,
            in(reg32) a,
            in(reg32) b,
            in(reg32) selector,
            options(pure, nomem, nostack),
        );
    }
    bytes
}

/// The high 32 bits of a·b.
#[inline(always)]
#[must_use]
pub const fn mul_high_u32(a: u32, b: u32) -> u32 {
    ((a as u64 * b as u64) >> 32) as u32
}

//! Vectors of f32, one type of them for each instruction set.
//!
//! The compiler vectorises only some loops over arrays. Kernels with explicit vectors run at full speed, whatever
//! changes around them.

use kernels_gpu::math::exp2_with;

use crate::tensor::Element;

/// The most numbers in a vector.
const MAX_LANES: usize = 16;

/// An instruction set. A value of this type proves that the machine has it, so its methods are safe.
pub(super) trait Simd: Copy {
    /// A vector.
    type F: Copy;

    /// Numbers in a vector.
    const LANES: usize;

    fn splat(self, x: f32) -> Self::F;

    /// The first numbers of a slice, which has enough.
    fn load(self, from: &[f32]) -> Self::F;

    /// The first elements of a slice, which has enough, as f32.
    #[inline(always)]
    fn widen<T: Element>(self, from: &[T]) -> Self::F {
        let mut numbers = [0.0; MAX_LANES];
        let from = &from[..Self::LANES];
        for lane in 0..Self::LANES {
            numbers[lane] = from[lane].to_f32();
        }
        self.load(&numbers)
    }

    /// Stores to the first numbers of a slice, which has enough.
    fn store(self, x: Self::F, to: &mut [f32]);

    fn add(self, a: Self::F, b: Self::F) -> Self::F;

    fn sub(self, a: Self::F, b: Self::F) -> Self::F;

    fn mul(self, a: Self::F, b: Self::F) -> Self::F;

    /// `a · b + c`, fused if the machine can do that.
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;

    /// The larger number, or `a` if one is NaN.
    fn larger(self, a: Self::F, b: Self::F) -> Self::F;

    /// 2ˣ for `x ≤ 0`; NaN stays.
    fn exp2(self, x: Self::F) -> Self::F;

    /// The sum of the lanes of each of four.
    fn sums(self, x: [Self::F; 4]) -> [f32; 4];

    /// The largest lane.
    fn max(self, x: Self::F) -> f32;
}

/// The first vectors of a slice. (A loop: what closures do inside the standard library's array functions
/// is compiled without the instruction set.)
#[inline(always)]
pub(super) fn load<S: Simd, const N: usize>(simd: S, from: &[f32]) -> [S::F; N] {
    let mut vectors = [simd.splat(0.0); N];
    for (n, vector) in vectors.iter_mut().enumerate() {
        *vector = simd.load(&from[n * S::LANES..]);
    }
    vectors
}

/// Prefetches memory that will be read soon.
#[inline(always)]
pub(super) fn prefetch<T>(memory: &[T]) {
    #[cfg(target_arch = "x86_64")]
    for line in memory.chunks((64 / size_of::<T>()).max(1)) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        // SAFETY: a hint; nothing is read as far as the program can tell.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = memory;
}

/// Arrays, which the compiler may vectorise.
#[derive(Clone, Copy)]
pub(super) struct Portable;

impl Portable {
    #[inline(always)]
    fn zip(a: [f32; 8], b: [f32; 8], f: impl Fn(f32, f32) -> f32) -> [f32; 8] {
        std::array::from_fn(|i| f(a[i], b[i]))
    }
}

impl Simd for Portable {
    type F = [f32; 8];

    const LANES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; 8]
    }

    #[inline(always)]
    fn load(self, from: &[f32]) -> Self::F {
        *from.first_chunk().expect("as long as a vector")
    }

    #[inline(always)]
    fn store(self, x: Self::F, to: &mut [f32]) {
        *to.first_chunk_mut().expect("as long as a vector") = x;
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        Self::zip(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        Self::zip(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        Self::zip(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| mul_add(a[i], b[i], c[i]))
    }

    #[inline(always)]
    fn larger(self, a: Self::F, b: Self::F) -> Self::F {
        Self::zip(a, b, |a, b| if b > a { b } else { a })
    }

    #[inline(always)]
    fn exp2(self, x: Self::F) -> Self::F {
        x.map(|x| exp2_with(x, mul_add))
    }

    #[inline(always)]
    fn sums(self, x: [Self::F; 4]) -> [f32; 4] {
        x.map(|x| {
            let x: [f32; 4] = std::array::from_fn(|i| x[i] + x[i + 4]);
            (x[0] + x[2]) + (x[1] + x[3])
        })
    }

    #[inline(always)]
    fn max(self, x: Self::F) -> f32 {
        x.into_iter()
            .fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
    }
}

/// Fused only if the target always has the instruction: otherwise it would be a library call.
#[inline(always)]
fn mul_add(a: f32, b: f32, c: f32) -> f32 {
    if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
        a.mul_add(b, c)
    } else {
        a * b + c
    }
}

#[cfg(target_arch = "x86_64")]
pub(super) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use kernels_gpu::math::{EXP2_LOWEST, EXP2_POLYNOMIAL, EXP2_ROUND};

    use super::Simd;

    /// AVX-512 (F, BW, DQ, VL), AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx512(());

    /// AVX2 and FMA.
    #[derive(Clone, Copy)]
    pub(in super::super) struct Avx2(());

    /// Safe methods, because `self` proves that the machine has the instructions.
    macro_rules! simd {
        ($isa:ident, $vector:ty, $lanes:literal, load = $load:ident, store = $store:ident, splat = $splat:ident,
         add = $add:ident, sub = $sub:ident, mul = $mul:ident, mul_add = $mul_add:ident, max = $max:ident,
         exponent = |$bits:ident| $exponent:expr, sums = |$to_sum:ident| $sums:expr,
         largest = |$to_max:ident| $largest:expr) => {
            impl $isa {
                /// # Safety
                /// The machine has the instruction set.
                pub(in super::super) const unsafe fn new() -> Self {
                    Self(())
                }
            }

            // SAFETY (of all blocks): `self` exists, so the machine has the instructions; loads and stores
            // stay in slices whose length was checked.
            impl Simd for $isa {
                type F = $vector;

                const LANES: usize = $lanes;

                #[inline(always)]
                fn splat(self, x: f32) -> Self::F {
                    unsafe { $splat(x) }
                }

                #[inline(always)]
                fn load(self, from: &[f32]) -> Self::F {
                    let from = &from[..$lanes];
                    unsafe { $load(from.as_ptr()) }
                }

                #[inline(always)]
                fn store(self, x: Self::F, to: &mut [f32]) {
                    let to = &mut to[..$lanes];
                    unsafe { $store(to.as_mut_ptr(), x) }
                }

                #[inline(always)]
                fn add(self, a: Self::F, b: Self::F) -> Self::F {
                    unsafe { $add(a, b) }
                }

                #[inline(always)]
                fn sub(self, a: Self::F, b: Self::F) -> Self::F {
                    unsafe { $sub(a, b) }
                }

                #[inline(always)]
                fn mul(self, a: Self::F, b: Self::F) -> Self::F {
                    unsafe { $mul(a, b) }
                }

                #[inline(always)]
                fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
                    unsafe { $mul_add(a, b, c) }
                }

                #[inline(always)]
                fn larger(self, a: Self::F, b: Self::F) -> Self::F {
                    // Returns its second operand if one is NaN.
                    unsafe { $max(b, a) }
                }

                #[inline(always)]
                fn exp2(self, x: Self::F) -> Self::F {
                    // As `exp2_with`, line by line.
                    let x = self.larger(x, self.splat(EXP2_LOWEST));
                    let round = self.splat(EXP2_ROUND);
                    let rounded = self.add(x, round);
                    let f = self.sub(x, self.sub(rounded, round));
                    let [first, rest @ ..] = EXP2_POLYNOMIAL;
                    let mut y = self.splat(first);
                    for c in rest {
                        y = self.mul_add(y, f, self.splat(c));
                    }
                    let scale = unsafe {
                        let $bits = rounded;
                        $exponent
                    };
                    self.mul(y, scale)
                }

                #[inline(always)]
                fn sums(self, x: [Self::F; 4]) -> [f32; 4] {
                    unsafe {
                        let $to_sum = x;
                        $sums
                    }
                }

                #[inline(always)]
                fn max(self, x: Self::F) -> f32 {
                    unsafe {
                        let $to_max = x;
                        $largest
                    }
                }
            }
        };
    }

    /// Sums of the lanes of four vectors of 8.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn sums([a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        let pairs = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(pairs),
            _mm256_extractf128_ps::<1>(pairs),
        );
        let mut to = [0.0; 4];
        // SAFETY: four numbers have room in an array of four.
        unsafe { _mm_storeu_ps(to.as_mut_ptr(), sums) };
        to
    }

    /// The largest of 8 lanes. NaN is ignored if there are numbers.
    #[target_feature(enable = "avx2,fma")]
    #[inline]
    fn largest(x: __m256) -> f32 {
        // The instruction returns its second operand if one is NaN.
        let number = _mm256_max_ps(x, _mm256_set1_ps(f32::NEG_INFINITY));
        let four = _mm_max_ps(
            _mm256_castps256_ps128(number),
            _mm256_extractf128_ps::<1>(number),
        );
        let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
    }

    /// The larger of the lanes of two halves. NaN is ignored if there are numbers.
    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn halve(x: __m512) -> __m256 {
        let number = _mm512_max_ps(x, _mm512_set1_ps(f32::NEG_INFINITY));
        _mm256_max_ps(
            _mm512_castps512_ps256(number),
            _mm512_extractf32x8_ps::<1>(number),
        )
    }

    /// The two halves of a vector, added.
    #[target_feature(enable = "avx512f,avx512dq")]
    #[inline]
    fn fold(x: __m512) -> __m256 {
        _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x))
    }

    simd!(
        Avx512,
        __m512,
        16,
        load = _mm512_loadu_ps,
        store = _mm512_storeu_ps,
        splat = _mm512_set1_ps,
        add = _mm512_add_ps,
        sub = _mm512_sub_ps,
        mul = _mm512_mul_ps,
        mul_add = _mm512_fmadd_ps,
        max = _mm512_max_ps,
        exponent = |bits| _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(bits))),
        sums = |x| sums(x.map(|x| fold(x))),
        largest = |x| largest(halve(x))
    );
    simd!(
        Avx2,
        __m256,
        8,
        load = _mm256_loadu_ps,
        store = _mm256_storeu_ps,
        splat = _mm256_set1_ps,
        add = _mm256_add_ps,
        sub = _mm256_sub_ps,
        mul = _mm256_mul_ps,
        mul_add = _mm256_fmadd_ps,
        max = _mm256_max_ps,
        exponent = |bits| _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(bits))),
        sums = |x| sums(x),
        largest = |x| largest(x)
    );
}

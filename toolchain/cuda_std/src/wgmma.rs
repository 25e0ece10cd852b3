//! Tensor cores of a warpgroup (sm_90a): `wgmma`, asynchronous products of 64-row tiles.
//!
//! ```text
//! fence();                                   // registers and A, B are ready
//! mma_ss::<Bf16, false, false, false, _>(&mut s, a, b);   // D = A·B
//! mma_ss::<Bf16, true, false, false, _>(&mut s, a2, b2);  // D += A·B, as many as one likes
//! commit_group();
//! …                                          // other work; the registers belong to the hardware
//! schedule_fence();                          // the other work stays before the wait
//! wait_group::<0>();
//! fence_operand(&mut s);                     // from here the compiler may read them
//! ```
//!
//! # Accumulators
//! D (64 × N, f32) is a `[f32; N / 2]` in each of the 128 threads; its length says N, any multiple of 8
//! in `8..=256`. Warp w of the warpgroup has rows 16w…16w+15. With `g = lane / 4`, `t = lane % 4`,
//! elements `4j`, `4j + 1` are row g, columns 8j + 2t and the next; `4j + 2`, `4j + 3` row g + 8.
//! A in registers (64 × 16) is a fragment of [`mma`](crate::mma)'s m16n8k16 in each warp.
//!
//! # What the compiler does not know
//! To the compiler each product is one opaque instruction that reads and writes its operands on the
//! spot. It really runs until [`wait_group`]. So after the wait, [`fence_operand`] takes every array that
//! the products read or wrote in registers (A fragments too, if they are written again): the compiler
//! cannot move a use of them above it. Separate instructions on one accumulator cost nothing: ptxas
//! neither serialises them nor copies registers between them (a test of this crate looks).

/// How the rows of an operand are permuted in shared memory, in units of 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u64)]
pub enum Swizzle {
    /// Not at all: 8 × 16-byte core matrices.
    None = 0,
    /// Rows of 128 bytes: bits 4–6 of an address are those XOR bits 7–9.
    B128 = 1,
    /// Rows of 64 bytes: bits 4–5 XOR bits 7–8.
    B64 = 2,
    /// Rows of 32 bytes: bit 4 XOR bit 7.
    B32 = 3,
}

impl Swizzle {
    /// Bytes of a row of the pattern.
    #[must_use]
    pub const fn row_bytes(self) -> u32 {
        match self {
            Self::None => 16,
            Self::B32 => 32,
            Self::B64 => 64,
            Self::B128 => 128,
        }
    }

    /// Where the byte at `offset` of a tile really lies; the tile begins at a multiple of 1024.
    #[must_use]
    pub const fn apply(self, offset: u32) -> u32 {
        let mask = self.row_bytes() / 16 - 1;
        offset ^ (((offset >> 7) & mask) << 4)
    }
}

/// Where an operand lies in shared memory and how: what `wgmma` takes for A and B.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub struct Descriptor(pub u64);

impl Descriptor {
    /// A descriptor of the operand that begins at shared address `address`.
    ///
    /// `leading` and `stride` are distances in bytes, multiples of 16, below 2^18:
    ///
    /// | layout | `leading` | `stride` |
    /// |---|---|---|
    /// | K-major, swizzled | unused (give 16) | between groups of 8 rows (M or N) |
    /// | K-major, [`Swizzle::None`] | between core matrices along K | between core matrices along M or N |
    /// | MN-major, swizzled | between the row patterns along M or N | between groups of 8 along K |
    ///
    /// With a swizzle the pattern is a function of the address, so the tile must begin at a multiple
    /// of its period (128 B: 1024, 64 B: 512, 32 B: 256); [`Descriptor::advance`] moves inside it.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: u32, leading: u32, stride: u32, swizzle: Swizzle) -> Self {
        Self(
            ((address & 0x3_FFFF) >> 4) as u64
                | (((leading & 0x3_FFFF) >> 4) as u64) << 16
                | (((stride & 0x3_FFFF) >> 4) as u64) << 32
                | (swizzle as u64) << 62,
        )
    }

    /// The same operand `bytes` further on, a multiple of 16: the next k-step, the next tile.
    ///
    /// The addresses involved must stay below 2^18 (as all shared memory does).
    #[inline(always)]
    #[must_use]
    pub const fn advance(self, bytes: u32) -> Self {
        // Only the low half changes, so this is one 32-bit addition.
        Self((self.0 & !0xFFFF_FFFF) | (self.0 as u32).wrapping_add(bytes >> 4) as u64)
    }
}

#[cfg(target_arch = "nvptx64")]
pub use device::*;

#[cfg(target_arch = "nvptx64")]
mod device {
    use super::Descriptor;
    use core::arch::asm;

    #[allow(improper_ctypes)]
    unsafe extern "C" {
        #[link_name = "llvm.nvvm.wgmma.fence.sync.aligned"]
        fn wgmma_fence();
        #[link_name = "llvm.nvvm.wgmma.commit_group.sync.aligned"]
        fn wgmma_commit_group();
        #[link_name = "llvm.nvvm.wgmma.wait_group.sync.aligned"]
        fn wgmma_wait_group(pending: u64);
    }

    /// Orders the warpgroup's accesses to registers (accumulators, A fragments) before the products
    /// that follow. Needed before the first product and after the registers were written otherwise.
    ///
    /// # Safety
    /// - All threads of the warpgroup come here, the lanes of a warp together.
    ///
    /// # PTX
    /// `wgmma.fence.sync.aligned` (sm_90a)
    #[inline(always)]
    pub unsafe fn fence() {
        // SAFETY: the caller's promise is the instruction's.
        unsafe { wgmma_fence() }
    }

    /// Closes the group of the products since the last commit.
    ///
    /// # Safety
    /// - All threads of the warpgroup come here, the lanes of a warp together.
    ///
    /// # PTX
    /// `wgmma.commit_group.sync.aligned` (sm_90a)
    #[inline(always)]
    pub unsafe fn commit_group() {
        // SAFETY: the caller's promise is the instruction's.
        unsafe { wgmma_commit_group() }
    }

    /// Waits until at most `PENDING` of the latest groups are incomplete; then [`fence_operand`] on what
    /// is complete.
    ///
    /// # Safety
    /// - All threads of the warpgroup come here, the lanes of a warp together.
    ///
    /// # PTX
    /// `wgmma.wait_group.sync.aligned PENDING` (sm_90a)
    #[inline(always)]
    pub unsafe fn wait_group<const PENDING: u64>() {
        const { assert!(PENDING < 8) };
        // SAFETY: the caller's promise is the instruction's.
        unsafe { wgmma_wait_group(PENDING) }
    }

    /// Holds arithmetic in its place: before a [`wait_group`] that it is to overlap.
    ///
    /// ptxas 13.0 starts a wait as early as it can, above all arithmetic that stands before it, so
    /// that a softmax between two waits would begin only when the products are done. It moves nothing
    /// across a fence of memory; this is the one that costs least, `MEMBAR.ALL.CTA` in machine code.
    ///
    /// # PTX
    /// `fence.acq_rel.cta`
    #[inline(always)]
    pub fn schedule_fence() {
        crate::fence::acq_rel_cta();
    }

    /// Registers of asynchronous products, for [`fence_operand`].
    pub trait Registers {
        #[doc(hidden)]
        fn fence(&mut self);
    }

    /// Ties registers to this place: no use of them moves across it. No instruction.
    #[inline(always)]
    pub fn fence_operand<R: Registers + ?Sized>(registers: &mut R) {
        registers.fence();
    }

    macro_rules! fence_registers {
        ($registers:expr, [$($i:tt)*]) => {
            // An asm must name its operands, so they stand in a comment.
            // SAFETY: no instruction.
            unsafe {
                asm!(
                    concat!("//", $(" {", $i, "}",)*),
                    $(inout(reg32) $registers[$i],)*
                    options(nomem, nostack),
                );
            }
        };
    }

    impl<const N: usize, R> Registers for [R; N]
    where
        R: Register,
    {
        #[inline(always)]
        fn fence(&mut self) {
            // In blocks of 8, then one by one: `N` is no literal.
            let mut i = 0;
            while i + 8 <= N {
                // SAFETY: `i + 8 <= N`.
                let block: &mut [R; 8] = unsafe { &mut *self.as_mut_ptr().add(i).cast() };
                R::fence_8(block);
                i += 8;
            }
            while i < N {
                R::fence_1(&mut self[i]);
                i += 1;
            }
        }
    }

    /// An element of [`Registers`].
    pub trait Register: Copy {
        #[doc(hidden)]
        fn fence_8(block: &mut [Self; 8]);
        #[doc(hidden)]
        fn fence_1(register: &mut Self);
    }

    macro_rules! registers {
        ($($type:ty),*) => {$(
            impl Register for $type {
                #[inline(always)]
                fn fence_8(block: &mut [Self; 8]) {
                    fence_registers!(block, [0 1 2 3 4 5 6 7]);
                }
                #[inline(always)]
                fn fence_1(register: &mut Self) {
                    let mut block = [*register];
                    fence_registers!(block, [0]);
                    *register = block[0];
                }
            }
        )*};
    }

    registers!(f32, u32);

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

    /// The accumulator of a product of 64 × N: `[f32; N / 2]`.
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
    }

    /// One instruction: `$d` is `out` (D = A·B) or `inout` (D += A·B), the literals around it
    /// the `scale-d` operand and what makes it.
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
        (@list $first:tt $($i:tt)*) => { concat!("{", $first, "}" $(, ", {", $i, "}")*) };
    }

    macro_rules! accumulators {
        ($($n:literal [$($i:tt)*];)*) => {$(
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
            }
        )*};
    }

    #[rustfmt::skip]
    accumulators! {
        8 [0 1 2 3];
        16 [0 1 2 3 4 5 6 7];
        24 [0 1 2 3 4 5 6 7 8 9 10 11];
        32 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15];
        40 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19];
        48 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23];
        56 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27];
        64 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31];
        72 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35];
        80 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39];
        88 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43];
        96 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47];
        104 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51];
        112 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55];
        120 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59];
        128 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63];
        136 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67];
        144 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71];
        152 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75];
        160 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79];
        168 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83];
        176 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87];
        184 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91];
        192 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95];
        200 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99];
        208 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103];
        216 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107];
        224 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111];
        232 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115];
        240 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119];
        248 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123];
        256 [0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47 48 49 50 51 52 53 54 55 56 57 58 59 60 61 62 63 64 65 66 67 68 69 70 71 72 73 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 94 95 96 97 98 99 100 101 102 103 104 105 106 107 108 109 110 111 112 113 114 115 116 117 118 119 120 121 122 123 124 125 126 127];
    }

    /// D = A·B, or D += A·B if `ADD`, both operands in shared memory.
    ///
    /// Not transposed means K-major (rows of A, columns of B contiguous along K), transposed M- or
    /// N-major.
    ///
    /// # Safety
    /// - All threads of the warpgroup come here, the lanes of a warp together.
    /// - [`fence`] came after the accumulator was last written or read otherwise, and
    ///   [`fence::proxy_async_shared`](crate::fence::proxy_async_shared) after A and B were written by
    ///   ordinary stores.
    /// - The descriptors cover readable shared memory; it stays unchanged, and the accumulator
    ///   untouched, until [`wait_group`].
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

    /// [`mma_ss`] that adds only if `add` says so (the accumulator must hold some value in any case).
    ///
    /// # Safety
    /// - As [`mma_ss`]'s; `add` is the same in all threads of the warpgroup.
    ///
    /// # PTX
    /// `wgmma.mma_async.sync.aligned.m64n<N>k16.f32.<T>.<T>` with a predicate for `scale-d` (sm_90a)
    #[inline(always)]
    pub unsafe fn mma_ss_if<
        T: Element,
        const TRANS_A: bool,
        const TRANS_B: bool,
        D: Accumulator,
    >(
        d: &mut D,
        a: Descriptor,
        b: Descriptor,
        add: bool,
    ) {
        // SAFETY: the caller's promise.
        unsafe { d.ss_if::<T, TRANS_A, TRANS_B>(a, b, add) }
    }

    /// [`mma_ss`] with A in registers, where it stays unchanged until [`wait_group`].
    ///
    /// # Safety
    /// - As [`mma_ss`]'s; [`fence`] came after A's registers were written too.
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

    /// [`mma_rs`] that adds only if `add` says so (the accumulator must hold some value in any case).
    ///
    /// # Safety
    /// - As [`mma_rs`]'s; `add` is the same in all threads of the warpgroup.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Swizzle; 4] = [Swizzle::None, Swizzle::B32, Swizzle::B64, Swizzle::B128];

    #[test]
    fn descriptor_fields_lie_where_the_hardware_reads_them() {
        let descriptor = Descriptor::new(0x12340, 1024, 2048, Swizzle::B128).0;
        assert_eq!(descriptor & 0x3FFF, 0x1234);
        assert_eq!(descriptor >> 16 & 0x3FFF, 64);
        assert_eq!(descriptor >> 32 & 0x3FFF, 128);
        assert_eq!(descriptor >> 62, 1);
        let modes = ALL.map(|swizzle| Descriptor::new(0, 16, 16, swizzle).0 >> 62);
        assert_eq!(modes, [0, 3, 2, 1]);
        let rest = !(0x3FFF | 0x3FFF << 16 | 0x3FFF << 32 | 3 << 62);
        assert_eq!(
            Descriptor::new(!0, !0, !0, Swizzle::B32).0 & rest,
            0,
            "stray bits"
        );
    }

    #[test]
    fn advancing_is_starting_further_on() {
        for address in [0, 1024, 0x2_0000, 0x3_7F00] {
            for bytes in [0, 16, 32, 4096, 0x80F0] {
                let start = Descriptor::new(address, 1024, 2048, Swizzle::B64);
                let there = Descriptor::new(address + bytes, 1024, 2048, Swizzle::B64);
                assert_eq!(start.advance(bytes), there, "{address:#x} + {bytes:#x}");
            }
        }
    }

    #[test]
    fn a_swizzle_permutes_the_16_byte_units_of_its_rows() {
        for swizzle in ALL {
            let mut seen = [false; 1024];
            for offset in 0..1024 {
                let place = swizzle.apply(offset);
                assert_eq!(place / swizzle.row_bytes(), offset / swizzle.row_bytes());
                assert_eq!(place % 16, offset % 16);
                assert_eq!(swizzle.apply(place), offset, "its own inverse");
                seen[place as usize] = true;
            }
            assert!(seen.iter().all(|&hit| hit), "{swizzle:?} is no permutation");
        }
    }

    #[test]
    fn eight_rows_of_a_column_fall_into_different_banks() {
        for swizzle in [Swizzle::B32, Swizzle::B64, Swizzle::B128] {
            // Eight consecutive rows, the same 16 bytes of each: what one ldmatrix phase reads.
            let row = swizzle.row_bytes();
            let units = (0..8).map(|r| swizzle.apply(r * row) % 128 / 16);
            let mut hits = [0; 8];
            units.for_each(|unit| hits[unit as usize] += 1);
            assert_eq!(hits, [1; 8], "{swizzle:?}");
        }
    }
}

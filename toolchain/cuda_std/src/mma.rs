//! Tensor cores of a warp: `mma.sync`, `ldmatrix`, `stmatrix`.
//!
//! # Fragments of m16n8k16
//! With `g = lane / 4`, `t = lane % 4`, pairs of 16-bit elements in a `u32`, low half first:
//!
//! - A (16 × 16, row-major): `a[0]` row g columns 2t, 2t+1; `a[1]` row g+8; `a[2]` and `a[3]` the same
//!   rows, columns 2t+8, 2t+9;
//! - B (16 × 8, column-major): `b[0]` rows 2t, 2t+1 of column g; `b[1]` rows 2t+8, 2t+9;
//! - C, D (16 × 8): `d[0]`, `d[1]` row g, columns 2t, 2t+1; `d[2]`, `d[3]` row g+8.

use core::arch::asm;

macro_rules! mma {
    ($($name:ident, $shape:literal, $type:literal, [$($a:tt)*], $a_list:literal, [$($b:tt)*], $b_list:literal, $arch:literal;)*) => {$(
        #[doc = concat!("D += A·B, ", $shape, ", ", $type, " in, f32 out; fragments as the [module](self) says.")]
        ///
        /// # Safety
        /// - All 32 lanes execute this together.
        ///
        /// # PTX
        #[doc = concat!("`mma.sync.aligned.", $shape, ".row.col.f32.", $type, ".", $type, ".f32` (", $arch, ")")]
        #[inline(always)]
        pub unsafe fn $name(d: &mut [f32; 4], a: [u32; [$($a),*].len()], b: [u32; [$($b),*].len()]) {
            // Not `pure`: LLVM may sink a pure asm into a branch that only some lanes take.
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!(
                        "mma.sync.aligned.", $shape, ".row.col.f32.", $type, ".", $type, ".f32 ",
                        "{{{d0}, {d1}, {d2}, {d3}}}, ", $a_list, ", ", $b_list, ", {{{d0}, {d1}, {d2}, {d3}}};"
                    ),
                    $(in(reg32) a[$a],)*
                    $(in(reg32) b[$b],)*
                    d0 = inout(reg32) d[0],
                    d1 = inout(reg32) d[1],
                    d2 = inout(reg32) d[2],
                    d3 = inout(reg32) d[3],
                    options(nomem, nostack),
                );
            }
        }
    )*};
}

mma! {
    m16n8k16_bf16, "m16n8k16", "bf16", [0 1 2 3], "{{{}, {}, {}, {}}}", [0 1], "{{{}, {}}}", "sm_80";
    m16n8k16_f16, "m16n8k16", "f16", [0 1 2 3], "{{{}, {}, {}, {}}}", [0 1], "{{{}, {}}}", "sm_80";
    m16n8k8_bf16, "m16n8k8", "bf16", [0 1], "{{{}, {}}}", [0], "{{{}}}", "sm_80";
    m16n8k8_f16, "m16n8k8", "f16", [0 1], "{{{}, {}}}", [0], "{{{}}}", "sm_75";
}

macro_rules! matrices {
    ($($load:ident, $store:ident, $count:literal, $shape:literal, $list:literal, [$($i:tt),*], $what:literal;)*) => {$(
        #[doc = concat!("Loads ", $what, " of 8 × 8 elements of 16 bits from shared memory.")]
        ///
        /// Lane `8·i + r` passes the address of row `r` of matrix `i`. Of each matrix, lane `l` receives element
        /// `2·(l % 4)` and the next one of row `l / 4` (transposed forms: of column `l / 4`).
        ///
        /// # Safety
        /// - All 32 lanes execute this together.
        /// - In the lanes that pass addresses, `row` is a shared address of 16 readable bytes, aligned to 16.
        ///
        /// # PTX
        #[doc = concat!("`ldmatrix.sync.aligned.m8n8.", $shape, ".shared.b16` (sm_75)")]
        #[inline(always)]
        #[must_use]
        pub unsafe fn $load(row: u32) -> [u32; $count] {
            let mut fragments = [0; $count];
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!("ldmatrix.sync.aligned.m8n8.", $shape, ".shared.b16 ", $list, ", [{row}];"),
                    $(out(reg32) fragments[$i],)*
                    row = in(reg32) row,
                    options(readonly, nostack),
                );
            }
            fragments
        }

        #[doc = concat!("Stores ", $what, " of 8 × 8 elements of 16 bits to shared memory; the reverse of [`", stringify!($load), "`].")]
        ///
        /// # Safety
        /// - All 32 lanes execute this together.
        /// - In the lanes that pass addresses, `row` is a shared address of 16 writable bytes, aligned to 16.
        ///
        /// # PTX
        #[doc = concat!("`stmatrix.sync.aligned.m8n8.", $shape, ".shared.b16` (sm_90)")]
        #[inline(always)]
        pub unsafe fn $store(row: u32, fragments: [u32; $count]) {
            // SAFETY: the caller's promise is the instruction's.
            unsafe {
                asm!(
                    concat!("stmatrix.sync.aligned.m8n8.", $shape, ".shared.b16 [{row}], ", $list, ";"),
                    $(in(reg32) fragments[$i],)*
                    row = in(reg32) row,
                    options(nostack),
                );
            }
        }
    )*};
}

matrices! {
    ldmatrix_x1, stmatrix_x1, 1, "x1", "{{{}}}", [0], "a matrix";
    ldmatrix_x2, stmatrix_x2, 2, "x2", "{{{}, {}}}", [0, 1], "two matrices";
    ldmatrix_x4, stmatrix_x4, 4, "x4", "{{{}, {}, {}, {}}}", [0, 1, 2, 3], "four matrices";
    ldmatrix_x1_trans, stmatrix_x1_trans, 1, "x1.trans", "{{{}}}", [0], "a transposed matrix";
    ldmatrix_x2_trans, stmatrix_x2_trans, 2, "x2.trans", "{{{}, {}}}", [0, 1], "two transposed matrices";
    ldmatrix_x4_trans, stmatrix_x4_trans, 4, "x4.trans", "{{{}, {}, {}, {}}}", [0, 1, 2, 3], "four transposed matrices";
}

/// Transposes a matrix of 8 × 8 16-bit elements, held as a fragment by the warp. Lane `l` passes element
/// `2·(l % 4)` and the next one of row `l / 4`, and receives those of column `l / 4`.
///
/// # Safety
/// - All 32 lanes execute this together.
///
/// # PTX
/// `movmatrix.sync.aligned.m8n8.trans.b16` (sm_75)
#[inline(always)]
#[must_use]
pub unsafe fn movmatrix_trans(fragment: u32) -> u32 {
    let transposed;
    // Not `pure`: LLVM may sink a pure asm into a branch that only some lanes take.
    // SAFETY: the caller's promise is the instruction's.
    unsafe {
        asm!("movmatrix.sync.aligned.m8n8.trans.b16 {}, {};", out(reg32) transposed, in(reg32) fragment, options(nomem, nostack));
    }
    transposed
}

//! The step around attention: the operations of a model between its matrix products.

#[cfg(any(not(target_arch = "nvptx64"), feature = "step"))]
pub mod embed;
#[cfg(any(not(target_arch = "nvptx64"), feature = "step"))]
pub mod gate;
#[cfg(any(not(target_arch = "nvptx64"), feature = "step"))]
pub mod norm;
pub mod qkv;
#[cfg(any(not(target_arch = "nvptx64"), feature = "step"))]
pub mod sample;

/// The tables of all these kernels.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[crate::registry::KernelInfo]] = &[
    qkv::ROWS[0],
    qkv::ROWS[1],
    norm::ROWS[0],
    norm::ROWS[1],
    gate::ROWS,
    embed::ROWS,
    sample::ROWS,
    sample::adjust::ROWS,
    sample::log_probs::ROWS,
];

/// Elements of a vector of 16 bytes.
pub const VECTOR: u32 = 8;

#[cfg(target_arch = "nvptx64")]
pub(crate) use vector::*;

#[cfg(target_arch = "nvptx64")]
mod vector {
    #[cfg(target_feature = "sm_90a")]
    use cuda_std::griddep;
    use cuda_std::{math::fma, prelude::*};

    use super::VECTOR;
    use crate::common::half::Half;

    /// Where every kernel of a step begins. On Hopper its blocks may start while those of the launch before end, and wait
    /// here until that launch is complete. So what it may have written is read by ordinary loads: `ld.global.nc` is for
    /// memory that nobody writes while the kernel runs. (The next launch is not allowed to start earlier: its blocks
    /// would take room, and sampling of 16 rows then takes up to 7 % longer.)
    #[inline(always)]
    pub fn begin() {
        #[cfg(target_feature = "sm_90a")]
        griddep::wait();
    }

    /// 8 elements in single precision.
    pub type Vector = [f32; VECTOR as usize];

    /// The address of a vector of 16-bit elements.
    #[inline(always)]
    pub const fn at(base: u64, vector: u64) -> u64 {
        base + vector * 16
    }

    #[inline(always)]
    pub fn unpack<T: Half>(words: [u32; 4]) -> Vector {
        let mut x = [0.0; 8];
        let mut i = 0;
        while i < 4 {
            let [first, second] = T::unpack(words[i]);
            x[2 * i] = first;
            x[2 * i + 1] = second;
            i += 1;
        }
        x
    }

    #[inline(always)]
    pub fn pack<T: Half>(x: Vector) -> [u32; 4] {
        [
            T::pack(x[0], x[1]),
            T::pack(x[2], x[3]),
            T::pack(x[4], x[5]),
            T::pack(x[6], x[7]),
        ]
    }

    /// The sum of squares.
    #[inline(always)]
    pub fn squares(x: &Vector) -> f32 {
        let mut sum = 0.0;
        let mut i = 0;
        while i < VECTOR as usize {
            sum = fma(x[i], x[i], sum);
            i += 1;
        }
        sum
    }

    /// The sum over groups of `lanes` lanes, a power of two.
    ///
    /// # Safety
    /// All lanes of the warp come here.
    #[inline(always)]
    pub unsafe fn sum_of_lanes(mut x: f32, mut lanes: u32) -> f32 {
        while lanes > 1 {
            lanes >>= 1;
            // SAFETY: the caller's promise.
            x += unsafe { warp::warp_shuffle_xor(warp::FULL_MASK, x, lanes, 32) };
        }
        x
    }
}

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
//! D (64 × N, f32) is a `[f32; N / 2]` in each of the 128 threads. Its length determines N, a multiple of
//! 8 in `8..=256`. Warp w of the warpgroup has rows 16w…16w+15. With `g = lane / 4`, `t = lane % 4`,
//! elements `4j`, `4j + 1` are row g, columns 8j + 2t and the next; `4j + 2`, `4j + 3` are row g + 8.
//! A in registers (64 × 16) is a fragment of [`mma`](crate::mma)'s m16n8k16 in each warp.
//!
//! # What the compiler does not know
//! To the compiler, each product is one opaque instruction that reads and writes its operands at once.
//! In fact it runs until [`wait_group`]. So after the wait, pass every register array that the products
//! read or wrote to [`fence_operand`] (A fragments, too, if they are overwritten): the compiler then
//! cannot move a use above the wait. Separate instructions on one accumulator cost nothing: ptxas neither
//! serialises them nor copies registers between them (a test of this crate checks this).

mod descriptor;
#[cfg(target_arch = "nvptx64")]
mod order;
#[cfg(target_arch = "nvptx64")]
mod product;
#[cfg(target_arch = "nvptx64")]
mod registers;

pub use descriptor::{Descriptor, Swizzle};
#[cfg(target_arch = "nvptx64")]
pub use order::{commit_group, fence, schedule_fence, wait_group};
#[cfg(target_arch = "nvptx64")]
pub use product::{
    Accumulator, Bf16, Element, F16, mma_rs, mma_rs_e4m3, mma_rs_if, mma_ss, mma_ss_e4m3, mma_ss_if,
};
#[cfg(target_arch = "nvptx64")]
pub use registers::{Register, Registers, fence_operand};

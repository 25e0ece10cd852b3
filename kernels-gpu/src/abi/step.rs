//! What the kernels of the step around attention take.

use bytemuck::{Pod, Zeroable};

/// How the token of a row is drawn.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct DrawParams {
    /// What differences of logits are multiplied by to become exponents of 2; 0: the largest logit is taken.
    pub scale: f32,
    /// How many of the largest logits stay; 0: all.
    pub top_k: u32,
    /// The share that stays, of 2³²; 0: all.
    pub top_p: u32,
    /// The smallest weight that stays, where the largest is [`ONE`](crate::step::sample::ONE).
    pub min_weight: u32,
    /// A random number.
    pub random: u64,
    /// Zero.
    pub reserved: [u32; 2],
}

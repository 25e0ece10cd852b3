//! Scales per token of 8-bit keys and values.

use cuda_std::{
    math::{lg2, rcp},
    shared,
};

use super::{super::KEYS, KEY_BLOCKS, Keys};
use crate::common::cache::scale_of_value;

/// The scales of a lane's keys in a chunk, and of their values.
#[derive(Clone, Copy)]
pub(super) struct TokenScales {
    pub(super) keys: [f32; 2 * KEY_BLOCKS],
    pub(super) values_log2: [f32; 2 * KEY_BLOCKS],
    pub(super) values_inverse: [f32; 2 * KEY_BLOCKS],
}

impl TokenScales {
    /// For caches without scales per token.
    pub(super) const ONE: Self = Self {
        keys: [1.0; 2 * KEY_BLOCKS],
        values_log2: [0.0; 2 * KEY_BLOCKS],
        values_inverse: [1.0; 2 * KEY_BLOCKS],
    };

    /// Loads the scales of KV head `head` of the `kv_heads` of a chunk whose scales are at the shared address `at`, and
    /// whose first key is at position `first`.
    ///
    /// # Safety
    /// The chunk is loaded.
    #[inline(always)]
    pub(super) unsafe fn load<const MASKED: bool>(
        [at, first]: [u32; 2],
        lane: u32,
        keys: Keys,
        kv_heads: u32,
        head: u32,
    ) -> Self {
        let mut scales = Self::ONE;
        let mut i = 0;
        while i < 2 * KEY_BLOCKS {
            let key = lane / 4 + i as u32 * 8;
            let at = at + (key * kv_heads + head) * 4;
            // SAFETY: inside the chunk's scales.
            let [of_key, of_value] = unsafe {
                [
                    shared::load_f32(at),
                    shared::load_f32(at + KEYS * kv_heads * 4),
                ]
            };
            let position = first + key;
            // Positions without a key have no scales.
            if !MASKED || position >= keys.begin && position < keys.end {
                scales.keys[i] = of_key;
                let of_value = scale_of_value(of_value);
                scales.values_log2[i] = lg2(of_value);
                scales.values_inverse[i] = rcp(of_value);
            }
            i += 1;
        }
        scales
    }
}

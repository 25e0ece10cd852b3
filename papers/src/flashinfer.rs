//! How FlashInfer splits requests along their keys.

use tandem_attn::plan::{Chunk, Rules};

/// Algorithm 1: no chunk is longer than the mean load of a CTA.
pub const SPLIT: Rules = Rules {
    chunk: Some(mean_load),
    ..crate::NONE
};

/// The mean load of a CTA, in keys.
fn mean_load(chunk: &Chunk) -> u32 {
    let mean = chunk.keys_of_units.div_ceil(u64::from(chunk.ctas));
    let mean = u32::try_from(mean).unwrap_or(u32::MAX / 2);
    mean.max(1).next_multiple_of(chunk.alignment)
}

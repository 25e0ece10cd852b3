//! Online softmax on the accumulators of tensor cores: what one thread holds of a warp's 16 rows.
//!
//! Of the accumulator of a wgmma, or of `m16n8`s side by side, a thread holds two rows, `lane / 4` and 8
//! further down in its warp's 16, and in each the columns `8 j + 2 (lane % 4)` and the one after. Element
//! `4 j + 2 h + e` of the array is row `h`, column `8 j + 2 (lane % 4) + e`. Four neighbouring lanes share
//! a row.

mod growth;
mod logits;
mod rows;

pub use growth::{SLACK, largest_sum};
pub use logits::{
    hide_after, hide_before, hide_other_branches, hide_strangers_from, lean, mask, transform,
};
pub use rows::{Rows, Shift, maxima_of_rows, weights_as_they_are};

//! Drafts: items before they are cut along the keys.

mod decode;
mod drafter;
mod input;
mod item;
mod joint;
mod prefill;
mod sizes;

pub use drafter::Drafter;
pub use input::{BatchInput, PartInput};
pub use item::{
    Draft, DraftRow, DraftRun, DraftSink, Drafts, INSIDE_PAGES, MeanLoads, NO_ROW_BLOCK, aligned,
    split_alignment,
};
pub use joint::WORTH_CUTTING;
pub use sizes::PrefillSizes;

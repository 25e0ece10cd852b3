//! Keys and values in pages.

mod view;

pub use view::{KvView, KvViewMut};

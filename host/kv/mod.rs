//! Keys and values in pages: whose page is which ([`PagePool`], [`Sequence`], [`PrefixCache`]), what a batch
//! reads ([`compose`], [`mask`]), and how it lies in memory ([`KvView`]).

pub mod compose;
pub mod mask;
mod pool;
mod radix;
mod scales;
mod sequence;
mod view;

pub use pool::{OutOfPages, PageCopy, PagePool};
pub use radix::{Pin, PrefixCache};
pub use scales::KvScales;
pub(crate) use scales::ScaleAt;
pub use sequence::Sequence;
pub use view::{KvTensors, KvView, KvViewMut};

#[cfg(test)]
mod tests;

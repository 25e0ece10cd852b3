//! Keys and values in pages: whose page is which ([`PagePool`], [`Sequence`], [`PrefixCache`]), what a batch
//! reads ([`compose`], [`mask`]), and how it lies in memory ([`KvView`]).

mod blocks;
mod by_head;
pub mod compose;
pub(crate) mod latent_656;
pub mod mask;
mod pool;
mod radix;
mod scales;
mod sequence;
mod view;

pub use blocks::{BlockMask, BlockSparse, BlockSparseRun, MaskedHeads};
pub use by_head::PagesByHead;
#[cfg(feature = "cuda")]
pub(crate) use by_head::by_head;
pub use kernels_gpu::abi::KvStrides;
pub use latent_656::LATENT_656_BYTES;
pub use pool::{OutOfPages, PageCopy, PagePool};
pub use radix::{Pin, PrefixCache};
pub use scales::KvScales;
pub(crate) use scales::ScaleAt;
#[cfg(feature = "cuda")]
pub(crate) use scales::check_in_row;
pub use sequence::Sequence;
pub use view::{KvTensors, KvView, KvViewMut};

#[cfg(test)]
mod tests;

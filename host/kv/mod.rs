//! The paged KV cache: bookkeeping of pages ([`PagePool`], [`Sequence`], [`PrefixCache`]) and the layout of keys and
//! values in memory ([`KvView`]).

mod blocks;
mod by_head;
mod compose;
pub(crate) mod latent_656;
pub(crate) mod latent_parts;
#[cfg(feature = "unstable")]
pub mod mask;
#[cfg(not(feature = "unstable"))]
mod mask;
mod pool;
mod radix;
mod rows;
mod scales;
mod sequence;
mod strided;
mod view;
mod view_mut;
mod view_pages;

pub use kernels_gpu::abi::KvStrides;
pub use pool::{OutOfPages, PageCopy, PagePool};
pub use radix::{Pin, PrefixCache};
pub(crate) use scales::ScaleAt;
#[cfg(feature = "cuda")]
pub(crate) use scales::check_in_row;
pub use scales::{AppendScales, KvScales};
pub use sequence::Sequence;
#[cfg(all(feature = "cuda", feature = "unstable"))]
pub(crate) use strided::{ScalesByHead, view_by_head};
#[cfg(feature = "cuda")]
pub(crate) use view::check_heads;
pub use view::{KvTensors, KvView};
pub use view_mut::KvViewMut;
#[cfg(feature = "cuda")]
pub(crate) use view_pages::by_token;

unstable! {
    use blocks::{BlockMask, BlockSparse, BlockSparseRun, MaskedHeads};
    use by_head::PagesByHead;
    use latent_656::LATENT_656_BYTES;
    use view::RopePart;
    use mask::DraftTree;
}

#[cfg(test)]
mod tests;

//! Attention of [`tandem_attn`] for candle's tensors: paged caches and ragged batches, on the CPU and on NVIDIA GPUs.
//!
//! There are three calls, with the tensor shapes of serving stacks on candle:
//!
//! - [`reshape_and_cache`] writes new keys and values to their slots (i64 with −1 for padding, or u32),
//! - [`paged_attention`] attends queries of any lengths to a paged cache,
//! - [`flash_attn_varlen`] attends packed queries to packed keys, without a cache.
//!
//! Everything else that a step needs is kept between calls. [`Attention`] has the planners, the kernels and the
//! workspaces of one device: make one when a model is loaded. A [`Step`] is one batch, made once from its block tables
//! (vectors or tensors) and used by every layer. A [`Layer`] is the scale, the mask and the sinks of a layer. A step
//! plans once for all layers that differ only in their sinks. Models that alternate local and global layers have two [`Layer`]s,
//! and call the same function with one or the other.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use tandem_candle::{Attention, Layer, paged_attention, reshape_and_cache};
//!
//! # fn main() -> candle_core::Result<()> {
//! let device = Device::Cpu;
//! let attention = Attention::new(&device)?; // once
//! let global = Layer::new(1.0 / 64_f32.sqrt());
//! let local = global.clone().with_window_left(1023);
//! // Caches of 32 blocks of 16 tokens, two heads of 64.
//! let k_cache = Tensor::zeros((32, 16, 2, 64), DType::F32, &device)?;
//! let v_cache = Tensor::zeros((32, 16, 2, 64), DType::F32, &device)?;
//!
//! // A step of two decodes, of 20 and 3 tokens with the new ones: once for all layers.
//! let step = attention.decode(&[vec![7_usize, 3], vec![9, 0]], &[20_usize, 3], 16)?;
//! let slots = Tensor::new(&[3 * 16 + 3_i64, 9 * 16 + 2], &device)?;
//!
//! // A layer.
//! let q = Tensor::ones((2, 8, 64), DType::F32, &device)?;
//! let k = Tensor::ones((2, 2, 64), DType::F32, &device)?;
//! reshape_and_cache(&k, &k, &k_cache, &v_cache, &slots, local.layout)?;
//! let out = paged_attention(&q, &k_cache, &v_cache, &step, &local)?;
//! assert_eq!(out.dims(), [2, 8, 64]);
//! # Ok(())
//! # }
//! ```
//!
//! # Types and layouts
//!
//! Queries, keys and values have the same type: F32, BF16 or F16 on the CPU, BF16 or F16 on a GPU. A cache may be
//! F8E4M3 instead ([`Layer::with_kv_scales`], [`reshape_and_quantise`]), on the CPU and on GPUs. Queries and new keys
//! may be slices of a fused projection: only the elements of a head must be contiguous. On a GPU, queries are read in
//! place if the heads of a token lie side by side, and the first element and the stride of tokens are multiples of 8;
//! otherwise they are copied first. New keys and values whose heads do not begin at multiples of 8 elements may be
//! refused there. Caches are
//! `[blocks, block_size, kv_heads, head_dim]` ([`KvLayout::Nhd`]) or `[blocks, kv_heads, block_size, head_dim]`
//! ([`KvLayout::Hnd`]). Caches of vLLM's first kernels, which split the elements of a head, are refused.
//!
//! # On a GPU
//!
//! With the feature `cuda`, all work runs on the stream of candle's device, and outputs are candle's own memory. The
//! kernels are precompiled. Block tables that are tensors on the device are read back when a step is made, which waits
//! for the device, so pass vectors if you have them. A slot mapping of i64 is converted by a kernel in each call:
//! convert it once per step with `to_dtype(DType::U32)`.
//!
//! # Not in the adapter
//!
//! The [README] lists what the adapter lacks, such as latent attention and CUDA graphs, and how to call [`tandem_attn`] for it on
//! candle's memory and stream.
//!
//! [README]: https://github.com/tandem-attn/tandem-attn/blob/main/adapters/candle/README.md#not-in-the-adapter

mod append;
mod class;
mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", test))]
mod growth;
mod layer;
mod layout;
mod ops;
mod step;
mod tables;
mod varlen;

pub use append::{reshape_and_cache, reshape_and_quantise};
pub use layer::Layer;
pub use ops::paged_attention;
pub use step::{Attention, Step};
pub use tables::{BlockTables, Lengths};
pub use tandem_attn;
pub use tandem_attn::problem::KvLayout;
pub use varlen::{flash_attn_varlen, flash_attn_varlen_windowed, varlen_attention};

use candle_core::Error;

/// Wraps an error of the core in candle's error.
fn wrap(error: impl Into<tandem_attn::Error>) -> Error {
    Error::wrap(error.into())
}

//! The problem to compute: the heads ([`Spec`]) and the requests ([`Batch`]).
//!
//! ```
//! use tandem_attn::problem::{Batch, PageTable, Spec};
//!
//! // 32 query heads, 8 KV heads, head dimension 128, bf16, causal.
//! let spec = Spec::new(32, 8, 128);
//! // A prompt of 20 tokens and a decode step at position 40, on pages of 16 tokens.
//! let mut table = PageTable::new(16, 1000);
//! table.push(&[7, 3], 20);
//! table.push(&[9, 1, 4], 41);
//! let batch = Batch::new(vec![0, 20, 21], table);
//!
//! spec.check()?;
//! batch.check(&spec)?;
//! assert_eq!((batch.q_len(1), batch.parts[0].kv_len(1)), (1, 41));
//! # Ok::<(), tandem_attn::problem::ProblemError>(())
//! ```

mod advice;
mod batch;
mod compute;
mod dtype;
mod error;
mod integer;
mod layout;
mod padding;
mod spec;
mod variant;

pub(crate) use advice::Quantity;
pub use batch::{Batch, PageTable, Part};
pub use dtype::Dtype;
pub use error::ProblemError;
pub use integer::Integer;
pub use layout::KvLayout;
pub(crate) use padding::Padding;
pub use spec::Spec;
pub use variant::Variant;
unstable! {
    use batch::Masks;
    use compute::Compute;
}

pub(crate) const MAX_HEAD_DIM: u32 = 1024;

pub(crate) const MAX_PAGE_SIZE: u32 = 4096;

/// Kernels round positions up to whole blocks of keys, in 32 bits with a sign.
pub(crate) const MAX_POSITION: u32 = i32::MAX as u32 - 1024;

pub(crate) fn fits(what: Quantity, got: u64, limit: u64) -> Result<(), ProblemError> {
    if got <= limit {
        Ok(())
    } else {
        Err(what.too_large(got, limit))
    }
}

#[cfg(test)]
mod tests;

//! Running plans.

#[cfg(feature = "cuda")]
pub mod gpu;

//! Kernels for Ampere and everything after it: `mma.sync`, `ldmatrix`, `cp.async`.
//!
//! They are compiled for Hopper too, where they do what tensor maps cannot: pages of any number of tokens.

pub mod decode;
pub mod pod;
pub mod prefill;

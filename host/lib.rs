//! Attention for LLM serving, in pure Rust.
//!
//! The tour: describe the heads with a [`problem::Spec`] and the requests with a [`problem::Batch`],
//! let the planner turn both into a [`plan::Plan`], and run the plan on a backend.

pub use error::Error;
pub use kernels_gpu::{abi, math, state, variant};

mod error;
pub mod exec;
pub mod kv;
pub mod plan;
pub mod problem;
pub mod reference;
pub mod schedule;
pub mod tensor;

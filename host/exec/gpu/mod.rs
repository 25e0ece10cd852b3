//! Running plans on an NVIDIA GPU.

pub mod embedded;

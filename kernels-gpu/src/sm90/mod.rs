//! Hopper.

pub mod decode;

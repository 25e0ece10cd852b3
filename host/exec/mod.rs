//! Running things: on threads of the CPU, or on an NVIDIA GPU (feature `cuda`).

pub mod cpu;
#[cfg(feature = "cuda")]
pub mod gpu;

pub use cpu::Cpu;

//! Kernels that measure the hardware.

pub mod ceilings;
pub mod loops;

/// The kernels.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[crate::registry::KernelInfo]] = &[ceilings::ROWS, loops::ROWS];

//! The device code that this program carries with it.

pub use kernels_bin::{Image, Module};

/// The kernels that `Gpu::new` takes: each family for each architecture.
#[cfg(not(feature = "build-kernels"))]
pub use kernels_bin::MODULES;

/// The kernels that `Gpu::new` takes: each family for each architecture, as compiled with this program.
#[cfg(feature = "build-kernels")]
pub static MODULES: &[Module] = include!(concat!(env!("OUT_DIR"), "/modules.rs"));

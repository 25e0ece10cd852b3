//! Builds a GPU crate to PTX, and to a cubin where ptxas is at hand, from a build script or a tool.
//!
//! The names are those of rust-cuda's `cuda_builder`; the compiler underneath is rustc's own
//! `nvptx64-nvidia-cuda` backend, so there is neither a codegen plug-in nor libNVVM to install.
//!
//! ```no_run
//! use cuda_builder::{CudaBuilder, NvvmArch};
//!
//! let module = CudaBuilder::new("kernels").arch(NvvmArch::Compute90a).build()?;
//! println!("PTX in {}", module.ptx_path.display());
//! if let Some(cubin) = &module.cubin {
//!     for entry in &cubin.resources {
//!         println!("{}: {} registers", entry.name, entry.registers);
//!     }
//! }
//! # Ok::<(), cuda_builder::CudaBuilderError>(())
//! ```
//!
//! # What is needed
//! A rustc with the sources of its library: see [`Compiler::find`] for where it is looked for and
//! [`CudaBuilderError::NoCompiler`] for the two commands that install one. ptxas is optional: see
//! [`Assembler::find`].
//!
//! # What a GPU crate looks like
//! A `#![no_std]` library, of any crate type: it is compiled as a `cdylib` whatever its manifest says,
//! so one crate can hold kernels and the plain code that the host shares. Which architecture is being
//! built shows as `cfg(target_feature = "sm_90a")`.
//!
//! rustc has no `__launch_bounds__`. A kernel states its own in a marker, which `#[kernel]` of
//! `cuda_std` writes and this crate turns into PTX directives: see [`ptx::apply_markers`].

#![warn(missing_docs)]

mod assembler;
mod builder;
mod compiler;
mod dependencies;
mod embed;
mod error;
mod nested;
pub mod ptx;
mod record;

pub use assembler::{Assembler, Cubin, EntryResources};
pub use builder::{CudaBuilder, CudaModule, NvvmArch, build_all};
pub use compiler::Compiler;
pub use embed::embed;
pub use error::CudaBuilderError;

//! Builds a GPU crate to PTX, and to a cubin if ptxas is available, from a build script or a tool.
//!
//! The names are those of rust-cuda's `cuda_builder`. The compiler is rustc's own `nvptx64-nvidia-cuda` backend, so
//! neither a codegen plug-in nor libNVVM has to be installed.
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
//! # Requirements
//! A rustc with the sources of its library: [`Compiler::find`] says where it is searched, and
//! [`CudaBuilderError::NoCompiler`] gives the two commands that install one. ptxas is optional: see
//! [`Assembler::find`]. It runs on Linux and macOS.
//!
//! # GPU crates
//! A GPU crate is a `#![no_std]` library. It is compiled as a `cdylib`, whatever crate type its manifest states, so one
//! crate can contain kernels and plain code that the host shares. `cfg(target_feature = "sm_90a")` tells the
//! architecture.
//!
//! rustc has no `__launch_bounds__`. A kernel states its launch bounds in a marker, which `#[kernel]` of `cuda_std`
//! writes and this crate turns into PTX directives: see [`ptx::apply_markers`].

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

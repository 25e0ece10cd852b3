//! The functions of the CUDA driver as symbols of the program, for crates that link `-lcuda`.
//!
//! The crate `cust` links against `libcuda.so`, which is part of an NVIDIA driver. Such a program neither links nor
//! starts on a machine without the driver. This crate defines the driver's functions itself, as trampolines: the first
//! call opens `libcuda.so.1` through [`libcuda`], and later calls jump directly into it. Without a driver the program
//! links, starts and runs; each driver function then returns `CUDA_ERROR_NO_DEVICE`.
//!
//! ```
//! use libcuda_link as _; // a dependency that nobody names is not linked
//! ```
//!
//! # At build time
//!
//! The build script of `cust_raw` needs a directory with a CUDA toolkit and adds `-lcuda` to the link. There are three
//! ways to satisfy it:
//!
//! - have a CUDA toolkit installed, and do nothing. Its `libcuda.so` is then on the linker's command line,
//!   but the functions defined here come first and the linker takes them. There are no duplicate symbols (a
//!   definition in an object outranks one in a shared library), and the ones here are hidden: nothing
//!   outside the program, the driver's own parts included, ever binds to them;
//! - set `CUDA_LIBRARY_PATH` to a directory with `lib64/libcuda.so` of the one line `INPUT(-lc)`. The
//!   workspace of tandem-attn does so in its `.cargo/config.toml`;
//! - set `DOCS_RS=1` while building: `cust_raw` then adds nothing to the link.
//!
//! # On other systems
//!
//! On Linux for x86-64 and AArch64, nothing else is needed. On other targets there are no trampolines, and `cust` links
//! against the toolkit as usual.

#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod entry_points;
#[cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]
mod trampolines;

//! Programs that call the CUDA driver, without CUDA on the machine.
//!
//! The crate `cust` links against `libcuda.so`, which comes with an NVIDIA driver. A program linked
//! that way neither links nor starts on a machine that has none. This crate defines the driver's
//! functions itself, as trampolines: the first call opens `libcuda.so.1` and from then on every call
//! jumps straight into it. Where there is no driver the program links, starts and runs; each driver
//! function then answers `CUDA_ERROR_NO_DEVICE`, and [`driver`] says what was looked for.
//!
//! ```
//! use libcuda as _; // a dependency that nobody names is not linked
//!
//! match libcuda::driver() {
//!     Ok(driver) => println!("opened {}", driver.name()),
//!     Err(missing) => println!("{missing}"),
//! }
//! ```
//!
//! # At build time
//!
//! `cust_raw`'s build script wants a directory with a CUDA toolkit and adds `-lcuda` to the link. In
//! this workspace `.cargo/config.toml` sets `CUDA_LIBRARY_PATH` to `toolchain/libcuda/link`, which
//! holds an empty linker script of that name. Elsewhere there are three ways:
//!
//! - set `CUDA_LIBRARY_PATH` to such a directory (`lib64/libcuda.so` with the one line `INPUT(-lc)`);
//! - set `DOCS_RS=1` while building: `cust_raw` then adds nothing to the link;
//! - have a CUDA toolkit installed, and do nothing. Its `libcuda.so` is then on the linker's command
//!   line, but the functions defined here come first and the linker takes them. There are no
//!   duplicate symbols (a definition in an object outranks one in a shared library), and the ones here
//!   are hidden: nothing outside the program, the driver's own parts included, ever binds to them.
//!
//! # On other systems
//!
//! On Linux for x86-64 and AArch64 this is all there is to it. On other targets the trampolines are
//! absent and `cust` links against the toolkit as it always did; [`driver`] and [`symbol`] work there.
//!
//! # An unusual place
//!
//! The environment variable `TANDEM_LIBCUDA`, when set, is the one file that is tried.

mod driver;
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

pub use driver::{Driver, NoDriver, driver, symbol};

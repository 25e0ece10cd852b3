//! The functions of the CUDA driver that tandem-attn calls, bound at run time.
//!
//! A program with these bindings needs no CUDA to build, link or start. The first call opens `libcuda.so.1`; each
//! function is looked up on its first call. Without a driver, every function returns [`Code::NO_DEVICE`], and
//! [`driver`] lists what was searched. A function that the driver is too old for returns [`Code::NO_FUNCTION`].
//!
//! ```
//! match libcuda::driver() {
//!     Ok(driver) => println!("opened {}", driver.name()),
//!     Err(missing) => println!("{missing}"),
//! }
//! ```
//!
//! This crate defines no global symbol, so other bindings can be used in the same program. Crates that link `-lcuda`
//! (`cust`) find the symbols in `tandem-libcuda-link`.
//!
//! # An unusual place
//!
//! If the environment variable `TANDEM_LIBCUDA` is set, only the file that it names is tried.

mod driver;
mod functions;
mod library;
mod types;

pub use driver::{Driver, Lookup, NoDriver, driver, stand_in, symbol};
pub use functions::*;
pub use library::Library;
pub use types::*;

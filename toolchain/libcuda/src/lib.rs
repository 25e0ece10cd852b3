//! The functions of the CUDA driver that tandem-attn calls, bound at run time.
//!
//! A program with these bindings needs no CUDA to build, link or start. The first call opens
//! `libcuda.so.1`; each function is looked up when it is first called. Where there is no driver every
//! function answers [`Code::NO_DEVICE`], and [`driver`] says what was looked for. A function that the
//! driver is too old for answers [`Code::NO_FUNCTION`].
//!
//! ```
//! match libcuda::driver() {
//!     Ok(driver) => println!("opened {}", driver.name()),
//!     Err(missing) => println!("{missing}"),
//! }
//! ```
//!
//! This crate defines no global symbol, so it stands beside any other binding in one program. Crates that
//! link `-lcuda` (`cust`) find the symbols in `tandem-libcuda-link`.
//!
//! # An unusual place
//!
//! The environment variable `TANDEM_LIBCUDA`, when set, is the one file that is tried.

mod driver;
mod functions;
mod library;
mod types;

pub use driver::{Driver, Lookup, NoDriver, driver, stand_in, symbol};
pub use functions::*;
pub use library::Library;
pub use types::*;

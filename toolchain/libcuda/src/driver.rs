//! Finding and opening the driver library, once for the life of the process.

use std::ffi::{CStr, OsString, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::library::Library;

/// Names the one file to open instead of the usual ones.
const OVERRIDE: &str = "TANDEM_LIBCUDA";

/// What is tried, in order: the loader's own search first, then the places where a driver lies
/// without the loader knowing (WSL, containers, NixOS).
#[cfg(not(windows))]
const CANDIDATES: [&str; 4] = [
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
];
#[cfg(windows)]
const CANDIDATES: [&str; 1] = ["nvcuda.dll"];

/// The opened driver library.
#[derive(Debug)]
pub struct Driver {
    name: String,
    library: Library,
}

impl Driver {
    /// The name under which it was found.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of a function of the driver; `None` where this driver does not have it.
    #[must_use]
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        self.library.symbol(name)
    }
}

/// No driver library could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoDriver {
    /// The files that were tried, in order.
    pub searched: Vec<String>,
    /// What the loader said about the first of them.
    pub reason: String,
}

impl fmt::Display for NoDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no CUDA driver: tried {} ({})",
            self.searched.join(", "),
            self.reason
        )
    }
}

impl std::error::Error for NoDriver {}

/// The driver library, opened on the first call; the answer never changes afterwards.
///
/// # Errors
/// [`NoDriver`] where no file of the search could be opened.
pub fn driver() -> Result<&'static Driver, &'static NoDriver> {
    static DRIVER: OnceLock<Result<Driver, NoDriver>> = OnceLock::new();
    DRIVER
        .get_or_init(|| match std::env::var_os(OVERRIDE) {
            Some(file) => open([file]),
            None => open(CANDIDATES.map(OsString::from)),
        })
        .as_ref()
}

/// Address of a driver function that the bindings lack, such as `cuLaunchKernelEx`.
///
/// `None` where there is no driver or the driver is too old for it.
#[must_use]
pub fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    driver().ok()?.symbol(name)
}

fn open<const N: usize>(candidates: [OsString; N]) -> Result<Driver, NoDriver> {
    let mut searched = Vec::with_capacity(N);
    let mut reason = String::new();
    for file in candidates {
        let name = file.to_string_lossy().into_owned();
        // SAFETY: opening the driver runs its initialisers, which every CUDA program does at start.
        match unsafe { Library::open(&file) } {
            Ok(library) => return Ok(Driver { name, library }),
            Err(said) => {
                if searched.is_empty() {
                    reason = said;
                }
                searched.push(name);
            }
        }
    }
    Err(NoDriver { searched, reason })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_named_with_the_reason() {
        let missing = open([
            OsString::from("/nowhere/libcuda.so.1"),
            OsString::from("/also/nowhere"),
        ])
        .unwrap_err();
        assert_eq!(missing.searched, ["/nowhere/libcuda.so.1", "/also/nowhere"]);
        let text = missing.to_string();
        assert!(text.contains("/also/nowhere"), "{text}");
        assert!(text.contains("No such file"), "{text}");
    }
}

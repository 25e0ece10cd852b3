//! Finds and opens the driver library, once per process.

use std::ffi::{CStr, OsString, c_void};
use std::fmt;
use std::ptr::NonNull;
use std::sync::OnceLock;

use crate::library::Library;

/// Environment variable with the only file to open, instead of the usual ones.
const OVERRIDE: &str = "TANDEM_LIBCUDA";

/// File names to try, in order: first the loader's own search, then places of the driver that the loader does not know
/// (WSL, containers, NixOS).
#[cfg(not(windows))]
const CANDIDATES: [&str; 4] = [
    "libcuda.so.1",
    "/usr/lib/wsl/lib/libcuda.so.1",
    "/usr/local/nvidia/lib64/libcuda.so.1",
    "/run/opengl-driver/lib/libcuda.so.1",
];
#[cfg(windows)]
const CANDIDATES: [&str; 1] = ["nvcuda.dll"];

/// Looks up functions of a driver by name.
pub type Lookup = fn(&CStr) -> Option<NonNull<c_void>>;

#[derive(Debug)]
enum Source {
    Library(Library),
    Program(Lookup),
}

/// The opened driver library, or its substitute.
#[derive(Debug)]
pub struct Driver {
    name: String,
    source: Source,
}

impl Driver {
    /// The name under which it was found.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Address of a function of the driver; `None` if this driver does not have it.
    #[must_use]
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        match &self.source {
            Source::Library(library) => library.symbol(name),
            Source::Program(lookup) => lookup(name),
        }
    }
}

/// No driver library could be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct NoDriver {
    /// The tried files, in order.
    pub searched: Vec<String>,
    /// The loader's message about the first of them.
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

static DRIVER: OnceLock<Result<Driver, NoDriver>> = OnceLock::new();

/// Substitutes functions of the program itself for a driver. Allowed only before the driver is first used, or if the
/// same substitute is already in place.
///
/// # Errors
/// What is in use instead: a driver, or [`NoDriver`] if none was found.
pub fn stand_in(
    name: &str,
    lookup: Lookup,
) -> Result<(), Result<&'static Driver, &'static NoDriver>> {
    let stands_in = DRIVER.get_or_init(|| {
        Ok(Driver {
            name: name.to_owned(),
            source: Source::Program(lookup),
        })
    });
    match stands_in {
        Ok(driver) if driver.name == name => Ok(()),
        other => Err(other.as_ref()),
    }
}

/// The driver library, opened on the first call. The result never changes afterwards.
///
/// # Errors
/// [`NoDriver`] if no file of the search could be opened.
pub fn driver() -> Result<&'static Driver, &'static NoDriver> {
    DRIVER
        .get_or_init(
            || match std::env::var_os(OVERRIDE).filter(|file| !file.is_empty()) {
                Some(file) => open([file]),
                None => open(CANDIDATES.map(OsString::from)),
            },
        )
        .as_ref()
}

/// Address of a driver function that the bindings lack, such as `cuLaunchKernelEx`.
///
/// `None` if there is no driver or if it is too old.
#[must_use]
pub fn symbol(name: &CStr) -> Option<NonNull<c_void>> {
    driver().ok()?.symbol(name)
}

fn open<const N: usize>(candidates: [OsString; N]) -> Result<Driver, NoDriver> {
    let mut searched = Vec::with_capacity(N);
    let mut reason = String::new();
    for file in candidates {
        let name = file.to_string_lossy().into_owned();
        // SAFETY: opening the driver runs its initialisers, which every CUDA program does at its start.
        match unsafe { Library::open(&file) } {
            Ok(library) => {
                let source = Source::Library(library);
                return Ok(Driver { name, source });
            }
            Err(said) => {
                // A file that is there and does not load explains more than the missing ones.
                if searched.is_empty() || is_missing(&reason) && !is_missing(&said) {
                    reason = said;
                }
                searched.push(name);
            }
        }
    }
    Err(NoDriver { searched, reason })
}

/// What glibc, musl and Windows say about a file that is not there.
fn is_missing(said: &str) -> bool {
    ["No such file", "cannot open shared object", "os error 126"]
        .iter()
        .any(|text| said.contains(text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_does_not_load_is_the_reason() {
        let name = format!("no-library-{}", std::process::id());
        let broken = std::env::temp_dir().join(name);
        std::fs::write(&broken, "no library").unwrap();
        let files = ["/nowhere/libcuda.so.1".into(), broken.clone().into()];
        let missing = open(files).unwrap_err();
        std::fs::remove_file(&broken).unwrap();
        let name = broken.file_name().unwrap().to_string_lossy();
        assert!(missing.reason.contains(&*name), "{missing}");
    }

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

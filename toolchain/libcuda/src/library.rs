//! Opens a library at run time, with the system's own two functions. The library is never closed: its addresses stay
//! valid until the process ends.

use std::{
    ffi::{CStr, OsStr, c_char, c_int, c_void},
    ptr::NonNull,
};

/// A library that stays open until the process ends.
#[derive(Debug)]
pub struct Library(NonNull<c_void>);

// SAFETY: the handle is only passed to functions that any thread may call.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

#[cfg(unix)]
mod system {
    use super::{CStr, c_char, c_int, c_void};

    // Before glibc 2.34, these functions are in a separate library.
    #[cfg_attr(all(target_os = "linux", target_env = "gnu"), link(name = "dl"))]
    unsafe extern "C" {
        pub fn dlopen(file: *const c_char, flags: c_int) -> *mut c_void;
        pub fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
        fn dlerror() -> *const c_char;
    }

    /// The loader's last error message on this thread.
    pub fn said() -> String {
        // SAFETY: returns null, or a string of this thread that stays valid until its next call of the loader.
        let text = unsafe { dlerror() };
        if text.is_null() {
            return "the loader did not say why".into();
        }
        // SAFETY: as above.
        unsafe { CStr::from_ptr(text) }
            .to_string_lossy()
            .into_owned()
    }
}

#[cfg(unix)]
impl Library {
    /// Opens a file by its path, or by a name that the system's loader searches.
    ///
    /// # Errors
    /// The loader's message.
    ///
    /// # Safety
    /// The library's initialisers may be run.
    pub unsafe fn open(file: &OsStr) -> Result<Self, String> {
        use std::{ffi::CString, os::unix::ffi::OsStrExt};

        // 2 is RTLD_NOW: resolve all symbols now. 0 is RTLD_LOCAL: do not provide them to other libraries.
        const NOW_AND_LOCAL: c_int = 2;
        let name = CString::new(file.as_bytes()).map_err(|_| "a zero in the name".to_owned())?;
        // SAFETY: the name is NUL-terminated; the caller allows the initialisers.
        let handle = unsafe { system::dlopen(name.as_ptr(), NOW_AND_LOCAL) };
        NonNull::new(handle).map(Self).ok_or_else(system::said)
    }

    /// Address of a function or variable; `None` if the library does not have it.
    #[must_use]
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is open. Only the address is taken; nothing is called.
        NonNull::new(unsafe { system::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

#[cfg(windows)]
mod system {
    use super::{c_char, c_void};

    #[link(name = "kernel32")]
    unsafe extern "system" {
        pub fn LoadLibraryW(file: *const u16) -> *mut c_void;
        pub fn GetProcAddress(library: *mut c_void, name: *const c_char) -> *mut c_void;
    }
}

#[cfg(windows)]
impl Library {
    /// Opens a file by its path, or by a name that the system's loader searches.
    ///
    /// # Errors
    /// The loader's message.
    ///
    /// # Safety
    /// The library's initialisers may be run.
    pub unsafe fn open(file: &OsStr) -> Result<Self, String> {
        use std::os::windows::ffi::OsStrExt;

        let name: Vec<u16> = file.encode_wide().chain([0]).collect();
        // SAFETY: the name is NUL-terminated; the caller allows the initialisers.
        let handle = unsafe { system::LoadLibraryW(name.as_ptr()) };
        NonNull::new(handle)
            .map(Self)
            .ok_or_else(|| std::io::Error::last_os_error().to_string())
    }

    /// Address of a function or variable; `None` if the library does not have it.
    #[must_use]
    pub fn symbol(&self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is open. Only the address is taken; nothing is called.
        NonNull::new(unsafe { system::GetProcAddress(self.0.as_ptr(), name.as_ptr()) })
    }
}

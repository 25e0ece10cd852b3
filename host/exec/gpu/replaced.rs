//! Kernels of a folder in the place of those in the program.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use super::embedded::{Image, MODULES, Module};
use crate::Error;

/// The modules of the program, some replaced: see [`modules_of`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ReplacedModules {
    /// All modules, for [`GpuBuilder::modules`](super::GpuBuilder::modules).
    pub modules: Vec<Module>,
    /// The names of those that come from the folder, such as `sm_90a-mla`, sorted.
    pub names: Vec<String>,
}

/// The name of a module's file in a folder, `kind` is `ptx` or `cubin`.
#[must_use]
pub fn module_file(folder: &Path, module: &Module, kind: &str) -> PathBuf {
    folder.join(format!("{}.{kind}", name(module)))
}

fn name(module: &Module) -> String {
    format!("{}-{}", module.arch, module.family)
}

/// The kernels in the program, with those of a folder in the place of their own: `sm_90a-mla.cubin` replaces the machine code of
/// the family `mla` for `sm_90a`, and `sm_90a-mla.ptx` its PTX. With PTX alone the driver has to compile it
/// ([`GpuBuilder::compile_ptx`](super::GpuBuilder::compile_ptx)), because the machine code in the program is of other kernels.
///
/// # Errors
/// [`Error::NoModules`] if the folder has none of these files, or one that cannot be read.
pub fn modules_of(folder: &Path) -> Result<ReplacedModules, Error> {
    let wrong = |file: &Path, reason: String| Error::NoModules {
        file: file.to_owned(),
        reason,
    };
    let read = |module: &Module, kind| {
        let file = module_file(folder, module, kind);
        match fs::read(&file) {
            Ok(bytes) => Ok(Some(Image::owned(bytes))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(wrong(&file, error.to_string())),
        }
    };
    fs::read_dir(folder).map_err(|error| wrong(folder, error.to_string()))?;
    let mut names = Vec::new();
    let mut modules = MODULES.to_vec();
    for module in &mut modules {
        let (ptx, cubin) = (read(module, "ptx")?, read(module, "cubin")?);
        if ptx.is_none() && cubin.is_none() {
            continue;
        }
        names.push(name(module));
        module.cubin = cubin;
        if let Some(ptx) = ptx {
            module.ptx = ptx;
        }
    }
    if names.is_empty() {
        return Err(wrong(folder, "it has no kernels".to_owned()));
    }
    names.sort_unstable();
    Ok(ReplacedModules { modules, names })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// An empty folder, removed at the end.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let name = format!("tandem-modules-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn files_of_a_folder_replace_what_they_are_named_after() {
        let folder = Folder::new("some");
        let [first, second] = [&MODULES[0], &MODULES[1]];
        fs::write(module_file(&folder.0, first, "cubin"), "code").unwrap();
        fs::write(module_file(&folder.0, second, "ptx"), "text").unwrap();
        fs::write(folder.0.join("notes.txt"), "no kernels").unwrap();
        let found = modules_of(&folder.0).unwrap();
        let mut names = [name(first), name(second)];
        names.sort_unstable();
        assert_eq!(found.names, names);
        assert_eq!(found.modules.len(), MODULES.len());
        let unpacked = |image: &Image| image.unpack().unwrap().into_owned();
        let code = found.modules[0].cubin.as_ref().map(unpacked);
        assert_eq!(code.as_deref(), Some(&b"code"[..]));
        assert_eq!(unpacked(&found.modules[0].ptx), unpacked(&first.ptx));
        // Machine code in the program is of other kernels than this PTX.
        assert!(found.modules[1].cubin.is_none());
        assert_eq!(unpacked(&found.modules[1].ptx), b"text");
        let kept = found.modules[2].cubin.as_ref().map(unpacked);
        assert_eq!(kept, MODULES[2].cubin.as_ref().map(unpacked));
    }

    #[test]
    fn a_folder_without_kernels_is_an_error() {
        let folder = Folder::new("none");
        fs::write(folder.0.join("sm_90a-unknown.cubin"), "code").unwrap();
        let error = modules_of(&folder.0).unwrap_err();
        assert!(
            matches!(&error, Error::NoModules { file, .. } if *file == folder.0),
            "{error:?}"
        );
        let said = error.to_string();
        assert!(said.contains("sm_90a-mla.cubin"), "{said}");
        let absent = modules_of(&folder.0.join("absent")).unwrap_err();
        assert!(matches!(absent, Error::NoModules { .. }), "{absent:?}");
        let unreadable = module_file(&folder.0, &MODULES[0], "cubin");
        fs::create_dir_all(&unreadable).unwrap();
        let error = modules_of(&folder.0).unwrap_err();
        assert!(
            matches!(&error, Error::NoModules { file, .. } if *file == unreadable),
            "{error:?}"
        );
    }
}

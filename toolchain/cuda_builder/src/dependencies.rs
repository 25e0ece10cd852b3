//! Dependencies that the modules of a crate share, mainly `core`. They are compiled once per architecture and copied to
//! the target directory of each module, because cargo allows only one compilation at a time in a target directory.

use std::{
    collections::HashMap,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use crate::{CudaBuilderError, builder::lock, nested::Compilation};

/// The file in a module's target directory that records with which dependencies it started.
const SEED: &str = "dependencies.txt";

/// State of the dependencies during a build of several modules: for each directory the state of its files, if it has
/// been examined already.
#[derive(Default)]
pub(crate) struct Dependencies(Mutex<HashMap<PathBuf, String>>);

impl Dependencies {
    /// Compiles the dependencies of `compilation` into `shared` if anything has changed, and updates the copy in its own
    /// directory if it is outdated. If that fails, `compilation` itself compiles what is missing, and reports what is
    /// wrong with it: the crate may only compile with its features.
    pub(crate) fn copy_to(
        &self,
        compilation: &Compilation<'_>,
        shared: &Path,
    ) -> Result<(), CudaBuilderError> {
        let own = compilation.target_dir;
        let failed = |path: &Path| CudaBuilderError::io(format!("write {}", path.display()));
        fs::create_dir_all(shared).map_err(failed(shared))?;
        // Waits for other processes and for threads of this one that build the same.
        let _lock = lock(&shared.join(".lock"))?;
        let known = self.known(shared);
        let state = match known {
            Some(state) => state,
            None => {
                let state = compile(compilation, shared).unwrap_or_default();
                let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
                states.insert(shared.into(), state.clone());
                state
            }
        };
        let seed = own.join(SEED);
        if fs::read_to_string(&seed).ok().as_ref() != Some(&state) {
            let _ = fs::remove_dir_all(own);
            copy(shared, own).map_err(failed(own))?;
            fs::write(&seed, state).map_err(failed(&seed))?;
        }
        Ok(())
    }

    fn known(&self, shared: &Path) -> Option<String> {
        let states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        states.get(shared).cloned()
    }
}

/// Compiles the crate without its features, to compile its dependencies. Returns a value that changes when a dependency
/// is compiled anew.
fn compile(compilation: &Compilation<'_>, shared: &Path) -> Result<String, CudaBuilderError> {
    let arguments = without_features(compilation.cargo_arguments);
    let (_, files) = Compilation {
        line_info: false,
        checks: false,
        silent: true,
        entries: None,
        cargo_arguments: &arguments,
        target_dir: shared,
        assembly: &shared.join("module.s"),
        ..*compilation
    }
    .run()?;
    let mut hasher = DefaultHasher::new();
    for file in &files {
        let modified = fs::metadata(file).and_then(|data| data.modified()).ok();
        (file, modified).hash(&mut hasher);
    }
    Ok(format!("{:016x}", hasher.finish()))
}

/// Arguments such as `--offline`, `--locked` and `--config`.
fn without_features(arguments: &[String]) -> Vec<String> {
    let mut kept = Vec::new();
    let mut arguments = arguments.iter();
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--features" | "-F" => {
                arguments.next();
            }
            "--all-features" | "--no-default-features" => {}
            other if other.starts_with("--features=") || other.starts_with("-F") => {}
            _ => kept.push(argument.clone()),
        }
    }
    kept
}

/// Files of at least this size are hard-linked instead of copied. They are compiled code, which compilers replace and
/// never overwrite. Copies of `core` in every module took 4 GB.
const LINKED: u64 = 64 << 10;

/// The locks of this crate and of cargo.
const LOCKS: [&str; 4] = [
    ".lock",
    ".cargo-lock",
    ".cargo-build-lock",
    ".cargo-artifact-lock",
];

/// Copies files with their modification times, by which cargo decides what is up to date.
fn copy(from: &Path, to: &Path) -> io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if entry.file_type()?.is_dir() {
            copy(&path, &target)?;
        } else if !LOCKS.iter().any(|lock| entry.file_name() == *lock) {
            let data = entry.metadata()?;
            if data.len() >= LINKED && fs::hard_link(&path, &target).is_ok() {
                continue;
            }
            fs::copy(&path, &target)?;
            let times = fs::FileTimes::new()
                .set_accessed(data.accessed()?)
                .set_modified(data.modified()?);
            fs::File::options()
                .append(true)
                .open(&target)?
                .set_times(times)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_keep_times_and_leave_locks() {
        let root = std::env::temp_dir().join(format!("cuda-builder-{}", std::process::id()));
        let (from, to) = (root.join("from"), root.join("to"));
        fs::create_dir_all(from.join("deps")).unwrap();
        for file in ["deps/libcore.rlib", "deps/liblock_api.rlib", ".cargo-lock"] {
            fs::write(from.join(file), file).unwrap();
        }
        copy(&from, &to).unwrap();
        let modified = |path: PathBuf| fs::metadata(path).unwrap().modified().unwrap();
        let file = "deps/libcore.rlib";
        assert_eq!(modified(from.join(file)), modified(to.join(file)));
        assert_eq!(fs::read_to_string(to.join(file)).unwrap(), file);
        assert!(!to.join(".cargo-lock").exists());
        assert!(to.join("deps/liblock_api.rlib").exists());
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn dependencies_get_all_arguments_but_features() {
        let given = "--offline --features a --features=b -F c -Fd --all-features --no-default-features --config x=1";
        let given: Vec<String> = given.split(' ').map(str::to_owned).collect();
        let kept = ["--offline", "--config", "x=1"];
        assert_eq!(without_features(&given), kept);
    }
}

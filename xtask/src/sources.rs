//! A hash of all that the compiler makes PTX from: while it is that of the report, the kernels need not be compiled.

use std::{
    fs,
    path::{Path, PathBuf},
};

use sha2::{Digest, Sha256};

use crate::Error;

/// The kernels with the crates that they are made of and built by, and the versions of others.
const PLACES: [&str; 7] = [
    "Cargo.lock",
    "Cargo.toml",
    "build/modules.rs",
    "kernels-gpu",
    "toolchain/cuda_builder",
    "toolchain/cuda_std",
    "toolchain/cuda_std_macros",
];

/// The hash for a workspace.
pub fn hash(workspace: &Path) -> Result<String, Error> {
    let mut files = Vec::new();
    for place in PLACES {
        collect(&workspace.join(place), &mut files)?;
    }
    files.sort();
    let mut hasher = Sha256::new();
    for file in &files {
        let text = fs::read(file)?;
        let name = file.strip_prefix(workspace)?.to_string_lossy();
        hasher.update(format!("{name} {}\n", text.len()));
        hasher.update(text);
    }
    Ok(format!("{:x}", hasher.finalize()))
}

/// Adds a file, or the sources and manifests of a folder without its tests.
fn collect(place: &Path, files: &mut Vec<PathBuf>) -> Result<(), Error> {
    if !place.is_dir() {
        files.push(place.into());
        return Ok(());
    }
    for entry in fs::read_dir(place)? {
        let path = entry?.path();
        let is_source = path
            .extension()
            .is_some_and(|kind| kind == "rs" || kind == "toml");
        if is_source || path.is_dir() && !path.ends_with("tests") {
            collect(&path, files)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace;

    #[test]
    fn an_edit_of_a_kernel_is_another_hash() {
        let root = std::env::temp_dir().join(format!("sources-{}", std::process::id()));
        for place in PLACES {
            let to = root.join(place);
            fs::create_dir_all(to.parent().unwrap()).unwrap();
            match place.contains('.') {
                true => fs::write(to, "").unwrap(),
                false => fs::create_dir_all(to.join("src/sm90")).unwrap(),
            }
        }
        let kernel = root.join("kernels-gpu/src/sm90/load.rs");
        let mut hashes = Vec::new();
        for text in ["load", "store"] {
            fs::write(&kernel, text).unwrap();
            hashes.push(hash(&root).unwrap());
        }
        fs::rename(&kernel, kernel.with_file_name("store.rs")).unwrap();
        hashes.push(hash(&root).unwrap());
        // The report itself has the hash.
        fs::write(root.join("kernels-gpu/static-report.txt"), "new").unwrap();
        assert_eq!(hash(&root).unwrap(), hashes[2]);
        fs::remove_dir_all(&root).unwrap();
        hashes.sort();
        hashes.dedup();
        assert_eq!(hashes.len(), 3);
        assert_eq!(hash(&workspace()).unwrap().len(), 64);
    }
}

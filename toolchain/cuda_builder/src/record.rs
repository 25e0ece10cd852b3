//! Records what a module was made from. If nothing has changed, cargo need not be run.

use std::{
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    time::SystemTime,
};

use serde_json::{Value, json};

use crate::{CudaBuilderError, nested::Compiled};

/// The recipe, and the sources with a hash of each.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Record {
    recipe: String,
    sources: Vec<(PathBuf, String)>,
    /// The warnings as the compiler showed them.
    pub(crate) warnings: String,
}

/// The hash of a source that was written after the compilation began: no file has it. What was compiled may be the
/// text of before, so that the next build asks cargo, which compares times.
const WRITTEN_SINCE: &str = "written since";

impl Record {
    /// The record of a compilation that began at that time.
    pub(crate) fn new(recipe: String, compiled: &Compiled, begun: SystemTime) -> Self {
        let source = |path: &PathBuf| {
            // Hashed first: a write between the two shows in the time.
            let hash = hash(path);
            let written = fs::metadata(path).and_then(|data| data.modified());
            let known = match written.is_ok_and(|written| written >= begun) {
                true => WRITTEN_SINCE.into(),
                false => hash,
            };
            (path.clone(), known)
        };
        Self {
            recipe,
            sources: compiled.sources.iter().map(source).collect(),
            warnings: compiled.warnings.clone(),
        }
    }

    pub(crate) fn read(path: &Path) -> Option<Self> {
        let record: Value = serde_json::from_str(&fs::read_to_string(path).ok()?).ok()?;
        let text = |value: &Value| value.as_str().map(str::to_owned);
        let source = |pair: &Value| Some((text(&pair[0])?.into(), text(&pair[1])?));
        Some(Self {
            recipe: text(&record["recipe"])?,
            sources: record["sources"]
                .as_array()?
                .iter()
                .map(source)
                .collect::<Option<_>>()?,
            warnings: text(&record["warnings"])?,
        })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), CudaBuilderError> {
        let record = json!({
            "recipe": self.recipe,
            "sources": self.sources,
            "warnings": self.warnings,
        });
        fs::write(path, record.to_string())
            .map_err(CudaBuilderError::io(format!("write {}", path.display())))
    }

    /// Whether the recipe and all sources are unchanged.
    pub(crate) fn is_current(&self, recipe: &str) -> bool {
        let unchanged = |(path, known): &(PathBuf, String)| hash(path) == *known;
        self.recipe == recipe && self.sources.iter().all(unchanged)
    }

    pub(crate) fn source_paths(&self) -> Vec<PathBuf> {
        self.sources.iter().map(|(path, _)| path.clone()).collect()
    }
}

/// Hash of a file's contents. A missing file has a hash that no file has.
fn hash(path: &Path) -> String {
    let Ok(bytes) = fs::read(path) else {
        return String::new();
    };
    let mut hasher = DefaultHasher::new();
    bytes.hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_record_is_current_until_recipe_or_source_change() {
        let source = std::env::temp_dir().join(format!("cuda-record-{}.rs", std::process::id()));
        fs::write(&source, "one").unwrap();
        let compiled = Compiled {
            sources: vec![source.clone()],
            warnings: "warning: \"w\"".into(),
        };
        let record = Record::new("as always".into(), &compiled, SystemTime::now());
        let path = source.with_extension("json");
        record.write(&path).unwrap();
        let read = Record::read(&path).unwrap();
        assert_eq!(read, record);
        assert!(read.is_current("as always") && !read.is_current("otherwise"));
        fs::write(&source, "two").unwrap();
        assert!(!read.is_current("as always"));
        fs::remove_file(source).unwrap();
        fs::remove_file(path).unwrap();
    }

    #[test]
    fn a_source_that_was_written_during_the_compilation_is_not_known() {
        let begun = SystemTime::now() - Duration::from_secs(1);
        let source = std::env::temp_dir().join(format!("cuda-edited-{}.rs", std::process::id()));
        fs::write(&source, "edited").unwrap();
        let compiled = Compiled {
            sources: vec![source.clone()],
            warnings: String::new(),
        };
        let record = Record::new("as always".into(), &compiled, begun);
        assert!(!record.is_current("as always"));
        fs::remove_file(source).unwrap();
        assert!(!record.is_current("as always"), "a missing file");
    }
}

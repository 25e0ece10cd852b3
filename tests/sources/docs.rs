//! What the documents link to is there.

use std::{
    fs,
    path::{Path, PathBuf},
};

fn documents() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let markdown = |folder: &str| {
        let entries = fs::read_dir(root.join(folder)).expect("the folder is there");
        let paths = entries.map(|entry| entry.expect("an entry").path());
        paths.filter(|path| path.extension().is_some_and(|extension| extension == "md"))
    };
    ["", "docs", "docs/guide", "docs/notes", "peers"]
        .into_iter()
        .flat_map(markdown)
        .collect()
}

/// Targets of `[text](target)` that are paths.
fn links(text: &str) -> impl Iterator<Item = &str> {
    let targets = text.split("](").skip(1);
    let targets = targets.filter_map(|rest| rest.split_once(')').map(|(target, _)| target));
    let paths = targets.filter(|target| !target.contains("://"));
    paths.filter_map(|target| target.split('#').next().filter(|path| !path.is_empty()))
}

#[test]
fn links_lead_to_files() {
    let mut missing = Vec::new();
    let mut found = 0;
    for document in documents() {
        let text = fs::read_to_string(&document).expect("a document is text");
        let folder = document.parent().expect("it is in a folder");
        for link in links(&text) {
            found += 1;
            if !folder.join(link).exists() {
                missing.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    assert!(found > 20, "only {found} links");
}

/// The pairs `file`: `test` of a document.
fn named_tests(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let mut parts = text.split('`').skip(1);
    let mut file = None;
    std::iter::from_fn(move || {
        loop {
            let (quoted, between) = (parts.next()?, parts.next().unwrap_or(""));
            if let Some(file) = file.take() {
                return Some((file, quoted));
            }
            file = (between.trim() == ":").then_some(quoted);
        }
    })
}

#[test]
fn guaranteed_promises_have_their_tests() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/guide/guarantees.md")).expect("a document");
    let mut found = 0;
    for (file, test) in named_tests(&text) {
        let code =
            fs::read_to_string(root.join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(
            code.contains(&format!("fn {test}(")),
            "{file} has no test {test}"
        );
        found += 1;
    }
    assert!(found > 15, "only {found} tests");
}

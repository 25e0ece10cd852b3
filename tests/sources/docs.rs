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

/// Whether there is a function of this name, and it is a test: attributes and comments stand on the lines right before it.
fn has_test(code: &str, name: &str) -> bool {
    let declaration = format!("fn {name}(");
    code.match_indices(&declaration).any(|(at, _)| {
        let before = &code[..at];
        let item = before.rfind("\n\n").map_or(before, |end| &before[end..]);
        item.lines().any(|line| line.trim() == "#[test]")
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
        assert!(has_test(&code, test), "{file} has no test {test}");
        found += 1;
    }
    assert!(found > 15, "only {found} tests");
}

/// Rows of the tables of promises: what is promised, what holds it.
fn promises(text: &str) -> impl Iterator<Item = (&str, &str)> {
    let tables = text.split("| promise | held by |\n").skip(1);
    let rows = tables.flat_map(|table| {
        let rows = table.lines().skip(1);
        rows.take_while(|line| line.starts_with('|'))
    });
    rows.map(|row| {
        let cells = row.trim_matches(['|', ' ']).rsplit_once(" | ");
        cells.unwrap_or_else(|| panic!("not two cells: {row}"))
    })
}

#[test]
fn each_promise_says_which_file_holds_it() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = fs::read_to_string(root.join("docs/guide/guarantees.md")).expect("a document");
    let mut found = 0;
    for (promise, held_by) in promises(&text) {
        let quoted = held_by.split('`').skip(1).step_by(2);
        let files: Vec<&str> = quoted.filter(|text| text.ends_with(".rs")).collect();
        let as_others = held_by.starts_with("every comparison above");
        assert!(!files.is_empty() || as_others, "nothing holds: {promise}");
        for file in files {
            assert!(root.join(file).is_file(), "{promise}: {file} is not there");
        }
        found += 1;
    }
    assert!(found > 30, "only {found} promises");
}

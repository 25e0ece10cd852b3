//! How many names a serving stack sees.
//!
//! A name is a type, trait, function, macro, constant or module that the documentation shows where the feature `unstable` is
//! off and `cuda`, `cust` and `cudarc` are on; each place where it shows counts. Methods, fields and variants are none, nor
//! are crates that are handed on (`half`), nor the emulated GPU, which is for tests (`emulator`).
//! `cargo doc --no-deps --features cuda,cust,cudarc` shows the same: the list behind "All Items", and the modules.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use syn::{Attribute, Item, UseTree, Visibility};

use crate::modules::{flatten, sources};

const MOST: usize = 60;

/// Items by module, those of inline modules too.
struct Library(BTreeMap<Vec<String>, Vec<Item>>);

impl Library {
    fn read() -> Self {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("host");
        let mut files = Vec::new();
        sources(&root, &mut files);
        let mut library = Self(BTreeMap::new());
        for file in files {
            let text = fs::read_to_string(&file).expect("a source file");
            let items = syn::parse_file(&text).expect("it compiles").items;
            library.add(path_of(&root, &file), items);
        }
        library
    }

    fn add(&mut self, path: Vec<String>, items: Vec<Item>) {
        for item in &items {
            if let Item::Mod(item) = item
                && let Some((_, inner)) = &item.content
            {
                let path = [path.clone(), vec![item.ident.to_string()]].concat();
                self.add(path, inner.clone());
            }
        }
        self.0.insert(path, items);
    }

    /// Adds the names that users see of a module which they call `shown`.
    fn names(&self, module: &[String], shown: &str, names: &mut Vec<String>) {
        for item in &self.0[module] {
            let (visibility, attributes, name) = match item {
                Item::Const(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Enum(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Fn(item) => (&item.vis, &item.attrs, &item.sig.ident),
                Item::Mod(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Static(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Struct(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Trait(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Type(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Union(item) => (&item.vis, &item.attrs, &item.ident),
                Item::Use(item) => {
                    if is_seen(&item.vis, &item.attrs) {
                        self.handed_on(module, &item.tree, shown, names);
                    }
                    continue;
                }
                // Among them `unstable!`.
                _ => continue,
            };
            if !is_seen(visibility, attributes) {
                continue;
            }
            let full = format!("{shown}{name}");
            if matches!(item, Item::Mod(_)) {
                let inner = [module, &[name.to_string()]].concat();
                self.names(&inner, &format!("{full}::"), names);
            }
            names.push(full);
        }
    }

    fn handed_on(&self, module: &[String], tree: &UseTree, shown: &str, names: &mut Vec<String>) {
        let mut found = Vec::new();
        flatten(tree, &mut Vec::new(), &mut found);
        for (name, path) in found {
            let name = name.unwrap_or_else(|| panic!("{shown} hands on all of {path:?}"));
            let path: Vec<_> = path.into_iter().filter(|part| part != "self").collect();
            let full = format!("{shown}{name}");
            let inner = [module, &path].concat();
            if self.0.contains_key(&inner) {
                self.names(&inner, &format!("{full}::"), names);
            } else if path.len() == 1 {
                continue; // a crate
            }
            names.push(full);
        }
    }
}

fn path_of(root: &Path, file: &Path) -> Vec<String> {
    let inside: PathBuf = file.strip_prefix(root).expect("inside").with_extension("");
    let mut path: Vec<String> = inside
        .iter()
        .map(|part| part.to_str().expect("a plain name").to_owned())
        .collect();
    path.pop_if(|last| last == "mod" || last == "lib");
    path
}

fn is_seen(visibility: &Visibility, attributes: &[Attribute]) -> bool {
    let off = ["unstable", "emulator"].map(|feature| format!("feature = \"{feature}\""));
    let is_off = attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        let condition = list.tokens.to_string();
        let named = off.iter().any(|feature| condition.contains(feature));
        list.path.is_ident("cfg") && (condition == "test" || named && !condition.contains("not"))
    });
    matches!(visibility, Visibility::Public(_)) && !is_off
}

#[test]
fn a_serving_stack_sees_few_names() {
    let mut names = Vec::new();
    Library::read().names(&[], "", &mut names);
    names.sort();
    println!("{} names:\n{}", names.len(), names.join("\n"));
    for expected in ["Cpu", "gpu", "gpu::Gpu", "plan::Planner", "problem::Spec"] {
        let is_expected = |name: &String| name == expected;
        assert!(names.iter().any(is_expected), "{expected} is missing");
    }
    let deep = names.iter().find(|name| name.matches("::").count() > 1);
    assert_eq!(deep, None, "deeper than one module");
    assert!(
        names.len() <= MOST,
        "{} names for {MOST}: put what is no serving stack's behind the feature `unstable`",
        names.len()
    );
}

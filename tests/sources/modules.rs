//! How the files of the library and of the kernels depend on each other: in no circle, and plans and caches know no
//! executor.
//!
//! A file depends on the file that defines a name which it imports or writes with its path; re-exports on the way do
//! not count, nor does what a module's own parents define. Tests inside files are left out, and so is what stands in the
//! arguments of macros.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use syn::{
    Attribute, Item, UseTree,
    visit::{self, Visit},
};

/// A module: a file, or a module inside one.
#[derive(Default)]
struct Module {
    file: String,
    defines: BTreeSet<String>,
    imports: Vec<Import>,
    /// Paths in code, as written.
    paths: Vec<Vec<String>>,
}

/// What `use` brings in.
struct Import {
    /// The name here; none of a star.
    name: Option<String>,
    path: Vec<String>,
    is_reexport: bool,
}

type Modules = BTreeMap<Vec<String>, Module>;

/// By the importing file, the files that it imports and a name for each.
type Arrows = BTreeMap<String, BTreeMap<String, String>>;

pub(super) fn sources(folder: &Path, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.file_stem().is_some_and(|stem| stem == "tests") {
            continue;
        }
        if path.is_dir() {
            sources(&path, files);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
}

/// The modules of a crate whose sources are in this folder.
fn modules(sources_of: &str) -> Modules {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join(sources_of);
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut modules = Modules::new();
    for file in files {
        let inside = file.strip_prefix(&root).expect("it is in the library");
        let mut path: Vec<String> = inside
            .with_extension("")
            .iter()
            .map(|part| part.to_str().expect("a plain name").to_owned())
            .collect();
        if path
            .last()
            .is_some_and(|last| last == "mod" || last == "lib")
        {
            path.pop();
        }
        let text = fs::read_to_string(&file).expect("a source file");
        let items = syn::parse_file(&text).expect("it compiles").items;
        let name = inside.to_str().expect("a plain name");
        read(&items, name, path, &mut modules);
    }
    modules
}

fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let cfg = attribute.path().is_ident("cfg");
        cfg && attribute
            .parse_args::<syn::Ident>()
            .is_ok_and(|of| of == "test")
    })
}

/// Items with those that are public where the feature `unstable` is on.
fn with_unstable(items: &[Item]) -> Vec<Item> {
    let mut all = Vec::new();
    for item in items {
        match item {
            Item::Macro(item) if item.mac.path.is_ident("unstable") => {
                let inner = syn::parse2::<syn::File>(item.mac.tokens.clone()).expect("items");
                all.extend(inner.items.into_iter().map(|item| match item {
                    Item::Use(item) => Item::Use(syn::ItemUse {
                        vis: syn::Visibility::Public(Default::default()),
                        ..item
                    }),
                    item => item,
                }));
            }
            item => all.push(item.clone()),
        }
    }
    all
}

fn read(items: &[Item], file: &str, path: Vec<String>, modules: &mut Modules) {
    let mut module = Module {
        file: file.to_owned(),
        ..Module::default()
    };
    for item in &with_unstable(items) {
        let name = match item {
            Item::Use(item) if !is_test(&item.attrs) => {
                let is_reexport = !matches!(item.vis, syn::Visibility::Inherited);
                let mut names = Vec::new();
                flatten(&item.tree, &mut Vec::new(), &mut names);
                module
                    .imports
                    .extend(names.into_iter().map(|(name, path)| Import {
                        name,
                        path,
                        is_reexport,
                    }));
                continue;
            }
            Item::Mod(item) => {
                if let (Some((_, items)), false) = (&item.content, is_test(&item.attrs)) {
                    let mut inner = path.clone();
                    inner.push(item.ident.to_string());
                    read(items, file, inner, modules);
                }
                continue;
            }
            Item::Const(item) => Some(&item.ident),
            Item::Enum(item) => Some(&item.ident),
            Item::Fn(item) => Some(&item.sig.ident),
            Item::Static(item) => Some(&item.ident),
            Item::Struct(item) => Some(&item.ident),
            Item::Trait(item) => Some(&item.ident),
            Item::Type(item) => Some(&item.ident),
            Item::Union(item) => Some(&item.ident),
            _ => None,
        };
        module.defines.extend(name.map(ToString::to_string));
        Paths(&mut module.paths).visit_item(item);
    }
    modules.insert(path, module);
}

pub(super) fn flatten(
    tree: &UseTree,
    before: &mut Vec<String>,
    imports: &mut Vec<(Option<String>, Vec<String>)>,
) {
    match tree {
        UseTree::Path(tree) => {
            before.push(tree.ident.to_string());
            flatten(&tree.tree, before, imports);
            before.pop();
        }
        UseTree::Group(tree) => {
            tree.items
                .iter()
                .for_each(|tree| flatten(tree, before, imports));
        }
        UseTree::Glob(_) => imports.push((None, before.clone())),
        UseTree::Name(syn::UseName { ident }) | UseTree::Rename(syn::UseRename { ident, .. }) => {
            let mut path = before.clone();
            if ident != "self" {
                path.push(ident.to_string());
            }
            let name = match tree {
                UseTree::Rename(tree) => Some(tree.rename.to_string()),
                _ => path.last().cloned(),
            };
            imports.push((name, path));
        }
    }
}

struct Paths<'a>(&'a mut Vec<Vec<String>>);

impl<'ast> Visit<'ast> for Paths<'_> {
    fn visit_path(&mut self, path: &'ast syn::Path) {
        let names = path
            .segments
            .iter()
            .map(|segment| segment.ident.to_string());
        self.0.push(names.collect());
        visit::visit_path(self, path);
    }

    fn visit_item_mod(&mut self, _: &'ast syn::ItemMod) {}
}

/// The file that defines what a path in a module leads to; none for modules and for names of other crates.
fn resolve(modules: &Modules, at: &[String], path: &[String], depth: u32) -> Option<String> {
    let mut at = at.to_vec();
    for (index, name) in path.iter().enumerate() {
        match name.as_str() {
            "crate" => at.clear(),
            "self" => {}
            "super" => drop(at.pop()),
            _ => {
                let mut child = at.clone();
                child.push(name.clone());
                if modules.contains_key(&child) {
                    at = child;
                    continue;
                }
                let module = modules.get(&at)?;
                if module.defines.contains(name) {
                    return Some(module.file.clone());
                }
                let named =
                    |import: &&Import| import.name.as_ref().is_none_or(|other| other == name);
                return module
                    .imports
                    .iter()
                    .filter(|_| depth < 8)
                    .filter(named)
                    .find_map(|import| {
                        let skipped = index + usize::from(import.name.is_some());
                        let onward = [&import.path, &path[skipped..]].concat();
                        resolve(modules, &at, &onward, depth + 1)
                    });
            }
        }
    }
    None
}

fn arrows(modules: &Modules) -> Arrows {
    let mut arrows = Arrows::new();
    for (path, module) in modules {
        // What code does with a re-export is found among its paths.
        let imports = module.imports.iter().filter(|import| !import.is_reexport);
        let imports = imports.map(|import| &import.path);
        for written in module.paths.iter().chain(imports) {
            let parents = (0..=path.len()).filter_map(|depth| modules.get(&path[..depth]));
            let is_parents = |file: &String| parents.clone().any(|parent| parent.file == *file);
            if let Some(file) = resolve(modules, path, written, 0)
                && !is_parents(&file)
            {
                let name = written.join("::");
                let from = arrows.entry(module.file.clone()).or_default();
                from.entry(file).or_insert(name);
            }
        }
    }
    arrows
}

/// A circle of files, if there is any.
fn circle(arrows: &Arrows) -> Option<Vec<String>> {
    fn walk(
        arrows: &Arrows,
        file: &str,
        way: &mut Vec<String>,
        done: &mut BTreeSet<String>,
    ) -> Option<Vec<String>> {
        if let Some(begin) = way.iter().position(|before| before == file) {
            return Some(way[begin..].to_vec());
        }
        if !done.insert(file.to_owned()) {
            return None;
        }
        way.push(file.to_owned());
        let next = arrows.get(file).into_iter().flat_map(BTreeMap::keys);
        let mut found = next.filter_map(|next| walk(arrows, next, way, done));
        let found = found.next();
        way.pop();
        found
    }
    let mut done = BTreeSet::new();
    arrows
        .keys()
        .find_map(|file| walk(arrows, file, &mut Vec::new(), &mut done))
}

#[test]
fn files_are_in_no_circle() {
    for sources_of in ["host", "kernels-gpu/src"] {
        let arrows = arrows(&modules(sources_of));
        let count: usize = arrows.values().map(BTreeMap::len).sum();
        assert!(count > 900, "only {count} imports of {sources_of} are seen");
        let circle = circle(&arrows).unwrap_or_default();
        let next = circle.iter().cycle().skip(1);
        let ties = circle.iter().zip(next).map(|(from, to)| {
            let name = &arrows[from][to];
            format!("{from} uses {name} of {to}")
        });
        let ties: Vec<_> = ties.collect();
        assert!(ties.is_empty(), "{}", ties.join("\n"));
    }
}

/// The groups of modules in the executor's `mod.rs` stand in their order.
#[test]
fn groups_of_the_gpu_executor_use_those_before_them() {
    let declared = include_str!("../../host/exec/gpu/mod.rs").split("\n\n");
    let groups: Vec<&str> = declared.collect();
    let group = |file: &str| {
        let name = file.strip_prefix("exec/gpu/")?.split(['/', '.']).next()?;
        let line = format!("mod {name};");
        let has = |group: &&str| group.lines().any(|other| other == line);
        groups.iter().position(has)
    };
    for (from, to) in arrows(&modules("host")) {
        let wrong = to.iter().find(|(to, _)| group(to) > group(&from));
        let wrong = wrong.filter(|_| group(&from).is_some());
        assert_eq!(wrong, None, "{from} is in an earlier group");
    }
}

#[test]
fn plans_and_caches_know_no_executor() {
    let arrows = arrows(&modules("host"));
    let known = arrows.iter().flat_map(|(from, to)| {
        let executors = to.iter().filter(|(to, _)| to.starts_with("exec/"));
        executors.map(move |(to, name)| (from, format!("{from} uses {name} of {to}")))
    });
    let knows_none = |from: &str| from.starts_with("plan/") || from.starts_with("kv/");
    let wrong: Vec<String> = known
        .filter(|(from, _)| knows_none(from))
        .map(|(_, tie)| tie)
        .collect();
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn circles_are_found() {
    let arrows = |ties: &[(&str, &str)]| {
        let mut arrows = Arrows::new();
        for (from, to) in ties {
            let from = arrows.entry((*from).to_owned()).or_default();
            from.insert((*to).to_owned(), String::new());
        }
        arrows
    };
    let line = arrows(&[("a", "b"), ("a", "c"), ("b", "c"), ("d", "a")]);
    assert_eq!(circle(&line), None);
    let round = arrows(&[("a", "b"), ("b", "c"), ("c", "d"), ("d", "b")]);
    assert_eq!(circle(&round).map(|circle| circle.len()), Some(3));
}

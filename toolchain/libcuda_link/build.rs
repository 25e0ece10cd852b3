//! Does nothing: cargo requires a build script if a package states `links`.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
}

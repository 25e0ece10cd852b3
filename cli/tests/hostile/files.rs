//! What hostile calls are given: a directory of inputs, most of them wrong.

#[path = "descriptions.rs"]
mod descriptions;
#[path = "results.rs"]
mod results;
#[path = "tensors.rs"]
mod tensors;
#[path = "workloads.rs"]
mod workloads;

use std::{fs, path::Path};

/// Writes all of them.
pub fn write(directory: &Path) {
    let put =
        |name: &str, content: &[u8]| fs::write(directory.join(name), content).expect("writable");
    workloads::write(&put);
    descriptions::traces(&put);
    descriptions::write(&put);
    tensors::write(&put);
    results::write(&put);
    fs::create_dir(directory.join("dir")).expect("writable");
    fs::hard_link(directory.join("ok.json"), directory.join("hard.json")).expect("a link");
    std::os::unix::fs::symlink("ok.json", directory.join("soft.json")).expect("a link");
    std::os::unix::fs::symlink("loop.json", directory.join("loop.json")).expect("a link");
}

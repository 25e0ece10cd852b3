//! Every entry of the static report that a GPU can run, launched once: for `compute-sanitizer`, which sees each kernel so in
//! one call.
//!
//! ```sh
//! compute-sanitizer --target-processes all --tool racecheck --error-exitcode 1 test-gpu entries::
//! ```
//!
//! Results are compared where `TANDEM_CHECKED=1`; a sanitizer asks for none of that, and the CPU takes longer than the GPU.
//! `TANDEM_ENTRIES=mla` launches those with this text in their name.

use std::{collections::BTreeSet, process::Command};

use crate::{
    common,
    launches::{self, attention},
};
use tandem_attn::exec::gpu::Gpu;

const TEST: &str = "entries::every_entry_is_launched";

/// Launches each entry, and says which, in a process that says its launches.
fn launch(gpu: &Gpu, only: &str) {
    let checked = std::env::var_os("TANDEM_CHECKED").is_some_and(|value| value == "1");
    let done = |name: &str, result: Result<Vec<launches::Output>, String>| {
        result.unwrap_or_else(|text| panic!("{name}: {text}"));
    };
    for row in launches::entries(gpu).filter(|row| row.name.contains(only)) {
        done(row.name, launches::run(gpu, row, 0, checked));
    }
    for (hooks, row) in launches::hooked(gpu) {
        let name = hooks.entry(row);
        if name.contains(only) {
            done(&name, attention::run_hooked(gpu, hooks, row, 0, checked));
        }
    }
}

/// The entries that were launched, for themselves or beside others.
fn launched(said: &str) -> BTreeSet<&str> {
    let lines = said
        .lines()
        .filter_map(|line| line.strip_prefix("tandem: "));
    lines
        .filter_map(|line| Some(line.split_once(" on ")?.0))
        .collect()
}

#[test]
fn every_entry_is_launched() {
    let Some(gpu) = common::gpu(TEST) else { return };
    let only = std::env::var("TANDEM_ENTRIES").unwrap_or_default();
    if std::env::var_os("TANDEM_TRACE").is_some() {
        return launch(gpu, &only);
    }
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", TEST, "--nocapture"])
        .env("TANDEM_TRACE", "1")
        .output()
        .expect("it starts");
    let said = String::from_utf8_lossy(&child.stderr);
    let rest = String::from_utf8_lossy(&child.stdout);
    assert!(child.status.success(), "{said}{rest}");
    let report = include_str!("../../kernels-gpu/static-report.txt");
    let words = report.lines().map(|line| line.split_whitespace());
    let entries: BTreeSet<&str> = words
        .filter_map(|mut words| (words.next() == Some(gpu.arch())).then(|| words.next())?)
        .filter(|entry| entry.contains(&only))
        .collect();
    assert!(
        !entries.is_empty(),
        "no entry of {} in the report",
        gpu.arch()
    );
    let launched = launched(&said);
    let missing: Vec<_> = entries.difference(&launched).collect();
    assert!(missing.is_empty(), "not launched: {missing:#?}");
    println!("{}: {} entries launched", gpu.arch(), entries.len());
}

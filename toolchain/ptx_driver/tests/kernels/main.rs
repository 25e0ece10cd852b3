//! Runs the shipped kernels on the CPU: whole plans on small batches, compared with naive attention in f64, under each
//! kind of schedule.
//!
//! A process opens only one driver, so each schedule has its own child process.

#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/gpu/problem.rs"]
#[allow(dead_code)]
mod problem;

#[path = "../../../../tests/gpu/launches/mod.rs"]
mod launches;

mod faults;
mod mutants;
mod scenarios;

use std::{collections::BTreeSet, path::PathBuf, process::Command};

const CHILD: &str = "PTX_DRIVER_CHILD";

/// The library under test, which cargo puts next to this program.
fn driver() -> PathBuf {
    let program = std::env::current_exe().unwrap();
    let here = program.parent().unwrap();
    let name = "libptx_driver.so";
    let places = [here.join(name), here.parent().unwrap().join(name)];
    places
        .into_iter()
        .find(|place| place.is_file())
        .expect("cargo builds the library before its tests")
}

/// Runs `test` in a child process on the emulated GPU. Returns its output, or `None` in the child itself.
fn child(test: &str, settings: &str) -> Option<String> {
    child_with(test, settings, &[])
}

/// Like [`child`], with further environment variables.
fn child_with(test: &str, settings: &str, more: &[(&str, &str)]) -> Option<String> {
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env("TANDEM_LIBCUDA", driver())
        .env("PTX_DRIVER", settings)
        .env("TANDEM_TRACE", "1")
        .env(CHILD, "1")
        .envs(more.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{settings}: {text}");
    Some(text)
}

fn all_scenarios(test: &str, settings: &str) {
    let Some(text) = child(test, &format!("log=1 {settings}")) else {
        scenarios::run_all();
        return;
    };
    for kernel in scenarios::EXPECTED {
        assert!(
            text.contains(&format!("{kernel}: [")),
            "{kernel} was not launched:\n{text}"
        );
        assert!(
            text.contains(&format!("tandem: {kernel} on stream ")),
            "the launch of {kernel} is not traced:\n{text}"
        );
    }
}

/// Launches every entry of the static report. The modules of each architecture run on their own GPU.
fn all_entries(test: &str, settings: &str) {
    for (arch, compute) in [("sm_90a", 90), ("sm_80", 80)] {
        let Some(text) = child(test, &format!("log=1 compute={compute} {settings}")) else {
            let gpu = scenarios::emulated();
            for row in launches::entries(&gpu) {
                launches::run(&gpu, row, 0, true)
                    .unwrap_or_else(|text| panic!("{}: {text}", row.name));
            }
            for (hooks, row) in launches::hooked(&gpu) {
                launches::attention::run_hooked(&gpu, hooks, row, 0, true)
                    .unwrap_or_else(|text| panic!("{}: {text}", hooks.entry(row)));
            }
            return;
        };
        let launched: BTreeSet<&str> = text
            .lines()
            .filter_map(|line| line.split_once(": [").map(|(kernel, _)| kernel))
            .collect();
        let report = include_str!("../../../../kernels-gpu/static-report.txt");
        let words = report.lines().map(|line| line.split_whitespace());
        let entries: BTreeSet<&str> = words
            .filter_map(|mut words| (words.next() == Some(arch)).then(|| words.next())?)
            .collect();
        assert!(!entries.is_empty(), "no entry of {arch} in the report");
        let missing: Vec<_> = entries.difference(&launched).collect();
        assert!(missing.is_empty(), "{arch}: not launched: {missing:#?}");
        println!("{arch}: {} entries launched, {settings}", entries.len());
    }
}

#[test]
fn every_kernel_with_warps_one_after_the_other() {
    let test = "every_kernel_with_warps_one_after_the_other";
    all_entries(test, "schedule=round");
}

#[test]
fn every_kernel_in_a_random_order() {
    all_entries("every_kernel_in_a_random_order", "schedule=random seed=5");
}

#[test]
fn every_kernel_with_copies_as_late_as_can_be() {
    let test = "every_kernel_with_copies_as_late_as_can_be";
    all_entries(test, "schedule=late seed=6");
}

#[test]
fn warps_one_after_the_other() {
    all_scenarios("warps_one_after_the_other", "schedule=round");
}

#[test]
fn a_random_order() {
    all_scenarios("a_random_order", "schedule=random seed=1");
}

#[test]
fn copies_as_late_as_can_be() {
    all_scenarios("copies_as_late_as_can_be", "schedule=late seed=2");
}

#[test]
fn busy_ctas_leave_units_to_others() {
    let Some(text) = child("busy_ctas_leave_units_to_others", "log=1") else {
        scenarios::run_claims();
        return;
    };
    for (entry, _) in scenarios::claims() {
        assert!(
            text.contains(&format!("{entry}: [")),
            "{entry} was not launched:\n{text}"
        );
    }
}

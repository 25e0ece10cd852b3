//! The kernels as they are shipped, run on the CPU: whole plans on small batches against naive attention in f64,
//! under each kind of schedule.
//!
//! A process opens one driver, so each schedule has a child process of its own.

#[path = "../../../../tests/common/mod.rs"]
mod common;
#[path = "../../../../tests/gpu_run/problem.rs"]
#[allow(dead_code)]
mod problem;

mod entries;
mod faults;
mod scenarios;

use std::{path::PathBuf, process::Command};

const CHILD: &str = "PTX_DRIVER_CHILD";

/// The library under test, which cargo has put beside this program.
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

/// Runs `test` again in a child on the emulated GPU; what it said, or `None` in the child itself.
fn child(test: &str, settings: &str) -> Option<String> {
    if std::env::var_os(CHILD).is_some() {
        return None;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture", "--include-ignored"])
        .env("TANDEM_LIBCUDA", driver())
        .env("PTX_DRIVER", settings)
        .env("TANDEM_TRACE", "1")
        .env(CHILD, "1")
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

/// Launches every kernel that plans have, on a driver of these settings.
fn all_entries(test: &str, settings: &str) {
    let Some(text) = child(test, settings) else {
        entries::run_all(&scenarios::emulated());
        return;
    };
    let launched = |kernel: &str| text.contains(&format!("tandem: {kernel} on stream "));
    let missing: Vec<_> = entries::expected()
        .filter(|kernel| !launched(kernel))
        .collect();
    assert!(missing.is_empty(), "not launched: {missing:#?}");
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

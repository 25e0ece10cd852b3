//! The scripts in `peers/` read workloads as the command does.

mod common;

use std::{path::Path, process::Command};

use common::run;

/// Cases as the scripts understand them: name, requests, query tokens, bytes, operations.
const SCRIPT: &str = "
import json, sys
sys.path.insert(0, sys.argv[1])
import workload
cases = workload.load(sys.argv[2])
print(json.dumps([[c.name, len(c.requests), sum(c.q_lens), *c.work()] for c in cases]))
";

/// Runs Python on the scripts; none if there is no Python.
fn python(test: &str, arguments: &[&str]) -> Option<std::process::Output> {
    let python = Command::new("python3")
        .args(arguments)
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output();
    if python.is_err() {
        eprintln!("skipped: {test}: no python3");
    }
    let python = python.ok()?;
    let said = String::from_utf8_lossy(&python.stderr);
    assert!(python.status.success(), "{said}");
    Some(python)
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

#[test]
fn scripts_count_the_same_work() {
    let peers = root().join("peers");
    for suite in ["quick", "mla", "prefill"] {
        let suite = root().join("cli/suites").join(suite).with_extension("json");
        let suite = suite.to_str().unwrap();
        let arguments = ["-c", SCRIPT, peers.to_str().unwrap(), suite];
        let Some(python) = python("scripts_count_the_same_work", &arguments) else {
            return;
        };
        let theirs: serde_json::Value = serde_json::from_slice(&python.stdout).unwrap();

        let directory = tempfile::tempdir().unwrap();
        // A byte of memory: the work is counted, and nothing runs.
        let arguments = [
            "bench",
            suite,
            "--backend",
            "cpu",
            "--max-memory",
            "0.000000001",
            "--json",
            "r.json",
        ];
        let said = run(directory.path(), &arguments);
        assert!(
            said.stderr.contains("nothing was measured"),
            "{}",
            said.stderr
        );
        let ours = std::fs::read(directory.path().join("r.json")).unwrap();
        let ours: serde_json::Value = serde_json::from_slice(&ours).unwrap();
        let fields = ["case", "requests", "query_tokens", "bytes", "flops"];
        let ours: Vec<_> = ours["results"]
            .as_array()
            .unwrap()
            .iter()
            .map(|result| fields.map(|field| result[field].clone()).to_vec())
            .collect();
        assert_eq!(serde_json::to_value(ours).unwrap(), theirs, "{suite}");
    }
}

#[test]
fn tests_of_the_scripts_pass() {
    let peers = root().join("peers");
    python(
        "tests_of_the_scripts_pass",
        &["-m", "unittest", "discover", peers.to_str().unwrap()],
    );
}

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

#[test]
fn scripts_count_the_same_work() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let suite = root.join("cli/suites/quick.json");
    let python = Command::new("python3")
        .arg("-c")
        .arg(SCRIPT)
        .args([root.join("peers"), suite.clone()])
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .output();
    let Ok(python) = python else {
        eprintln!("skipped: scripts_count_the_same_work: no python3");
        return;
    };
    let said = String::from_utf8_lossy(&python.stderr);
    assert!(python.status.success(), "{said}");
    let theirs: serde_json::Value = serde_json::from_slice(&python.stdout).unwrap();

    let directory = tempfile::tempdir().unwrap();
    let suite = suite.to_str().unwrap();
    let arguments = [
        "bench",
        suite,
        "--seconds",
        "0",
        "--check",
        "0",
        "--json",
        "r.json",
    ];
    let said = run(directory.path(), &arguments);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let ours = std::fs::read(directory.path().join("r.json")).unwrap();
    let ours: serde_json::Value = serde_json::from_slice(&ours).unwrap();
    let fields = ["case", "requests", "query_tokens", "bytes", "flops"];
    let ours: Vec<_> = ours["results"]
        .as_array()
        .unwrap()
        .iter()
        .map(|result| fields.map(|field| result[field].clone()).to_vec())
        .collect();
    assert_eq!(serde_json::to_value(ours).unwrap(), theirs);
}

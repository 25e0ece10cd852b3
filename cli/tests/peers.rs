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
    let unnamed = tempfile::tempdir().unwrap();
    let unnamed = unnamed.path().join("unnamed.json");
    // The command finds a case that the scripts ask for by its name.
    let cases = r#"{"heads": 4, "kv_heads": 2, "head_dim": 64, "cases": [
        {"requests": [{"q_len": 1, "kv_len": 40, "count": 3}]},
        {"requests": [{"q_len": 1, "kv_len": 41}, {"q_len": 7, "kv_len": 9}, {"q_len": 5, "kv_len": 6, "count": 2}]},
        {"tree": {"nodes_per_level": [1, 2, 4], "tokens_per_level": [64, 32, 16]}},
        {"requests": [{"q_len": 1, "kv_len": 8}], "kv_heads": 1, "name": "with a name"}]}"#;
    std::fs::write(&unnamed, cases).unwrap();
    let of_suites = ["quick", "mla", "prefill"].map(|suite| {
        let path = root().join("cli/suites").join(suite);
        path.with_extension("json")
    });
    for suite in of_suites.iter().chain([&unnamed]) {
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

/// Cases that no peer takes have names, too.
#[test]
fn scripts_name_cases_as_the_command_does() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("w.json");
    let path = path.to_str().unwrap();
    let peers = root().join("peers");
    let few = r#""heads": 4, "kv_heads": 2, "head_dim": 64"#;
    let many = vec![r#"{"q_len": 1, "kv_len": 9}"#; 18].join(", ");
    let levels = vec!["1"; 19].join(", ");
    for requests in [
        r#""requests": [{"q_len": 7, "kv_len": 90, "branches": 2, "count": 2}]"#,
        r#""requests": [{"q_len": 64, "kv_len": 512, "one_block_in": 4}]"#,
        &format!(
            r#""requests": [{many}], "tree": {{"nodes_per_level": [{levels}], "tokens_per_level": [{levels}]}}"#
        ),
    ] {
        std::fs::write(path, format!("{{{few}, {requests}}}")).unwrap();
        let arguments = ["-c", SCRIPT, peers.to_str().unwrap(), path];
        let Some(python) = python("scripts_name_cases_as_the_command_does", &arguments) else {
            return;
        };
        let theirs: serde_json::Value = serde_json::from_slice(&python.stdout).unwrap();
        let name = theirs[0][0].as_str().unwrap();
        let arguments = ["plan", path, "--device", "h200", "--case", name];
        let said = run(directory.path(), &arguments);
        assert_eq!(said.code, 0, "{name}: {}", said.stderr);
    }
}

/// There are kernels for all shapes that the script draws.
#[test]
fn random_prompts_are_planned() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("random.json");
    let script = root().join("peers/random_prompts.py");
    let [script, path] = [&script, &path].map(|path| path.to_str().unwrap());
    let arguments = [script, "--seed", "20261201", path];
    let Some(python) = python("random_prompts_are_planned", &arguments) else {
        return;
    };
    let said = String::from_utf8_lossy(&python.stderr);
    assert!(said.contains("seed 20261201"), "{said}");
    let said = run(directory.path(), &["plan", path, "--device", "h200"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
}

#[test]
fn tests_of_the_scripts_pass() {
    let peers = root().join("peers");
    python(
        "tests_of_the_scripts_pass",
        &["-m", "unittest", "discover", peers.to_str().unwrap()],
    );
}

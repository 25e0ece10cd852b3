//! Input that is far too large, of the wrong kind, or in the way.

mod common;

use std::path::Path;

use common::{Said, files, run};

/// What `tandem plan` says of a workload of 32/8 heads with these fields.
fn plan(fields: &str) -> Said {
    let directory = tempfile::tempdir().unwrap();
    let text = format!(r#"{{"heads": 32, "kv_heads": 8, "head_dim": 128, {fields}}}"#);
    std::fs::write(directory.path().join("w.json"), text).unwrap();
    run(directory.path(), &["plan", "w.json"])
}

#[test]
fn batches_that_no_machine_holds_are_refused_before_they_are_made() {
    for (fields, message) in [
        (
            r#""variant": {"causal": false}, "requests": [{"q_len": 1, "kv_len": 0, "count": 4000000000}]"#,
            "4000000000 requests",
        ),
        (
            r#""tree": {"nodes_per_level": [1, 4000000000], "tokens_per_level": [5, 0]}"#,
            "4000000000 requests",
        ),
        (
            r#""page_size": 128, "requests": [{"q_len": 3000000000, "kv_len": 3000000000, "count": 2}]"#,
            "6000000000 query tokens",
        ),
        (
            r#""requests": [{"q_len": 1, "kv_len": 4000000000, "count": 9}]"#,
            "2250000000 pages",
        ),
        (
            r#""requests": [{"q_len": 4194304, "kv_len": 4194304, "one_block_in": 1, "count": 2}]"#,
            "2147483648 blocks of 128 queries × blocks of 128 keys",
        ),
    ] {
        let said = plan(fields);
        assert_eq!(said.code, 2, "{fields}: {}", said.stderr);
        assert!(said.stderr.contains(message), "{fields}: {}", said.stderr);
    }
}

/// It took minutes before it was checked, or its name filled the screen.
#[test]
fn trees_of_very_many_levels_are_refused_and_long_ones_have_a_short_name() {
    let tree = |nodes: u32, levels: usize| {
        let nodes = vec![nodes.to_string(); levels].join(",");
        let mut tokens = vec!["0"; levels];
        tokens[levels - 1] = "1";
        let tokens = tokens.join(",");
        plan(&format!(
            r#""tree": {{"nodes_per_level": [{nodes}], "tokens_per_level": [{tokens}]}}"#
        ))
    };
    let said = tree(1 << 20, 17);
    assert_eq!(said.code, 2, "{}", said.stderr);
    let message = "17825792 nodes in all levels";
    assert!(said.stderr.contains(message), "{}", said.stderr);
    let said = tree(2, 300);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let name = "tree 2,2,2,2,2,2,2,2,292 more of 0,";
    assert!(said.stdout.starts_with(name), "{}", said.stdout);
}

/// Each leaf of a tree lists the pages above it too, and each block of queries with a mask those that it sees.
#[test]
fn page_lists_that_no_machine_holds_are_refused_before_they_are_made() {
    for fields in [
        r#""tree": {"nodes_per_level": [1, 1000000], "tokens_per_level": [1000000000, 16]}"#,
        r#""tree": {"nodes_per_level": [1, 1000000, 1000000], "tokens_per_level": [1000000000, 0, 0]}"#,
        r#""page_size": 1, "requests": [{"q_len": 4194304, "kv_len": 4194304, "one_block_in": 1}]"#,
    ] {
        let said = plan(fields);
        assert_eq!(said.code, 2, "{fields}: {}", said.stderr);
        assert!(
            said.stderr.contains("of memory and"),
            "{fields}: {}",
            said.stderr
        );
    }
}

/// A short file of a paper's form can stand for any number of cases.
#[test]
fn files_that_stand_for_too_many_cases_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let pod = |n_chunks: u32, chunk: u32| {
        format!(
            r#"{{"fig1": {{"q_heads": 32, "kv_heads": 8, "configs": {{}}}},
            "fig6": {{"q_heads": 32, "kv_heads": 8, "chunk": {chunk}, "n_chunks": {n_chunks}, "d_bs": [1], "d_cl": 64}},
            "fig11": {{"cases": []}}, "fig13": {{"q_heads": 32, "kv_heads": 8, "ctx": [], "d_bs": []}},
            "fig14": {{"models": {{}}, "ctx": 64, "p_chunk": 64, "d_bs": []}},
            "table8": {{"ctx": 64, "chunk": {chunk}, "d_bs": 1, "chunk_ids": [4294967295]}}}}"#
        )
    };
    for (text, message) in [
        (pod(u32::MAX, 64), "it stands for 4294967296 cases"),
        (pod(9, 1 << 31), "query tokens: give at most"),
    ] {
        std::fs::write(directory.path().join("pod.json"), text).unwrap();
        let said = run(directory.path(), &["plan", "pod.json"]);
        assert_eq!(said.code, 2, "{}", said.stderr);
        assert!(said.stderr.contains(message), "{}", said.stderr);
    }
}

#[test]
fn no_names_of_our_types_are_shown() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("w.json");
    for text in [
        "",
        "[]",
        "3",
        "null",
        r#"{"requests": [3]}"#,
        r#"{"tree": 1}"#,
        r#"{"heads": -1}"#,
    ] {
        std::fs::write(&path, text).unwrap();
        for arguments in [
            &["plan", "w.json"][..],
            &["roofline", "w.json", "--svg", "r.svg"],
        ] {
            let said = run(directory.path(), arguments);
            assert_eq!(said.code, 2, "{text}");
            assert!(said.stderr.starts_with("error: w.json:"), "{}", said.stderr);
            for word in ["struct", "Fields", "u32", "elements"] {
                assert!(!said.stderr.contains(word), "{text}: {}", said.stderr);
            }
        }
    }
    assert_eq!(files(directory.path()), ["w.json"]);
}

#[test]
fn descriptions_are_pointed_at_too() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        std::fs::write(directory.path().join(name), text).unwrap();
    };
    write(
        "w.json",
        r#"{"heads": 4, "kv_heads": 2, "head_dim": 64, "requests": [{"q_len": 1, "kv_len": 9}]}"#,
    );
    write("d.json", "{\n \"name\": 3\n}");
    write("m.json", "{\n \"name\": \"x\",,\n}");
    for arguments in [
        &["plan", "w.json", "--device", "d.json"][..],
        &["serve-sim", "--model", "m.json"],
        &["chunk-size", "--device", "m.json"],
    ] {
        let said = run(directory.path(), arguments);
        assert_eq!(said.code, 2, "{arguments:?}");
        assert!(
            said.stderr.contains(".json:2:") && said.stderr.contains(" 2 | "),
            "{}",
            said.stderr
        );
    }
    let device = tandem_attn::plan::DeviceDescription::named("h200").unwrap();
    let mut device = serde_json::to_value(device).unwrap();
    device["sms"] = 0.into();
    write("d.json", &device.to_string());
    let said = run(directory.path(), &["plan", "w.json", "--device", "d.json"]);
    assert_eq!(said.code, 2);
    assert!(
        said.stderr.starts_with("error: d.json: ") && said.stderr.contains("sms"),
        "{}",
        said.stderr
    );
}

#[test]
fn known_fields_are_listed_below_an_unknown_one() {
    let said = plan(r#""request": []"#);
    assert!(
        said.stderr.contains("unknown field `request`\n"),
        "{}",
        said.stderr
    );
    assert!(
        said.stderr.contains(" = known are name, "),
        "{}",
        said.stderr
    );
    assert!(said.stderr.lines().all(|line| line.chars().count() < 100));
}

#[test]
fn nothing_is_computed_for_an_output_that_cannot_be_written() {
    let directory = tempfile::tempdir().unwrap();
    for arguments in [
        &["bench", "--seconds", "600", "--json", "no/r.json"][..],
        &["demo", "--svg", "no/r.svg"],
        &["serve-sim", "--svg", "no/r.svg"],
    ] {
        let said = run(directory.path(), arguments);
        assert_eq!(said.code, 1, "{arguments:?}");
        assert!(said.stdout.is_empty(), "{}", said.stdout);
        assert!(
            said.stderr.contains("there is no directory no"),
            "{}",
            said.stderr
        );
    }
    assert!(files(directory.path()).is_empty());
}

#[test]
fn numbers_without_sense_are_named() {
    for arguments in [
        &["bench", "--seconds", "-1"][..],
        &["bench", "--max-memory", "-1"],
        &["bench", "--max-memory", "nan"],
        &["serve-sim", "--rate", "-1"],
        &["serve-sim", "--batch", "0"],
        &["chunk-size", "--batch", "0"],
        &["chunk-size", "--prompt", "4000000000"],
        &["bench", "--split", "-5"],
    ] {
        let said = run(Path::new("."), arguments);
        assert_eq!(said.code, 2, "{arguments:?}");
        let (flag, value) = (arguments[1], arguments[2]);
        assert!(
            said.stderr
                .contains(&format!("invalid value '{value}' for '{flag}")),
            "{}",
            said.stderr
        );
        assert!(said.stderr.contains(": give "), "{}", said.stderr);
    }
}

#[test]
fn simulations_and_advice_are_narrow() {
    // `run` looks at the width.
    let simulated = run(Path::new("."), &["serve-sim", "--requests", "20"]);
    assert_eq!(simulated.code, 0, "{}", simulated.stderr);
    let refused = run(
        Path::new("."),
        &["serve-sim", "--requests", "3", "--prompt", "16000000"],
    );
    assert!(
        refused.stdout.contains("3 requests too large for the pool")
            && !refused.stdout.contains("NaN"),
        "{}",
        refused.stdout
    );
    let advised = run(Path::new("."), &["chunk-size"]);
    assert!(advised.stdout.contains("recommended"), "{}", advised.stdout);
}

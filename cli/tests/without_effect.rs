//! Flags that would change nothing are refused.

mod common;

use common::{files, run};

const WORKLOAD: &str =
    r#"{"heads": 4, "kv_heads": 2, "head_dim": 64, "requests": [{"q_len": 1, "kv_len": 9}]}"#;

/// Runs the command next to a workload; it must refuse, write nothing, and say each of these texts.
fn refused(line: &str, texts: &[&str]) {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("w.json"), WORKLOAD).unwrap();
    let arguments: Vec<_> = line.split_whitespace().collect();
    let said = run(directory.path(), &arguments);
    assert_eq!(said.code, 2, "{line}: {}{}", said.stdout, said.stderr);
    for text in texts {
        assert!(said.stderr.contains(text), "{line}: {}", said.stderr);
    }
    assert_eq!(files(directory.path()), ["w.json"], "{line}");
}

/// They were once accepted beside a workload or a suite, and ignored.
#[test]
fn flags_of_serving_need_it() {
    for flag in [
        "--model yi-6b",
        "--device a100",
        "--trace t.csv",
        "--requests 2",
        "--prompt 20",
        "--generated 2",
        "--prefix 4",
        "--rate 1",
        "--load 0.5",
        "--start 1",
        "--window 1",
        "--seed 2",
        "--policy orca",
        "--budget 64",
        "--chunk 64",
        "--target-ms 9",
        "--no-prefix-cache",
        "--batch 2",
        "--cache 640",
        "--page-size 8",
        "--cache-type e4m3",
        "--wait",
        "--correction c.json",
        "--calibration c.json",
        "--svg s.svg",
        "--parts p.svg",
    ] {
        let name = flag.split_whitespace().next().unwrap();
        refused(&format!("bench {flag} --json r.json"), &["--serve"]);
        for measured in ["w.json", "--suite quick", "--case x", "--seconds 0"] {
            refused(&format!("bench {measured} {flag}"), &[name]);
        }
    }
}

#[test]
fn flags_of_measuring_do_not_go_with_serving() {
    for flag in [
        "w.json",
        "--suite mla",
        "--check 3",
        "--energy",
        "--pod serial",
        "--gpus 2",
    ] {
        refused(&format!("bench --serve {flag}"), &["cannot be used with"]);
    }
}

/// Nothing could be measured, which was said only after the limits of the machine.
#[test]
fn flags_of_8_bits_need_a_case_with_such_keys() {
    for (line, texts) in [
        (
            "--token-scales",
            [
                "--token-scales is for keys and values in f8e4m3 or f8e5m2",
                "--kv-dtype",
            ],
        ),
        (
            "--compute f8 --kv-dtype f8e5m2",
            [
                "--compute f8 is for keys and values in f8e4m3",
                "--kv-dtype",
            ],
        ),
    ] {
        refused(&format!("bench w.json --json r.json {line}"), &texts);
    }
}

/// It generates one text.
#[cfg(feature = "engine")]
#[test]
fn generating_has_no_batch() {
    refused("generate nowhere a --batch 2", &["--batch"]);
}

/// They were accepted, and changed nothing or less than they say.
#[cfg(feature = "engine")]
#[test]
fn flags_of_serving_change_something() {
    for (line, texts) in [
        ("--chunk 256", ["--chunk is for", "add sarathi"]),
        ("--target-ms 9", ["--target-ms is for", "decode-priority"]),
        (
            "--policy sarathi --chunk 2000",
            ["--chunk 2000", "1024 tokens of a step"],
        ),
        (
            "--policy orca+unpacked --no-prefix-cache",
            ["no request shares a prefix", "--no-prefix-cache"],
        ),
        (
            "--no-prefix-cache",
            ["--no-prefix-cache: the requests have no blocks", "--prefix"],
        ),
        (
            "--policy orca+unpacked",
            ["orca+unpacked: the requests have no blocks", "hash_ids"],
        ),
        ("--seed 2", ["--rate", "--load"]),
        ("--prefix 30", ["--prefix 30", "a multiple of 16"]),
        ("--backend cpu --wait", ["--wait", "--backend gpu"]),
    ] {
        refused(&format!("bench --serve {line}"), &texts);
    }
}

#[test]
fn compiling_kernels_is_for_gpus() {
    let texts = ["--compile-ptx is for GPUs", "--backend gpu"];
    refused(
        "bench w.json --json r.json --backend cpu --compile-ptx",
        &texts,
    );
    refused("demo --backend cpu --compile-ptx", &texts);
}

/// Only `generate` and `serve` took the number of a GPU.
#[test]
fn numbers_are_of_gpus() {
    for line in [
        "demo",
        "bench w.json --json r.json",
        #[cfg(feature = "engine")]
        "bench --serve",
    ] {
        let texts = ["--gpu is for GPUs", "--backend gpu"];
        refused(&format!("{line} --backend cpu --gpu 1"), &texts);
    }
    refused(
        "bench w.json --gpus 2 --gpu 1",
        &["--gpu is for one GPU", "--gpus"],
    );
}

#[test]
fn several_gpus_are_gpus() {
    for backend in ["cpu", "emulated"] {
        let line = format!("bench w.json --gpus 2 --backend {backend} --json r.json");
        refused(&line, &["--gpus is for GPUs", "--backend"]);
    }
    for (deal, text) in [
        (
            "pages:16",
            "9 GPUs would merge their results, and at most 8",
        ),
        ("heads:2+pages:16", "give a number of shares that divides 9"),
    ] {
        refused(&format!("bench w.json --gpus 9 --deal {deal}"), &[text]);
    }
    refused(
        "plan w.json --gpus 2 --device cpu",
        &["--gpus is for GPUs", "--device"],
    );
    refused(
        "plan w.json --gpus 2 --deal heads --deal pages:1 --svg p.svg",
        &["--svg", "one --deal"],
    );
}

/// "Nothing was written" is what exit code 2 means.
#[test]
fn the_device_is_described_last() {
    refused(
        "plan w.json --gpus 2 --json p.json --describe d.json",
        &["--json writes the plan of one GPU"],
    );
}

#[test]
fn flags_of_simulations_need_what_they_change() {
    for (line, texts) in [
        ("--speed 2", ["--speed", "or give --rate"]),
        ("--seed 2", ["--rate", "required"]),
        ("--policy orca --chunk 64", ["--chunk", "policy sarathi,"]),
        (
            "--policy orca,sarathi-serve --chunk 64",
            ["--chunk", "policy sarathi,"],
        ),
        (
            "--policy orca+pod --target-ms 9",
            ["--target-ms", "decode-priority"],
        ),
        (
            "--policy sarathi --chunk 4096",
            ["--chunk 4096", "the 2048 tokens of a step"],
        ),
        ("--policy fifo --chunk 64", ["\"fifo\"", "known: sarathi"]),
        ("--policy orca+unpacked", ["+unpacked", "--plan"]),
        ("--policy orca+pod+pod", ["+pod+pod", "may end in +pod"]),
        ("--no-prefix-cache", ["no blocks in common", "hash_ids"]),
    ] {
        refused(&format!("serve-sim --requests 2 {line}"), &texts);
    }
    let said = run(
        std::path::Path::new("."),
        &[
            "serve-sim",
            "--requests",
            "2",
            "--policy",
            "sarathi+pod",
            "--chunk",
            "64",
            "--rate",
            "9",
            "--seed",
            "3",
            "--speed",
            "2",
        ],
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
}

#[test]
fn what_there_is_instead_is_named() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("w.json"), WORKLOAD).unwrap();
    let said = run(
        directory.path(),
        &["bench", "w.json", "--seconds", "0", "--json", "r.json"],
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
    let said = run(
        directory.path(),
        &["compare", "r.json", "r.json", "--base", "peer"],
    );
    assert_eq!(said.code, 2);
    assert!(
        said.stderr.contains("\"peer\": there are tandem\n"),
        "{}",
        said.stderr
    );
    // The reason why a case was left out is shown whole.
    let call = "bench w.json --seconds 0 --backend cpu --kv-dtype f8e4m3 --compute f8";
    let call: Vec<_> = call.split_whitespace().collect();
    let said = run(directory.path(), &call);
    let words = said.stdout.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(
        words.contains("supported: none on this device; otherwise leave --compute f8 out"),
        "{}",
        said.stdout
    );
    assert!(!said.stdout.contains('…'), "{}", said.stdout);
}

#[test]
fn energy_is_of_gpus() {
    refused(
        "bench w.json --energy --backend cpu",
        &["--energy is for NVIDIA GPUs"],
    );
    refused("bench w.json --energy --gpus 2", &["--energy"]);
}

/// A sparse batch is planned everywhere, and runs where its indices are.
#[test]
fn chosen_keys_are_not_replaced_by_others() {
    const CHOSEN: &str = r#"{"heads": 4, "kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": true, "kv_dtype": "f8e4m3",
        "top_k": 3, "requests": [{"q_len": 1, "kv_len": 9}]}"#;
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("w.json"), CHOSEN).unwrap();
    let said = run(directory.path(), &["plan", "w.json", "--device", "h200"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    let arguments = "bench w.json --backend cpu --seconds 0";
    let arguments: Vec<_> = arguments.split_whitespace().collect();
    let said = run(directory.path(), &arguments);
    assert_eq!(said.code, 2, "{}", said.stdout);
    assert!(said.stderr.contains("top_k"), "{}", said.stderr);
    let arguments = ["plan", "w.json", "--device", "h200", "--gpus", "2"];
    let said = run(directory.path(), &arguments);
    assert_eq!(said.code, 2, "{}", said.stdout);
    assert!(said.stderr.contains("top_k of 3"), "{}", said.stderr);
}

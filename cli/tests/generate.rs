//! `tandem generate` and `tandem bench --serve` on a tiny random model.

mod common;
#[path = "common/legible.rs"]
mod legible;

use std::{path::Path, process::Command};

use common::{Said, model, run};
use legible::legible;

#[test]
fn a_model_writes_on_the_same_each_time() {
    let folder = model("qwen2");
    let here = std::env::temp_dir();
    let arguments = [
        "generate",
        &folder,
        "The planner",
        "--backend",
        "cpu",
        "--max-new-tokens",
        "9",
        "--ignore-end",
    ];
    let Said {
        code,
        stdout: first,
        stderr,
    } = run(&here, &arguments);
    assert_eq!(code, 0, "{stderr}");
    assert!(
        first.len() > 4 && stderr.contains("9 written (as many as were asked for)"),
        "{first:?}, {stderr}"
    );
    // Chunks of the prompt are its own business.
    let chunked = [&arguments[..], &["--budget", "2"]].concat();
    assert_eq!(run(&here, &chunked).stdout, first);
    let drawn = |seed: &str| {
        let drawn = [&arguments[..], &["--temperature", "20", "--seed", seed]].concat();
        run(&here, &drawn).stdout
    };
    assert_eq!(drawn("5"), drawn("5"));
    // How tokens are drawn, where none is.
    for ignored in [["--seed", "5"], ["--top-k", "3"], ["--top-p", "0.5"]] {
        let Said { code, stderr, .. } = run(&here, &[&arguments[..], &ignored].concat());
        assert!(
            code != 0 && stderr.contains("Give --temperature"),
            "{stderr}"
        );
    }
    assert_ne!(drawn("5"), drawn("6"));
    let chat = [
        "generate",
        &folder,
        "Which page?",
        "--chat",
        "--system",
        "Be short.",
        "--backend",
        "cpu",
        "--max-new-tokens",
        "9",
    ];
    assert_eq!(run(&here, &chat).code, 0);
}

#[test]
fn fixed_splits_fall_between_pages() {
    let here = std::env::temp_dir();
    let line = |splits: &str| {
        let folder = model("qwen2");
        let more = ["--backend", "cpu", "--max-new-tokens", "9", "--ignore-end"];
        let arguments = ["generate", &folder, "The planner", "--fixed-splits", splits];
        run(&here, &[&arguments[..], &more].concat())
    };
    let Said { code, stderr, .. } = line("16");
    assert!(code == 0 && stderr.contains("9 written"), "{stderr}");
    for (splits, says) in [
        ("20", "multiple of the page size 16"),
        ("0", "--fixed-splits"),
    ] {
        let Said { code, stderr, .. } = line(splits);
        assert!(code == 2 && stderr.contains(says), "{stderr}");
    }
}

/// A file or a pipe gets the text as the model wrote it: indented code, right-to-left marks and all.
#[test]
fn a_text_that_is_not_shown_on_a_terminal_is_unchanged() {
    let (from, copy) = (model("qwen2"), tempfile::tempdir().unwrap());
    for file in std::fs::read_dir(from).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    let at = copy.path().join("tokenizer.json");
    let tokenizer = std::fs::read_to_string(&at).unwrap();
    let mut tokenizer: serde_json::Value = serde_json::from_str(&tokenizer).unwrap();
    // The model writes bytes that are no character. This decoder reads them as another text.
    let written = "\t\r\u{1b}[1m\u{200f}\u{202e}";
    tokenizer["decoder"] = serde_json::json!({"type": "Sequence", "decoders": [
        tokenizer["decoder"],
        {"type": "Replace", "pattern": {"String": "\u{fffd}"}, "content": written},
    ]});
    std::fs::write(&at, tokenizer.to_string()).unwrap();
    let output = common::tandem(copy.path())
        .args(["generate", ".", "The planner", "--backend", "cpu"])
        .args(["--max-new-tokens", "9", "--ignore-end"])
        .output()
        .unwrap();
    let (stdout, stderr) = (output.stdout, output.stderr);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&stderr)
    );
    let text = String::from_utf8(stdout).unwrap();
    assert!(text.contains(written) && !text.contains("\\u{"), "{text:?}");
    assert!(text.ends_with('\n'), "{text:?}");
}

/// What main memory does not hold is refused before it is taken.
#[cfg(target_os = "linux")]
#[test]
fn caches_larger_than_memory_are_refused() {
    let folder = model("qwen2");
    let arguments =
        format!("generate {folder} x --backend cpu --cache 16000000 --max-new-tokens 2");
    let command = format!(
        "ulimit -v 2000000; exec {} {arguments}",
        env!("CARGO_BIN_EXE_tandem")
    );
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("caches of 16000000 tokens") && stderr.contains("smaller --cache"),
        "{stderr}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn a_prompt_without_end_is_not_read_to_its_end() {
    let output = Command::new(env!("CARGO_BIN_EXE_tandem"))
        .args(["generate", &model("qwen2"), "-", "--backend", "cpu"])
        .stdin(std::fs::File::open("/dev/zero").unwrap())
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{stderr}");
    assert!(
        stderr.contains("standard input: it has more than"),
        "{stderr}"
    );
}

#[cfg(target_os = "linux")]
#[test]
fn traces_larger_than_memory_are_refused() {
    for more in [
        "--requests 16777216 --prefix 16",
        "--requests 400 --prompt 16777216 --prefix 16",
    ] {
        let command = format!(
            "ulimit -v 2000000; exec {} bench --serve --backend cpu {more}",
            env!("CARGO_BIN_EXE_tandem")
        );
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("give fewer --requests"), "{stderr}");
    }
}

#[test]
fn what_is_no_model_is_wrong_input() {
    let here = tempfile::tempdir().unwrap();
    let Said {
        code, stderr: said, ..
    } = run(here.path(), &["generate", "nowhere", "a"]);
    assert!(
        code == 2
            && said.contains("nowhere is not there: give the folder of a model")
            && said.contains("hf download"),
        "{code}: {said}"
    );
    let named = run(here.path(), &["serve", ".", "--listen", "localhost:8000"]);
    assert_eq!(named.code, 2);
    assert!(
        named
            .stderr
            .contains("give an IP address and a port, such as 127.0.0.1:8000"),
        "{}",
        named.stderr
    );
    let named = run(here.path(), &["serve", ".", "--name", ""]);
    assert!(
        named.code == 2 && named.stderr.contains("--name"),
        "{}",
        named.stderr
    );
    let said = run(here.path(), &["serve", "."]).stderr;
    assert!(said.contains(". has no config.json: give"), "{said}");
    let Said {
        code, stderr: said, ..
    } = run(
        here.path(),
        &[
            "generate",
            &model("llama3"),
            "a",
            "--max-new-tokens",
            "600",
            "--backend",
            "cpu",
        ],
    );
    assert!(
        code == 2
            && said.contains("601 tokens of prompt and answer are more than the 512 positions"),
        "{code}: {said}"
    );
    for (option, value, message) in [
        ("--cache", "16", "which has 1: give a larger --cache"),
        (
            "--temperature",
            "-1",
            "the temperature of the sampling is -1",
        ),
    ] {
        let model = model("llama3");
        let call = ["generate", &model, "a", option, value, "--backend", "cpu"];
        let said = run(here.path(), &call);
        assert_eq!(said.code, 2, "{}", said.stderr);
        assert!(said.stderr.contains(message), "{}", said.stderr);
    }
    std::fs::copy(
        Path::new(&model("llama3")).join("tokenizer.json"),
        here.path().join("tokenizer.json"),
    )
    .unwrap();
    std::fs::write(
        here.path().join("config.json"),
        "{\"model_type\": \"mamba\"}",
    )
    .unwrap();
    let Said {
        code, stderr: said, ..
    } = run(here.path(), &["generate", ".", "a", "--backend", "cpu"]);
    assert!(
        code == 2 && said.contains("models of type \"mamba\" are not supported"),
        "{code}: {said}"
    );
}

#[test]
fn a_trace_is_replayed_beside_its_simulation() {
    let directory = tempfile::tempdir().unwrap();
    let mut csv = "num_prefill_tokens,num_decode_tokens\n".to_owned();
    (0..300).for_each(|i| csv += &format!("{}.0,{}.0\n", 20 + i % 30, 4 + i % 7));
    std::fs::write(directory.path().join("trace.csv"), csv).unwrap();
    let folder = model("llama3");
    let serve = |more: &[&str]| {
        let arguments = [
            "bench",
            "--serve",
            "--backend",
            "cpu",
            "--model",
            &folder,
            "--budget",
            "64",
            "--batch",
            "8",
            "--cache",
            "2048",
        ];
        run(directory.path(), &[&arguments[..], more].concat())
    };
    // It slept until they arrive.
    let late = serve(&["--trace", "trace.csv", "--rate", "1e-12"]);
    assert_eq!(late.code, 2, "{}", late.stderr);
    assert!(late.stderr.contains("arrivals[1] is at"), "{}", late.stderr);
    let said = serve(&[
        "--trace",
        "trace.csv",
        "--load",
        "0.5",
        "--requests",
        "20",
        "--policy",
        "prefill-first,sarathi-serve,sarathi-serve+pod",
        "--json",
        "served.json",
        "--calibration",
        "calibration.json",
        "--svg",
        "served.svg",
        "--parts",
        "parts.svg",
    ]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(said.stdout.contains("50 % of the"), "{}", said.stdout);
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    let served: serde_json::Value = serde_json::from_str(&read("served.json")).unwrap();
    let policies = served["policies"].as_array().unwrap();
    assert_eq!(policies.len(), 3);
    for policy in policies {
        for of in ["finished", "prompt_tokens", "generated_tokens"] {
            let [measured, simulated] = ["measured", "simulated"].map(|which| &policy[which][of]);
            assert_eq!(measured, simulated, "{of}");
        }
        assert_eq!(policy["measured"]["finished"], 20);
    }
    for (picture, words) in [
        ("served.svg", "simulated"),
        ("parts.svg", "product: gate and up"),
    ] {
        let svg = read(picture);
        assert!(svg.contains(words), "{picture}");
        legible(&svg);
    }

    // The calibration is a correction for the simulator and for this model, which it contains.
    let calibration: serde_json::Value = serde_json::from_str(&read("calibration.json")).unwrap();
    let of = calibration["origin"]["model"].to_string();
    std::fs::write(directory.path().join("model.json"), of).unwrap();
    for (model, code) in [("model.json", 0), ("llama-3-8b", 2)] {
        let call =
            format!("serve-sim --correction calibration.json --requests 9 --ahead --model {model}");
        let simulated = run(directory.path(), &call.split(' ').collect::<Vec<_>>());
        assert_eq!(simulated.code, code, "{}", simulated.stderr);
        let words: Vec<_> = simulated.stderr.split_whitespace().collect();
        let said = words.join(" ");
        assert!(
            code == 0 || said.contains("with model llama3, and this is for model llama-3-8b"),
            "{said}"
        );
    }
    // A beginning may be in the middle.
    let window = serve(&[
        "--trace",
        "trace.csv",
        "--correction",
        "calibration.json",
        "--load",
        "0.8",
        "--start",
        "0.2",
        "--window",
        "0.3",
        "--policy",
        "sarathi-serve,sarathi-serve+pod",
        "--json",
        "window.json",
    ]);
    assert_eq!(window.code, 0, "{}", window.stderr);
    let window: serde_json::Value = serde_json::from_str(&read("window.json")).unwrap();
    assert_eq!(window["policies"][1]["measured"]["makespan_s"], 0.3);
    // The CPU computes a step while the host waits.
    assert_eq!(window["ahead"], false);

    // The flags of single policies are those of the simulator.
    let flags = serve(&[
        "--requests",
        "6",
        "--prompt",
        "40",
        "--generated",
        "5",
        "--prefix",
        "32",
        "--correction",
        "calibration.json",
        "--policy",
        "sarathi,decode-priority",
        "--chunk",
        "16",
        "--target-ms",
        "5",
        "--no-prefix-cache",
        "--json",
        "flags.json",
    ]);
    assert_eq!(flags.code, 0, "{}", flags.stderr);
    let flags: serde_json::Value = serde_json::from_str(&read("flags.json")).unwrap();
    assert_eq!(flags["chunk"], 16);
    assert_eq!(flags["prefix_cache"], false);
    for policy in flags["policies"].as_array().unwrap() {
        // Each prompt is computed whole, the common part too.
        assert_eq!(policy["measured"]["prompt_tokens"], 6 * 40);
        assert_eq!(policy["measured"]["finished"], 6);
    }

    // A policy that asks the cost model composes the same steps when it is measured and when it is simulated. With this
    // correction, of an older file, no prompt meets the target.
    let slow = "{\"linear\": [{\"at\": 1, \"measured_ns\": 1e9}]}";
    std::fs::write(directory.path().join("slow.json"), slow).unwrap();
    let arguments = "--requests 6 --prompt 40 --generated 9 --correction slow.json --policy decode-priority --json same.json";
    let same = serve(&arguments.split(' ').collect::<Vec<_>>());
    assert_eq!(same.code, 0, "{}", same.stderr);
    let same: serde_json::Value = serde_json::from_str(&read("same.json")).unwrap();
    let [measured, simulated] =
        ["measured", "simulated"].map(|which| &same["policies"][0][which]["steps"]);
    assert_eq!(measured, simulated);

    let short = "--requests 6 --prompt 60 --generated 400 --window 1e-6 --policy orca --correction slow.json";
    let said = serve(&short.split(' ').collect::<Vec<_>>());
    assert!(
        said.code == 1 && said.stderr.contains("give a longer --window"),
        "{}",
        said.stderr
    );

    for (wrong, reason) in [
        (&["--policy", "orca+fast"][..], "there is no +fast"),
        (
            &["--prompt", "20", "--prefix", "30"],
            "--prefix 30 is more than the 20",
        ),
        (
            &["--prompt", "600", "--generated", "10"],
            "the shortest has 610 tokens of prompt and answer, and the model has 512 positions",
        ),
    ] {
        let said = serve(wrong);
        assert!(
            said.code != 0 && said.stderr.contains(reason),
            "{wrong:?}: {}",
            said.stderr
        );
    }

    let mut arguments = vec!["bench", "--serve", "--backend", "cpu", "--model", &folder];
    arguments.extend(["--prompt", "100", "--cache", "64"]);
    let said = run(directory.path(), &arguments);
    assert!(
        said.code == 2 && said.stderr.contains("the KV cache holds 64 tokens"),
        "{}",
        said.stderr
    );

    // Answers of one token have no time between tokens, and some requests are too long.
    let csv = "num_prefill_tokens,num_decode_tokens\n20,1\n900,1\n";
    std::fs::write(directory.path().join("short.csv"), csv).unwrap();
    let arguments = ["--trace", "short.csv", "--policy", "sarathi-serve"];
    let correction = ["--correction", "calibration.json"];
    let said = serve(&[&arguments[..], &correction].concat());
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(said.stdout.contains("TBT -, tokens/s"), "{}", said.stdout);
    assert!(
        said.stdout.starts_with("llama3 on the CPU: ")
            && said.stdout.contains("simulated as 1 × h200"),
        "{}",
        said.stdout
    );
}

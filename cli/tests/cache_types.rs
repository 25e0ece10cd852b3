//! `--cache-type` of `generate`, `serve`, `bench --serve`, `serve-sim` and `chunk-size`.

mod common;

use std::process::Command;

use common::{Said, model, run};

#[test]
fn texts_are_generated_with_caches_of_each_type() {
    let folder = model("qwen2");
    // Texts of random models have characters that other tests refuse to see.
    let generate = |more: &[&str]| {
        let drawn = ["--temperature", "20", "--seed", "5", "--ignore-end"];
        let output = Command::new(env!("CARGO_BIN_EXE_tandem"))
            .args(["generate", &folder, "The planner", "--backend", "cpu"])
            .args(drawn)
            .args(["--max-new-tokens", "200"])
            .args(more)
            .output()
            .unwrap();
        Said {
            code: output.status.code().unwrap(),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    };
    let wide = generate(&[]);
    assert_eq!(wide.code, 0, "{}", wide.stderr);
    assert!(!wide.stderr.contains("caches in"), "{}", wide.stderr);
    assert_eq!(generate(&["--cache-type", "auto"]).stdout, wide.stdout);
    let [plain, scaled] = ["e4m3", "e4m3-scaled"].map(|name| {
        let Said {
            code,
            stdout,
            stderr,
        } = generate(&["--cache-type", name]);
        assert_eq!(code, 0, "{stderr}");
        assert!(
            stderr.contains(&format!(", caches in {name}\n")),
            "{stderr}"
        );
        stdout
    });
    // Rounding changes what is drawn.
    assert!(plain != wide.stdout && scaled != wide.stdout && plain != scaled);
    // As other servers name the flag and the type.
    assert_eq!(generate(&["--kv-cache-dtype", "fp8"]).stdout, plain);
    let wrong = generate(&["--cache-type", "q8_0"]);
    assert_eq!(wrong.code, 2);
    for text in ["q8_0", "auto", "e4m3", "e4m3-scaled"] {
        assert!(wrong.stderr.contains(text), "{}", wrong.stderr);
    }
}

/// Caches of 8 bits fit memory in which those of f32 do not.
#[cfg(target_os = "linux")]
#[test]
fn memory_is_counted_as_the_caches_take_it() {
    let folder = model("qwen2");
    let with = |cache_type: &str| {
        let arguments = format!(
            "generate {folder} x --backend cpu --cache 3000000 --max-new-tokens 2 --cache-type {cache_type}"
        );
        let command = format!(
            "ulimit -v 1600000; exec {} {arguments}",
            env!("CARGO_BIN_EXE_tandem")
        );
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), stderr)
    };
    let (code, said) = with("auto");
    assert!(
        code == Some(2) && said.contains("smaller --cache"),
        "{said}"
    );
    assert!(said.contains("--cache-type"), "{said}");
    for cache_type in ["e4m3", "e4m3-scaled"] {
        let (code, said) = with(cache_type);
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn a_calibration_is_for_its_type_of_caches() {
    let directory = tempfile::tempdir().unwrap();
    let folder = model("llama3");
    let call = ["bench", "--serve", "--backend", "cpu", "--model", &folder];
    let small = "--budget 64 --batch 4 --cache 2048 --requests 4 --prompt 40 --generated 3 --policy sarathi-serve,sarathi-serve+pod";
    let small: Vec<_> = small.split(' ').collect();
    let serve = |more: &[&str]| run(directory.path(), &[&call[..], &small, more].concat());
    let said = serve(&[
        "--cache-type",
        "e4m3-scaled",
        "--json",
        "served.json",
        "--calibration",
        "calibration.json",
    ]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    // The heading is as wide as the name of the CPU, and may be wrapped.
    let words: Vec<_> = said.stdout.split_whitespace().collect();
    assert!(
        words.join(" ").contains(", caches in e4m3-scaled"),
        "{}",
        said.stdout
    );
    let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
    let served: serde_json::Value = serde_json::from_str(&read("served.json")).unwrap();
    assert_eq!(served["cache_type"], "e4m3-scaled");
    assert_eq!(served["policies"][0]["measured"]["finished"], 4);
    let correction: serde_json::Value = serde_json::from_str(&read("calibration.json")).unwrap();
    assert_eq!(correction["cache_type"], "e4m3-scaled");

    // The simulator takes no folders. The file says which model it is for.
    let of = correction["origin"]["model"].to_string();
    std::fs::write(directory.path().join("model.json"), of).unwrap();
    let corrected = ["--correction", "calibration.json"];
    for (command, more) in [
        (
            "serve-sim",
            &["--model", "model.json", "--requests", "3"][..],
        ),
        ("chunk-size", &["--model", "model.json", "--prompt", "90"]),
    ] {
        let call = |of: &[&str]| {
            run(
                directory.path(),
                &[&[command], more, &corrected, of].concat(),
            )
        };
        let said = call(&["--cache-type", "e4m3-scaled"]);
        assert_eq!(said.code, 0, "{}", said.stderr);
        let said = call(&[]);
        let words = said.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(said.code, 2, "{words}");
        assert!(
            words.contains(
                "with KV caches of type e4m3-scaled, and this is for caches of type auto"
            ),
            "{words}"
        );
    }
    let said = serve(&corrected);
    assert!(
        said.code == 2 && said.stderr.contains("e4m3-scaled"),
        "{}",
        said.stderr
    );
    let said = serve(&[&corrected[..], &["--cache-type", "e4m3-scaled"]].concat());
    assert_eq!(said.code, 0, "{}", said.stderr);
    // The simulated hardware has kernels, too.
    let said = serve(&["--device", "a100", "--cache-type", "e4m3"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
}

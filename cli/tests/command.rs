//! The command from outside: what it prints, what it writes, how it ends.

mod common;

use std::{path::Path, time::Duration};

use common::{files, run, tandem};
use expect_test::expect_file;

const HYBRID: &str = include_str!("data/hybrid.json");

fn directory() -> tempfile::TempDir {
    let directory = tempfile::tempdir().expect("a temporary directory");
    std::fs::write(directory.path().join("hybrid.json"), HYBRID).expect("writable");
    directory
}

/// Numbers as `N` and runs of spaces as one: what stays when costs or the machine change.
fn shape_of(text: &str) -> String {
    let mut shape = String::new();
    for c in text.chars() {
        let last = shape.chars().last();
        match c {
            '0'..='9' if last == Some('N') => {}
            '.' if last == Some('N') => {}
            '0'..='9' => shape.push('N'),
            ' ' if last == Some(' ') => {}
            c => shape.push(c),
        }
    }
    shape
}

#[test]
fn the_demo_is_right_and_short() {
    let directory = directory();
    let said = run(directory.path(), &[]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(
        said.stdout
            .contains("query tokens checked against attention in f64")
    );
    assert!(said.stdout.lines().count() < 30);
    assert_eq!(files(directory.path()), ["hybrid.json", "tandem-demo.svg"]);
}

#[test]
fn the_emulator_measures_nothing() {
    let directory = directory();
    let said = run(
        directory.path(),
        &["bench", "hybrid.json", "--backend", "emulated"],
    );
    assert_eq!(said.code, 2);
    assert!(
        said.stderr.contains("only `tandem trace`"),
        "{}",
        said.stderr
    );
    assert_eq!(files(directory.path()), ["hybrid.json"]);
}

/// It ended as if a result were not right.
#[test]
fn a_benchmark_without_a_case_that_fits_is_wrong_input() {
    let directory = directory();
    let line = "bench hybrid.json --backend cpu --max-memory 0.000000001";
    let said = run(directory.path(), &line.split(' ').collect::<Vec<_>>());
    assert_eq!(said.code, 2, "{}", said.stderr);
    assert!(
        said.stderr
            .contains("nothing was measured: 1 case left out"),
        "{}",
        said.stderr
    );
}

#[test]
fn the_table_of_a_plan_has_its_form() {
    let directory = directory();
    let one = r#"{"heads": 32, "kv_heads": 8, "head_dim": 128, "requests": [{"q_len": 1, "kv_len": 100}]}"#;
    std::fs::write(directory.path().join("one.json"), one).unwrap();
    let said = run(directory.path(), &["plan", "one.json", "--split", "off"]);
    assert_eq!(said.code, 0, "{}", said.stderr);
    expect_file!["snapshots/plan.txt"].assert_eq(&shape_of(&said.stdout));
}

/// Not the kernels that groups name where a run takes others, nor only those.
#[test]
fn a_plan_names_what_is_launched() {
    let directory = directory();
    let requests = |q_len: u32, kv_len: u32, count: usize| {
        let request = format!(r#"{{"q_len": {q_len}, "kv_len": {kv_len}}}"#);
        vec![request; count]
    };
    let workload = |dim: u32, dtype: &str, requests: &[String]| {
        format!(
            r#"{{"heads": 32, "kv_heads": 8, "head_dim": {dim}, "kv_dtype": "{dtype}", "requests": [{}]}}"#,
            requests.join(", ")
        )
    };
    let decodes = requests(1, 8000, 64);
    let prompts = requests(700, 700, 2);
    let hybrid = [requests(1024, 8192, 1), requests(1, 4096, 64)].concat();
    for (device, dim, dtype, requests, expected) in [
        ("h200", 80, "bf16", &decodes, "decode_8x32_d80_bf16_pair"),
        (
            "a100",
            96,
            "bf16",
            &prompts,
            "sm80_prefill_128x64_d128_bf16_general, pad_heads ×2",
        ),
        (
            "a100",
            128,
            "f8e4m3",
            &prompts,
            "widen_bf16, sm80_prefill_128x64_d128_bf16",
        ),
        (
            "h200",
            64,
            "f8e4m3",
            &hybrid,
            "\n  side by side, on SMs apart",
        ),
    ] {
        std::fs::write(
            directory.path().join("w.json"),
            workload(dim, dtype, requests),
        )
        .unwrap();
        let said = run(directory.path(), &["plan", "w.json", "--device", device]);
        assert_eq!(said.code, 0, "{}", said.stderr);
        assert!(
            said.stdout.contains(expected),
            "{expected}:\n{}",
            said.stdout
        );
        let pool = "on a pool in NHD, its keys and values in one layout, without scales of tokens";
        assert!(said.stdout.contains(pool), "{}", said.stdout);
    }
    let said = run(directory.path(), &["plan", "w.json", "--device", "cpu"]);
    assert!(!said.stdout.contains("launches"), "{}", said.stdout);
}

/// One batch once had two times for the same form.
#[test]
fn a_hybrid_plan_takes_what_its_form_is_predicted_to() {
    let directory = directory();
    for device in ["h200", "a100"] {
        for form in ["auto", "serial", "streams", "fused"] {
            let arguments = ["plan", "hybrid.json", "--device", device, "--pod", form];
            let said = run(directory.path(), &arguments);
            assert_eq!(said.code, 0, "{}", said.stderr);
            let find = |text: &str| said.stdout.lines().find(|line| line.contains(text));
            let takes = find("takes ").expect("a time").strip_prefix("takes ");
            let takes = takes.and_then(|line| line.split(" by ").next());
            let chosen = find("this plan").expect("the form");
            let chosen = chosen.trim_end_matches("  ← this plan");
            assert!(
                takes.is_some_and(|time| chosen.ends_with(time)),
                "{}",
                said.stdout
            );
        }
    }
}

#[test]
fn plans_are_written_for_every_device() {
    let directory = directory();
    for device in ["h200", "h100", "a100", "a6000", "rtx4090", "cpu"] {
        let said = run(
            directory.path(),
            &[
                "plan",
                "hybrid.json",
                "--device",
                device,
                "--svg",
                "p.svg",
                "--json",
                "p.json",
            ],
        );
        assert_eq!(said.code, 0, "{}", said.stderr);
        let plan = std::fs::read_to_string(directory.path().join("p.json")).unwrap();
        let plan: tandem_attn::plan::Plan = serde_json::from_str(&plan).unwrap();
        assert_eq!(plan.total_q, 64 + 3 + 6);
    }
}

#[test]
fn a_described_device_plans_as_the_known_one() {
    let directory = directory();
    let plan = |device: &str, described: &str, json: &str| {
        let arguments = [
            "plan",
            "hybrid.json",
            "--device",
            device,
            "--describe",
            described,
            "--json",
            json,
        ];
        let said = run(directory.path(), &arguments);
        assert_eq!(said.code, 0, "{}", said.stderr);
        std::fs::read_to_string(directory.path().join(json)).unwrap()
    };
    let known = plan("h200", "mine.json", "known.json");
    assert_eq!(plan("mine.json", "again.json", "described.json"), known);
}

#[test]
fn results_can_be_drawn_and_compared() {
    let directory = directory();
    let said = run(
        directory.path(),
        &[
            "bench",
            "hybrid.json",
            "--seconds",
            "0.01",
            "--json",
            "a.json",
        ],
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(said.stdout.contains("% limit"), "{}", said.stdout);
    let said = run(directory.path(), &["roofline", "a.json", "--svg", "a.svg"]);
    assert_eq!((said.code, said.stdout.as_str()), (0, "1 point in a.svg\n"));
    let said = run(
        directory.path(),
        &["compare", "--check", "a.json", "a.json"],
    );
    assert_eq!(said.code, 0, "{}", said.stderr);
    assert!(said.stdout.contains("1 case in common"), "{}", said.stdout);
}

#[test]
fn ablations_compute_the_same() {
    let directory = directory();
    for flags in [
        ["--packing", "off"],
        ["--packing", "pat-paper"],
        ["--split", "off"],
        ["--split", "64"],
        ["--decode-tile", "16x64"],
        ["--pod", "serial"],
        ["--pod", "streams"],
        ["--pod", "fused"],
    ] {
        let mut arguments = vec!["bench", "hybrid.json", "--seconds", "0", "--check", "73"];
        arguments.extend(flags);
        let said = run(directory.path(), &arguments);
        assert_eq!(said.code, 0, "{flags:?}: {}{}", said.stdout, said.stderr);
        assert!(
            said.stdout.contains(&format!("with {}", flags.join(" "))),
            "{}",
            said.stdout
        );
    }
}

#[test]
fn broken_files_are_pointed_at() {
    let directory = directory();
    let cases: [(&str, &str, &str); 8] = [
        ("\"kv_len\": 200", "\"kv_len\": \"long\"", "broken.json:6:"),
        (
            "\"kv_len\": 200",
            "\"kv_lem\": 200",
            "unknown field `kv_lem`",
        ),
        ("\"head_dim\": 64,", "\"head_dim\": 64,,", "broken.json:3:"),
        ("\"bf16\"", "\"bf17\"", "unknown element type \"bf17\""),
        (
            "[1, 2, 6]",
            "[1, 2]",
            "nodes_per_level has 2 levels and tokens_per_level 3",
        ),
        (
            "\"kv_heads\": 2",
            "\"kv_heads\": 3",
            "8 query heads cannot share 3 KV heads",
        ),
        (
            "\"q_len\": 64",
            "\"q_len\": 300",
            "requests[0]: q_len is 300 and kv_len 200: count",
        ),
        (
            "\"page_size\": 16",
            "\"page_size\": 0",
            "page_size is 0: give 1 to 4096",
        ),
    ];
    for (right, wrong, message) in cases {
        let text = HYBRID.replace(right, wrong);
        assert_ne!(text, HYBRID);
        std::fs::write(directory.path().join("broken.json"), text).unwrap();
        let said = run(directory.path(), &["plan", "broken.json", "--svg", "p.svg"]);
        assert_eq!(said.code, 2, "{wrong}: {}", said.stderr);
        assert!(said.stderr.contains(message), "{wrong}: {}", said.stderr);
        assert!(said.stdout.is_empty());
    }
    std::fs::write(directory.path().join("broken.json"), "[1]").unwrap();
    let said = run(directory.path(), &["plan", "broken.json"]).stderr;
    assert!(said.contains("and this is a list"), "{said}");
    assert_eq!(files(directory.path()), ["broken.json", "hybrid.json"]);
}

#[test]
fn the_line_of_an_error_is_shown() {
    let directory = directory();
    let text = HYBRID.replace("\"kv_len\": 77", "\"kv_len\": -77");
    std::fs::write(directory.path().join("broken.json"), text).unwrap();
    let said = run(directory.path(), &["bench", "broken.json"]);
    expect_file!["snapshots/broken.txt"].assert_eq(&said.stderr);
}

#[test]
fn wrong_flags_are_pointed_at() {
    let directory = directory();
    let cases: [(&[&str], &str); 9] = [
        (&["plan"], "<WORKLOAD.json>"),
        (&["plan", "none.json"], "cannot read none.json"),
        (
            &["plan", "hybrid.json", "--device", "h300"],
            "no device is named \"h300\": give h200",
        ),
        (
            &["plan", "hybrid.json", "--case", "x"],
            "no case has \"x\" in its name",
        ),
        (
            &["bench", "--split", "some"],
            "give makespan, flashinfer, off",
        ),
        (
            &["bench", "--decode-tile", "16"],
            "rows and keys such as 16x128",
        ),
        // Of options without negative values, too.
        (
            &["plan", "hybrid.json", "--gpus", "-3"],
            "invalid value '-3' for '--gpus",
        ),
        (
            &["bench", "--check", "-3"],
            "invalid value '-3' for '--check",
        ),
        (
            &["roofline", "hybrid.json", "--svg", "r.svg"],
            "hybrid.json:2:",
        ),
    ];
    for (arguments, message) in cases {
        let said = run(directory.path(), arguments);
        assert_eq!(said.code, 2, "{arguments:?}: {}", said.stderr);
        assert!(
            said.stderr.contains(message),
            "{arguments:?}: {}",
            said.stderr
        );
    }
    assert_eq!(files(directory.path()), ["hybrid.json"]);
}

/// What the program was built without is no misspelt subcommand.
#[test]
fn subcommands_of_other_features_say_how_to_have_them() {
    let directory = directory();
    for (subcommand, there, features) in [
        ("trace", cfg!(feature = "emulator"), "emulator"),
        ("generate", cfg!(feature = "engine"), "cuda,engine"),
        ("serve", cfg!(feature = "engine"), "cuda,engine"),
    ] {
        let said = run(directory.path(), &[subcommand, "--some"]);
        let install = format!("install it with `cargo install --path cli --features {features}`");
        assert_eq!(said.code, if there { 2 } else { 3 }, "{}", said.stderr);
        assert_eq!(said.stderr.contains(&install), !there, "{}", said.stderr);
        let doctor = run(directory.path(), &["doctor"]).stdout;
        let nowhere = format!("nowhere: `cargo install --path cli --features {features}`");
        assert_eq!(doctor.contains(&nowhere), !there, "{doctor}");
    }
}

/// It named another set of features than the subcommands of models.
#[cfg(not(feature = "engine"))]
#[test]
fn serving_a_trace_without_models_says_how_to_have_them() {
    let directory = directory();
    let said = run(directory.path(), &["bench", "--serve"]);
    assert_eq!(said.code, 3, "{}", said.stderr);
    let install = "install it with `cargo install --path cli --features cuda,engine`";
    assert!(said.stderr.contains(install), "{}", said.stderr);
}

/// It once said that CTAs are busy −0 % of the time.
#[test]
fn a_plan_of_no_work_takes_no_time() {
    let directory = directory();
    let empty = HYBRID
        .split_once("\"requests\"")
        .map(|(heads, _)| format!("{heads}\"requests\": [{{ \"q_len\": 0, \"kv_len\": 9 }}] }}"))
        .expect("a workload of requests");
    std::fs::write(directory.path().join("empty.json"), empty).expect("writable");
    let said = run(directory.path(), &["plan", "empty.json"]);
    assert!(
        said.stdout.contains("busy 0 %"),
        "{}{}",
        said.stdout,
        said.stderr
    );
}

#[test]
fn what_no_kernel_does_is_not_planned() {
    let directory = directory();
    let good = std::fs::read_to_string(directory.path().join("hybrid.json")).unwrap();
    for (from, to, flags, message) in [
        (
            "\"head_dim\": 64",
            "\"head_dim\": 272",
            &[][..],
            "a head dimension of 272; supported: 64, 64 with values of 512, 80, 96, 112, 128",
        ),
        (
            "\"bf16\"",
            "\"f32\"",
            &[],
            "no kernel for h200 takes keys and values in F32",
        ),
        (
            "bf16",
            "bf16",
            &["--decode-tile", "7x13"],
            "has tiles of 7×13 at head dimension 64; supported: 8×32",
        ),
    ] {
        std::fs::write(directory.path().join("other.json"), good.replace(from, to)).unwrap();
        let plan = |more: &[&str]| {
            run(
                directory.path(),
                &[&["plan", "other.json"], flags, more].concat(),
            )
        };
        let said = plan(&[]);
        assert_eq!(said.code, 2, "{to}: {}", said.stderr);
        assert!(said.stderr.contains(message), "{to}: {}", said.stderr);
        // The CPU computes all of it.
        let said = plan(&["--device", "cpu"]);
        assert_eq!(said.code, 0, "{to}: {}", said.stderr);
    }
}

#[test]
fn a_plan_takes_another_type_for_keys_and_values() {
    let directory = directory();
    let plan = |dtype| {
        let call = ["plan", "hybrid.json", "--kv-dtype", dtype];
        run(directory.path(), &call)
    };
    let said = plan("f8e4m3");
    assert!(
        said.code == 0 && said.stdout.contains("KV f8e4m3") && said.stdout.contains("_e4m3"),
        "{}{}",
        said.stdout,
        said.stderr
    );
    let said = plan("f32");
    assert!(
        said.code == 2 && said.stderr.contains("keys and values in F32"),
        "{}",
        said.stderr
    );
}

/// Whether this command, as it was built, finds a GPU on this machine.
fn has_gpu() -> bool {
    #[cfg(feature = "cuda")]
    let found = tandem_attn::exec::gpu::Gpu::new(0).is_ok();
    #[cfg(not(feature = "cuda"))]
    let found = false;
    found
}

#[test]
fn a_benchmark_on_a_gpu_ends_well_and_a_missing_one_has_its_own_code() {
    let directory = directory();
    let said = run(
        directory.path(),
        &["bench", "hybrid.json", "--backend", "gpu"],
    );
    let wanted = if has_gpu() { 0 } else { 3 };
    assert_eq!(said.code, wanted, "{}", said.stderr);
}

#[cfg(feature = "cuda")]
#[test]
fn a_folder_with_kernels_replaces_those_in_the_program() {
    let directory = directory();
    let folder = directory.path().join("kernels");
    std::fs::create_dir(&folder).unwrap();
    let bench = |backend: &str| {
        let mut command = tandem(directory.path());
        command.args([
            "bench",
            "hybrid.json",
            "--seconds",
            "0",
            "--backend",
            backend,
        ]);
        let output = command.env("TANDEM_MODULES", "kernels").output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    // Nobody who names a folder gets the CPU, or the kernels in the program.
    for backend in ["gpu", "auto"] {
        let (code, said) = bench(backend);
        assert_eq!(code, Some(2), "{said}");
        assert!(
            said.contains("TANDEM_MODULES: kernels: it has no kernels: give a folder"),
            "{said}"
        );
    }
    for file in ["sm_80-measure.cubin", "sm_90a-mla.ptx"] {
        std::fs::write(folder.join(file), "not a kernel").unwrap();
    }
    let (code, said) = bench("gpu");
    assert_eq!(code, Some(3), "{said}");
    let line = "TANDEM_MODULES: kernels of kernels in the place of the program's: sm_80-measure, sm_90a-mla\n";
    assert_eq!(said.matches(line).count(), 1, "{said}");
}

#[test]
fn an_output_that_cannot_be_written_is_an_error() {
    let directory = directory();
    let said = run(
        directory.path(),
        &["plan", "hybrid.json", "--svg", "no/where.svg"],
    );
    assert_eq!(said.code, 1);
    assert!(
        said.stderr.contains("cannot write no/where.svg"),
        "{}",
        said.stderr
    );
}

#[test]
fn help_is_narrow_and_has_examples() {
    for command in [
        "demo",
        "plan",
        "attend",
        "bench",
        "roofline",
        "compare",
        "serve-sim",
        "chunk-size",
    ] {
        for flag in ["-h", "--help"] {
            let said = run(Path::new("."), &[command, flag]);
            assert_eq!(said.code, 0);
            assert!(said.stdout.contains("Example"), "tandem {command} {flag}");
        }
    }
    assert!(
        run(Path::new("."), &["--help"])
            .stdout
            .contains("Exit codes")
    );
}

#[cfg(unix)]
#[test]
fn an_interrupt_leaves_nothing_behind() {
    let directory = directory();
    let mut child = tandem(directory.path())
        .args([
            "bench",
            "hybrid.json",
            "--seconds",
            "60",
            "--json",
            "out.json",
        ])
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(700));
    let id = child.id().to_string();
    let sent = std::process::Command::new("kill")
        .args(["-INT", &id])
        .status();
    assert!(sent.unwrap().success());
    assert_eq!(child.wait().unwrap().code(), Some(130));
    assert_eq!(files(directory.path()), ["hybrid.json"]);
}

/// The exit code, and what it says, of a command whose reader goes away before anything is printed.
#[cfg(unix)]
fn unread(directory: &Path, line: &str) -> (Option<i32>, String) {
    let mut child = tandem(directory)
        .args(line.split_whitespace())
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    (output.status.code(), said)
}

/// `tandem plan … | head`: the reader goes away before everything is printed.
#[cfg(unix)]
#[test]
fn a_reader_may_leave() {
    let directory = directory();
    let left = unread(directory.path(), "plan hybrid.json");
    assert_eq!(left, (Some(0), String::new()));
}

/// The run once ended there with exit code 0: outputs were left out, and a failed check passed.
#[cfg(unix)]
#[test]
fn a_reader_that_leaves_changes_neither_files_nor_the_exit_code() {
    let directory = directory();
    let unread = |line: &str| unread(directory.path(), line);
    let served = "serve-sim --requests 3 --policy orca --json s.json --svg s.svg";
    assert_eq!(unread(served), (Some(0), String::new()));
    let there = files(directory.path());
    for file in ["s.json", "s.svg"] {
        assert!(there.iter().any(|name| name == file), "{there:?}");
    }
    let (code, said) = unread("serve-sim --requests 3 --policy sarathi-serve --prompt 10000000");
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("no request finished"), "{said}");
}

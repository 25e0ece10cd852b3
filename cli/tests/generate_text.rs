//! The text of `tandem generate`, and the options that say how it is drawn.

mod common;

use std::{fs, path::Path};

use common::{Said, model, run, tandem};
use serde_json::{Value, json};

/// A few tokens behind "The planner".
fn generate(folder: &str, more: &[&str]) -> Said {
    let fixed = [
        "generate",
        folder,
        "The planner",
        "--backend",
        "cpu",
        "--max-new-tokens",
        "3",
    ];
    run(Path::new("."), &[&fixed[..], more].concat())
}

/// A copy of a family's model.
fn copied(family: &str) -> tempfile::TempDir {
    let (from, copy) = (model(family), tempfile::tempdir().unwrap());
    for file in fs::read_dir(&from).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

/// Decoders of Mistral's tokenizers take away the space at the beginning of a text. What continues a prompt is none. Few
/// tokens of the fixture begin with a space, so that the decoder takes away a letter here.
#[test]
fn a_continuation_keeps_the_space_before_its_first_word() {
    let (from, copy) = (model("mistral"), copied("mistral"));
    let changed = copy.path().join("tokenizer.json");
    let tokenizer: Value = serde_json::from_slice(&fs::read(&changed).unwrap()).unwrap();
    let drawn = |folder: &str, seed: &str| {
        let said = generate(folder, &["--temperature", "9", "--seed", seed]);
        assert_eq!(said.code, 0, "{}", said.stderr);
        said.stdout
    };
    let first = |seed: &u32| {
        let right = drawn(&from, &seed.to_string());
        let letter = right.chars().next().filter(char::is_ascii_alphabetic)?;
        Some((seed.to_string(), letter, right))
    };
    let (seed, letter, right) = (0..12).find_map(|seed| first(&seed)).expect("a letter");
    let mut tokenizer = tokenizer;
    let decoders = tokenizer["decoder"]["decoders"]
        .as_array_mut()
        .expect("a sequence");
    decoders.push(json!({"type": "Strip", "content": letter, "start": 1, "stop": 0}));
    fs::write(&changed, tokenizer.to_string()).unwrap();
    assert_eq!(drawn(copy.path().to_str().unwrap(), &seed), right);
}

/// The weights, which are not there, would take minutes to load.
#[test]
fn a_text_that_is_too_long_is_refused_before_the_weights_are_read() {
    let copy = copied("qwen2");
    fs::remove_file(copy.path().join("model.safetensors")).unwrap();
    let folder = copy.path().to_str().unwrap();
    let said = run(
        Path::new("."),
        &["generate", folder, "a", "--max-new-tokens", "100000"],
    );
    assert!(
        said.code == 2
            && said
                .stderr
                .contains("100001 tokens of prompt and answer are more than the"),
        "{}",
        said.stderr
    );
}

/// Also with values that are their defaults.
#[test]
fn options_of_drawing_are_refused_where_nothing_is_drawn() {
    let folder = model("qwen2");
    for option in [
        ["--seed", "0"],
        ["--top-k", "0"],
        ["--top-p", "1"],
        ["--min-p", "0"],
        ["--min-p", "0.1"],
    ] {
        for more in [
            &option[..],
            &[&option[..], &["--temperature", "0"]].concat(),
        ] {
            let said = generate(&folder, more);
            assert_eq!(said.code, 2, "{more:?}: {}{}", said.stdout, said.stderr);
            assert!(
                said.stderr.contains(option[0]) && said.stderr.contains("Give --temperature"),
                "{}",
                said.stderr
            );
        }
        let said = generate(&folder, &[&option[..], &["--temperature", "0.5"]].concat());
        assert_eq!(said.code, 0, "{}", said.stderr);
    }
}

/// `eos_token_id` may be missing in the configurations, or have another token. The tokenizer's ends a text, too; if no file names
/// one, one line says so.
#[test]
fn a_text_ends_with_the_token_of_the_tokenizer() {
    let (from, copy) = (model("qwen2"), copied("qwen2"));
    let folder = copy.path().to_str().unwrap();
    let without = |file: &str, field: &str| {
        let path = copy.path().join(file);
        let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        json.as_object_mut()
            .unwrap()
            .remove(field)
            .expect("a field");
        fs::write(path, json.to_string()).unwrap();
    };
    without("config.json", "eos_token_id");
    without("generation_config.json", "eos_token_id");
    // Texts of random weights have bytes that `run` refuses.
    let drawn = |folder: &str, seed: u32, more: &[&str]| {
        let output = tandem(copy.path())
            .args([
                "generate",
                folder,
                "The planner",
                "--backend",
                "cpu",
                "--max-new-tokens",
                "400",
            ])
            .args(["--temperature", "20", "--seed", &seed.to_string()])
            .args(more)
            .output()
            .unwrap();
        assert!(output.status.success());
        (output.stdout, String::from_utf8(output.stderr).unwrap())
    };
    let ended = |said: &str| said.contains("(the model ended it)");
    let mut all = (0..20).map(|seed| (seed, drawn(&from, seed, &[])));
    let (seed, (right, _)) = all.find(|(_, (_, said))| ended(said)).expect("one ends");
    let generation = copy.path().join("generation_config.json");
    let without_ends = fs::read(&generation).unwrap();
    // The fixture has no token of this number.
    for file in [&without_ends[..], b"{\"eos_token_id\": 1000000}"] {
        fs::write(&generation, file).unwrap();
        let (text, said) = drawn(folder, seed, &[]);
        assert!(ended(&said) && text == right, "{said}");
    }
    fs::write(&generation, &without_ends).unwrap();

    without("tokenizer_config.json", "eos_token");
    let warning = "no token that ends a text";
    let (_, said) = drawn(folder, seed, &[]);
    assert!(!ended(&said) && said.contains(warning), "{said}");
    let (_, said) = drawn(folder, seed, &["--ignore-end"]);
    assert!(!said.contains(warning), "{said}");
}

/// As many models' `generation_config.json` have it.
#[test]
fn a_model_says_how_its_tokens_are_drawn() {
    let copy = copied("qwen2");
    let folder = copy.path().to_str().unwrap();
    let write = |fields: &Value| {
        fs::write(
            copy.path().join("generation_config.json"),
            fields.to_string(),
        )
        .unwrap();
    };
    let said = |more: &[&str]| {
        let said = generate(folder, more);
        assert_eq!(said.code, 0, "{}", said.stderr);
        said
    };
    let drawn = said(&["--temperature", "20", "--seed", "5"]).stdout;
    let greedy = said(&[]).stdout;
    assert_ne!(drawn, greedy);
    write(
        &json!({"do_sample": true, "temperature": 20.0, "no_repeat_ngram_size": 3, "eos_token_id": 1}),
    );
    let by_file = said(&["--seed", "5"]);
    assert_eq!(by_file.stdout, drawn);
    assert!(
        by_file.stderr.contains(
            "generation_config.json has no_repeat_ngram_size = 3, which is not implemented"
        ),
        "{}",
        by_file.stderr
    );
    let without = said(&["--generation-config", "none"]);
    assert_eq!(without.stdout, greedy);
    assert!(
        !without.stderr.contains("no_repeat_ngram_size"),
        "{}",
        without.stderr
    );
    assert_eq!(said(&["--temperature", "0"]).stdout, greedy);
    write(&json!({"do_sample": false, "temperature": 20.0}));
    assert_eq!(said(&[]).stdout, greedy);
    // Penalties count for greedy texts, too.
    write(&json!({"do_sample": false, "repetition_penalty": 5.0}));
    let penalised = said(&[]).stdout;
    assert_ne!(penalised, greedy);
    assert_eq!(said(&["--repetition-penalty", "1"]).stdout, greedy);
    write(&json!({}));
    assert_eq!(said(&["--repetition-penalty", "5"]).stdout, penalised);
    let wrong = generate(folder, &["--repetition-penalty", "0"]);
    assert!(
        wrong.code == 2 && wrong.stderr.contains("between 0.01 and 100"),
        "{}",
        wrong.stderr
    );
    write(&json!({"temperature": -1.0}));
    let wrong = generate(folder, &[]);
    assert!(
        wrong.code == 2
            && wrong
                .stderr
                .contains("generation_config.json: the temperature of the sampling is -1"),
        "{}",
        wrong.stderr
    );
}

/// As Qwen 3's template has it.
#[test]
fn variables_of_a_chat_template_are_given() {
    let copy = copied("qwen2");
    let template = "{{ messages[0].content }}{% if enable_thinking is defined and enable_thinking is false %}!{% endif %}";
    fs::write(copy.path().join("chat_template.jinja"), template).unwrap();
    let chat = |more: &[&str]| {
        let chat = ["--chat", "--chat-template-kwargs"];
        generate(copy.path().to_str().unwrap(), &[&chat[..], more].concat())
    };
    let tokens = |json: &str| {
        let said = chat(&[json]);
        assert_eq!(said.code, 0, "{}", said.stderr);
        said.stderr
            .split_once(" tokens read")
            .unwrap()
            .0
            .parse::<u32>()
            .unwrap()
    };
    let [thinking, not] = [
        "{\"enable_thinking\": true}",
        "{\"enable_thinking\": false}",
    ]
    .map(tokens);
    assert_eq!(not, thinking + 1);
    for (json, part) in [
        (
            "{\"other\": 1}",
            "does not write a variable other (it has enable_thinking)",
        ),
        ("[1]", "give a JSON object"),
    ] {
        let said = chat(&[json]);
        assert!(
            said.code == 2 && said.stderr.contains(part),
            "{}",
            said.stderr
        );
    }
}

#[test]
fn pages_have_the_size_that_is_asked_for() {
    let folder = model("llama3");
    let usual = generate(&folder, &[]);
    for size in ["1", "7", "128"] {
        let said = generate(&folder, &["--page-size", size]);
        assert_eq!(
            (said.code, &said.stdout),
            (0, &usual.stdout),
            "{}",
            said.stderr
        );
    }
    for size in ["0", "4097"] {
        let said = generate(&folder, &["--page-size", size]);
        assert!(
            said.code == 2 && said.stderr.contains("--page-size"),
            "{}",
            said.stderr
        );
    }
    let cached = |cache: &str| generate(&folder, &["--page-size", "4", "--cache", cache]);
    assert_eq!(cached("8").code, 0);
    let said = cached("4").stderr;
    assert!(
        said.contains("needs 2 pages of the KV cache, which has 1"),
        "{said}"
    );
}

#[test]
fn the_cpu_has_no_number() {
    let said = generate(&model("llama3"), &["--gpu", "1"]);
    assert!(
        said.code == 2 && said.stderr.contains("--gpu is for GPUs"),
        "{}",
        said.stderr
    );
}

/// The cache has room for the text, and the model decides how long that may be. Its random texts are not looked at.
#[test]
fn texts_may_have_all_positions_of_the_model() {
    let with = |tokens: &str| {
        let said = std::process::Command::new(env!("CARGO_BIN_EXE_tandem"))
            .args([
                "generate",
                &model("qwen2"),
                "The planner",
                "--backend",
                "cpu",
            ])
            .args([
                "--page-size",
                "1",
                "--ignore-end",
                "--max-new-tokens",
                tokens,
            ])
            .output()
            .unwrap();
        (said.status.code(), String::from_utf8(said.stderr).unwrap())
    };
    let (code, said) = with("500");
    assert!(code == Some(0) && said.contains("500 written"), "{said}");
    let (code, said) = with("16777216");
    assert!(
        code == Some(2) && said.contains("positions of the model"),
        "{said}"
    );
}

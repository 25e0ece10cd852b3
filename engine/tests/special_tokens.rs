//! The special tokens around a text, as `tokenizer_config.json` asks for them.

mod common;

use std::fs;

use common::{expected_text, folder};
use serde_json::{Value, json};
use tandem_engine::{Error, Text};

/// Qwen 2's tokenizer, whose `tokenizer.json` adds no tokens, or Llama 3's, with other settings.
fn read(family: &str, settings: Value, adds: Option<&str>) -> Result<Text, Error> {
    let copy = tempfile::tempdir().expect("writable");
    let tokenizer = fs::read(folder(family).join("tokenizer.json")).expect("a fixture");
    let mut tokenizer: Value = serde_json::from_slice(&tokenizer).expect("a fixture");
    if let Some(name) = adds {
        let token = json!({"id": name, "ids": [0], "tokens": [name]});
        tokenizer["post_processor"] = json!({
            "type": "TemplateProcessing", "special_tokens": {name: token},
            "single": [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        });
    }
    let write = |name: &str, value: &Value| {
        fs::write(copy.path().join(name), value.to_string()).expect("writable");
    };
    write("tokenizer.json", &tokenizer);
    write("tokenizer_config.json", &settings);
    Text::read(copy.path())
}

/// Older models have them only there.
#[test]
fn special_tokens_may_have_a_file_of_their_own() {
    let map = json!({"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}});
    let read = |settings: Value| {
        let (_folder, text) = common::with_template("{{ bos_token }}{{ eos_token }}", |to| {
            let write = |name: &str, value: &Value| {
                fs::write(to.join(name), value.to_string()).expect("writable");
            };
            write("special_tokens_map.json", &map);
            write("tokenizer_config.json", &settings);
        });
        let rendered = text.render(&[]).expect("a sound template");
        (rendered, text.end())
    };
    let (rendered, end) = read(json!({}));
    assert_eq!(rendered, "<|im_start|><|im_end|>");
    assert!(end.is_some());
    // The other file's count.
    let (rendered, other) = read(json!({"eos_token": "<|endoftext|>"}));
    assert_eq!(rendered, "<|im_start|><|endoftext|>");
    assert!(other.is_some() && other != end);
}

/// `DeepSeek-R1-Distill-Qwen`, for one, has `add_bos_token`, and a `tokenizer.json` that adds nothing.
#[test]
fn tokens_around_a_text_are_those_of_the_settings() {
    let right = expected_text("qwen2");
    let (bos, eos) = (0, 1);
    let baked = Some("<|endoftext|>");
    for (class, settings, adds, first, last) in [
        (
            "LlamaTokenizerFast",
            json!({"add_bos_token": true}),
            None,
            true,
            false,
        ),
        (
            "LlamaTokenizer",
            json!({"add_bos_token": true, "add_eos_token": true}),
            None,
            true,
            true,
        ),
        (
            "GemmaTokenizerFast",
            json!({"add_eos_token": true}),
            None,
            true,
            true,
        ),
        (
            "GemmaTokenizer",
            json!({"add_bos_token": false}),
            baked,
            false,
            false,
        ),
        (
            "LlamaTokenizerFast",
            json!({"add_bos_token": false, "add_eos_token": true}),
            baked,
            false,
            true,
        ),
        // Without the settings, and for other classes, `tokenizer.json` decides.
        ("LlamaTokenizerFast", json!({}), None, false, false),
        ("LlamaTokenizerFast", json!({}), baked, true, false),
        (
            "LlamaTokenizerFast",
            json!({"add_bos_token": null}),
            baked,
            true,
            false,
        ),
        (
            "PreTrainedTokenizerFast",
            json!({"add_bos_token": true, "add_eos_token": true}),
            None,
            false,
            false,
        ),
        (
            "Qwen2Tokenizer",
            json!({"add_bos_token": false}),
            baked,
            true,
            false,
        ),
    ] {
        let mut settings = settings;
        settings["tokenizer_class"] = json!(class);
        settings["bos_token"] = json!("<|endoftext|>");
        settings["eos_token"] = json!({"content": "<|im_end|>", "special": true});
        let named = settings.to_string();
        let text = read("qwen2", settings, adds).expect("sound");
        let tokens = [
            if first { vec![bos] } else { vec![] },
            right.tokens.clone(),
            if last { vec![eos] } else { vec![] },
        ];
        assert_eq!(
            text.encode(&right.text, true).unwrap(),
            tokens.concat(),
            "{named}"
        );
        // A chat's template writes all special tokens.
        assert_eq!(
            text.encode(&right.text, false).unwrap(),
            right.tokens,
            "{named}"
        );
    }
}

#[test]
fn special_tokens_without_a_name_or_an_id_are_refused() {
    for (settings, message) in [
        (
            json!({"add_bos_token": true}),
            "add_bos_token is true, but there is no bos_token: give its name",
        ),
        (
            json!({"add_bos_token": false, "add_eos_token": true, "eos_token": "<none>"}),
            "eos_token is \"<none>\", which is no token of tokenizer.json: give the name of one",
        ),
    ] {
        let mut settings = settings;
        settings["tokenizer_class"] = json!("LlamaTokenizerFast");
        let refused = read("qwen2", settings, None).unwrap_err();
        assert!(matches!(refused, Error::Malformed { .. }), "{refused:?}");
        let said = refused.to_string();
        assert!(
            said.contains("tokenizer_config.json") && said.contains(message),
            "{said}"
        );
    }
}

/// Programs that add tokens to a model may write them to `tokenizer_config.json` alone.
#[test]
fn tokens_that_only_the_settings_have_are_added() {
    let tokenizer = fs::read(folder("qwen2").join("tokenizer.json")).expect("a fixture");
    let tokenizer: Value = serde_json::from_slice(&tokenizer).expect("a fixture");
    let size = tokenizer["model"]["vocab"].as_object().unwrap().len() as u32;
    let token = |name: &str, special: bool| json!({"content": name, "special": special, "lstrip": false, "normalized": false, "rstrip": false, "single_word": false});
    let settings = |tokens: &[(u32, Value)]| {
        let tokens = tokens
            .iter()
            .map(|(id, token)| (id.to_string(), token.clone()));
        json!({"added_tokens_decoder": Value::Object(tokens.collect())})
    };
    let known = token("<|endoftext|>", true);
    let new = [
        (0, known.clone()),
        (size, token("<a>", true)),
        (size + 1, token("<b>", false)),
    ];
    let text = read("qwen2", settings(&new), None).expect("sound");
    let tokens = text.encode("<a><b><|endoftext|>", false).unwrap();
    assert_eq!(tokens, [size, size + 1, 0]);
    assert_eq!(text.decode(&tokens).unwrap(), "<b>");
    // For a token of `tokenizer.json`, its id there counts, as in `transformers`.
    let text = read("qwen2", settings(&[(7, known)]), None).expect("sound");
    assert_eq!(text.encode("<|endoftext|>", false).unwrap(), [0]);
    let refused = read("qwen2", settings(&[(size + 1, token("<a>", true))]), None);
    let said = refused.unwrap_err().to_string();
    let message = format!(
        "tokenizer_config.json: added_tokens_decoder has \"<a>\" with the id {}, but tokenizer.json has no such token, and would \
         give it the id {size}: add the token to tokenizer.json",
        size + 1
    );
    assert!(said.contains(&message), "{said}");
}

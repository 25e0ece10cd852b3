//! White space in a row, of which regular expressions of tokenizers split only so much.

mod common;

use std::fs;

use common::folder;
use serde_json::{Value, json};
use tandem_engine::{Error, Text};

/// Qwen 2's tokenizer, which splits texts as given.
fn splitting(pre_tokenizer: &Value) -> Text {
    let tokenizer = fs::read(folder("qwen2").join("tokenizer.json")).expect("a fixture");
    let mut tokenizer: Value = serde_json::from_slice(&tokenizer).expect("a fixture");
    tokenizer["pre_tokenizer"] = pre_tokenizer.clone();
    let copy = tempfile::tempdir().expect("writable");
    fs::write(copy.path().join("tokenizer.json"), tokenizer.to_string()).expect("writable");
    Text::read(copy.path()).expect("sound")
}

/// Behind more than a million spaces everything would be one piece: other tokens than in a text of its own.
#[test]
fn what_is_behind_much_white_space_is_split_or_refused() {
    let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
    // Llama 3's.
    let pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    let llama = json!({"type": "Sequence", "pretokenizers": [split, bytes(false)]});
    let end = " 1234567 attention is all";
    for splits in [&bytes(true), &llama] {
        let text = splitting(splits);
        let own = text.encode(end, false).unwrap();
        let much = text.encode(&(" ".repeat(100_000) + end), false);
        assert!(much.unwrap().ends_with(&own), "{splits}");
        let refused = text.encode(&(" ".repeat(500_000) + end), false);
        let Err(Error::Tokenizer { reason }) = refused else {
            panic!("{splits}: {} tokens", refused.unwrap().len());
        };
        assert_eq!(
            reason,
            "500001 white-space characters in a row are more than 500000"
        );
    }
    // White space that is not in a row, and a tokenizer without expressions.
    let text = splitting(&llama);
    text.encode(&" a".repeat(300_000), false)
        .expect("short rows");
    let plain = json!({"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": false});
    let plain = splitting(&plain).encode(&" ".repeat(500_001), false);
    plain.expect("no expression");
}

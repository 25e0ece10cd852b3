//! Texts that continue a prompt, as they arrive: together with the prompt they are what the tokens decode to.

mod common;

use std::fs;

use common::{FAMILIES, expected_text, folder};
use serde_json::{Value, json};
use tandem_engine::{Text, TextStream};

/// The tokenizer of a family. Mistral's has what converters of Llama's tokenizers write: a space before each text, which
/// the decoder takes away again.
fn text(family: &str) -> Text {
    if family != "mistral" {
        return Text::read(&folder(family)).expect("a fixture");
    }
    let tokenizer = fs::read(folder(family).join("tokenizer.json")).expect("a fixture");
    let mut tokenizer: Value = serde_json::from_slice(&tokenizer).expect("a fixture");
    let prepend = json!({"type": "Prepend", "prepend": "▁"});
    tokenizer["normalizer"] =
        json!({"type": "Sequence", "normalizers": [prepend, tokenizer["normalizer"]]});
    let decoders = tokenizer["decoder"]["decoders"]
        .as_array_mut()
        .expect("a sequence");
    decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
    let copy = tempfile::tempdir().expect("writable");
    fs::write(copy.path().join("tokenizer.json"), tokenizer.to_string()).expect("writable");
    Text::read(copy.path()).expect("sound")
}

/// The text of an answer, token by token.
fn streamed(text: &Text, mut stream: TextStream, answer: &[u32]) -> String {
    let mut streamed = String::new();
    for &token in answer {
        streamed += &stream.push(text, token).unwrap();
    }
    streamed + &stream.finish(text).unwrap()
}

#[test]
fn a_prompt_and_its_continuation_are_one_text() {
    for family in FAMILIES {
        let text = text(family);
        for whole in [
            expected_text(family).text,
            "def f():\n    return  3\n".to_owned(),
        ] {
            let tokens = text.encode(&whole, false).unwrap();
            assert_eq!(text.decode(&tokens).unwrap(), whole, "{family}");
            let mut cuts = 0;
            for cut in 0..=tokens.len() {
                let (prompt, answer) = tokens.split_at(cut);
                let before = text.decode(prompt).unwrap();
                // Other cuts are within a character.
                let Some(right) = whole.strip_prefix(&before) else {
                    continue;
                };
                let stream = TextStream::after(&text, prompt).unwrap();
                assert_eq!(
                    streamed(&text, stream, answer),
                    right,
                    "{family} after {before:?}"
                );
                cuts += 1;
            }
            assert!(cuts > 10, "{family}: {cuts}");
        }
    }
}

/// They have no text, and do not make the next word the first one.
#[test]
fn special_tokens_within_an_answer_keep_the_space_behind_them() {
    for family in FAMILIES {
        let text = text(family);
        let ids = |of: &str| text.encode(of, false).unwrap();
        let answer = [ids("The planner"), vec![0; 3], ids(" reads")].concat();
        let right = text.decode(&answer).unwrap();
        assert!(right.contains("planner "), "{family}: {right:?}");
        assert_eq!(
            streamed(&text, TextStream::default(), &answer),
            right,
            "{family}"
        );
        // A prompt of special tokens alone has no text.
        let stream = TextStream::after(&text, &[0, 0]).unwrap();
        assert_eq!(streamed(&text, stream, &answer), right, "{family}");
    }
}

/// Calls of tools begin with special tokens in some models' texts. Token by token they are where they are in the whole text.
#[test]
fn special_tokens_may_be_part_of_a_text() {
    for family in FAMILIES {
        let text = text(family);
        let words = text.encode("A é 語, planner", false).unwrap();
        let name = |token: u32| text.token(token).unwrap().text;
        // Tokens 0 to 2 of the fixtures are special. Behind a cut character, too.
        for at in 0..=words.len() {
            let (before, after) = words.split_at(at);
            let answer = [&[2], before, &[0, 2], after, &[2]].concat();
            let right = text.decode_with_special_tokens(&answer).unwrap();
            assert!(right.starts_with(&name(2)) && right.ends_with(&name(2)));
            assert!(right.contains(&(name(0) + &name(2))), "{family}: {right}");
            for prompt in [&[][..], &[0], &words, &[0, 2]] {
                let stream = TextStream::after(&text, prompt).unwrap();
                let stream = stream.with_special_tokens(&text).unwrap();
                let given = streamed(&text, stream, &answer);
                assert_eq!(given, right, "{family}, behind {prompt:?}");
            }
            let without = streamed(&text, TextStream::default(), &answer);
            assert_eq!(without, text.decode(&answer).unwrap(), "{family}");
        }
    }
}

//! `tokenizer_config.json`: special tokens, whether they are put around a text, and the chat template. `special_tokens_map.json`:
//! special tokens that the other file does not have.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Map, Value, json};
use tokenizers::{AddedToken, PostProcessorWrapper, Tokenizer};

/// The fields that are used.
#[derive(Default, Deserialize)]
pub(super) struct Settings {
    bos_token: Option<Value>,
    eos_token: Option<Value>,
    tokenizer_class: Option<String>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    added_tokens_decoder: Option<BTreeMap<u32, Added>>,
    pub chat_template: Option<Value>,
}

/// The special tokens of `special_tokens_map.json`.
#[derive(Deserialize)]
pub(super) struct SpecialTokens {
    bos_token: Option<Value>,
    eos_token: Option<Value>,
}

/// A token that the file gives an id.
#[derive(Deserialize)]
struct Added {
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    normalized: Option<bool>,
    #[serde(default)]
    special: bool,
}

impl Added {
    fn token(&self) -> AddedToken {
        AddedToken::from(self.content.as_str(), self.special)
            .single_word(self.single_word)
            .lstrip(self.lstrip)
            .rstrip(self.rstrip)
            .normalized(self.normalized.unwrap_or(!self.special))
    }
}

/// The classes of `transformers` that read `add_bos_token` and `add_eos_token`. For others `tokenizer.json` decides what is
/// put around a text.
const CLASSES: [&str; 4] = [
    "LlamaTokenizer",
    "LlamaTokenizerFast",
    "GemmaTokenizer",
    "GemmaTokenizerFast",
];

/// The file gives a special token as a string, or as an object that contains the string.
fn name(token: Option<&Value>) -> Option<&str> {
    match token? {
        Value::String(text) => Some(text),
        Value::Object(object) => object.get("content")?.as_str(),
        _ => None,
    }
}

impl Settings {
    /// Takes what it lacks from the other file.
    pub(super) fn or(self, others: SpecialTokens) -> Self {
        Self {
            bos_token: self.bos_token.or(others.bos_token),
            eos_token: self.eos_token.or(others.eos_token),
            ..self
        }
    }

    /// Name of the token at the beginning of a text; empty if there is none.
    pub(super) fn bos(&self) -> &str {
        name(self.bos_token.as_ref()).unwrap_or_default()
    }

    /// Name of the token at the end of a text; empty if there is none.
    pub(super) fn eos(&self) -> &str {
        name(self.eos_token.as_ref()).unwrap_or_default()
    }

    /// Adds the tokens that only this file has, as `transformers` does. The error says what is wrong with it.
    pub(super) fn add_tokens(&self, tokenizer: &mut Tokenizer) -> Result<(), String> {
        let missing = self.added_tokens_decoder.iter().flatten();
        let missing = missing.filter(|(_, added)| {
            !added.content.is_empty() && tokenizer.token_to_id(&added.content).is_none()
        });
        let missing: Vec<_> = missing.collect();
        // The tokenizer numbers them.
        tokenizer
            .add_tokens(missing.iter().map(|(_, added)| added.token()))
            .map_err(|error| error.to_string())?;
        for (id, added) in missing {
            let name = &added.content;
            let got = tokenizer.token_to_id(name).unwrap_or_default();
            if got != *id {
                return Err(format!(
                    "added_tokens_decoder has {name:?} with the id {id}, but tokenizer.json has no such token, and would give it \
                     the id {got}: add the token to tokenizer.json, or download both files again"
                ));
            }
        }
        Ok(())
    }

    /// Makes a tokenizer put the special tokens around a text that the file asks for. The error says what is wrong with it.
    ///
    /// If the file has neither setting, `tokenizer.json` decides: version 4 of `transformers` then adds a BOS token for these
    /// classes, version 5 does not. Version 5 does not read the settings at all if there is a `tokenizer.json`.
    pub(super) fn apply(&self, tokenizer: &mut Tokenizer) -> Result<(), String> {
        let class = self.tokenizer_class.as_deref().unwrap_or_default();
        let given = self.add_bos_token.is_some() || self.add_eos_token.is_some();
        if !given || !CLASSES.contains(&class) {
            return Ok(());
        }
        let mut tokens = Map::new();
        let mut special = |setting: &str, adds: bool, field: &str, token: Option<&Value>| {
            if !adds {
                return Ok(None);
            }
            let Some(name) = name(token).filter(|name| !name.is_empty()) else {
                return Err(format!(
                    "{setting} is true, but there is no {field}: give its name, or set {setting} to false"
                ));
            };
            let Some(id) = tokenizer.token_to_id(name) else {
                return Err(format!(
                    "{field} is {name:?}, which is no token of tokenizer.json: give the name of one, or set {setting} to false"
                ));
            };
            tokens.insert(
                name.to_owned(),
                json!({"id": name, "ids": [id], "tokens": [name]}),
            );
            Ok(Some(json!({"SpecialToken": {"id": name, "type_id": 0}})))
        };
        // Defaults of these classes.
        let (adds_bos, adds_eos) = (
            self.add_bos_token.unwrap_or(true),
            self.add_eos_token.unwrap_or(false),
        );
        let before = special(
            "add_bos_token",
            adds_bos,
            "bos_token",
            self.bos_token.as_ref(),
        )?;
        let behind = special(
            "add_eos_token",
            adds_eos,
            "eos_token",
            self.eos_token.as_ref(),
        )?;
        let [a, b] = ["A", "B"].map(|id| json!({"Sequence": {"id": id, "type_id": 0}}));
        let single: Vec<_> = before
            .into_iter()
            .chain([a.clone()])
            .chain(behind)
            .collect();
        // The builder of templates would read a colon in a token's name as the beginning of a type.
        let processor: PostProcessorWrapper = serde_json::from_value(json!({
            "type": "TemplateProcessing", "single": single, "pair": [a, b], "special_tokens": tokens,
        }))
        .map_err(|error| error.to_string())?;
        tokenizer.with_post_processor(Some(processor));
        Ok(())
    }
}

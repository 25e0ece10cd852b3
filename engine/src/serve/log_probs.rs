//! Log-probabilities as answers write them.

use serde_json::{Map, Value, json};

use super::api::Kind;
use crate::{Error, LogProbs, Text, text::TokenText};

/// A token of an answer.
#[derive(Debug)]
pub(super) struct Entry {
    token: Scored,
    top: Vec<Scored>,
    /// Characters of the answer before it.
    offset: usize,
}

#[derive(Debug)]
struct Scored {
    text: TokenText,
    value: f64,
}

/// JSON has no −∞; clients of other servers expect this number.
const LEAST: f32 = -9999.0;

impl Scored {
    fn new(text: &Text, token: u32, value: f32) -> Result<Self, Error> {
        Ok(Self {
            text: text.token(token)?,
            // The shortest number with these digits. NaN becomes the least, too.
            value: value.max(LEAST).to_string().parse().unwrap_or(0.0),
        })
    }

    /// As completions name tokens. Those that are no text have their bytes, so that no two have the same name.
    fn name(&self) -> String {
        match std::str::from_utf8(&self.text.bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                let bytes = self.text.bytes.iter().map(|byte| format!("\\x{byte:02x}"));
                format!("bytes:{}", bytes.collect::<String>())
            }
        }
    }

    fn in_chat(&self) -> Value {
        json!({"token": self.text.text, "logprob": self.value, "bytes": self.text.bytes})
    }
}

impl Entry {
    /// A token of an answer that has so many characters before it.
    pub(super) fn new(
        text: &Text,
        offset: usize,
        token: u32,
        log_probs: &LogProbs,
    ) -> Result<Self, Error> {
        let top = log_probs.top.iter();
        let top = top.map(|one| Scored::new(text, one.token, one.value));
        Ok(Self {
            token: Scored::new(text, token, log_probs.token)?,
            top: top.collect::<Result<_, _>>()?,
            offset,
        })
    }

    fn in_chat(&self) -> Value {
        let mut entry = self.token.in_chat();
        entry["top_logprobs"] = self.top.iter().map(Scored::in_chat).collect();
        entry
    }

    /// The most probable tokens by their names, and the token itself. Of tokens with the same bytes there is one: the token
    /// itself, else the first.
    fn by_name(&self) -> Value {
        let mut named = Map::new();
        for one in &self.top {
            named.entry(one.name()).or_insert_with(|| one.value.into());
        }
        named.insert(self.token.name(), self.token.value.into());
        named.into()
    }
}

/// The field `logprobs` of a choice.
pub(super) fn written(kind: Kind, entries: &[Entry]) -> Value {
    match kind {
        Kind::Chat => {
            let content: Value = entries.iter().map(Entry::in_chat).collect();
            json!({"content": content, "refusal": null})
        }
        Kind::Completion => {
            let of = |field: fn(&Entry) -> Value| entries.iter().map(field).collect::<Value>();
            json!({
                "tokens": of(|entry| entry.token.name().into()),
                "token_logprobs": of(|entry| entry.token.value.into()),
                "top_logprobs": of(Entry::by_name),
                "text_offset": of(|entry| entry.offset.into()),
            })
        }
    }
}

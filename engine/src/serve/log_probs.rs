//! Log-probabilities as answers write them.

use serde_json::{Map, Value, json, value::RawValue};

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

/// The field `logprobs` of a choice. Each token is written when it comes: a whole answer has many of them.
#[derive(Debug)]
pub(super) struct Written {
    kind: Kind,
    /// The elements of its lists; a chat has one.
    lists: [String; 4],
}

impl Written {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            lists: Default::default(),
        }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.lists[0].is_empty()
    }

    pub(super) fn push(&mut self, entry: &Entry) {
        let elements = match self.kind {
            Kind::Chat => vec![entry.in_chat()],
            Kind::Completion => vec![
                entry.token.name().into(),
                entry.token.value.into(),
                entry.by_name(),
                entry.offset.into(),
            ],
        };
        for (list, element) in self.lists.iter_mut().zip(elements) {
            if !list.is_empty() {
                list.push(',');
            }
            *list += &element.to_string();
        }
    }

    /// The field with the tokens since it was last taken.
    pub(super) fn take(&mut self) -> Box<RawValue> {
        let [first, values, top, offsets] = std::mem::take(&mut self.lists);
        let json = match self.kind {
            Kind::Chat => format!(r#"{{"content":[{first}],"refusal":null}}"#),
            Kind::Completion => format!(
                r#"{{"tokens":[{first}],"token_logprobs":[{values}],"top_logprobs":[{top}],"text_offset":[{offsets}]}}"#
            ),
        };
        RawValue::from_string(json).expect("lists of JSON values")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_written_as_they_come() {
        let scored = |bytes: &[u8], value| Scored {
            text: TokenText {
                text: String::from_utf8_lossy(bytes).into_owned(),
                bytes: bytes.to_vec(),
            },
            value,
        };
        let entries = [
            Entry {
                token: scored(b"\"a", -0.5),
                top: vec![scored(b"b", -0.25), scored(b"\"a", -0.5)],
                offset: 0,
            },
            Entry {
                token: scored(&[0xc3], -9999.0),
                top: Vec::new(),
                offset: 2,
            },
        ];
        let written = |kind| {
            let mut written = Written::new(kind);
            entries.iter().for_each(|entry| written.push(entry));
            let all = written.take();
            assert!(written.is_empty());
            serde_json::from_str::<Value>(all.get()).unwrap()
        };
        let likeliest = [
            json!({"token": "b", "logprob": -0.25, "bytes": [98]}),
            json!({"token": "\"a", "logprob": -0.5, "bytes": [34, 97]}),
        ];
        let content = json!([
            {"token": "\"a", "logprob": -0.5, "bytes": [34, 97], "top_logprobs": likeliest},
            {"token": "\u{fffd}", "logprob": -9999.0, "bytes": [195], "top_logprobs": []},
        ]);
        let right = json!({"content": content, "refusal": null});
        assert_eq!(written(Kind::Chat), right);
        let right = json!({
            "tokens": ["\"a", "bytes:\\xc3"], "token_logprobs": [-0.5, -9999.0],
            "top_logprobs": [{"b": -0.25, "\"a": -0.5}, {"bytes:\\xc3": -9999.0}], "text_offset": [0, 2],
        });
        assert_eq!(written(Kind::Completion), right);
    }
}

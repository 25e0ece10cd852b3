//! The fields of a JSON object, taken one by one. An error has the field, its value, and what it may be.

use std::fmt;

use serde::{
    Deserialize, Deserializer,
    de::{Error as _, MapAccess, Visitor},
};
use serde_json::{Map, Value, json};

use super::api::{Kind, Refusal};

/// Fields that were not taken yet. A field that is `null` counts as left out.
pub(super) struct Fields {
    /// Put before the names in errors.
    prefix: &'static str,
    fields: Map<String, Value>,
}

impl Fields {
    pub(super) const fn new(prefix: &'static str, fields: Map<String, Value>) -> Self {
        Self { prefix, fields }
    }

    /// The fields of a request's body.
    pub(super) fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let Object(fields) = serde_json::from_slice(body)
            .map_err(|error| Refusal::wrong(format!("the body is no JSON object: {error}")))?;
        Ok(Self::new("", fields))
    }

    /// Takes a field. `read` returns `None` for a value that breaks the rule.
    pub(super) fn take<T>(
        &mut self,
        name: &str,
        rule: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, Refusal> {
        let value = self.fields.remove(name).filter(|value| !value.is_null());
        let Some(value) = value else {
            return Ok(None);
        };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => {
                let (prefix, value) = (self.prefix, shown(&value));
                Err(Refusal::wrong(format!("{prefix}{name} is {value}: {rule}")))
            }
        }
    }

    /// Takes a field that must be there.
    pub(super) fn need<T>(
        &mut self,
        name: &str,
        rule: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<T, Refusal> {
        self.take(name, rule, read)?
            .ok_or_else(|| Refusal::wrong(format!("{}{name} is missing: {rule}", self.prefix)))
    }

    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, Refusal> {
        self.take(name, "give true or false", Value::as_bool)
    }

    pub(super) fn number(&mut self, name: &str) -> Result<Option<f32>, Refusal> {
        let read = |value: &Value| value.as_f64().map(|number| number as f32);
        self.take(name, "give a number", read)
    }

    pub(super) fn count(&mut self, name: &str) -> Result<Option<u32>, Refusal> {
        let rule = format!("give a whole number from 1 to {}", u32::MAX);
        self.take(name, &rule, whole)
    }

    /// A field that was not taken, is not `null`, and does not rest at a value without effect.
    pub(super) fn rest(&self, rests: impl Fn(&str, &Value) -> bool) -> Option<String> {
        let mut left = self.fields.iter();
        let left = left.find(|(name, value)| !value.is_null() && !rests(name, value));
        left.map(|(name, _)| format!("{}{name}", self.prefix))
    }
}

/// Fields that do not affect the text.
const BESIDE_THE_TEXT: [&str; 6] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "safety_identifier",
];

/// Whether a field that is not read has a value that changes nothing. Clients send such defaults.
pub(super) fn rests(kind: Kind, name: &str, value: &Value) -> bool {
    match name {
        "n" | "best_of" | "repetition_penalty" | "length_penalty" => value.as_f64() == Some(1.0),
        "presence_penalty" | "frequency_penalty" | "top_logprobs" | "min_tokens" => {
            value.as_f64() == Some(0.0)
        }
        "logprobs"
        | "echo"
        | "ignore_eos"
        | "use_beam_search"
        | "include_stop_str_in_output"
        | "continue_final_message" => *value == json!(false),
        "skip_special_tokens" | "add_generation_prompt" => *value == json!(true),
        // The template of a chat writes them; those of a completion are added.
        "add_special_tokens" => *value == json!(kind == Kind::Completion),
        "suffix" => *value == json!(""),
        "logit_bias" => *value == json!({}),
        "tools" | "functions" => *value == json!([]),
        // Tools themselves are refused, so that these choices have no effect.
        "tool_choice" | "function_call" => *value == json!("none") || *value == json!("auto"),
        "parallel_tool_calls" => value.is_boolean(),
        "response_format" => *value == json!({"type": "text"}),
        "modalities" => *value == json!(["text"]),
        _ => BESIDE_THE_TEXT.contains(&name),
    }
}

pub(super) fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

pub(super) fn whole(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|number| number.try_into().ok())
}

/// A value as JSON; the beginning of a long one.
pub(super) fn shown(value: &Value) -> String {
    const MOST: usize = 60;
    let json = value.to_string();
    match json.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &json[..end]),
        None => json,
    }
}

/// An object that has each field once. A second value of a field would otherwise replace the first silently.
struct Object(Map<String, Value>);

impl<'de> Deserialize<'de> for Object {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Object;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Object, A::Error> {
                let mut fields = Map::new();
                while let Some((name, value)) = map.next_entry::<String, Value>()? {
                    if fields.insert(name.clone(), value).is_some() {
                        return Err(A::Error::custom(format!("{name:?} is there twice")));
                    }
                }
                Ok(Object(fields))
            }
        }
        from.deserialize_map(Read)
    }
}

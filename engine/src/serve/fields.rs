//! The fields of a JSON object, taken one by one. An error has the field, its value, and what it may be.

use serde_json::{Map, Value, json};

use super::{api::Kind, json::Object, refusal::Refusal};

/// Fields that were not taken yet. A field that is `null` counts as left out.
pub(super) struct Fields {
    /// Put before the names in errors.
    prefix: String,
    fields: Map<String, Value>,
}

impl Fields {
    pub(super) fn new(prefix: impl Into<String>, fields: Map<String, Value>) -> Self {
        let prefix = prefix.into();
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
                let name = self.full(name);
                let message = format!("{name} is {}: {rule}", shown(&value));
                Err(Refusal::of(name, message))
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
        self.take(name, rule, read)?.ok_or_else(|| {
            let name = self.full(name);
            let message = format!("{name} is missing: {rule}");
            Refusal::of(name, message)
        })
    }

    /// A field's name as errors have it.
    pub(super) fn full(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
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
        let read = |value: &Value| whole(value).filter(|&count| count > 0);
        self.take(name, &rule, read)
    }

    /// Refuses a field that was not taken and is not `null`, unless it has one of its values without effect (`idle`).
    pub(super) fn end(&self, idle: impl Fn(&str) -> Idle) -> Result<(), Refusal> {
        for (name, value) in self.fields.iter().filter(|(_, value)| !value.is_null()) {
            let name_in_errors = self.full(name);
            let message = match idle(name) {
                Idle::Any => continue,
                Idle::Empty if *value == json!([]) => continue,
                Idle::Empty => format!("{name_in_errors} is not rendered here: leave it out"),
                Idle::Values(values) if values.iter().any(|idle| same(idle, value)) => continue,
                Idle::Values(values) => {
                    let values: Vec<String> = values.iter().map(Value::to_string).collect();
                    let (value, values) = (shown(value), values.join(" or "));
                    format!("{name_in_errors} is {value}, and only {values} is implemented")
                }
                Idle::Unknown => format!("{name_in_errors} is not known here: leave it out"),
            };
            return Err(Refusal::of(name_in_errors, message));
        }
        Ok(())
    }
}

/// The values without effect of a field that is not read. Clients send such defaults.
pub(super) enum Idle {
    /// None: the field is not known.
    Unknown,
    Any,
    /// An empty list; a chat template would have to write anything else.
    Empty,
    Values(Vec<Value>),
}

/// Whether values are equal; 1 and 1.0 are.
fn same(a: &Value, b: &Value) -> bool {
    a == b || a.as_f64().is_some_and(|a| b.as_f64() == Some(a))
}

/// Fields that do not affect the text.
const BESIDE_THE_TEXT: [&str; 4] = ["user", "metadata", "prompt_cache_key", "safety_identifier"];

/// The values without effect of a request's field that is not read.
pub(super) fn idle(kind: Kind, name: &str) -> Idle {
    let value = match name {
        "best_of" | "length_penalty" => json!(1),
        "top_logprobs" => json!(0),
        "echo"
        | "use_beam_search"
        | "include_stop_str_in_output"
        | "continue_final_message"
        // Nothing is stored.
        | "store" => {
            json!(false)
        }
        // There is one.
        "service_tier" => return Idle::Values(vec![json!("auto"), json!("default")]),
        "add_generation_prompt" => json!(true),
        // The template of a chat writes them; those of a completion are added.
        "add_special_tokens" => json!(kind == Kind::Completion),
        "suffix" => json!(""),
        "tools" | "functions" => json!([]),
        // Completions have no tools, so that these choices have no effect.
        "tool_choice" | "function_call" => {
            return Idle::Values(vec![json!("none"), json!("auto")]);
        }
        "parallel_tool_calls" => return Idle::Values(vec![json!(true), json!(false)]),
        "response_format" => json!({"type": "text"}),
        "modalities" => json!(["text"]),
        _ if BESIDE_THE_TEXT.contains(&name) => return Idle::Any,
        _ => return Idle::Unknown,
    };
    Idle::Values(vec![value])
}

pub(super) fn text(value: &Value) -> Option<String> {
    value.as_str().map(str::to_owned)
}

/// A whole number. Clients in languages with one type of numbers may write 16.0.
pub(super) fn integer(value: &Value) -> Option<i64> {
    // 2⁶³, from which on numbers do not fit.
    const END: f64 = -(i64::MIN as f64);
    let number = || {
        let number = value.as_f64()?;
        let fits = number.fract() == 0.0 && (-END..END).contains(&number);
        fits.then_some(number as i64)
    };
    value.as_i64().or_else(number)
}

/// A whole number of 64 bits, with or without a sign.
pub(super) fn bits(value: &Value) -> Option<u64> {
    let signed = || integer(value).map(i64::cast_unsigned);
    value.as_u64().or_else(signed)
}

/// A whole number that is not negative.
pub(super) fn whole(value: &Value) -> Option<u32> {
    integer(value)?.try_into().ok()
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

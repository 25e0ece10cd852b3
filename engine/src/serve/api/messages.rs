//! The messages of a chat.

use serde_json::{Value, json};

use super::chat;
use crate::serve::{
    fields::{self, Fields, Idle},
    refusal::Refusal,
};

/// A role that chat templates know. Many templates leave out the message of another role and give no error.
fn role(value: &Value) -> Option<String> {
    match value.as_str()? {
        role @ ("system" | "user" | "assistant" | "tool") => Some(role.to_owned()),
        // OpenAI's newer name.
        "developer" => Some("system".to_owned()),
        _ => None,
    }
}

/// The message of a chat at an index.
pub(super) fn parse(index: usize, value: Value) -> Result<Value, Refusal> {
    let name = format!("messages[{index}]");
    let Value::Object(message) = value else {
        let value = fields::shown(&value);
        let message = format!("{name} is {value}: give an object with role and content");
        return Err(Refusal::of(name, message));
    };
    let mut fields = Fields::new(format!("{name}."), message);
    let rule = "give \"system\", \"user\", \"assistant\" or \"tool\"";
    let role = fields.need("role", rule, role)?;
    let rule = "give a text or a list of text parts";
    let rule_of_calls = "give a list of calls, in a message of the assistant";
    let calls = fields.take("tool_calls", rule_of_calls, |value| {
        let calls = value.as_array()?;
        (calls.is_empty() || role == "assistant").then(|| calls.clone())
    })?;
    let calls = calls.filter(|calls| !calls.is_empty());
    let call = fields.take(
        "tool_call_id",
        "give a text, in a message of a tool",
        |value| fields::text(value).filter(|_| role == "tool"),
    )?;
    let speaker = fields.take("name", "give a text", fields::text)?;
    let given = |value: &Value| Some(value.clone());
    let content = match calls {
        // A message that calls tools need not say anything.
        Some(_) => fields.take("content", rule, given)?,
        None => Some(fields.need("content", rule, given)?),
    };
    let content = match content.unwrap_or_default() {
        Value::Null => Value::Null,
        Value::String(text) => text.into(),
        Value::Array(parts) => {
            let parts = parts.into_iter().enumerate();
            let texts = parts.map(|(at, part)| text_of(&format!("{name}.content[{at}]"), part));
            // As vLLM joins them: parts are often texts of their own.
            texts.collect::<Result<Vec<_>, _>>()?.join("\n").into()
        }
        other => {
            let (name, other) = (fields.full("content"), fields::shown(&other));
            let message = format!("{name} is {other}: {rule}");
            return Err(Refusal::of(name, message));
        }
    };
    fields.end(|_| Idle::Empty)?;
    let mut message = json!({"role": role, "content": content});
    // Few templates write it. Others leave it out, as in `transformers`.
    if let Some(speaker) = speaker {
        message["name"] = speaker.into();
    }
    if let Some(calls) = calls {
        message["tool_calls"] = chat::calls(&format!("{name}.tool_calls"), calls)?;
    }
    if let Some(call) = call {
        message["tool_call_id"] = call.into();
    }
    Ok(message)
}

/// The text of a part of a message.
fn text_of(name: &str, mut part: Value) -> Result<String, Refusal> {
    let text = match (part["type"].as_str(), part["text"].as_str()) {
        (Some("text"), Some(text)) => text.to_owned(),
        (Some(other), _) if other != "text" => {
            let message = format!("{name} is of type {other:?}: only text is read here");
            return Err(Refusal::of(name, message));
        }
        _ => {
            let part = fields::shown(&part);
            let message = format!("{name} is {part}: give {{\"type\": \"text\", \"text\": …}}");
            return Err(Refusal::of(name, message));
        }
    };
    let mut others = part.as_object_mut().map(std::mem::take).unwrap_or_default();
    others.retain(|field, _| !matches!(field.as_str(), "type" | "text"));
    Fields::new(format!("{name}."), others).end(|field| match field {
        // Prefixes are cached without it.
        "cache_control" => Idle::Any,
        _ => Idle::Empty,
    })?;
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::serve::api::{self, Kind, Prompt};

    /// Chat templates write no message whose role they do not know, and `developer` is OpenAI's newer name of the system.
    #[test]
    fn developers_are_the_system() {
        let body = json!({"messages": [
            {"role": "developer", "content": "a"}, {"role": "system", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        ]});
        let asked = api::parse(Kind::Chat, body.to_string().as_bytes(), "tiny").unwrap();
        let [Prompt::Chat(messages, _)] = &asked.prompts[..] else {
            panic!("a chat");
        };
        let roles: Vec<_> = messages.iter().map(|message| &message["role"]).collect();
        assert_eq!(roles, ["system", "system", "user", "assistant"]);
    }

    /// As in vLLM. A part is often a whole document.
    #[test]
    fn parts_of_a_message_are_lines() {
        let part = |text: &str| json!({"type": "text", "text": text});
        let content = json!([part("one"), part(""), part("two")]);
        let body = json!({"messages": [{"role": "user", "content": content}]}).to_string();
        let asked = api::parse(Kind::Chat, body.as_bytes(), "tiny").unwrap();
        let [Prompt::Chat(messages, _)] = &asked.prompts[..] else {
            panic!("a chat");
        };
        assert_eq!(messages[0]["content"], "one\n\ntwo");
    }

    /// Templates of tools and of several speakers write it.
    #[test]
    fn the_name_of_a_message_is_for_the_template() {
        let parse = |name: &Value| {
            let mut message = json!({"role": "user", "content": "a"});
            message["name"] = name.clone();
            let body = json!({"messages": [message]}).to_string();
            api::parse(Kind::Chat, body.as_bytes(), "tiny")
        };
        for (given, passed) in [(json!("Ann"), Some(json!("Ann"))), (Value::Null, None)] {
            let asked = parse(&given).unwrap();
            let [Prompt::Chat(messages, _)] = &asked.prompts[..] else {
                panic!("a chat");
            };
            assert_eq!(messages[0].get("name"), passed.as_ref());
        }
        let refused = parse(&json!(3)).unwrap_err();
        assert_eq!(refused.message, "messages[0].name is 3: give a text");
    }
}

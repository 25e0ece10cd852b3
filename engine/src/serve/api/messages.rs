//! The messages of a chat.

use serde_json::Value;

use super::super::refusal::Refusal;
use crate::{
    Message,
    serve::fields::{self, Fields, Idle},
};

/// A role that all chat templates know. Many templates leave out the message of another role and give no error.
fn role(value: &Value) -> Option<String> {
    match value.as_str()? {
        role @ ("system" | "user" | "assistant") => Some(role.to_owned()),
        // OpenAI's newer name.
        "developer" => Some("system".to_owned()),
        _ => None,
    }
}

/// The message of a chat at an index.
pub(super) fn parse(index: usize, value: Value) -> Result<Message, Refusal> {
    let name = format!("messages[{index}]");
    let Value::Object(message) = value else {
        let value = fields::shown(&value);
        let message = format!("{name} is {value}: give an object with role and content");
        return Err(Refusal::of(name, message));
    };
    let mut fields = Fields::new(format!("{name}."), message);
    let rule = "give \"system\", \"user\" or \"assistant\"";
    let role = fields.need("role", rule, role)?;
    let rule = "give a text or a list of text parts";
    let content = match fields.need("content", rule, |value| Some(value.clone()))? {
        Value::String(text) => text,
        Value::Array(parts) => {
            let parts = parts.into_iter().enumerate();
            let text = parts.map(|(at, part)| text_of(&format!("{name}.content[{at}]"), part));
            text.collect::<Result<_, _>>()?
        }
        other => {
            let (name, other) = (fields.full("content"), fields::shown(&other));
            let message = format!("{name} is {other}: {rule}");
            return Err(Refusal::of(name, message));
        }
    };
    fields.end(|field| match field {
        // The chat templates of the supported families do not use the name of a speaker.
        "name" => Idle::Any,
        _ => Idle::Empty,
    })?;
    Ok(Message { role, content })
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
    use serde_json::json;

    use crate::serve::api::{self, Kind, Prompt};

    /// Chat templates write no message whose role they do not know, and `developer` is OpenAI's newer name of the system.
    #[test]
    fn developers_are_the_system() {
        let body = json!({"messages": [
            {"role": "developer", "content": "a"}, {"role": "system", "content": "b"},
            {"role": "user", "content": "c"}, {"role": "assistant", "content": "d"},
        ]});
        let asked = api::parse(Kind::Chat, body.to_string().as_bytes(), "tiny").unwrap();
        let [Prompt::Chat(messages)] = &asked.prompts[..] else {
            panic!("a chat");
        };
        let roles: Vec<_> = messages.iter().map(|message| &message.role[..]).collect();
        assert_eq!(roles, ["system", "system", "user", "assistant"]);
    }
}

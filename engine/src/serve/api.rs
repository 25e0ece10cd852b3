//! Requests and errors in OpenAI's format. A field that would change the text and is not implemented is refused.

mod messages;

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use tandem_attn::step::StepError;

use super::fields::{self, Fields, Idle};
use crate::{Error, Generation, Message, Sampling, Text};

/// The endpoint of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    Chat,
}

/// Why a request gets no answer.
#[derive(Debug)]
pub(super) struct Refusal {
    pub status: StatusCode,
    message: String,
    /// The field that is wrong, if it is one.
    param: Option<String>,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
        }
    }

    pub(super) fn wrong(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// A wrong field.
    pub(super) fn of(field: impl Into<String>, message: impl Into<String>) -> Self {
        Self::wrong(message).in_field(field)
    }

    fn in_field(mut self, field: impl Into<String>) -> Self {
        self.param = Some(field.into());
        self
    }

    pub(super) fn no_model(name: &str, model: &str) -> Self {
        let message = format!("there is no model {name:?} here, only {model:?}");
        Self::new(StatusCode::NOT_FOUND, message).in_field("model")
    }

    pub(super) fn busy() -> Self {
        Self::new(
            StatusCode::TOO_MANY_REQUESTS,
            "as many requests wait as may: try again later",
        )
    }

    /// The body of the response, in OpenAI's format.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status.is_server_error() {
            true => "server_error",
            false => "invalid_request_error",
        };
        let (message, param) = (&self.message, &self.param);
        let code = self.status.as_str();
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    pub(super) fn failed(message: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let refusal = Self::wrong(error.to_string());
        let Error::Attention(tandem_attn::Error::Step(StepError::Sampling { what, .. })) = error
        else {
            return refusal;
        };
        refusal.in_field(what.trim_start_matches("the "))
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = respond(self.status, &self.body());
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        response
    }
}

pub(super) fn respond(status: StatusCode, value: &Value) -> Response {
    let kind = (header::CONTENT_TYPE, "application/json");
    (status, [kind], value.to_string()).into_response()
}

/// A parsed request.
pub(super) struct Asked {
    pub prompt: Prompt,
    pub parameters: Parameters,
}

pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat(Vec<Message>),
}

/// Bytes that chat templates write around a message: about 50 in Llama 3's, less in the others.
const FRAME: usize = 64;

impl Prompt {
    /// Bytes of text to tokenize; for a chat, about as many as its template writes.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(prompt) => prompt.len(),
            Self::Tokens(_) => 0,
            Self::Chat(messages) => messages
                .iter()
                .map(|Message { role, content }| role.len() + content.len() + FRAME)
                .sum(),
        }
    }

    pub(super) fn encode(self, text: &Text) -> Result<Vec<u32>, Error> {
        match self {
            Self::Text(prompt) => text.encode(&prompt, true),
            Self::Tokens(tokens) => Ok(tokens),
            Self::Chat(messages) => text.encode_chat(&messages),
        }
    }
}

/// How to generate the text.
pub(super) struct Parameters {
    max_tokens: Option<u32>,
    /// Maximum number of tokens if the request does not give one.
    usual_tokens: u32,
    sampling: Sampling,
    pub stop: Vec<String>,
    pub stream: bool,
    pub include_usage: bool,
}

impl Parameters {
    /// Parameters for a prompt. `request_tokens` limits prompt and answer together. A larger request is refused, not
    /// cut.
    pub(super) fn generation(&self, prompt: Vec<u32>, request_tokens: u32) -> Generation {
        let prompt_tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let left = request_tokens.saturating_sub(prompt_tokens).max(1);
        Generation {
            prompt,
            max_new_tokens: self.max_tokens.unwrap_or(self.usual_tokens.min(left)),
            sampling: self.sampling,
            ignore_ends: false,
            computed: 0,
        }
    }
}

const MOST_STOPS: usize = 16;

/// A text or a list of token ids.
fn prompt(value: &Value) -> Option<Prompt> {
    match value {
        Value::String(text) => Some(Prompt::Text(text.clone())),
        Value::Array(ids) => ids
            .iter()
            .map(fields::whole)
            .collect::<Option<_>>()
            .map(Prompt::Tokens),
        _ => None,
    }
}

/// A text, or a list of some.
fn stops(value: &Value) -> Option<Vec<String>> {
    let stops = match value {
        Value::String(stop) => vec![stop.clone()],
        Value::Array(stops) => stops.iter().map(fields::text).collect::<Option<Vec<_>>>()?,
        _ => return None,
    };
    let right = stops.len() <= MOST_STOPS && !stops.iter().any(String::is_empty);
    right.then_some(stops)
}

pub(super) fn parse(kind: Kind, body: &[u8], model: &str) -> Result<Asked, Refusal> {
    let mut fields = Fields::parse(body)?;
    let named = fields.take("model", "give a text", fields::text)?;
    if let Some(other) = named.filter(|name| name != model) {
        return Err(Refusal::no_model(&other, model));
    }
    let rule = "give a text or a list of token ids; give several prompts one by one";
    let given = fields.take("prompt", rule, |value| match value {
        // Some clients always send a list of prompts.
        Value::Array(prompts) if prompts.len() == 1 => {
            prompt(value).or_else(|| prompt(&prompts[0]))
        }
        _ => prompt(value),
    })?;
    let messages = fields.take("messages", "give a list of messages", |value| {
        value.as_array().cloned()
    })?;
    let prompt = match (kind, given, messages) {
        (Kind::Completion, Some(prompt), None) => prompt,
        (Kind::Chat, None, Some(messages)) if messages.is_empty() => {
            let message = "messages is empty: give at least one message";
            return Err(Refusal::of("messages", message));
        }
        (Kind::Chat, None, Some(messages)) => Prompt::Chat(
            (0..)
                .zip(messages)
                .map(|(index, value)| messages::parse(index, value))
                .collect::<Result<_, _>>()?,
        ),
        (Kind::Completion, None, None) => {
            return Err(Refusal::of("prompt", format!("prompt is missing: {rule}")));
        }
        (Kind::Chat, None, None) => {
            let message = "messages is missing: give a list of messages";
            return Err(Refusal::of("messages", message));
        }
        (Kind::Completion, ..) => {
            let message = "a completion has a prompt, and no messages";
            return Err(Refusal::of("messages", message));
        }
        (Kind::Chat, ..) => {
            let message = "a chat has messages, and no prompt";
            return Err(Refusal::of("prompt", message));
        }
    };
    let (max_tokens, stream, include_usage) = (
        limit(&mut fields)?,
        fields.flag("stream")?,
        usage(&mut fields)?,
    );
    let stream = stream.unwrap_or(false);
    if include_usage.is_some() && !stream {
        let message = "stream_options are for streams: set stream to true, or leave them out";
        return Err(Refusal::of("stream_options", message));
    }
    let stop = format!("give a text, or up to {MOST_STOPS} of them, none empty");
    let top_k = |value: &Value| match value.as_i64() {
        Some(-1) => Some(0),
        _ => fields::whole(value),
    };
    let parameters = Parameters {
        max_tokens,
        // Defaults of OpenAI's interface.
        usual_tokens: match kind {
            Kind::Completion => 16,
            Kind::Chat => u32::MAX,
        },
        sampling: Sampling {
            temperature: fields.number("temperature")?.unwrap_or(1.0),
            top_k: fields
                .take(
                    "top_k",
                    "give a number of tokens, or -1 or 0 for all",
                    top_k,
                )?
                .unwrap_or(0),
            top_p: fields.number("top_p")?.unwrap_or(1.0),
            min_p: fields.number("min_p")?.unwrap_or(0.0),
            seed: fields
                .take("seed", "give a whole number of 64 bits", Value::as_i64)?
                .map_or_else(|| fastrand::u64(..), i64::cast_unsigned),
        },
        stop: fields.take("stop", &stop, stops)?.unwrap_or_default(),
        stream,
        include_usage: include_usage.unwrap_or(false),
    };
    fields.end(|name| fields::idle(kind, name))?;
    Ok(Asked { prompt, parameters })
}

/// The maximum number of tokens, by its new name or its old one.
fn limit(fields: &mut Fields) -> Result<Option<u32>, Refusal> {
    let new = fields.count("max_completion_tokens")?;
    let old = fields.count("max_tokens")?;
    match (new, old) {
        (Some(new), Some(old)) if new != old => Err(Refusal::of(
            "max_tokens",
            format!("max_completion_tokens is {new} and max_tokens is {old}: give one of them"),
        )),
        _ => Ok(new.or(old)),
    }
}

/// Whether a stream ends with its usage; none if the request has no `stream_options`.
fn usage(fields: &mut Fields) -> Result<Option<bool>, Refusal> {
    let options = fields.take("stream_options", "give an object", |value| {
        value.as_object().cloned()
    })?;
    let Some(options) = options else {
        return Ok(None);
    };
    let mut options = Fields::new("stream_options.", options);
    let include = options.flag("include_usage")?.unwrap_or(false);
    options.end(|_| Idle::Values(vec![json!(false)]))?;
    Ok(Some(include))
}

#[cfg(test)]
mod tests;

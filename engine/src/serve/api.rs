//! Requests and errors in OpenAI's format. A field that would change the text and is not implemented is refused.

use axum::{
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value};

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
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, message }
    }

    fn wrong(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
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
        let error = serde_json::json!({"message": self.message, "type": kind, "code": self.status.as_u16()});
        serde_json::json!({"error": error})
    }

    pub(super) fn failed(message: String) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message)
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        Self::wrong(error.to_string())
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = json(self.status, &self.body());
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, header::HeaderValue::from_static("1"));
        }
        response
    }
}

pub(super) fn json(status: StatusCode, value: &Value) -> Response {
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

impl Prompt {
    /// Bytes of text to tokenize.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(prompt) => prompt.len(),
            Self::Tokens(_) => 0,
            Self::Chat(messages) => messages.iter().map(|message| message.content.len()).sum(),
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

#[derive(Deserialize)]
struct Body {
    model: Option<String>,
    #[serde(default, deserialize_with = "given")]
    prompt: Option<PromptField>,
    messages: Option<Vec<MessageField>>,
    max_tokens: Option<u32>,
    max_completion_tokens: Option<u32>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<u32>,
    min_p: Option<f32>,
    seed: Option<i64>,
    stop: Option<OneOrMany>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum PromptField {
    Text(String),
    Tokens(Vec<u32>),
}

/// Reports what a prompt may be, in place of Rust type names.
fn given<'de, D: Deserializer<'de>>(field: D) -> Result<Option<PromptField>, D::Error> {
    let wrong = |_| {
        serde::de::Error::custom(
            "prompt is a text or a list of token ids; give several prompts one by one",
        )
    };
    PromptField::deserialize(field).map(Some).map_err(wrong)
}

#[derive(Deserialize)]
struct MessageField {
    role: String,
    content: ContentField,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum ContentField {
    Text(String),
    Parts(Vec<Part>),
}

#[derive(Deserialize)]
struct Part {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
}

/// Fields that do not affect the text.
const BESIDE_THE_TEXT: [&str; 4] = ["user", "metadata", "store", "service_tier"];
/// Fields that are accepted at the value at which they have no effect.
const AT_REST: [(&str, f64); 4] = [
    ("n", 1.0),
    ("best_of", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
];
const MOST_STOPS: usize = 16;

pub(super) fn parse(kind: Kind, body: &[u8], model: &str) -> Result<Asked, Refusal> {
    let body: Body =
        serde_json::from_slice(body).map_err(|error| Refusal::wrong(error.to_string()))?;
    for (name, value) in &body.rest {
        let rests = AT_REST
            .iter()
            .any(|(rest, at)| rest == name && value.as_f64() == Some(*at));
        let nothing = matches!(value, Value::Null | Value::Bool(false));
        if !rests && !nothing && !BESIDE_THE_TEXT.contains(&name.as_str()) {
            return Err(Refusal::wrong(format!(
                "{name} is not computed here: leave it out"
            )));
        }
    }
    if let Some(other) = body.model.filter(|name| name != model) {
        let message = format!("there is no model {other:?} here, only {model:?}");
        return Err(Refusal::new(StatusCode::NOT_FOUND, message));
    }
    let prompt = match (kind, body.prompt, body.messages) {
        (Kind::Completion, Some(PromptField::Text(text)), None) => Prompt::Text(text),
        (Kind::Completion, Some(PromptField::Tokens(tokens)), None) => Prompt::Tokens(tokens),
        (Kind::Chat, None, Some(messages)) => Prompt::Chat(
            messages
                .into_iter()
                .map(message)
                .collect::<Result<_, _>>()?,
        ),
        (Kind::Completion, ..) => {
            return Err(Refusal::wrong("a completion has a prompt, and no messages"));
        }
        (Kind::Chat, ..) => return Err(Refusal::wrong("a chat has messages, and no prompt")),
    };
    let stop = match body.stop {
        None => Vec::new(),
        Some(OneOrMany::One(stop)) => vec![stop],
        Some(OneOrMany::Many(stops)) => stops,
    };
    if stop.len() > MOST_STOPS || stop.iter().any(String::is_empty) {
        return Err(Refusal::wrong(format!(
            "stop is a text, or up to {MOST_STOPS} of them, none empty"
        )));
    }
    let stream = body.stream.unwrap_or(false);
    if body.stream_options.is_some() && !stream {
        return Err(Refusal::wrong(
            "stream_options are for streams: set stream to true, or leave them out",
        ));
    }
    let temperature = body.temperature.unwrap_or(1.0);
    let parameters = Parameters {
        max_tokens: body.max_completion_tokens.or(body.max_tokens),
        // Defaults of OpenAI's interface.
        usual_tokens: match kind {
            Kind::Completion => 16,
            Kind::Chat => u32::MAX,
        },
        sampling: Sampling {
            temperature,
            top_k: body.top_k.unwrap_or(0),
            top_p: body.top_p.unwrap_or(1.0),
            min_p: body.min_p.unwrap_or(0.0),
            seed: body
                .seed
                .map_or_else(|| fastrand::u64(..), |seed| seed as u64),
        },
        stop,
        stream,
        include_usage: body
            .stream_options
            .and_then(|options| options.include_usage)
            .unwrap_or(false),
    };
    Ok(Asked { prompt, parameters })
}

/// The chat templates of the supported families do not use the name of a speaker.
const BESIDE_A_MESSAGE: &str = "name";

fn message(field: MessageField) -> Result<Message, Refusal> {
    for (name, value) in &field.rest {
        let nothing = match value {
            Value::Null | Value::Bool(false) => true,
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        if !nothing && name != BESIDE_A_MESSAGE {
            return Err(Refusal::wrong(format!(
                "{name} of a message is not rendered here: leave it out"
            )));
        }
    }
    let content = match field.content {
        ContentField::Text(text) => text,
        ContentField::Parts(parts) => {
            let texts = parts
                .into_iter()
                .map(|part| match (part.kind.as_str(), part.text) {
                    ("text", Some(text)) => Ok(text),
                    (other, _) => Err(Refusal::wrong(format!(
                        "a part of type {other:?}: only text is read here"
                    ))),
                });
            texts.collect::<Result<String, _>>()?
        }
    };
    let role = field.role;
    Ok(Message { role, content })
}

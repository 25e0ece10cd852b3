//! Why a request gets no answer, in OpenAI's format.

use axum::{
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Serialize;
use serde_json::{Value, json};
use tandem_attn::step::StepError;
use tandem_schedule::ScheduleError;

use crate::Error;

#[derive(Debug)]
pub(super) struct Refusal {
    pub status: StatusCode,
    pub message: String,
    /// The field that is wrong, if it is one.
    param: Option<String>,
    /// Whether the client has gone, so that nobody reads this.
    pub has_left: bool,
}

impl Refusal {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self {
            status,
            message: message.into(),
            param: None,
            has_left: false,
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

    /// The client may try again. `what` says what there are too many of.
    pub(super) fn busy(what: &str) -> Self {
        let message = format!("{what}: try again later");
        Self::new(StatusCode::TOO_MANY_REQUESTS, message)
    }

    pub(super) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The body of the response.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let (message, param) = (&self.message, &self.param);
        let code = self.status.as_str();
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }
}

/// What the engine refuses. Limits are those that the flags of `tandem serve` set.
impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::Attention(tandem_attn::Error::Step(StepError::Sampling { what, .. })) => {
                Self::wrong(error.to_string()).in_field(what.trim_start_matches("the "))
            }
            // The client cannot change it, and may send the same request to another server.
            Error::BrokenTemplate { .. } => Self::failed(error.to_string()),
            Error::MinTokens { min, max } => Self::of(
                "min_tokens",
                format!(
                    "min_tokens is {min}, and the answer may have {max} tokens: give a smaller min_tokens or a larger max_tokens"
                ),
            ),
            Error::Schedule(ScheduleError::RequestTooLong { prompt, new, limit }) => {
                Self::wrong(format!(
                    "{prompt} tokens of the prompt and {new} of the answer are more than the {limit} that a request to this \
                     server may have: use a shorter prompt or answer, or start the server with a larger --request-tokens"
                ))
            }
            Error::Schedule(ScheduleError::PoolTooSmall { wanted, total }) => Self::wrong(format!(
                "the request needs {wanted} pages of the KV cache, which has {total}: use a shorter prompt or answer, or start \
                 the server with a larger --cache"
            )),
            error => Self::wrong(error.to_string()),
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let mut response = respond(self.status, &self.body());
        let more = match self.status {
            StatusCode::TOO_MANY_REQUESTS => Some((header::RETRY_AFTER, "1")),
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            _ => None,
        };
        if let Some((name, value)) = more {
            let value = HeaderValue::from_static(value);
            response.headers_mut().insert(name, value);
        }
        response
    }
}

pub(super) fn respond(status: StatusCode, value: &impl Serialize) -> Response {
    let kind = (header::CONTENT_TYPE, "application/json");
    (status, [kind], json_of(value)).into_response()
}

pub(super) fn json_of(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("its maps have texts as keys")
}

//! Turns tokens into an answer, whole or as events.

use std::{
    convert::Infallible,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::{
    api::{Kind, Refusal, respond},
    metrics::Taken,
    runner::Piece,
};
use crate::{Error, Finish, Text, TextStream};

/// An answer being generated. Dropping it cancels its request.
pub(super) struct Answer {
    pub taken: Taken,
    pub tokens: UnboundedReceiver<Piece>,
    pub assembly: Assembly,
    pub labels: Labels,
    pub prompt_tokens: usize,
    pub generated: u32,
}

/// Assembles the text from tokens, up to a stop text.
pub(super) struct Assembly {
    text: Arc<Text>,
    stream: TextStream,
    stops: Vec<String>,
    /// Text held back because it may be the beginning of a stop text.
    held: String,
}

impl Assembly {
    pub(super) fn new(text: Arc<Text>, stream: TextStream, stops: Vec<String>) -> Self {
        Self {
            text,
            stream,
            stops,
            held: String::new(),
        }
    }

    /// Returns the text that a token adds, and whether a stop text ends the answer.
    fn push(&mut self, token: u32) -> Result<(String, bool), Error> {
        self.held += &self.stream.push(&self.text, token)?;
        if self.stop() {
            return Ok((std::mem::take(&mut self.held), true));
        }
        let held = &self.held;
        let begins = |at: usize| self.stops.iter().any(|stop| stop.starts_with(&held[at..]));
        let boundaries = held.char_indices().map(|(at, _)| at);
        let keep = boundaries
            .into_iter()
            .find(|&at| begins(at))
            .unwrap_or(held.len());
        let rest = self.held.split_off(keep);
        Ok((std::mem::replace(&mut self.held, rest), false))
    }

    /// Returns the text held back, and whether a stop text ends it.
    fn finish(&mut self) -> Result<(String, bool), Error> {
        self.held += &self.stream.finish(&self.text)?;
        let ended = self.stop();
        Ok((std::mem::take(&mut self.held), ended))
    }

    /// Cuts the held text before a stop text. Returns whether there is one.
    fn stop(&mut self) -> bool {
        let stops = self.stops.iter();
        let first = stops.filter_map(|stop| self.held.find(stop)).min();
        if let Some(at) = first {
            self.held.truncate(at);
        }
        first.is_some()
    }
}

/// Seconds since 1970.
pub(super) fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// The fields around every text of an answer.
pub(super) struct Labels {
    kind: Kind,
    id: String,
    model: String,
    created: u64,
}

impl Labels {
    pub(super) fn new(kind: Kind, index: u64, model: &str) -> Self {
        let prefix = match kind {
            Kind::Completion => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{index}"),
            model: model.to_owned(),
            created: seconds(),
        }
    }

    fn around(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model, "choices": choices,
        })
    }

    fn event(&self, text: &str, first: bool, finish: Option<&str>) -> Value {
        let (object, content) = match self.kind {
            Kind::Completion => ("text_completion", ("text", json!(text))),
            Kind::Chat => (
                "chat.completion.chunk",
                (
                    "delta",
                    match (first, finish) {
                        (true, _) => json!({"role": "assistant", "content": text}),
                        (false, Some(_)) if text.is_empty() => json!({}),
                        (false, _) => json!({"content": text}),
                    },
                ),
            ),
        };
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish});
        choice[content.0] = content.1;
        self.around(object, json!([choice]))
    }
}

/// The next piece of an answer.
enum Next {
    Text(String),
    /// The last text and the finish reason.
    End(String, &'static str),
    Failed(String),
}

impl Answer {
    async fn next(&mut self) -> Next {
        let next = self.piece().await;
        match next {
            Next::Text(_) => {}
            Next::End(..) => self.taken.completed(),
            Next::Failed(_) => self.taken.failed(),
        }
        next
    }

    async fn piece(&mut self) -> Next {
        let next = match self.tokens.recv().await {
            Some(Piece::Token(token)) => {
                self.generated += 1;
                self.taken.token();
                self.assembly.push(token).map(|(text, ended)| match ended {
                    true => Next::End(text, "stop"),
                    false => Next::Text(text),
                })
            }
            Some(Piece::Finished(reason)) => {
                self.assembly.finish().map(|(text, ended)| match reason {
                    Finish::Length if !ended => Next::End(text, "length"),
                    _ => Next::End(text, "stop"),
                })
            }
            Some(Piece::Failed(reason)) => return Next::Failed(reason),
            None => return Next::Failed("the engine has failed".to_owned()),
        };
        next.unwrap_or_else(|error| Next::Failed(error.to_string()))
    }

    fn usage(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": self.generated,
            "total_tokens": self.prompt_tokens + self.generated as usize,
        })
    }

    pub(super) async fn whole(mut self) -> Response {
        let mut whole = String::new();
        let finish = loop {
            match self.next().await {
                Next::Text(text) => whole += &text,
                Next::End(text, finish) => {
                    whole += &text;
                    break finish;
                }
                Next::Failed(reason) => return Refusal::failed(reason).into_response(),
            }
        };
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish});
        let object = match self.labels.kind {
            Kind::Completion => {
                choice["text"] = json!(whole);
                "text_completion"
            }
            Kind::Chat => {
                choice["message"] = json!({"role": "assistant", "content": whole});
                "chat.completion"
            }
        };
        let mut body = self.labels.around(object, json!([choice]));
        body["usage"] = self.usage();
        respond(StatusCode::OK, &body)
    }

    /// Streams the answer as server-sent events. With the usage, which comes last, every event has the field.
    pub(super) fn streamed(self, include_usage: bool) -> Response {
        let events = stream::unfold(Some((self, true)), move |state| async move {
            let (mut answer, first) = state?;
            // Tokens that complete no text yet cause no event.
            let next = loop {
                match answer.next().await {
                    Next::Text(text) if text.is_empty() && !first => {}
                    next => break next,
                }
            };
            let text_event = |text: &str, finish| {
                let mut event = answer.labels.event(text, first, finish);
                if include_usage {
                    event["usage"] = Value::Null;
                }
                frame(&event)
            };
            let (event, goes_on) = match next {
                Next::Text(text) => (text_event(&text, None), true),
                Next::End(text, finish) => {
                    let mut end = text_event(&text, Some(finish));
                    if include_usage {
                        let mut usage = answer.labels.event("", false, None);
                        usage["choices"] = json!([]);
                        usage["usage"] = answer.usage();
                        end += &frame(&usage);
                    }
                    (end + "data: [DONE]\n\n", false)
                }
                Next::Failed(reason) => {
                    let error = Refusal::failed(reason).body();
                    (frame(&error), false)
                }
            };
            Some((
                Ok::<_, Infallible>(event),
                goes_on.then_some((answer, false)),
            ))
        });
        let headers = [
            (header::CONTENT_TYPE, "text/event-stream"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, Body::from_stream(events)).into_response()
    }
}

fn frame(value: &Value) -> String {
    format!("data: {value}\n\n")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn assembly(stop: &str) -> (Assembly, Arc<Text>) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2");
        let text = Arc::new(Text::read(&folder).unwrap());
        (
            Assembly::new(
                Arc::clone(&text),
                TextStream::default(),
                vec![stop.to_owned()],
            ),
            text,
        )
    }

    /// The last token may end within a character; its text then comes when the answer finishes.
    #[test]
    fn what_the_last_token_gives_may_end_the_answer() {
        let replacement = char::REPLACEMENT_CHARACTER.to_string();
        for (stop, expected) in [
            (replacement.as_str(), ("".to_owned(), true)),
            ("never", (replacement.clone(), false)),
        ] {
            let (mut assembly, text) = assembly(stop);
            let cut = text.encode("é", false).unwrap()[0];
            assert_eq!(assembly.push(cut).unwrap(), (String::new(), false));
            assert_eq!(assembly.finish().unwrap(), expected, "{stop}");
        }
    }
}

//! Turns the tokens of one or several choices into an answer, whole or as events.

use std::{
    convert::Infallible,
    future::poll_fn,
    task::{Context, Poll},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use futures_util::stream;
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};
use tokio::time::{Instant, timeout_at};

use super::{
    api::Kind,
    assembly::Assembly,
    log_probs::Written,
    refusal::{Refusal, json_of, respond},
    runner::{Piece, Taken},
};
use crate::Finish;

/// An answer being generated. Dropping it cancels its requests.
pub(super) struct Answer {
    pub choices: Vec<Choice>,
    pub labels: Labels,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Number of choices for each prompt.
    pub each: usize,
    /// The choice that is asked first for its next piece, so that none is behind the others.
    pub turn: usize,
}

/// One of the texts of an answer.
pub(super) struct Choice {
    taken: Taken,
    assembly: Assembly,
    /// Log-probabilities of its tokens that the client does not have yet.
    scored: Written,
    generated: u32,
    cached: u32,
    /// Whether it has had no event yet.
    first: bool,
    ended: bool,
}

impl Choice {
    pub(super) fn new(taken: Taken, assembly: Assembly, kind: Kind) -> Self {
        Self {
            taken,
            assembly,
            scored: Written::new(kind),
            generated: 0,
            cached: 0,
            first: true,
            ended: false,
        }
    }

    /// Its next text, of which it may have none yet.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Next> {
        let piece = loop {
            match std::task::ready!(self.taken.pieces.poll_recv(context)) {
                Some(Piece::Started { cached }) => self.cached = cached,
                piece => break piece,
            }
        };
        let next = self.next(piece);
        match &next {
            Next::Text(_) => {}
            Next::End(..) => self.taken.completed(),
            Next::Failed(_) => self.taken.failed(),
        }
        self.ended = !matches!(next, Next::Text(_));
        Poll::Ready(next)
    }

    fn next(&mut self, piece: Option<Piece>) -> Next {
        let next = match piece {
            Some(Piece::Token(token, log_probs)) => {
                self.generated += 1;
                let scored = log_probs.map(|log_probs| self.assembly.scored(token, &log_probs));
                match scored.transpose() {
                    Ok(scored) => scored.iter().for_each(|scored| self.scored.push(scored)),
                    Err(error) => return Next::Failed(error.to_string()),
                }
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
            _ => return Next::Failed("the engine has failed".to_owned()),
        };
        next.unwrap_or_else(|error| Next::Failed(error.to_string()))
    }
}

/// Seconds since 1970.
pub(super) fn seconds() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// An answer, or an event of a stream.
#[derive(Serialize)]
struct Labelled<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<ChoiceBody<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Value>,
}

/// A choice in it.
#[derive(Serialize)]
struct ChoiceBody<'a> {
    index: usize,
    logprobs: Option<Box<RawValue>>,
    finish_reason: Option<&'a str>,
    #[serde(flatten)]
    content: Content<'a>,
}

/// Its text, in the field of the interface.
#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Content<'a> {
    Text(&'a str),
    Message(Value),
    Delta(Value),
}

/// The fields around every text of an answer.
pub(super) struct Labels {
    kind: Kind,
    id: String,
    model: String,
    created: u64,
    /// Whether answers have log-probabilities.
    log_probs: bool,
}

impl Labels {
    /// `id` is that of the answer, without the prefix of its kind.
    pub(super) fn new(kind: Kind, id: &str, model: &str, log_probs: bool) -> Self {
        let prefix = match kind {
            Kind::Completion => "cmpl",
            Kind::Chat => "chatcmpl",
        };
        Self {
            kind,
            id: format!("{prefix}-{id}"),
            model: model.to_owned(),
            created: seconds(),
            log_probs,
        }
    }

    fn labelled<'a>(&'a self, object: &'static str, choices: Vec<ChoiceBody<'a>>) -> Labelled<'a> {
        Labelled {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage: None,
        }
    }

    /// An event with these choices.
    fn event<'a>(&'a self, choices: Vec<ChoiceBody<'a>>) -> Labelled<'a> {
        let object = match self.kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion.chunk",
        };
        self.labelled(object, choices)
    }

    fn text_event<'a>(
        &'a self,
        index: usize,
        text: &'a str,
        scored: &mut Written,
        first: bool,
        finish_reason: Option<&'a str>,
    ) -> Labelled<'a> {
        let content = match (self.kind, first, finish_reason) {
            (Kind::Completion, ..) => Content::Text(text),
            (Kind::Chat, true, _) => Content::Delta(json!({"role": "assistant", "content": text})),
            (Kind::Chat, false, Some(_)) if text.is_empty() => Content::Delta(json!({})),
            (Kind::Chat, false, _) => Content::Delta(json!({"content": text})),
        };
        self.event(vec![ChoiceBody {
            index,
            logprobs: (!scored.is_empty()).then(|| scored.take()),
            finish_reason,
            content,
        }])
    }

    /// A whole answer with these texts and the reasons why they ended, and its choices with their log-probabilities.
    fn whole<'a>(&'a self, texts: &'a [(String, &str)], choices: &mut [Choice]) -> Labelled<'a> {
        let texts = texts.iter().zip(choices).enumerate();
        let choices = texts.map(|(index, ((text, finish), choice))| ChoiceBody {
            index,
            logprobs: self.log_probs.then(|| choice.scored.take()),
            finish_reason: Some(finish),
            content: match self.kind {
                Kind::Completion => Content::Text(text),
                Kind::Chat => Content::Message(json!({"role": "assistant", "content": text})),
            },
        });
        let object = match self.kind {
            Kind::Completion => "text_completion",
            Kind::Chat => "chat.completion",
        };
        self.labelled(object, choices.collect())
    }
}

/// The next piece of a choice.
enum Next {
    Text(String),
    /// The last text and the finish reason.
    End(String, &'static str),
    Failed(String),
}

impl Answer {
    /// The next piece of a choice that has not ended, and the choice's index. At least one must not have ended.
    async fn next(&mut self) -> (usize, Next) {
        poll_fn(|context| {
            let (before, after) = (0..self.turn, self.turn..self.choices.len());
            for index in after.chain(before) {
                let choice = &mut self.choices[index];
                if !choice.ended
                    && let Poll::Ready(next) = choice.poll(context)
                {
                    self.turn = index + 1;
                    if matches!(next, Next::Failed(_)) {
                        // There is no answer without this choice.
                        self.choices
                            .iter_mut()
                            .for_each(|choice| choice.taken.failed());
                    }
                    return Poll::Ready((index, next));
                }
            }
            Poll::Pending
        })
        .await
    }

    fn has_ended(&self) -> bool {
        self.choices.iter().all(|choice| choice.ended)
    }

    /// A prompt counts once, however many choices it has. Those behind the first may find the pages of the first.
    fn usage(&self) -> Value {
        let generated: u64 = self.choices.iter().map(|c| u64::from(c.generated)).sum();
        let first = self.choices.iter().step_by(self.each);
        let cached: u64 = first.map(|choice| u64::from(choice.cached)).sum();
        json!({
            "prompt_tokens": self.prompt_tokens, "completion_tokens": generated,
            "total_tokens": self.prompt_tokens as u64 + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        })
    }

    pub(super) async fn whole(mut self) -> Response {
        let mut texts = vec![(String::new(), ""); self.choices.len()];
        while !self.has_ended() {
            let (index, next) = self.next().await;
            match next {
                Next::Text(text) => texts[index].0 += &text,
                Next::End(text, finish) => {
                    texts[index].0 += &text;
                    texts[index].1 = finish;
                }
                Next::Failed(reason) => return Refusal::failed(reason).into_response(),
            }
        }
        let usage = self.usage();
        let mut body = self.labels.whole(&texts, &mut self.choices);
        body.usage = Some(usage);
        respond(StatusCode::OK, &body)
    }

    /// The next events of a stream, and whether more follow.
    async fn events(&mut self, include_usage: bool) -> (String, bool) {
        // Tokens that complete no text yet cause no event.
        let (index, next) = loop {
            match self.next().await {
                (index, Next::Text(text)) if text.is_empty() && !self.choices[index].first => {}
                next => break next,
            }
        };
        let (text, finish) = match next {
            Next::Text(text) => (text, None),
            Next::End(text, finish) => (text, Some(finish)),
            Next::Failed(reason) => return (frame(&Refusal::failed(reason).body()), false),
        };
        let choice = &mut self.choices[index];
        let first = std::mem::take(&mut choice.first);
        let labels = &self.labels;
        let mut event = labels.text_event(index, &text, &mut choice.scored, first, finish);
        event.usage = include_usage.then_some(Value::Null);
        let mut events = frame(&event);
        if !self.has_ended() {
            return (events, true);
        }
        if include_usage {
            let mut last = self.labels.event(Vec::new());
            last.usage = Some(self.usage());
            events += &frame(&last);
        }
        (events + "data: [DONE]\n\n", false)
    }

    /// Streams the answer as server-sent events. With the usage, which comes last, every event has the field. Whenever
    /// there is no event for `keep_alive`, the stream gets a comment.
    pub(super) fn streamed(self, include_usage: bool, keep_alive: Duration) -> Response {
        let events = stream::unfold(Some(self), move |answer| async move {
            let mut answer = answer?;
            let event = answer.events(include_usage);
            let (event, goes_on) = match Instant::now().checked_add(keep_alive) {
                Some(until) => timeout_at(until, event)
                    .await
                    .unwrap_or_else(|_| (": keep-alive\n\n".to_owned(), true)),
                None => event.await,
            };
            Some((Ok::<_, Infallible>(event), goes_on.then_some(answer)))
        });
        let headers = [
            // Without it, clients such as Python's requests read Latin-1.
            (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
            (header::CACHE_CONTROL, "no-cache"),
        ];
        (headers, Body::from_stream(events)).into_response()
    }
}

fn frame(value: &impl Serialize) -> String {
    format!("data: {}\n\n", json_of(value))
}

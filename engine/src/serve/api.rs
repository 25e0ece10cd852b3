//! Requests in OpenAI's format. A field that would change the text and is not implemented is refused.

mod chat;
mod logits;
mod messages;

use std::sync::Arc;

use serde_json::{Value, json};
use tandem_schedule::ScheduleError;

use super::{
    fields::{self, Fields, Idle},
    refusal::Refusal,
};
use crate::{ChatOptions, Error, Generation, LogitRules, SamplingOptions, Text};

/// The endpoint of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    Chat,
}

/// A parsed request.
#[derive(Debug)]
pub(super) struct Asked {
    pub prompts: Vec<Prompt>,
    pub parameters: Parameters,
}

impl Asked {
    /// Number of choices of the answer: `n` for each prompt.
    pub(super) fn choices(&self) -> usize {
        let each = self.parameters.choices as usize;
        self.prompts.len().saturating_mul(each)
    }
}

#[derive(Debug, PartialEq)]
pub(super) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Chat(Vec<Value>, ChatOptions),
    /// What the template writes for a chat.
    Rendered(String),
}

fn json_bytes(value: &Value) -> usize {
    value.to_string().len()
}

impl Prompt {
    /// Bytes of text to tokenize; for a chat, of what its template gets.
    pub(super) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(prompt) | Self::Rendered(prompt) => prompt.len(),
            Self::Tokens(_) => 0,
            Self::Chat(messages, options) => {
                let bytes = |message: &Value| {
                    let of = |field: &str| message[field].as_str().map_or(0, str::len);
                    let calls = message.get("tool_calls").map_or(0, json_bytes);
                    of("role") + of("content") + of("tool_call_id") + calls
                };
                let tools = options.tools.iter().map(json_bytes);
                let given = options.variables.iter();
                let variables = given.map(|(name, value)| name.len() + json_bytes(value));
                let beside: usize = tools.chain(variables).sum();
                messages.iter().map(bytes).sum::<usize>() + beside
            }
        }
    }

    /// Writes a chat with its template.
    pub(super) fn render(self, text: &Text) -> Result<Self, Error> {
        Ok(match self {
            Self::Chat(messages, options) => Self::Rendered(text.render_with(&messages, &options)?),
            other => other,
        })
    }

    pub(super) fn encode(self, text: &Text) -> Result<Vec<u32>, Error> {
        match self {
            Self::Text(prompt) => text.encode(&prompt, true),
            Self::Tokens(tokens) => Ok(tokens),
            Self::Chat(messages, options) => text.encode_chat_with(&messages, &options),
            // The template writes all special tokens.
            Self::Rendered(prompt) => text.encode(&prompt, false),
        }
    }
}

/// How to generate the text.
#[derive(Debug)]
pub(super) struct Parameters {
    kind: Kind,
    /// Number of choices for each prompt.
    pub choices: u32,
    max_tokens: Option<u32>,
    pub min_tokens: u32,
    sampling: SamplingOptions,
    bias: Vec<(u32, f32)>,
    pub log_probs: Option<u32>,
    /// Whether the request says how a token is drawn, beside the temperature.
    draws: bool,
    seed: u64,
    ignore_ends: bool,
    stop_tokens: Vec<u32>,
    pub stop: Arc<[String]>,
    /// Whether special tokens are part of the text, by their names.
    pub special_tokens: bool,
    pub stream: bool,
    pub include_usage: bool,
}

impl Parameters {
    /// Maximum number of new tokens behind a prompt.
    fn new_tokens(&self, prompt: u32, most: &Most) -> u32 {
        let left = most.request_tokens.saturating_sub(prompt).max(1);
        let usual = match self.kind {
            // The default of OpenAI's interface.
            Kind::Completion => 16,
            Kind::Chat => most.answer_tokens,
        };
        self.max_tokens.unwrap_or(usual.min(left))
    }

    /// Refuses a prompt that is too long, as the engine would, before each of its choices gets it.
    pub(super) fn check(&self, prompt: usize, most: &Most) -> Result<(), Error> {
        let prompt = u32::try_from(prompt).unwrap_or(u32::MAX);
        let new = self.new_tokens(prompt, most);
        let got = u64::from(prompt) + u64::from(new);
        if got > u64::from(most.positions) {
            let limit = most.positions;
            return Err(Error::TooLong { got, limit });
        }
        if got > u64::from(most.limit) {
            let limit = most.limit;
            return Err(ScheduleError::RequestTooLong { prompt, new, limit }.into());
        }
        Ok(())
    }

    /// What the engine is asked for the choice of that index, but for its prompt of so many tokens. A request that breaks a limit is
    /// refused, not cut.
    pub(super) fn generation(&self, choice: usize, prompt: usize, most: &Most) -> Generation {
        let prompt_tokens = u32::try_from(prompt).unwrap_or(u32::MAX);
        let mut usual = most.usual;
        // Who says how a token is drawn wants one drawn.
        if self.draws && usual.temperature == Some(0.0) {
            usual.temperature = None;
        }
        // The first choice has the request's seed. An odd factor, so that no two choices have the same one.
        let apart = (choice as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let sampling = self.sampling.or(usual);
        Generation {
            max_new_tokens: self.new_tokens(prompt_tokens, most),
            sampling: sampling.sampling(1.0, self.seed.wrapping_add(apart)),
            rules: LogitRules {
                penalties: sampling.penalties(),
                bias: self.bias.clone(),
            },
            log_probs: self.log_probs,
            ignore_ends: self.ignore_ends,
            min_new_tokens: self.min_tokens,
            stop_tokens: self.stop_tokens.clone(),
            ..Generation::greedy(Vec::new(), 0)
        }
    }
}

/// What a request may have at most, and has if it does not say.
pub(super) struct Most {
    /// How tokens are drawn. What is open here is as in OpenAI's interface.
    pub usual: SamplingOptions,
    /// Positions of the model.
    pub positions: u32,
    /// Tokens of a prompt and its answer together, by the engine's limits.
    pub limit: u32,
    /// As many as the caches have room for, too.
    pub request_tokens: u32,
    /// Tokens of a chat's answer if the request gives no maximum.
    pub answer_tokens: u32,
}

/// Choices of a prompt, as in OpenAI's interface.
const MOST_N: u32 = 128;
/// As in OpenAI's interface.
const MOST_STOPS: usize = 4;
/// Each piece of a text is compared with all of them.
const MOST_STOP_BYTES: usize = 4096;
const MOST_STOP_TOKENS: usize = 64;

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

/// One or several prompts.
fn prompts(value: &Value) -> Option<Vec<Prompt>> {
    match value {
        Value::Array(several) if several.iter().any(|one| !one.is_number()) => {
            several.iter().map(prompt).collect()
        }
        one => prompt(one).map(|prompt| vec![prompt]),
    }
}

fn stop_tokens(value: &Value) -> Option<Vec<u32>> {
    let ids = value.as_array()?;
    let few = ids.len() <= MOST_STOP_TOKENS;
    few.then(|| ids.iter().map(fields::whole).collect())?
}

/// A text, or a list of some.
fn stops(value: &Value) -> Option<Vec<String>> {
    let stops = match value {
        Value::String(stop) => vec![stop.clone()],
        Value::Array(stops) => stops.iter().map(fields::text).collect::<Option<Vec<_>>>()?,
        _ => return None,
    };
    let bytes: usize = stops.iter().map(String::len).sum();
    let few = stops.len() <= MOST_STOPS && bytes <= MOST_STOP_BYTES;
    (few && !stops.iter().any(String::is_empty)).then_some(stops)
}

pub(super) fn parse(kind: Kind, body: &[u8], model: &str) -> Result<Asked, Refusal> {
    let mut fields = Fields::parse(body)?;
    let named = fields.take("model", "give a text", fields::text)?;
    if let Some(other) = named.filter(|name| name != model) {
        return Err(Refusal::no_model(&other, model));
    }
    let rule = "give a text, a list of token ids, or a list of several of these";
    let given = fields.take("prompt", rule, prompts)?;
    let messages = fields.take("messages", "give a list of messages", |value| {
        value.as_array().cloned()
    })?;
    let prompts = match (kind, given, messages) {
        (Kind::Completion, Some(prompts), None) => prompts,
        (Kind::Chat, None, Some(messages)) if messages.is_empty() => {
            let message = "messages is empty: give at least one message";
            return Err(Refusal::of("messages", message));
        }
        (Kind::Chat, None, Some(messages)) => {
            let messages = (0..).zip(messages);
            let messages = messages.map(|(index, value)| messages::parse(index, value));
            let messages = messages.collect::<Result<_, _>>()?;
            vec![Prompt::Chat(messages, chat::options(&mut fields)?)]
        }
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
    let stop = format!(
        "give a text, or up to {MOST_STOPS} of them, none empty, with {MOST_STOP_BYTES} bytes together"
    );
    let top_k = |value: &Value| match fields::integer(value) {
        Some(-1) => Some(0),
        _ => fields::whole(value),
    };
    let sampling = SamplingOptions {
        temperature: fields.number("temperature")?,
        top_k: fields.take(
            "top_k",
            "give a number of tokens, or -1 or 0 for all",
            top_k,
        )?,
        top_p: fields.number("top_p")?,
        min_p: fields.number("min_p")?,
        presence_penalty: fields.number("presence_penalty")?,
        frequency_penalty: fields.number("frequency_penalty")?,
        repetition_penalty: fields.number("repetition_penalty")?,
    };
    let seed = fields.take("seed", "give a whole number of 64 bits", fields::bits)?;
    let ids = format!("give a list of up to {MOST_STOP_TOKENS} token ids");
    // Some models mark their calls with special tokens, and the client reads the calls in the text.
    let has_tools =
        |prompt: &Prompt| matches!(prompt, Prompt::Chat(_, options) if !options.tools.is_empty());
    let skips = fields.flag("skip_special_tokens")?;
    let special_tokens = skips.map_or_else(|| prompts.iter().any(has_tools), |skips| !skips);
    let parameters = Parameters {
        kind,
        choices: choices(&mut fields)?,
        max_tokens,
        min_tokens: fields
            .take("min_tokens", "give a number of tokens", fields::whole)?
            .unwrap_or(0),
        ignore_ends: fields.flag("ignore_eos")?.unwrap_or(false),
        stop_tokens: fields
            .take("stop_token_ids", &ids, stop_tokens)?
            .unwrap_or_default(),
        draws: seed.is_some() || sampling.has_rules(),
        sampling,
        bias: logits::biases(&mut fields)?,
        log_probs: logits::log_probs(kind, &mut fields)?,
        seed: seed.unwrap_or_else(|| fastrand::u64(..)),
        stop: fields
            .take("stop", &stop, stops)?
            .unwrap_or_default()
            .into(),
        special_tokens,
        stream,
        include_usage: include_usage.unwrap_or(false),
    };
    fields.end(|name| fields::idle(kind, name))?;
    Ok(Asked {
        prompts,
        parameters,
    })
}

/// Number of choices for each prompt.
fn choices(fields: &mut Fields) -> Result<u32, Refusal> {
    let rule = format!("give a whole number from 1 to {MOST_N}");
    let read = |value: &Value| fields::whole(value).filter(|n| (1..=MOST_N).contains(n));
    Ok(fields.take("n", &rule, read)?.unwrap_or(1))
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
    // Random characters beside the text, which hide its length on the way. There are none here.
    options.flag("include_obfuscation")?;
    options.end(|_| Idle::Values(vec![json!(false)]))?;
    Ok(Some(include))
}

#[cfg(test)]
mod tests;

//! Chat templates: Jinja, with the few functions that models' templates call.

use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Environment, ErrorKind, Value, context, syntax::SyntaxConfig};
use serde::{Deserialize, Serialize};

use super::date::strftime;
use crate::Error;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The author: usually `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

const NAME: &str = "chat";
/// Limit of instructions per rendering: a template comes with the model and must not block the server.
const FUEL: u64 = 50_000_000;

#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

impl ChatTemplate {
    pub(super) fn new(source: String, bos: String, eos: String) -> Result<Self, Error> {
        let mut environment = Environment::new();
        // The settings of `transformers`.
        let mut syntax = SyntaxConfig::builder();
        syntax.trim_blocks(true).lstrip_blocks(true);
        environment.set_syntax(syntax.build().map_err(|error| refused(&error))?);
        environment.set_fuel(Some(FUEL));
        environment
            .set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |reason: String| {
            Err::<String, _>(minijinja::Error::new(ErrorKind::InvalidOperation, reason))
        });
        // Templates that write today's date call it.
        environment.add_function("strftime_now", |format: &str| {
            let now = SystemTime::now().duration_since(UNIX_EPOCH);
            strftime(format, now.map_or(0, |now| now.as_secs())).map_err(|wrong| {
                let reason = format!("strftime_now knows no {wrong}");
                minijinja::Error::new(ErrorKind::InvalidOperation, reason)
            })
        });
        environment
            .add_template_owned(NAME, source)
            .map_err(|error| refused(&error))?;
        Ok(Self {
            environment,
            bos,
            eos,
        })
    }

    pub(super) fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| refused(&error))?;
        let messages = messages.iter().map(|Message { role, content }| {
            Value::from_pairs([("role", role.as_str()), ("content", content.as_str())])
        });
        let rendered = template.render(context! {
            messages => messages.collect::<Vec<_>>(),
            add_generation_prompt => true,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        });
        rendered.map_err(|error| refused(&error))
    }
}

fn refused(error: &minijinja::Error) -> Error {
    let reason = error
        .detail()
        .map_or_else(|| error.to_string(), str::to_owned);
    Error::ChatTemplate { reason }
}

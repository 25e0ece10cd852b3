//! Chat templates: Jinja, with the few functions that models' templates call.

use std::{
    collections::BTreeSet,
    time::{SystemTime, UNIX_EPOCH},
};

use minijinja::{
    Environment, ErrorKind, Value, escape_formatter,
    syntax::SyntaxConfig,
    value::{Serde, ValueKind},
};
use serde::{Deserialize, Serialize};
use serde_json::Map;

use super::{date::strftime, tojson::tojson};
use crate::Error;

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// The author: usually `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// What a chat template gets beside the messages.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ChatOptions {
    /// Tools that the model may call, in OpenAI's format.
    pub tools: Vec<serde_json::Value>,
    /// Variables of the template, such as `enable_thinking` of Qwen 3's.
    pub variables: Map<String, serde_json::Value>,
}

const NAME: &str = "chat";
/// Limit of instructions per rendering: a template comes with the model and must not block the server.
const FUEL: u64 = 50_000_000;
/// Variables that are not the caller's.
const OWN: [&str; 6] = [
    "add_generation_prompt",
    "bos_token",
    "documents",
    "eos_token",
    "messages",
    "tools",
];
/// The roles that all templates know.
const ROLES: [&str; 3] = ["system", "user", "assistant"];

#[derive(Debug)]
pub(super) struct ChatTemplate {
    environment: Environment<'static>,
    /// Variables that it reads.
    variables: BTreeSet<String>,
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
        environment.add_filter("tojson", tojson);
        // As Python writes them.
        environment.set_formatter(|out, state, value| match value.kind() {
            ValueKind::None => Ok(out.write_str("None")?),
            ValueKind::Bool => Ok(out.write_str(if value.is_true() { "True" } else { "False" })?),
            _ => escape_formatter(out, state, value),
        });
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
            .add_template_owned(NAME, without_marks(&source))
            .map_err(|error| refused(&error))?;
        let template = environment.get_template(NAME);
        let template = template.map_err(|error| refused(&error))?;
        let mut variables: BTreeSet<_> = template.undeclared_variables(false).into_iter().collect();
        for (function, _) in environment.globals() {
            variables.remove(function);
        }
        Ok(Self {
            variables,
            environment,
            bos,
            eos,
        })
    }

    pub(super) fn render(
        &self,
        messages: &[impl Serialize],
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let messages: Vec<_> = messages.iter().map(|one| Value::from(Serde(one))).collect();
        self.check(options)?;
        let template = self
            .environment
            .get_template(NAME)
            .map_err(|error| refused(&error))?;
        let tools = Some(&options.tools).filter(|tools| !tools.is_empty());
        let own = [
            ("messages", messages.iter().cloned().collect()),
            ("tools", Value::from(Serde(tools))),
            ("documents", ().into()),
            ("add_generation_prompt", true.into()),
            ("bos_token", self.bos.as_str().into()),
            ("eos_token", self.eos.as_str().into()),
        ];
        let given = options.variables.iter();
        let given = given.map(|(name, value)| (name.as_str(), Value::from(Serde(value))));
        let rendered = template.render(Value::from_pairs(given.chain(own)));
        let rendered = rendered.map_err(|error| refused(&error))?;
        check_written(&messages, &rendered)?;
        Ok(rendered)
    }

    /// Refuses variables and tools that the template does not read.
    fn check(&self, options: &ChatOptions) -> Result<(), Error> {
        let left_out = |what: String| Err(Error::NotInTemplate { what });
        for name in options.variables.keys() {
            if OWN.contains(&name.as_str()) || !self.variables.contains(name) {
                let known = self.variables.iter().map(String::as_str);
                let known: Vec<_> = known.filter(|name| !OWN.contains(name)).collect();
                let known = match known.is_empty() {
                    true => "none".to_owned(),
                    false => known.join(", "),
                };
                return left_out(format!("a variable {name} (it has {known})"));
            }
        }
        if !options.tools.is_empty() && !self.variables.contains("tools") {
            return left_out("tools".to_owned());
        }
        Ok(())
    }
}

/// Refuses messages that the template left out: many templates write only the roles that they know. The first of each role,
/// and the first call, stand for the others.
fn check_written(messages: &[Value], rendered: &str) -> Result<(), Error> {
    let left_out = |what: String| Err(Error::NotInTemplate { what });
    let field = |of: &Value, name: &str| of.get_attr(name).unwrap_or_default();
    let mut known: BTreeSet<_> = ROLES.map(str::to_owned).into();
    for message in messages {
        let role = field(message, "role");
        let role = role.as_str().unwrap_or_default();
        if known.contains(role) {
            continue;
        }
        known.insert(role.to_owned());
        let content = field(message, "content");
        let content = content.as_str().unwrap_or_default().trim();
        // Some templates write results of tools as JSON.
        let json = serde_json::Value::from(content).to_string();
        if !rendered.contains(content) && !rendered.contains(json.trim_matches('"')) {
            return left_out(format!("messages of role {role:?}"));
        }
    }
    let mut calls = messages.iter().flat_map(|message| {
        let calls = field(message, "tool_calls").try_iter();
        calls.into_iter().flatten().next()
    });
    let name = calls
        .next()
        .map(|call| field(&field(&call, "function"), "name"));
    let name = name.as_ref().and_then(Value::as_str).unwrap_or_default();
    match rendered.contains(name) {
        true => Ok(()),
        false => left_out("tool_calls".to_owned()),
    }
}

/// Without `{% generation %}` and `{% endgeneration %}`, which mark for training what a model writes, and write nothing.
fn without_marks(source: &str) -> String {
    let mut rest = source;
    let mut text = String::with_capacity(source.len());
    while let Some((before, block)) = rest.split_once("{%") {
        text += before;
        text += "{%";
        let end = block.find("%}").unwrap_or(block.len());
        let inner = block[..end].trim_matches(['-', '+']).trim();
        text += &match inner {
            "generation" => block[..end].replace(inner, "if true"),
            "endgeneration" => block[..end].replace(inner, "endif"),
            _ => block[..end].to_owned(),
        };
        rest = &block[end..];
    }
    text + rest
}

fn refused(error: &minijinja::Error) -> Error {
    let reason = error
        .detail()
        .map_or_else(|| error.to_string(), str::to_owned);
    Error::ChatTemplate { reason }
}

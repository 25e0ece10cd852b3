//! The chat templates of a model's folder.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::{
    chat::{ChatOptions, ChatTemplate},
    optional,
    settings::Settings,
};
use crate::{Error, error::damaged};

/// Name of the chat template for conversations with tools, as in `transformers`.
const TOOL_USE: &str = "tool_use";
/// Name of the one for others, in a list of templates.
const DEFAULT: &str = "default";

/// The chat templates of a model.
#[derive(Debug)]
pub(super) struct Templates {
    usual: Option<ChatTemplate>,
    /// The one for conversations with tools, if it is another one.
    tools: Option<ChatTemplate>,
}

impl Templates {
    /// Reads them from files of their own; else from the tokenizer's settings; else from the file that processors for texts
    /// and pictures have.
    pub(super) fn read(folder: &Path, settings: &Settings) -> Result<Self, Error> {
        let file = optional(&folder.join("chat_template.jinja"))?;
        let listed = match (&file, &settings.chat_template) {
            (Some(_), _) => None,
            (None, Some(listed)) => Some(listed.clone()),
            (None, None) => of_processor(folder)?,
        };
        let named = |name: &str| named(listed.as_ref()?, name);
        let tools = folder.join(format!("additional_chat_templates/{TOOL_USE}.jinja"));
        let tools = optional(&tools)?.or_else(|| named(TOOL_USE));
        let usual = file.or_else(|| named(DEFAULT));
        let (bos, eos) = (settings.bos(), settings.eos());
        let template = |source: Option<String>| {
            let template =
                source.map(|source| ChatTemplate::new(source, bos.to_owned(), eos.to_owned()));
            template.transpose()
        };
        Ok(Self {
            usual: template(usual)?,
            tools: template(tools)?,
        })
    }

    pub(super) const fn has_any(&self) -> bool {
        self.usual.is_some()
    }

    /// The one that writes a conversation.
    pub(super) fn of(&self, options: &ChatOptions) -> Option<&ChatTemplate> {
        let for_tools = self.tools.as_ref();
        let for_tools = for_tools.filter(|_| !options.tools.is_empty());
        for_tools.or(self.usual.as_ref())
    }
}

/// What `chat_template.json` has, as of Mistral Small 3.1, whose tokenizer has no template.
fn of_processor(folder: &Path) -> Result<Option<Value>, Error> {
    #[derive(Deserialize)]
    struct Processor {
        chat_template: Option<Value>,
    }
    let path = folder.join("chat_template.json");
    let Some(text) = optional(&path)? else {
        return Ok(None);
    };
    match serde_json::from_str::<Processor>(&text) {
        Ok(read) => Ok(read.chat_template),
        Err(error) => Err(Error::Malformed {
            path,
            reason: damaged(&error),
        }),
    }
}

/// The template of this name from a list of named ones. A single one is the default.
fn named(templates: &Value, name: &str) -> Option<String> {
    match templates {
        Value::String(source) => Some(source.clone()).filter(|_| name == DEFAULT),
        Value::Array(named) => named
            .iter()
            .find(|one| one.get("name").and_then(Value::as_str) == Some(name))
            .and_then(|one| one.get("template")?.as_str().map(str::to_owned)),
        _ => None,
    }
}

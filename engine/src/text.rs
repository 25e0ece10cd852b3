//! Text to tokens and back: `tokenizer.json`, chat templates, and answers as they come.

mod chat;

use std::{fs, io, path::Path};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::Tokenizer;

pub use chat::Message;

use crate::Error;
use chat::ChatTemplate;

/// The text side of a model.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
}

/// What is read of `tokenizer_config.json`.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    bos_token: Option<Value>,
    eos_token: Option<Value>,
    chat_template: Option<Value>,
}

/// Special tokens stand as a string, or as an object with the string inside.
fn special(token: Option<Value>) -> String {
    let text = match token {
        Some(Value::String(text)) => Some(text),
        Some(Value::Object(object)) => object
            .get("content")
            .and_then(Value::as_str)
            .map(str::to_owned),
        _ => None,
    };
    text.unwrap_or_default()
}

impl Text {
    /// Reads `tokenizer.json`, and the chat template where there is one, from a model's folder.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Malformed`], [`Error::ChatTemplate`].
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(|error| Error::Read {
            path: path.clone(),
            error,
        })?;
        let tokenizer = Tokenizer::from_bytes(bytes).map_err(|error| Error::Malformed {
            path,
            reason: error.to_string(),
        })?;
        let path = folder.join("tokenizer_config.json");
        let config: TokenizerConfig = match optional(&path)? {
            None => TokenizerConfig::default(),
            Some(text) => serde_json::from_str(&text).map_err(|error| Error::Malformed {
                path,
                reason: error.to_string(),
            })?,
        };
        let source = match optional(&folder.join("chat_template.jinja"))? {
            Some(source) => Some(source),
            None => config.chat_template.and_then(default_template),
        };
        let template = source
            .map(|source| {
                ChatTemplate::new(source, special(config.bos_token), special(config.eos_token))
            })
            .transpose()?;
        Ok(Self {
            tokenizer,
            template,
        })
    }

    /// Tokens of a text; `special` adds those that the tokenizer puts around one (a begin, as a rule). Names of special
    /// tokens in the text become these tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoded = self
            .tokenizer
            .encode_fast(text, special)
            .map_err(tokenizer_error)?;
        Ok(encoded.get_ids().to_vec())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.tokenizer.decode(tokens, true).map_err(tokenizer_error)
    }

    /// Whether conversations can be rendered.
    #[must_use]
    pub const fn has_chat_template(&self) -> bool {
        self.template.is_some()
    }

    /// Tokens of a conversation up to where the model is to answer.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::ChatTemplate`], [`Error::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        // The template writes the special tokens, the first one too.
        self.encode(&self.render(messages)?, false)
    }

    /// A conversation as the model was trained to read it.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::ChatTemplate`].
    pub fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let template = self.template.as_ref().ok_or(Error::NoChatTemplate)?;
        template.render(messages)
    }
}

/// Several templates under names: the one that is called default.
fn default_template(template: Value) -> Option<String> {
    match template {
        Value::String(source) => Some(source),
        Value::Array(named) => named
            .iter()
            .find(|one| one.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|one| one.get("template")?.as_str().map(str::to_owned)),
        _ => None,
    }
}

fn optional(path: &Path) -> Result<Option<String>, Error> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::Read {
            path: path.to_owned(),
            error,
        }),
    }
}

fn tokenizer_error(error: tokenizers::Error) -> Error {
    Error::Tokenizer {
        reason: error.to_string(),
    }
}

/// Turns tokens into text as they come. A character whose bytes are several tokens appears with the last of them.
#[derive(Debug, Default)]
pub struct TextStream {
    /// Tokens whose text may change what comes behind them.
    tokens: Vec<u32>,
    /// How much of their text was given.
    given: usize,
    /// Of them, how many that text is of.
    settled: usize,
}

impl TextStream {
    /// The text that a token adds; empty where it is not whole yet.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn push(&mut self, text: &Text, token: u32) -> Result<String, Error> {
        self.tokens.push(token);
        let decoded = text.decode(&self.tokens)?;
        if decoded.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        self.take(text, &decoded)
    }

    /// What is left at the end: bytes that never became a character.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn finish(&mut self, text: &Text) -> Result<String, Error> {
        let decoded = text.decode(&self.tokens)?;
        self.take(text, &decoded)
    }

    fn take(&mut self, text: &Text, decoded: &str) -> Result<String, Error> {
        let new = decoded.get(self.given..).unwrap_or_default().to_owned();
        // The tokens before the last ones stay for the spaces between; older ones are done with.
        self.tokens.drain(..self.settled);
        self.settled = self.tokens.len();
        self.given = text.decode(&self.tokens)?.len();
        Ok(new)
    }
}

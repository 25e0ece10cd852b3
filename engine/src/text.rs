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

    /// The byte that a token is, where the decoder puts characters together from such tokens.
    fn byte(&self, token: u32) -> Result<Option<u8>, Error> {
        let name = self.tokenizer.id_to_token(token).unwrap_or_default();
        let digits = name
            .strip_prefix("<0x")
            .and_then(|name| name.strip_suffix('>'));
        let Some(byte) = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) else {
            return Ok(None);
        };
        // Others write the name.
        let is_byte = self.decode(&[token])?.chars().count() == 1;
        Ok(is_byte.then_some(byte))
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

/// Turns tokens into text as they come. A character whose bytes are several tokens appears with the last of them; bytes
/// that can become no character any more, and replacement characters that the model wrote, appear a few tokens later.
#[derive(Debug, Default)]
pub struct TextStream {
    /// Tokens whose text may change what comes behind them.
    tokens: Vec<u32>,
    /// Of them, how many are done with.
    settled: usize,
    /// Text of those, by themselves.
    before: String,
    /// What was given of the others' text.
    given: String,
    /// What was not: replacement characters, in whose place a character may come.
    held: String,
    /// Bytes of a character that is not whole, of tokens that are a byte each.
    bytes: Vec<u8>,
}

/// Bytes of a character that lacks one: decoders write as many replacement characters for them at most.
const MOST_HELD: usize = 3;
/// Tokens without an end of which all are decoded again with each that comes, and how many stay.
const MOST_PENDING: usize = 16;
const STAY: usize = 8;

impl TextStream {
    /// The text that a token adds; empty where it is not whole yet.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn push(&mut self, text: &Text, token: u32) -> Result<String, Error> {
        if let Some(byte) = text.byte(token)? {
            return self.push_byte(text, token, byte);
        }
        let cut = replacements(std::mem::take(&mut self.bytes).len());
        self.tokens.push(token);
        let pending = self.pending(text)?;
        let new = match pending.strip_prefix(&self.given) {
            Some(rest) => {
                let (new, held) = rest.split_at(rest.len() - unsure(rest));
                self.held = held.to_owned();
                new.to_owned()
            }
            // With this token bytes are a character that were given as none.
            None => std::mem::take(&mut self.held) + &text.decode(&[token])?,
        };
        if self.held.is_empty() {
            self.settle(text)?;
        } else {
            self.given += &new;
            self.shorten(text)?;
        }
        Ok(cut + &new)
    }

    /// Decoders read a run of bytes as a whole: a character that is not whole yet takes those before it along. So runs are decoded
    /// here, with a replacement character for each byte of none, as decoders have it.
    fn push_byte(&mut self, text: &Text, token: u32, byte: u8) -> Result<String, Error> {
        let mut new = std::mem::take(&mut self.held);
        self.bytes.push(byte);
        while let Err(error) = std::str::from_utf8(&self.bytes) {
            let Some(wrong) = error.error_len() else {
                break;
            };
            new += &replacements(wrong);
            self.bytes.drain(..wrong);
        }
        if let Ok(whole) = std::str::from_utf8(&self.bytes) {
            new += whole;
            self.bytes.clear();
        }
        self.tokens = vec![token];
        self.settled = 0;
        self.settle(text)?;
        Ok(new)
    }

    /// What is left at the end: bytes that never became a character.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn finish(&mut self, text: &Text) -> Result<String, Error> {
        let held = std::mem::take(&mut self.held);
        let cut = replacements(std::mem::take(&mut self.bytes).len());
        self.settle(text)?;
        Ok(held + &cut)
    }

    /// All of the text was given. The tokens before the last ones stay for the spaces between; older ones are done with.
    fn settle(&mut self, text: &Text) -> Result<(), Error> {
        self.tokens.drain(..self.settled);
        self.settled = self.tokens.len();
        self.before = text.decode(&self.tokens)?;
        self.given.clear();
        Ok(())
    }

    /// Text of the tokens that are not done with.
    fn pending(&self, text: &Text) -> Result<String, Error> {
        let decoded = text.decode(&self.tokens)?;
        match decoded.strip_prefix(&self.before) {
            Some(pending) => Ok(pending.to_owned()),
            // A run of bytes, one of which is wrong, is decoded otherwise than its beginning was.
            None => text.decode(&self.tokens[self.settled..]),
        }
    }

    /// Forgets tokens whose text was given, so that a long run without an end costs no more than a short one.
    fn shorten(&mut self, text: &Text) -> Result<(), Error> {
        if self.tokens.len() - self.settled <= MOST_PENDING {
            return Ok(());
        }
        let stay = self.tokens.len() - STAY;
        let decoded = text.decode(&self.tokens[stay..])?;
        if let Some(given) = decoded.strip_suffix(&self.held) {
            self.given = given.to_owned();
            self.tokens.drain(..stay);
            self.settled = 0;
            self.before.clear();
        }
        Ok(())
    }
}

fn replacements(count: usize) -> String {
    std::iter::repeat_n(char::REPLACEMENT_CHARACTER, count).collect()
}

/// Bytes of the replacement characters at a text's end that a character may take the place of.
fn unsure(text: &str) -> usize {
    let end = text.chars().rev().take(MOST_HELD);
    let end = end.take_while(|&end| end == char::REPLACEMENT_CHARACTER);
    end.map(char::len_utf8).sum()
}

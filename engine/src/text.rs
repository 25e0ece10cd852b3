//! Tokenization, detokenization of streamed answers, and chat templates.

mod chat;
mod date;
mod float;
mod limit;
mod methods;
mod piece;
mod settings;
mod spaces;
mod templates;
mod tojson;

use std::{fs, io, path::Path};

use serde::{Serialize, de::DeserializeOwned};
use tokenizers::Tokenizer;

pub use chat::{ChatOptions, Message};
pub use piece::TokenText;

use crate::{
    Error,
    error::{damaged, unread},
};
use settings::Settings;
use templates::Templates;

/// Tokenizer and chat template of a model.
#[derive(Debug)]
pub struct Text {
    tokenizer: Tokenizer,
    templates: Templates,
    /// Whether regular expressions split a text.
    has_regex: bool,
    end: Option<u32>,
}

impl Text {
    /// Reads `tokenizer.json` and, if there is one, the chat template from a model's folder.
    ///
    /// # Errors
    /// [`Error::Read`], [`Error::Malformed`], [`Error::BrokenTemplate`].
    pub fn read(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(|error| Error::Read {
            path: path.clone(),
            error,
        })?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes).map_err(|error| Error::Malformed {
            path,
            reason: unread(&bytes, &error),
        })?;
        // Settings of the program that saved the file. A prompt that was cut or padded would give another text.
        tokenizer
            .with_padding(None)
            .with_truncation(None)
            .map_err(tokenizer_error)?;
        let path = folder.join("tokenizer_config.json");
        let mut settings: Settings = read_json(&path)?.unwrap_or_default();
        if let Some(others) = read_json(&folder.join("special_tokens_map.json"))? {
            settings = settings.or(others);
        }
        let malformed = |reason: String| Error::Malformed {
            path: path.clone(),
            reason,
        };
        settings.add_tokens(&mut tokenizer).map_err(malformed)?;
        settings.apply(&mut tokenizer).map_err(malformed)?;
        Ok(Self {
            templates: Templates::read(folder, &settings)?,
            has_regex: spaces::has_regex(&tokenizer)?,
            end: tokenizer.token_to_id(settings.eos()),
            tokenizer,
        })
    }

    /// Tokens of a text. `special` adds the tokens that the tokenizer puts around a text (usually one at the
    /// beginning). Names of special tokens in the text become these tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`], also for more than 500,000 white-space characters in a row, if the tokenizer splits texts by
    /// regular expressions.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        if self.has_regex {
            spaces::check(text)?;
        }
        let encoded = self
            .tokenizer
            .encode_fast(text, special)
            .map_err(tokenizer_error)?;
        Ok(encoded.get_ids().to_vec())
    }

    /// Text of tokens, without special tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.decoded(tokens, false)
    }

    /// Text of tokens, with the names of special tokens: some models write their calls of tools with such tokens.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode_with_special_tokens(&self, tokens: &[u32]) -> Result<String, Error> {
        self.decoded(tokens, true)
    }

    fn decoded(&self, tokens: &[u32], special: bool) -> Result<String, Error> {
        let decoded = self.tokenizer.decode(tokens, !special);
        decoded.map_err(tokenizer_error)
    }

    /// The token that ends a text, as the tokenizer's settings name it. The model's configuration need not name it:
    /// [`Architecture::ends`](crate::Architecture::ends) may be empty, or have others only.
    #[must_use]
    pub const fn end(&self) -> Option<u32> {
        self.end
    }

    /// The byte that a token stands for, if the decoder assembles characters from byte tokens.
    fn byte(&self, token: u32) -> Result<Option<u8>, Error> {
        let name = self.tokenizer.id_to_token(token).unwrap_or_default();
        let digits = name
            .strip_prefix("<0x")
            .and_then(|name| name.strip_suffix('>'));
        let Some(byte) = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) else {
            return Ok(None);
        };
        // A decoder without byte tokens returns the token's name, which is longer.
        let is_byte = self.decode(&[token])?.chars().count() == 1;
        Ok(is_byte.then_some(byte))
    }

    /// Whether a token has no text: it has no name, or is special and those have none.
    fn is_silent(&self, token: u32, special: bool) -> bool {
        let known = self.tokenizer.get_added_vocabulary();
        let name = self.tokenizer.id_to_token(token);
        name.is_none_or(|name| !special && known.is_special_token(&name))
    }

    /// Whether there is a chat template.
    #[must_use]
    pub const fn has_chat_template(&self) -> bool {
        self.templates.has_any()
    }

    /// Tokens of a conversation, up to the position where the model answers.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::ChatTemplate`], [`Error::BrokenTemplate`], [`Error::ChatTooLong`], [`Error::Tokenizer`].
    pub fn encode_chat(&self, messages: &[Message]) -> Result<Vec<u32>, Error> {
        self.encode_chat_with(messages, &ChatOptions::default())
    }

    /// Like [`encode_chat`](Self::encode_chat), with tools and variables of the template, and messages that may have more
    /// fields than [`Message`]: `tool_calls`, or a `content` that is `null`.
    ///
    /// # Errors
    /// As [`encode_chat`](Self::encode_chat); [`Error::NotInTemplate`]; [`Error::ChatTooLong`] for a template that writes more
    /// than two bytes for each byte of the messages, tools and variables as JSON, and 256 KiB beside.
    pub fn encode_chat_with(
        &self,
        messages: &[impl Serialize],
        options: &ChatOptions,
    ) -> Result<Vec<u32>, Error> {
        // The template writes all special tokens, including the first.
        self.encode(&self.render_with(messages, options)?, false)
    }

    /// Renders a conversation with the chat template.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`], [`Error::ChatTemplate`], [`Error::BrokenTemplate`], [`Error::ChatTooLong`].
    pub fn render(&self, messages: &[Message]) -> Result<String, Error> {
        self.render_with(messages, &ChatOptions::default())
    }

    /// Like [`render`](Self::render), with what [`encode_chat_with`](Self::encode_chat_with) takes.
    ///
    /// # Errors
    /// As [`render`](Self::render); [`Error::NotInTemplate`], [`Error::ChatTooLong`].
    pub fn render_with(
        &self,
        messages: &[impl Serialize],
        options: &ChatOptions,
    ) -> Result<String, Error> {
        let template = self.templates.of(options);
        let template = template.ok_or(Error::NoChatTemplate)?;
        template.render(messages, options)
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

/// What a file that may be missing has.
fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>, Error> {
    let Some(text) = optional(path)? else {
        return Ok(None);
    };
    let read = serde_json::from_str(&text).map_err(|error| Error::Malformed {
        path: path.to_owned(),
        reason: damaged(&error),
    });
    read.map(Some)
}

fn tokenizer_error(error: tokenizers::Error) -> Error {
    Error::Tokenizer {
        reason: error.to_string(),
    }
}

/// Turns tokens into text as they arrive. A character whose bytes span several tokens appears with the last of them.
/// Bytes that can no longer become a character, and replacement characters that the model wrote, appear a few tokens
/// later.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    /// Tokens whose text may still affect the text of later tokens.
    tokens: Vec<u32>,
    /// How many of these tokens have had all their text returned.
    settled: usize,
    /// Text of those settled tokens, decoded alone.
    before: String,
    /// Returned text of the other tokens.
    given: String,
    /// Text not returned yet: replacement characters that a whole character may replace.
    held: String,
    /// Bytes of an incomplete character, from byte tokens.
    bytes: Vec<u8>,
    /// Whether special tokens have a text.
    special: bool,
}

/// Maximum bytes of an incomplete character. Decoders write at most one replacement character for each.
const MOST_HELD: usize = 3;
/// If more unsettled tokens than this are pending, all but the last `STAY` are dropped, because each new token decodes
/// all pending ones again.
const MOST_PENDING: usize = 16;
const STAY: usize = 8;

impl TextStream {
    /// The text that continues a prompt. Some decoders take away the space at the beginning of a text, which the
    /// continuation of another text must keep. For an answer that is a text of its own use [`TextStream::default`].
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn after(text: &Text, prompt: &[u32]) -> Result<Self, Error> {
        let tokens = prompt[prompt.len().saturating_sub(STAY)..].to_vec();
        Ok(Self {
            settled: tokens.len(),
            before: text.decode(&tokens)?,
            tokens,
            ..Self::default()
        })
    }

    /// The same stream, with the names of special tokens. For a stream without tokens yet.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn with_special_tokens(self, text: &Text) -> Result<Self, Error> {
        Ok(Self {
            before: text.decoded(&self.tokens, true)?,
            special: true,
            ..self
        })
    }

    /// The text that a token adds; empty if no character is complete yet.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn push(&mut self, text: &Text, token: u32) -> Result<String, Error> {
        if text.is_silent(token, self.special) {
            return Ok(String::new());
        }
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
            // With this token, bytes that were returned as replacement characters became a character.
            None => std::mem::take(&mut self.held) + &text.decoded(&[token], self.special)?,
        };
        if self.held.is_empty() {
            self.settle(text)?;
        } else {
            self.given += &new;
            self.shorten(text)?;
        }
        Ok(cut + &new)
    }

    /// Some decoders decode a run of bytes as a whole, so an incomplete character would spoil the ones before it. Runs
    /// are therefore decoded here. Each byte of no character becomes a replacement character, as in these decoders.
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

    /// The rest of the text: bytes that never became a character.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn finish(&mut self, text: &Text) -> Result<String, Error> {
        let held = std::mem::take(&mut self.held);
        let cut = replacements(std::mem::take(&mut self.bytes).len());
        self.settle(text)?;
        Ok(held + &cut)
    }

    /// Settles all tokens after all of their text was returned. The last ones with a text stay, because they decide about
    /// spaces before the next token; others are dropped.
    fn settle(&mut self, text: &Text) -> Result<(), Error> {
        let before = text.decoded(&self.tokens[self.settled..], self.special)?;
        self.given.clear();
        if before.is_empty() && self.settled > 0 {
            self.tokens.truncate(self.settled);
            return Ok(());
        }
        self.tokens.drain(..self.settled);
        self.settled = self.tokens.len();
        self.before = before;
        Ok(())
    }

    /// Text of the tokens that are not settled.
    fn pending(&self, text: &Text) -> Result<String, Error> {
        let decoded = text.decoded(&self.tokens, self.special)?;
        match decoded.strip_prefix(&self.before) {
            Some(pending) => Ok(pending.to_owned()),
            // An invalid byte in a run changes how the decoder reads the beginning of the run.
            None => text.decoded(&self.tokens[self.settled..], self.special),
        }
    }

    /// Drops tokens whose text was returned, so that a long run without a settled end stays cheap.
    fn shorten(&mut self, text: &Text) -> Result<(), Error> {
        if self.tokens.len() - self.settled <= MOST_PENDING {
            return Ok(());
        }
        let stay = self.tokens.len() - STAY;
        let decoded = text.decoded(&self.tokens[stay..], self.special)?;
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

/// Bytes of the replacement characters at the end of a text that a character may still replace.
fn unsure(text: &str) -> usize {
    let end = text.chars().rev().take(MOST_HELD);
    let end = end.take_while(|&end| end == char::REPLACEMENT_CHARACTER);
    end.map(char::len_utf8).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each new token decodes the pending ones again. Tokens without a text behind half a character were kept, all of them.
    #[test]
    fn few_tokens_are_pending_however_many_have_no_text() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2");
        let text = Text::read(&folder).unwrap();
        for silent in [0, u32::MAX] {
            let [first, last] = text.encode("é", false).unwrap()[..] else {
                panic!("two tokens");
            };
            let mut stream = TextStream::default();
            assert_eq!(stream.push(&text, first).unwrap(), "");
            for _ in 0..1000 {
                assert_eq!(stream.push(&text, silent).unwrap(), "");
            }
            assert!(stream.tokens.len() <= MOST_PENDING + 1);
            assert_eq!(stream.push(&text, last).unwrap(), "é");
        }
    }
}

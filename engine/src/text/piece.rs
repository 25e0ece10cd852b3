//! The text of single tokens.

use super::{Text, tokenizer_error};
use crate::Error;

/// What a token stands for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenText {
    /// Its text. Bytes that are no whole character appear as replacement characters.
    pub text: String,
    /// Its bytes. A character may span several tokens.
    pub bytes: Vec<u8>,
}

impl Text {
    /// The text of a token behind others, with its space if it begins with one. Special tokens have their names.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn token(&self, token: u32) -> Result<TokenText, Error> {
        if let Some(byte) = self.byte(token)? {
            let bytes = vec![byte];
            let text = String::from_utf8_lossy(&bytes).into_owned();
            return Ok(TokenText { text, bytes });
        }
        let name = self.tokenizer.id_to_token(token).unwrap_or_default();
        // Some decoders take one space or all of them away at the beginning of a text.
        let text = match name.starts_with('▁') {
            true => name.replace('▁', " "),
            false => {
                let decoded = self.tokenizer.decode(&[token], false);
                decoded.map_err(tokenizer_error)?
            }
        };
        let bytes = match text.contains(char::REPLACEMENT_CHARACTER) {
            true => name.chars().map(byte_of).collect(),
            false => None,
        };
        let bytes = bytes.unwrap_or_else(|| text.clone().into_bytes());
        Ok(TokenText { text, bytes })
    }
}

/// The byte that a character stands for in names of byte-level tokens: itself if it can be seen, else one of those
/// from 256 on.
fn byte_of(character: char) -> Option<u8> {
    let seen = |byte: &u8| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let code = u32::from(character);
    match u8::try_from(code) {
        Ok(byte) => Some(byte).filter(seen),
        Err(_) => (0..=u8::MAX)
            .filter(|byte| !seen(byte))
            .nth(code as usize - 256),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn names_of_bytes_are_those_of_byte_level_tokenizers() {
        for (character, byte) in [
            ('!', b'!'),
            ('Ġ', b' '),
            ('Ċ', b'\n'),
            ('ÿ', 255),
            ('Ń', 173),
        ] {
            assert_eq!(byte_of(character), Some(byte), "{character}");
        }
        assert_eq!(byte_of(' '), None);
        assert_eq!(byte_of('語'), None);
    }

    #[test]
    fn tokens_of_a_text_have_its_bytes() {
        for family in ["llama3", "qwen2", "gemma3", "mistral"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
            let text = Text::read(&folder.join(family)).unwrap();
            let written = " é 語 the planner, 🙂";
            let ids = text.encode(written, false).unwrap();
            let tokens: Vec<_> = ids.iter().map(|&id| text.token(id).unwrap()).collect();
            let bytes: Vec<u8> = tokens
                .iter()
                .flat_map(|token| token.bytes.clone())
                .collect();
            assert_eq!(
                String::from_utf8(bytes).unwrap().trim_start(),
                written.trim_start()
            );
            // Some of them are parts of characters.
            assert!(
                tokens
                    .iter()
                    .any(|token| std::str::from_utf8(&token.bytes).is_err())
            );
        }
    }
}

//! Limit of white space in a row. Regular expressions of tokenizers look for the last white-space character with another
//! character behind it (`\s+(?!\S)`). For more than a million characters `fancy-regex` gives up, and `tokenizers` leaves the
//! rest of the text in one piece, so that its tokens are others, without an error.

use serde_json::Value;
use tokenizers::Tokenizer;

use super::tokenizer_error;
use crate::Error;

const MOST: usize = 500_000;

/// Whether a tokenizer splits texts by regular expressions.
pub(super) fn has_regex(tokenizer: &Tokenizer) -> Result<bool, Error> {
    let splits = serde_json::to_value(tokenizer.get_pre_tokenizer());
    let splits = splits.map_err(|error| tokenizer_error(error.into()))?;
    Ok(is_in(&splits))
}

/// Whether there is a regular expression in the JSON of what splits texts.
fn is_in(value: &Value) -> bool {
    match value {
        Value::Object(fields) => fields.iter().any(|(name, value)| match name.as_str() {
            "Regex" => true,
            "use_regex" => value == true,
            _ => is_in(value),
        }),
        Value::Array(values) => values.iter().any(is_in),
        _ => false,
    }
}

/// Refuses a text with more white space in a row than regular expressions split.
pub(super) fn check(text: &str) -> Result<(), Error> {
    if text.len() <= MOST {
        return Ok(());
    }
    let (mut most, mut row) = (0, 0);
    for character in text.chars() {
        row += 1;
        if !character.is_whitespace() {
            row = 0;
        }
        most = most.max(row);
    }
    match most {
        0..=MOST => Ok(()),
        _ => Err(Error::Tokenizer {
            reason: format!("{most} white-space characters in a row are more than {MOST}"),
        }),
    }
}

//! From tokens to text, up to a stop text.

use std::sync::Arc;

use super::log_probs::Entry;
use crate::{Error, LogProbs, Text, TextStream};

/// Assembles the text from tokens, up to a stop text.
pub(super) struct Assembly {
    text: Arc<Text>,
    stream: TextStream,
    stops: Arc<[String]>,
    /// Tokens to come within which no stop text may end.
    before_stop: u32,
    /// Characters of the text that was returned.
    returned: usize,
    /// Text held back because it may be the beginning of a stop text.
    held: String,
    /// Bytes of it in which none may end.
    early: usize,
}

impl Assembly {
    pub(super) fn new(
        text: Arc<Text>,
        stream: TextStream,
        stops: Arc<[String]>,
        min_tokens: u32,
    ) -> Self {
        Self {
            text,
            stream,
            stops,
            before_stop: min_tokens,
            returned: 0,
            held: String::new(),
            early: 0,
        }
    }

    /// The place of a token that comes next, with its log-probabilities.
    pub(super) fn scored(&self, token: u32, log_probs: &LogProbs) -> Result<Entry, Error> {
        let offset = self.returned + self.held.chars().count();
        Entry::new(&self.text, offset, token, log_probs)
    }

    /// Returns the text that a token adds, and whether a stop text ends the answer.
    pub(super) fn push(&mut self, token: u32) -> Result<(String, bool), Error> {
        let pushed = self.added(token)?;
        self.returned += pushed.0.chars().count();
        Ok(pushed)
    }

    fn added(&mut self, token: u32) -> Result<(String, bool), Error> {
        self.held += &self.stream.push(&self.text, token)?;
        if self.before_stop > 0 {
            self.before_stop -= 1;
            self.early = self.held.len();
        } else if self.stop() {
            return Ok((std::mem::take(&mut self.held), true));
        }
        let held = &self.held;
        // A whole stop text that may not end the answer is text.
        let continues =
            |stop: &String, from: &str| stop.len() > from.len() && stop.starts_with(from);
        let begins = |at: usize| self.stops.iter().any(|stop| continues(stop, &held[at..]));
        let boundaries = held.char_indices().map(|(at, _)| at);
        let keep = boundaries
            .into_iter()
            .find(|&at| begins(at))
            .unwrap_or(held.len());
        let rest = self.held.split_off(keep);
        self.early = self.early.saturating_sub(keep);
        Ok((std::mem::replace(&mut self.held, rest), false))
    }

    /// Returns the text held back, and whether a stop text ends it.
    pub(super) fn finish(&mut self) -> Result<(String, bool), Error> {
        self.held += &self.stream.finish(&self.text)?;
        let ended = self.before_stop == 0 && self.stop();
        Ok((std::mem::take(&mut self.held), ended))
    }

    /// Cuts the held text before a stop text. Returns whether there is one.
    fn stop(&mut self) -> bool {
        let held = &self.held;
        let find = |stop: &String| {
            let mut ends_late = (self.early + 1).saturating_sub(stop.len())..=held.len();
            let from = ends_late.find(|&at| held.is_char_boundary(at))?;
            held[from..].find(stop).map(|at| from + at)
        };
        let first = self.stops.iter().filter_map(find).min();
        if let Some(at) = first {
            self.held.truncate(at);
        }
        first.is_some()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn assembly(stops: &[&str], min_tokens: u32) -> (Assembly, Arc<Text>) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/qwen2");
        let text = Arc::new(Text::read(&folder).unwrap());
        (
            Assembly::new(
                Arc::clone(&text),
                TextStream::default(),
                stops.iter().map(|&stop| stop.to_owned()).collect(),
                min_tokens,
            ),
            text,
        )
    }

    /// The last token may end within a character; its text then comes when the answer finishes.
    #[test]
    fn what_the_last_token_gives_may_end_the_answer() {
        let replacement = char::REPLACEMENT_CHARACTER.to_string();
        for (stop, expected) in [
            (replacement.as_str(), ("".to_owned(), true)),
            ("never", (replacement.clone(), false)),
        ] {
            let (mut assembly, text) = assembly(&[stop], 0);
            let cut = text.encode("é", false).unwrap()[0];
            assert_eq!(assembly.push(cut).unwrap(), (String::new(), false));
            assert_eq!(assembly.finish().unwrap(), expected, "{stop}");
        }
    }

    /// A stop text ends the answer if it ends behind the minimum, wherever it begins.
    #[test]
    fn stop_texts_may_begin_within_the_minimum_of_tokens() {
        for (stops, min_tokens, pushed, expected) in [
            (&["ab"][..], 1, &["a", "b"][..], &["", ""][..]),
            // Whole within the minimum, they are text.
            (&["ab"], 2, &["a", "b", "c"], &["", "ab", "c"]),
            (&["ab"], 2, &["a", "b", "ab"], &["", "ab", ""]),
            // So are those within another that may be beginning.
            (
                &["abcd", "bc"],
                3,
                &["a", "b", "c", "x"],
                &["", "", "", "abcx"],
            ),
            (&["abcd", "bc"], 3, &["a", "b", "c", "d"], &["", "", "", ""]),
            // One that shares its beginning with the end of another.
            (
                &["aba"],
                3,
                &["a", "b", "a", "b", "a"],
                &["", "", "ab", "", ""],
            ),
            (
                &["aéa"],
                4,
                &["a", "é", "a", "é", "a"],
                &["", "", "aé", "", ""],
            ),
        ] {
            let (mut assembly, text) = assembly(stops, min_tokens);
            let mut got = Vec::new();
            let mut ended = false;
            for piece in pushed {
                assert!(!ended, "{stops:?} {pushed:?}");
                let mut new = String::new();
                for token in text.encode(piece, false).unwrap() {
                    let (more, end) = assembly.push(token).unwrap();
                    new += &more;
                    ended |= end;
                }
                got.push(new);
            }
            assert_eq!(got, expected, "{stops:?} {pushed:?}");
            assert_eq!(ended, expected.last() == Some(&""), "{stops:?} {pushed:?}");
        }
    }
}

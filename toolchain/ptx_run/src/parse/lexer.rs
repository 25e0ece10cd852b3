//! Tokens of PTX.

/// A token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// An opcode, a name, a number, a directive.
    Word(&'a str),
    /// A single character.
    Mark(u8),
}

/// The tokens of a text with their lines, without comments.
pub struct Lexer<'a> {
    text: &'a str,
    at: usize,
    line: u32,
}

impl<'a> Lexer<'a> {
    pub fn new(text: &'a str, line: u32) -> Self {
        Self { text, at: 0, line }
    }
}

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

impl<'a> Iterator for Lexer<'a> {
    type Item = (u32, Token<'a>);

    fn next(&mut self) -> Option<Self::Item> {
        let bytes = self.text.as_bytes();
        loop {
            let byte = *bytes.get(self.at)?;
            match byte {
                b'\n' => {
                    self.line += 1;
                    self.at += 1;
                }
                b' ' | b'\t' | b'\r' => self.at += 1,
                b'/' if bytes.get(self.at + 1) == Some(&b'/') => {
                    self.at += self.text[self.at..].find('\n')?;
                }
                _ if in_word(byte) => {
                    let start = self.at;
                    while self.at < bytes.len() {
                        // `::` is part of an opcode; `:` after a name ends a label.
                        if in_word(bytes[self.at]) {
                            self.at += 1;
                        } else if bytes[self.at..].starts_with(b"::") {
                            self.at += 2;
                        } else {
                            break;
                        }
                    }
                    return Some((self.line, Token::Word(&self.text[start..self.at])));
                }
                b'"' => {
                    let start = self.at;
                    self.at += 1;
                    while *bytes.get(self.at)? != b'"' {
                        self.at += 1;
                    }
                    self.at += 1;
                    return Some((self.line, Token::Word(&self.text[start..self.at])));
                }
                _ => {
                    self.at += 1;
                    return Some((self.line, Token::Mark(byte)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opcodes_keep_their_double_colons_and_labels_lose_theirs() {
        let tokens: Vec<_> =
            Lexer::new("$L__BB0_1: // gone\n\tld.a::b.v2 {%r1, _}, [%rd1+-4];", 7).collect();
        let words: Vec<_> = tokens
            .iter()
            .map(|&(line, token)| match token {
                Token::Word(word) => (line, word.to_owned()),
                Token::Mark(mark) => (line, (mark as char).to_string()),
            })
            .collect();
        let expected = [
            (7, "$L__BB0_1"),
            (7, ":"),
            (8, "ld.a::b.v2"),
            (8, "{"),
            (8, "%r1"),
            (8, ","),
            (8, "_"),
            (8, "}"),
            (8, ","),
            (8, "["),
            (8, "%rd1"),
            (8, "+"),
            (8, "-"),
            (8, "4"),
            (8, "]"),
            (8, ";"),
        ];
        assert_eq!(words, expected.map(|(line, word)| (line, word.to_owned())));
    }
}

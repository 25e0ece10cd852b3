//! Text width and line breaks.

/// Upper bound of the width of text, from letters of DejaVu Sans, which is wider than other common fonts.
pub(crate) fn text_width(text: &str, size: u32) -> f64 {
    let of = |c: char| match c {
        'i' | 'j' | 'l' | '.' | ',' | ' ' | '\'' | '|' | '·' | '/' | ':' | ';' | 'I' => 0.34,
        'f' | 'r' | 't' | '(' | ')' | '[' | ']' | '-' => 0.42,
        'm' | 'M' | 'W' | '%' | '@' | '…' | '←' | '→' => 1.0,
        'w' | '+' | '=' | '<' | '>' | '×' | '±' | '~' | '#' => 0.85,
        'A'..='Z' => 0.79,
        '0'..='9' | 'a'..='z' | 'µ' | '–' | '_' | '"' => 0.64,
        // Letters of other scripts are about as wide as high.
        _ => 1.0,
    };
    // Fonts differ, so allow for a slightly wider one.
    const WIDER: f64 = 1.03;
    text.chars().map(of).sum::<f64>() * f64::from(size) * WIDER
}

/// Breaks text into lines no wider than `width`, between words if possible. Text of more than `MOST` lines ends with
/// `…`.
pub(crate) fn lines(text: &str, size: u32, width: f64) -> Vec<String> {
    const MOST: usize = 6;
    let mut lines: Vec<String> = vec![String::new()];
    for word in text.split(' ') {
        let line = lines.last_mut().expect("there is one");
        let joined = if line.is_empty() {
            word.to_owned()
        } else {
            format!("{line} {word}")
        };
        if text_width(&joined, size) <= width {
            *line = joined;
            continue;
        }
        if !line.is_empty() {
            lines.push(String::new());
        }
        for c in word.chars() {
            let line = lines.last_mut().expect("there is one");
            line.push(c);
            if text_width(line, size) > width {
                line.pop();
                lines.push(c.to_string());
            }
        }
    }
    if lines.len() > MOST {
        lines.truncate(MOST);
        let last = lines.last_mut().expect("there are some");
        while text_width(last, size) + f64::from(size) > width {
            last.pop();
        }
        last.push('…');
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_titles_are_broken_between_words() {
        let width = text_width("one two", 13);
        assert_eq!(lines("one two three", 13, width), ["one two", "three"]);
        assert!(lines(&"x".repeat(40), 13, width).len() > 3);
        let endless = lines(&"x".repeat(4000), 13, width);
        assert!(endless.len() == 6 && endless[5].ends_with('…'));
        assert!(endless.iter().all(|line| text_width(line, 13) <= width));
    }
}

//! PTX whose registers are numbered relative to each other: zstd packs it a third smaller.
//!
//! A compiler numbers registers in order, so each copy of an unrolled loop has other numbers. The differences between one
//! number and the next are the same in all copies: `%r823` after `%r820` becomes `%r+3`. Each class (`%r`, `%rd`, `%p`) is
//! counted by itself.

/// A register: where its number begins behind the class, and where it ends.
struct Register<'a> {
    class: &'a [u8],
    number: i64,
    len: usize,
}

/// The register at the start of `text`, which begins with `%`. Its number has a sign if it is `relative`.
fn register(text: &[u8], relative: bool) -> Option<Register<'_>> {
    let letters = text[1..].iter().take_while(|c| c.is_ascii_lowercase());
    let class = &text[..1 + letters.count()];
    let number = &text[class.len()..];
    let sign = match number.first()? {
        b'+' if relative => 1,
        b'-' if relative => -1,
        b'0'..=b'9' if !relative => 0,
        _ => return None,
    };
    let number = if relative { &number[1..] } else { number };
    // More digits are no register's number, and might not fit.
    let digits = number.iter().take_while(|c| c.is_ascii_digit()).take(9);
    let digits = &number[..digits.count()];
    if class.len() == 1 || digits.is_empty() {
        return None;
    }
    let number = digits
        .iter()
        .fold(0, |number, digit| number * 10 + i64::from(digit - b'0'));
    Some(Register {
        class,
        number: if sign < 0 { -number } else { number },
        len: class.len() + usize::from(relative) + digits.len(),
    })
}

/// The last number of each class.
#[derive(Default)]
struct Last<'a>(Vec<(&'a [u8], i64)>);

impl<'a> Last<'a> {
    fn of(&mut self, class: &'a [u8]) -> &mut i64 {
        let place = self.0.iter().position(|(known, _)| *known == class);
        let place = place.unwrap_or_else(|| {
            self.0.push((class, 0));
            self.0.len() - 1
        });
        &mut self.0[place].1
    }
}

/// Replaces the numbers of all registers.
fn rewritten(
    text: &[u8],
    relative: bool,
    mut write: impl FnMut(&mut i64, i64, &mut Vec<u8>) -> Option<()>,
) -> Option<Vec<u8>> {
    let (mut out, mut last) = (Vec::with_capacity(text.len()), Last::default());
    let mut rest = text;
    while let Some(at) = rest.iter().position(|c| *c == b'%') {
        out.extend_from_slice(&rest[..at]);
        rest = &rest[at..];
        match register(rest, relative) {
            Some(found) => {
                out.extend_from_slice(found.class);
                write(last.of(found.class), found.number, &mut out)?;
                rest = &rest[found.len..];
            }
            None => {
                out.push(b'%');
                rest = &rest[1..];
            }
        }
    }
    out.extend_from_slice(rest);
    Some(out)
}

/// PTX with relative numbers. `None` where [`absolute`] would not give the same text back.
#[cfg_attr(not(test), allow(dead_code, reason = "for those who write packages"))]
pub fn relative(ptx: &[u8]) -> Option<Vec<u8>> {
    let text = rewritten(ptx, false, |last, number, out| {
        out.extend_from_slice(format!("{:+}", number - *last).as_bytes());
        *last = number;
        Some(())
    })?;
    (absolute(&text).as_deref() == Some(ptx)).then_some(text)
}

/// The PTX of a text with relative numbers. `None` where a number would be negative.
#[cfg_attr(not(test), allow(dead_code, reason = "for those who read packages"))]
pub fn absolute(text: &[u8]) -> Option<Vec<u8>> {
    rewritten(text, true, |last, step, out| {
        *last += step;
        if *last < 0 {
            return None;
        }
        out.extend_from_slice(last.to_string().as_bytes());
        Some(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_count_from_the_last_of_their_class() {
        let ptx = b"add.s32 %r823, %r820, %tid.x;\nld [%rd5+16], %r824; st [%SP+8], %rd4;";
        let text = relative(ptx).unwrap();
        let expected = b"add.s32 %r+823, %r-3, %tid.x;\nld [%rd+5+16], %r+4; st [%SP+8], %rd-1;";
        assert_eq!(text, expected);
        assert_eq!(absolute(&text).unwrap(), ptx);
    }

    #[test]
    fn texts_that_would_not_come_back_are_refused() {
        assert_eq!(relative(b"mov %r1, %r+2;"), None);
        assert_eq!(relative(b"mov %r007, 1;"), None);
        assert_eq!(absolute(b"mov %r+1, %r-2;"), None);
        for ptx in [&b"100 %"[..], b"%%r", b"% 5", b"%r12345678901", b""] {
            let text = relative(ptx).unwrap();
            assert_eq!(absolute(&text).unwrap(), ptx);
        }
    }
}

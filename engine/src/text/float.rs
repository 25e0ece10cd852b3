//! Floating-point numbers as Python writes them.

/// The shortest digits that are this number, with an exponent where Python has one: below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    // Rust has the same digits and the same limits, but `1e-5` for `1e-05`, and `1e16` for `1e+16`.
    let text = format!("{number:?}");
    let Some((digits, exponent)) = text.split_once('e') else {
        return text;
    };
    match exponent.strip_prefix('-') {
        Some(exponent) => format!("{digits}e-{exponent:0>2}"),
        None => format!("{digits}e+{exponent:0>2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected texts are those of Python's `repr`.
    #[test]
    fn numbers_are_those_of_python() {
        for (number, expected) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e-4, "0.0001"),
            (9.99e-5, "9.99e-05"),
            (-1.5e-7, "-1.5e-07"),
            (5e-324, "5e-324"),
            (123_456_789.125, "123456789.125"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (1.25e20, "1.25e+20"),
            (f64::MAX, "1.7976931348623157e+308"),
            (f64::INFINITY, "inf"),
            (f64::NAN, "nan"),
        ] {
            assert_eq!(float(number), expected);
        }
    }
}

//! What was called, and what came of it.

use std::collections::BTreeMap;

/// Counts over cases.
#[derive(Clone, Debug, Default)]
pub struct Tally {
    /// Calls that were judged.
    pub calls: u64,
    /// Results that were right, by what is special about them.
    pub right: BTreeMap<&'static str, u64>,
    /// Wrong calls among them, by class.
    pub wrong: BTreeMap<&'static str, u64>,
    /// Right calls that were refused, mostly because nothing was compiled for them, by the error's first words.
    pub unsupported: BTreeMap<String, u64>,
}

impl Tally {
    pub fn add(&mut self, other: Self) {
        self.calls += other.calls;
        for (special, count) in other.right {
            *self.right.entry(special).or_default() += count;
        }
        for (class, count) in other.wrong {
            *self.wrong.entry(class).or_default() += count;
        }
        for (error, count) in other.unsupported {
            *self.unsupported.entry(error).or_default() += count;
        }
    }

    /// A result was right.
    pub fn right(&mut self, special: &[&'static str]) {
        for special in special {
            *self.right.entry(special).or_default() += 1;
        }
    }

    /// A wrong call was made, and refused.
    pub fn refused(&mut self, class: &'static str) {
        self.calls += 1;
        *self.wrong.entry(class).or_default() += 1;
    }

    /// A right call was refused, mostly for want of a kernel.
    pub fn unsupported(&mut self, error: &str) {
        // Numbers apart, as the same.
        let words: Vec<&str> = error
            .split_whitespace()
            .filter(|word| !word.chars().any(|c| c.is_ascii_digit()))
            .take(9)
            .collect();
        *self.unsupported.entry(words.join(" ")).or_default() += 1;
    }
}

/// What a case did that it must not.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The step; none: before the first.
    pub step: Option<usize>,
    pub what: String,
}

impl Failure {
    pub fn at(step: usize, what: String) -> Self {
        Self {
            step: Some(step),
            what,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.step {
            Some(step) => write!(f, "step {step}: {}", self.what),
            None => write!(f, "planning: {}", self.what),
        }
    }
}

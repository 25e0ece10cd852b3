//! Checks of the tensors of a call that the CPU and GPUs have in common, and the errors that they return.

use crate::{Error, problem::Dtype};

/// The error of an extent that does not follow a rule.
pub(crate) fn extent(
    tensor: &'static str,
    dimension: &'static str,
    got: usize,
    rule: impl Into<String>,
) -> Error {
    Error::Extent {
        tensor,
        dimension,
        got,
        rule: rule.into(),
    }
}

/// Checks an extent that `of` has, too.
pub(crate) fn check_extent(
    tensor: &'static str,
    dimension: &'static str,
    got: usize,
    expected: usize,
    of: &str,
) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    let rule = format!("{expected}, as {of}");
    Err(extent(tensor, dimension, got, rule))
}

/// Checks an extent that is not below `least`; `why` ends the sentence.
pub(crate) fn check_least(
    tensor: &'static str,
    dimension: &'static str,
    got: usize,
    least: usize,
    why: &str,
) -> Result<(), Error> {
    if got >= least {
        return Ok(());
    }
    let rule = format!("at least {least}{why}");
    Err(extent(tensor, dimension, got, rule))
}

/// Checks an element type that `other` has, too.
pub(crate) fn check_same(
    tensor: &'static str,
    got: Dtype,
    other: &'static str,
    expected: Dtype,
) -> Result<(), Error> {
    if got == expected {
        return Ok(());
    }
    Err(Error::DtypesDiffer {
        tensor,
        got,
        other,
        expected,
    })
}

/// Checks that an element type is one of `possible`, which `expected` lists in words.
pub(crate) fn check_dtype(
    tensor: &'static str,
    got: Dtype,
    possible: &[Dtype],
    expected: &'static str,
) -> Result<(), Error> {
    if possible.contains(&got) {
        return Ok(());
    }
    Err(Error::Dtype {
        tensor,
        got,
        expected,
    })
}

//! Launch bounds of kernels: comments in the kernel's body that become directives.

use super::{Entry, entries};

/// Prefix of a marker's words; see [`apply_markers`].
pub const MARKER: &str = "// tandem.kernel ";

/// Launch bounds and similar properties that a kernel states.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LaunchBounds {
    /// Maximum number of threads of a block: `.maxntid`.
    pub max_threads: Option<u32>,
    /// Number of blocks that must fit on a multiprocessor: `.minnctapersm`.
    pub min_blocks: Option<u32>,
    /// Maximum number of registers of a thread: `.maxnreg`.
    pub max_registers: Option<u32>,
    /// Number of blocks of a cluster along x: `.reqnctapercluster`, which makes a plain launch use clusters.
    pub cluster: Option<u32>,
    /// Whether the first parameter begins with a tensor map, which the hardware needs aligned to 64 bytes.
    pub tensor_maps: bool,
}

/// Why a marker could not be applied.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MarkerError {
    /// A word of the marker is unknown, or its number is invalid.
    #[error(
        "kernel {entry}: cannot read `{word}` in its launch bounds; known are max_threads, min_blocks, max_registers, cluster, tensor_maps, each with =number"
    )]
    Word {
        /// The kernel.
        entry: String,
        /// The word.
        word: String,
    },
    /// A kernel's marker is in the body of another entry, or in no entry.
    #[error(
        "the launch bounds of kernel {named} lie in {found}: a kernel must not be called from device code"
    )]
    Misplaced {
        /// The kernel that the marker names.
        named: String,
        /// Where the marker was found.
        found: String,
    },
    /// ptxas ignores `min_blocks` without `max_threads`.
    #[error("kernel {0} states min_blocks without max_threads")]
    MinBlocksAlone(String),
    /// `tensor_maps` for a kernel whose first parameter is not a struct aligned to 16 bytes.
    #[error(
        "kernel {entry} takes tensor maps, but its first parameter is `{parameter}`: make it a by-value struct of repr(C, align(16))"
    )]
    NoTensorMapParameter {
        /// The kernel.
        entry: String,
        /// Its first parameter as PTX declares it.
        parameter: String,
    },
}

/// Turns the markers in a module into directives.
///
/// A marker is a comment in the body of the entry that it names, with any of these words:
///
/// ```text
/// // tandem.kernel prefill_sm90 max_threads=384 min_blocks=1 cluster=2 tensor_maps=1
/// ```
///
/// They become `.maxntid`, `.minnctapersm`, `.maxnreg` (from `max_registers`) and `.reqnctapercluster` after the
/// parameter list. `tensor_maps` raises the alignment of the first parameter from 16 bytes, the most that rustc
/// can express, to 64.
///
/// # Errors
/// [`MarkerError`] if a marker is invalid, out of place or contradicts the entry.
pub fn apply_markers(ptx: &str) -> Result<String, MarkerError> {
    let mut amended = String::with_capacity(ptx.len() + 1024);
    let mut copied = 0;
    let entries = entries(ptx);
    reject_strays(ptx, &entries)?;
    for entry in &entries {
        let bounds = launch_bounds(ptx, entry)?;
        if bounds.tensor_maps {
            let (at, length) = first_alignment(ptx, entry)?;
            amended.push_str(&ptx[copied..at]);
            amended.push_str(".align 64");
            copied = at + length;
        }
        let after_list = (entry.parameters.end + 1).min(entry.body.start - 1);
        amended.push_str(&ptx[copied..after_list]);
        copied = after_list;
        let mut directive = |name: &str, value: Option<u32>, rest: &str| {
            if let Some(value) = value {
                amended.push_str(&format!("\n.{name} {value}{rest}"));
            }
        };
        directive("maxntid", bounds.max_threads, ", 1, 1");
        directive("minnctapersm", bounds.min_blocks, "");
        directive("maxnreg", bounds.max_registers, "");
        directive("reqnctapercluster", bounds.cluster, ", 1, 1");
    }
    amended.push_str(&ptx[copied..]);
    Ok(amended)
}

/// The launch bounds that the entry states; the default if it states none.
///
/// # Errors
/// As [`apply_markers`].
pub fn launch_bounds(ptx: &str, entry: &Entry) -> Result<LaunchBounds, MarkerError> {
    let mut bounds = LaunchBounds::default();
    // LLVM may have copied the comment together with a branch; all copies are equal.
    for marker in markers(&ptx[entry.body.clone()]) {
        let mut words = marker.split_whitespace();
        let named = words.next().unwrap_or_default();
        if named != entry.name {
            return Err(MarkerError::Misplaced {
                named: named.into(),
                found: format!("kernel {}", entry.name),
            });
        }
        for word in words {
            let unknown = || MarkerError::Word {
                entry: entry.name.into(),
                word: word.into(),
            };
            let (key, value) = word.split_once('=').ok_or_else(unknown)?;
            let value: u32 = value.parse().map_err(|_| unknown())?;
            match key {
                "max_threads" => bounds.max_threads = Some(value),
                "min_blocks" => bounds.min_blocks = Some(value),
                "max_registers" => bounds.max_registers = Some(value),
                "cluster" => bounds.cluster = Some(value),
                "tensor_maps" => bounds.tensor_maps = value != 0,
                _ => return Err(unknown()),
            }
        }
    }
    if bounds.min_blocks.is_some() && bounds.max_threads.is_none() {
        return Err(MarkerError::MinBlocksAlone(entry.name.into()));
    }
    Ok(bounds)
}

fn markers(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.trim_start().strip_prefix(MARKER))
}

fn reject_strays(ptx: &str, entries: &[Entry]) -> Result<(), MarkerError> {
    let mut outside = 0;
    for end in entries
        .iter()
        .map(|entry| &entry.body)
        .chain([&(ptx.len()..ptx.len())])
    {
        if let Some(marker) = markers(&ptx[outside..end.start]).next() {
            let named = marker.split_whitespace().next().unwrap_or_default().into();
            return Err(MarkerError::Misplaced {
                named,
                found: "a function that is no kernel".into(),
            });
        }
        outside = end.end;
    }
    Ok(())
}

/// Position and length of `.align 16` of the first parameter.
fn first_alignment(ptx: &str, entry: &Entry) -> Result<(usize, usize), MarkerError> {
    const EXPRESSIBLE: &str = ".align 16";
    let list = &ptx[entry.parameters.clone()];
    let first = list.split(',').next().unwrap_or_default();
    match first.find(".align 16 .b8") {
        Some(offset) => Ok((entry.parameters.start + offset, EXPRESSIBLE.len())),
        None => Err(MarkerError::NoTensorMapParameter {
            entry: entry.name.into(),
            parameter: first.trim().into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ptx::tests::MODULE;

    fn with_marker(words: &str) -> String {
        MODULE.replace(
            "max_threads=384 min_blocks=1 cluster=2 tensor_maps=1",
            words,
        )
    }

    #[test]
    fn bounds_become_directives_after_the_parameter_list() {
        let amended = apply_markers(MODULE).unwrap();
        assert!(
            amended.contains(
                ".ptr .align 1 copy_param_1\n)\n.maxntid 384, 1, 1\n.minnctapersm 1\n.reqnctapercluster 2, 1, 1\n{"
            ),
            "{amended}"
        );
        assert!(
            amended.contains(".param .align 64 .b8 copy_param_0[176]"),
            "{amended}"
        );
        assert!(
            amended.contains(".visible .entry plain()\n{"),
            "an entry without a marker changed: {amended}"
        );
    }

    #[test]
    fn only_what_is_stated_is_written() {
        let amended = apply_markers(&with_marker("max_threads=128")).unwrap();
        assert!(amended.contains(")\n.maxntid 128, 1, 1\n{"), "{amended}");
        assert!(amended.contains(".param .align 16 .b8"), "{amended}");
        assert_eq!(apply_markers(&with_marker("")).unwrap(), with_marker(""));
    }

    #[test]
    fn a_marker_that_cannot_be_honoured_is_an_error() {
        let word = |text: &str| apply_markers(&with_marker(text)).unwrap_err();
        assert!(
            matches!(word("max_threads=many"), MarkerError::Word { word, .. } if word == "max_threads=many")
        );
        assert!(matches!(word("speed=9"), MarkerError::Word { .. }));
        assert!(matches!(word("fast"), MarkerError::Word { .. }));
        assert_eq!(
            word("min_blocks=2"),
            MarkerError::MinBlocksAlone("copy".into())
        );
    }

    #[test]
    fn a_marker_out_of_place_is_an_error() {
        let inlined = MODULE.replace("tandem.kernel copy", "tandem.kernel other");
        assert!(
            matches!(apply_markers(&inlined), Err(MarkerError::Misplaced { named, .. }) if named == "other")
        );
        let stray = MODULE.replacen("\tret;", "\t// tandem.kernel copy max_threads=1", 1);
        assert!(
            matches!(apply_markers(&stray), Err(MarkerError::Misplaced { found, .. }) if found.contains("no kernel"))
        );
    }

    #[test]
    fn tensor_maps_want_a_struct_first() {
        let scalar = MODULE.replace(
            ".param .align 16 .b8 copy_param_0[176]",
            ".param .u64 copy_param_0",
        );
        let error = apply_markers(&scalar).unwrap_err();
        assert!(
            matches!(&error, MarkerError::NoTensorMapParameter { parameter, .. } if parameter == ".param .u64 copy_param_0")
        );
    }
}

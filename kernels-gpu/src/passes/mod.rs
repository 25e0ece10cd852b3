//! What goes around attention: merging partial states, appending keys and values, padding heads.

pub mod append;
pub mod merge;
pub mod pad;

/// The tables of all.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[&[crate::registry::KernelInfo]] = &[
    append::ROWS,
    merge::ROWS[0],
    merge::ROWS[1],
    merge::F32_ROWS,
    pad::ROWS,
];

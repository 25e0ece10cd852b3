//! The rows of `qkv_step` in the registry.

use super::{sine_bytes, threads};
use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

macro_rules! rows {
    ($half:ident $element:literal { $($heads:literal, $blocks:expr;)* }) => {
        &[$(KernelInfo {
            element: Element::$half,
            ..row(concat!("qkv_step_", $heads, "_", $element), false, $heads, $blocks)
        }),*]
    };
}

macro_rules! quantising_rows {
    ($half:ident $element:literal { $($heads:literal, $blocks:expr;)* }) => {
        &[$(KernelInfo {
            element: Element::$half,
            cache: Some(Element::E4m3),
            ..row(concat!("qkv_step_", $heads, "_", $element, "_e4m3"), true, $heads, $blocks)
        }),*]
    };
}

/// See the macro `table`.
pub const ROWS: &[&[KernelInfo]] = table!(list rows);
/// With 8-bit pages.
pub const QUANTISING_ROWS: &[&[KernelInfo]] = table!(list quantising_rows);

const fn row(name: &'static str, quantises: bool, heads: u32, blocks: u32) -> KernelInfo {
    let family = if quantises {
        Family::Quantise
    } else {
        Family::Step
    };
    KernelInfo {
        threads: threads(heads),
        registers: registers(threads(heads), blocks),
        // At most: a token has two groups at least, and 32 lanes at most.
        shared_bytes: if heads == 1 { 0 } else { sine_bytes(5, 2, 32) },
        ..KernelInfo::new(name, family, Arch::Sm80, Op::QkvStep { heads, quantises })
    }
}

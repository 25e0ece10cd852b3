//! The rows of the registry.

use super::{FEW, LONG, MANY, Shape, THREADS};
use crate::registry::{Arch, Element, Family, KernelInfo, Op, registers};

macro_rules! rows {
    ($output:ident $element:literal { $($what:ident: $shape:ident;)* }) => {
        &[$(KernelInfo {
            element: Element::$output,
            ..row(concat!("merge_", stringify!($what), "_", $element), $shape)
        }),*]
    };
}

/// See the macro `table`.
pub const ROWS: &[&[KernelInfo]] = table!(list rows);
/// See the macro `f32_table`.
pub const F32_ROWS: &[KernelInfo] = f32_table!(rows);

const fn row(name: &'static str, shape: Shape) -> KernelInfo {
    KernelInfo {
        threads: THREADS,
        registers: registers(THREADS, shape.blocks),
        ..KernelInfo::new(name, Family::Passes, Arch::Sm80, Op::Merge(shape))
    }
}

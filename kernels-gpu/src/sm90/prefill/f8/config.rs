//! The table of 8-bit prefill kernels.

/// The kernels, one per row and 16-bit float type of queries and outputs: `prefill_<rows>x<keys>_d<head
/// dimension>_<element>_f8[_<flag>…]`. All support scales, sinks and masks of the last keys.
#[doc(hidden)]
#[macro_export]
macro_rules! prefill_f8_table {
    ($as:ident $then:ident) => {
        $crate::each_half! { $as $then {
            // Rows × keys, head dimension, flags, columns of each product with values, stages of [queries, keys, values],
            // of half a block.
            128 x 256, 128, [],    [128, 128, 128], [2, 4, 4];
            128 x 256, 128, [cap], [128, 128, 128], [2, 4, 4];
            128 x 128, 256, [],    [ 96,  96,  64], [2, 3, 3];
            128 x 128, 256, [cap], [ 96,  96,  64], [2, 3, 3];
        }}
    };
}

#[cfg(not(target_arch = "nvptx64"))]
mod rows {
    use super::super::super::Shape;
    use crate::{
        has,
        registry::{Arch, Element, Family, KernelInfo, Loads, Op},
    };

    macro_rules! rows {
        ($half:ident $element:literal { $(
            $rows:literal x $keys:literal, $dim:literal, [$($flag:ident),*], $parts:expr, $stages:expr;
        )* }) => {
            &[$(KernelInfo {
                element: Element::$half,
                cap: has(&[$(stringify!($flag)),*], "cap"),
                ..row(
                    concat!("prefill_", $rows, "x", $keys, "_d", $dim, "_", $element, "_f8" $(, "_", stringify!($flag))*),
                    Shape::of_8_bits($rows, $keys, $dim, $stages),
                )
            }),*]
        };
    }

    /// See the macro `prefill_f8_table`.
    pub const ROWS: &[&[KernelInfo]] = crate::prefill_f8_table!(list rows);

    const fn row(name: &'static str, shape: Shape) -> KernelInfo {
        KernelInfo {
            loads: Loads::PagesOrRows,
            cache: Some(Element::E4m3),
            products_of_8_bits: true,
            rows: shape.rows(),
            keys: shape.keys,
            head_dim: shape.head_dim,
            value_dim: shape.value_dim,
            stages: shape.stages,
            threads: shape.threads(),
            registers: shape.registers()[0],
            shared_bytes: shape.shared_bytes(),
            ctas_per_sm: 1,
            ..KernelInfo::new(name, Family::PrefillF8, Arch::Sm90a, Op::Prefill)
        }
    }
}
#[cfg(not(target_arch = "nvptx64"))]
pub use rows::ROWS;

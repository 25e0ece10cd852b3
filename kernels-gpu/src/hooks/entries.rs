//! The entries of a variant: one for each row of a family's table that has only the `cap` flag.

/// One kernel of a variant, which is constructed from the launch's parameters and the variant's own.
#[doc(hidden)]
#[macro_export]
macro_rules! variant_entry {
    ($own:ty, #[kernel($($attribute:tt)*)] |$p:ident: $params:ty, $variant:ident| $run:expr) => {
        /// # Safety
        /// The parameters describe memory as their type says.
        #[::cuda_std::kernel($($attribute)*)]
        pub unsafe fn entry($p: $params, own: <$own as $crate::variant::FromLaunch>::Own) {
            // SAFETY: the host checked the parameters, and the caller of the run vouches for their addresses.
            let $variant = unsafe {
                <$own as $crate::variant::FromLaunch>::from_launch($p.attention.variant, &own)
            };
            // SAFETY: the caller's promise.
            unsafe { $run }
        }
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! prefill_of_variant {
    ($variant:tt $half:ident $element:literal { $(
        $rows:literal x $keys:literal, $dim:literal / $value_dim:literal, $flags:tt, $stages:expr;
    )* }) => {
        $($crate::prefill_of_variant! { @$flags $variant $half $element $rows $keys $dim $value_dim $stages })*
    };
    (@[cap] ($name:literal $variant:ty, $heads:tt $elements:tt) $half:ident $element:literal
        $rows:literal $keys:literal $dim:literal $value_dim:literal $stages:expr) => {
        #[allow(unused_imports, dead_code)]
        const _: () = {
            use $crate::{
                common::half,
                sm90::prefill::{Shape, run},
            };
            const SHAPE: Shape = Shape::new($rows, $keys, [$dim, $value_dim], $stages, false);

            $crate::variant_entry! {
                $variant,
                #[kernel(
                    name = ["prefill_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                    only = [($dim, $heads), ($half, $elements)],
                    max_threads = SHAPE.threads(),
                    max_registers = SHAPE.registers()[0],
                    tensor_maps = maps
                )]
                |p: $crate::abi::PrefillParams, variant| run::<
                    half::$half,
                    _,
                    true,
                    false,
                    { SHAPE.registers()[1] },
                    { SHAPE.registers()[2] },
                    { SHAPE.stages },
                    { SHAPE.value_stages },
                    { $keys / 2 },
                    { $keys / 4 },
                    { $value_dim / 2 },
                >(&p, maps, &variant, SHAPE)
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

#[doc(hidden)]
#[macro_export]
macro_rules! decode_mma_of_variant {
    ($variant:tt $half:ident $element:literal { $(
        $rows:literal x $keys:literal, $dim:literal, $flags:tt;
    )* }) => {
        $($crate::decode_mma_of_variant! { @$flags $variant $half $element $rows $keys $dim })*
    };
    (@[cap] ($name:literal $variant:ty, $heads:tt $elements:tt) $half:ident $element:literal $rows:literal $keys:literal $dim:literal) => {
        #[allow(unused_imports, dead_code)]
        const _: () = {
            use $crate::{
                common::{cache::BITS16, half},
                sm90::decode_mma::{producers, row_blocks, run, warps},
            };

            $crate::variant_entry! {
                $variant,
                #[kernel(
                    name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                    only = [($dim, $heads), ($half, $elements)],
                    max_threads = (warps($dim, $rows, BITS16) + producers($dim, $rows, BITS16)) * 32,
                    min_blocks = 1,
                    tensor_maps = maps
                )]
                |p: $crate::abi::DecodeParams, variant| run::<
                    half::$half,
                    $variant,
                    $dim,
                    $rows,
                    { warps($dim, $rows, BITS16) },
                    BITS16,
                    { $dim / 16 },
                    { row_blocks(BITS16) },
                    { $dim / 32 },
                >(&p, maps, variant)
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

#[doc(hidden)]
#[macro_export]
macro_rules! decode_wide_of_variant {
    ($variant:tt $half:ident $element:literal { $(
        $rows:literal x $keys:literal, $dim:literal, $flags:tt, $stages:literal, $ctas:literal;
    )* }) => {
        $($crate::decode_wide_of_variant! { @$flags $variant $half $element $rows $keys $dim $stages $ctas })*
    };
    (@[cap] ($name:literal $variant:ty, $heads:tt $elements:tt) $half:ident $element:literal
        $rows:literal $keys:literal $dim:literal $stages:literal $ctas:literal) => {
        #[allow(unused_imports, dead_code)]
        const _: () = {
            use $crate::{
                common::{cache::{BITS16, Stored}, half},
                sm90::decode_wgmma::wide::{Shape, run},
            };
            const SHAPE: Shape = Shape::new($rows, $keys, $dim, $stages, $ctas);

            $crate::variant_entry! {
                $variant,
                #[kernel(
                    name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                    only = [($dim, $heads), ($half, $elements)],
                    max_threads = SHAPE.threads(),
                    min_blocks = SHAPE.ctas_per_sm,
                    tensor_maps = maps
                )]
                |p: $crate::abi::DecodeParams, variant| run::<
                    Stored<half::$half, BITS16>,
                    $variant,
                    { SHAPE.registers()[0] },
                    { SHAPE.registers()[1] },
                    { SHAPE.registers()[2] },
                    { SHAPE.stages },
                    $dim,
                    { $dim / 32 },
                    { $keys / 2 },
                    { $keys / 4 },
                    { $dim / 2 },
                >(&p, maps, &variant, SHAPE)
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

#[doc(hidden)]
#[macro_export]
macro_rules! sm80_prefill_of_variant {
    ($variant:tt $half:ident $element:literal { $(
        $rows:literal x $keys:literal, $dim:literal, $flags:tt;
    )* }) => {
        $($crate::sm80_prefill_of_variant! { @$flags $variant $half $element $rows $keys $dim })*
    };
    (@[cap] ($name:literal $variant:ty, $heads:tt $elements:tt) $half:ident $element:literal $rows:literal $keys:literal $dim:literal) => {
        #[allow(unused_imports, dead_code)]
        const _: () = {
            use $crate::{
                common::half,
                sm80::prefill::{Shape, is_general, run},
            };
            const SHAPE: Shape = Shape { keys: $keys, head_dim: $dim };

            $crate::variant_entry! {
                $variant,
                #[kernel(
                    name = ["sm80_prefill_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                    only = [($dim, $heads), ($half, $elements)],
                    max_threads = SHAPE.threads(),
                    min_blocks = SHAPE.ctas_per_sm()
                )]
                |p: $crate::abi::GatherPrefillParams, variant| run::<
                    half::$half,
                    _,
                    { $keys / 2 },
                    { $dim / 2 },
                    { SHAPE.halves() as usize },
                    { is_general(&SHAPE, &["cap"]) },
                >(&p, &variant, SHAPE)
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

#[doc(hidden)]
#[macro_export]
macro_rules! sm80_decode_of_variant {
    ($variant:tt $half:ident $element:literal { $(
        $rows:literal x $keys:literal, $dim:literal, $flags:tt;
    )* }) => {
        $($crate::sm80_decode_of_variant! { @$flags $variant $half $element $rows $keys $dim })*
    };
    (@[cap] ($name:literal $variant:ty, $heads:tt $elements:tt) $half:ident $element:literal $rows:literal $keys:literal $dim:literal) => {
        #[allow(unused_imports, dead_code)]
        const _: () = {
            use $crate::{
                common::{cache::BITS16, half},
                sm80::decode::{Shape, run},
            };
            const SHAPE: Shape = Shape { head_dim: $dim, cache: BITS16, one_warp: false };

            $crate::variant_entry! {
                $variant,
                #[kernel(
                    name = ["sm80_decode_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                    only = [($dim, $heads), ($half, $elements)],
                    max_threads = SHAPE.threads(),
                    min_blocks = 2
                )]
                |p: $crate::abi::GatherDecodeParams, variant| run::<half::$half, _, BITS16, { $dim / 16 }, { $dim / 32 }, { SHAPE.ring() as usize }>(
                    &p, &variant, SHAPE,
                )
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

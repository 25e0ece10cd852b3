//! Kernels of a variant: those with a soft cap, compiled once more with the variant's hooks in its place.

#[cfg(not(target_arch = "nvptx64"))]
pub use host::{Hooks, HooksName};

#[cfg(not(target_arch = "nvptx64"))]
mod host {
    use core::fmt;

    use crate::registry::{Element, Family, KernelId, KernelInfo};

    /// What a variant is called: up to 23 letters, digits and underscores.
    #[derive(Clone, Copy, PartialEq, Eq, Hash)]
    pub struct HooksName {
        len: u8,
        bytes: [u8; Self::MOST],
    }

    impl HooksName {
        const MOST: usize = 23;

        /// None where it is no such name.
        #[must_use]
        pub const fn new(name: &str) -> Option<Self> {
            let name = name.as_bytes();
            let mut bytes = [0; Self::MOST];
            if name.is_empty() || name.len() > Self::MOST {
                return None;
            }
            let mut i = 0;
            while i < name.len() {
                if !(name[i].is_ascii_alphanumeric() || name[i] == b'_') {
                    return None;
                }
                bytes[i] = name[i];
                i += 1;
            }
            let len = name.len() as u8;
            Some(Self { len, bytes })
        }

        /// The name.
        #[must_use]
        pub fn as_str(&self) -> &str {
            std::str::from_utf8(&self.bytes[..self.len.into()]).unwrap_or_default()
        }
    }

    impl fmt::Display for HooksName {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.pad(self.as_str())
        }
    }

    impl fmt::Debug for HooksName {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            fmt::Debug::fmt(self.as_str(), f)
        }
    }

    #[cfg(feature = "serde")]
    impl serde::Serialize for HooksName {
        fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
            serializer.serialize_str(self.as_str())
        }
    }

    #[cfg(feature = "serde")]
    impl<'de> serde::Deserialize<'de> for HooksName {
        fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            let name = String::deserialize(deserializer)?;
            let wrong = || {
                let most = Self::MOST;
                serde::de::Error::custom(format!(
                    "a variant is called {name:?}: give up to {most} letters, digits and underscores"
                ))
            };
            Self::new(&name).ok_or_else(wrong)
        }
    }

    /// The kernels of a variant, as [`variant_kernels!`](crate::variant_kernels) makes them.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Hooks {
        /// What specifications call it, and how the entries end.
        pub name: HooksName,
        /// Size of what a run gives it, in bytes.
        pub own_bytes: usize,
        /// The families that it was instantiated for.
        pub families: &'static [Family],
        /// The head dimensions.
        pub heads: &'static [u32],
        /// The types of queries, keys, values and outputs.
        pub elements: &'static [Element],
    }

    impl Hooks {
        /// The kernels in whose place there is one of the variant's.
        pub fn kernels(&self) -> impl Iterator<Item = KernelId> + use<'_> {
            KernelId::all().filter(|id| self.replaces(id.info()))
        }

        /// Whether there is a kernel of the variant's in the place of this one.
        #[must_use]
        pub fn replaces(&self, row: &KernelInfo) -> bool {
            Self::replaceable(row)
                && self.families.contains(&row.family)
                && self.heads.contains(&row.head_dim)
                && self.elements.contains(&row.element)
        }

        /// Whether kernels of variants can stand in the place of this one: it runs alone, has a soft cap, and reads 16 bits.
        #[must_use]
        pub fn replaceable(row: &KernelInfo) -> bool {
            row.cap && row.cache.is_none() && !row.stands_in
        }

        /// The entry in the place of a kernel.
        #[must_use]
        pub fn entry(&self, row: &KernelInfo) -> String {
            let plain = row.name.trim_end_matches("_cap");
            format!("{plain}_{}", self.name)
        }
    }
}

/// Instantiates kernels of a [variant](crate::variant::FromLaunch): one line in a crate that is compiled for GPUs by
/// `cuda_builder`, and for the host as well, where it makes the [`Hooks`] that `tandem_attn` is given.
///
/// ```
/// use kernels_gpu::{abi::VariantParams, math::Real, variant::{FromLaunch, Pair, Variant}, variant_kernels};
///
/// /// Logits that grow with the number of keys that a query may see.
/// #[derive(Clone, Copy)]
/// pub struct Growing(VariantParams);
///
/// impl Variant for Growing {
///     const TRANSFORMS_LOGITS: bool = true;
///
///     fn params(&self) -> &VariantParams {
///         &self.0
///     }
///
///     fn logit<R: Real>(&self, dot: R, at: Pair) -> R {
///         let growth = 1.0 + at.position as f32 / 65536.0;
///         dot * R::from_f32(self.0.scale_log2 * growth)
///     }
/// }
///
/// impl FromLaunch for Growing {
///     type Own = ();
///
///     fn from_launch(params: VariantParams, _: &()) -> Self {
///         Self(params)
///     }
/// }
///
/// variant_kernels! { pub const GROWING: "growing" = [Prefill, DecodeMma, DecodeWgmma, Sm80Decode] of Growing; }
///
/// assert_eq!(GROWING.kernels().count(), 2 * (3 + 6 + 6 + 3));
/// ```
///
/// Families are those of the registry: `Prefill`, `DecodeMma` (8 and 16 rows) and `DecodeWgmma` (64 and 128 rows) are for
/// Hopper and pages of a multiple of 8 tokens; `Sm80Prefill` and `Sm80Decode` for GPUs from Ampere on, the latter also for
/// pages of any size on Hopper. Each comes for all head dimensions and both 16-bit floats, unless it is `where heads [128],
/// elements [Bf16]`, which compiles sooner.
#[macro_export]
macro_rules! variant_kernels {
    ($(#[$doc:meta])* $vis:vis const $hooks:ident: $name:literal = [$($family:ident),+ $(,)?] of $variant:ty;) => {
        $crate::variant_kernels! {
            $(#[$doc])*
            $vis const $hooks: $name = [$($family),+] of $variant where heads [64, 128, 256], elements [Bf16, F16];
        }
    };
    ($(#[$doc:meta])* $vis:vis const $hooks:ident: $name:literal = [$($family:ident),+ $(,)?] of $variant:ty where
        heads $heads:tt, elements $elements:tt;) => {
        const _: () = <$variant as $crate::variant::FromLaunch>::RUNS_ON_GPUS;

        $(#[$doc])*
        #[cfg(not(target_arch = "nvptx64"))]
        $vis const $hooks: $crate::Hooks = $crate::Hooks {
            name: match $crate::HooksName::new($name) {
                Some(name) => name,
                None => panic!("a variant is called by up to 23 letters, digits and underscores"),
            },
            own_bytes: ::core::mem::size_of::<<$variant as $crate::variant::FromLaunch>::Own>(),
            families: &[$($crate::registry::Family::$family),+],
            heads: &$heads,
            elements: {
                use $crate::registry::Element::*;
                &$elements
            },
        };

        $($crate::variant_kernels! { @$family ($name $variant, $heads $elements) })+
    };
    (@Prefill $variant:tt) => {
        #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
        const _: () = { $crate::prefill_table! { with prefill_of_variant $variant } };
    };
    (@DecodeMma $variant:tt) => {
        #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
        const _: () = { $crate::decode_mma_table! { with decode_mma_of_variant $variant } };
    };
    (@DecodeWgmma $variant:tt) => {
        #[cfg(all(target_arch = "nvptx64", target_feature = "sm_90a"))]
        const _: () = { $crate::decode_wide_table! { with decode_wide_of_variant $variant } };
    };
    (@Sm80Prefill $variant:tt) => {
        #[cfg(target_arch = "nvptx64")]
        const _: () = { $crate::sm80_prefill_table! { with sm80_prefill_of_variant $variant } };
    };
    (@Sm80Decode $variant:tt) => {
        #[cfg(target_arch = "nvptx64")]
        const _: () = { $crate::sm80_decode_table! { with sm80_decode_of_variant $variant } };
    };
}

/// Of a table's rows those with a soft cap and nothing else.
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
            use $crate::sm90::prefill::{Shape, run};
            const SHAPE: Shape =
                Shape::new($rows, $keys, [$dim, $value_dim], $stages, false, $crate::common::cache::BITS16);

            /// # Safety
            /// The parameters describe memory as `PrefillParams` says.
            #[::cuda_std::kernel(
                name = ["prefill_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                only = [($dim, $heads), ($half, $elements)],
                max_threads = SHAPE.threads(),
                max_registers = SHAPE.registers()[0],
                tensor_maps = maps
            )]
            pub unsafe fn entry(
                p: $crate::abi::PrefillParams,
                own: <$variant as $crate::variant::FromLaunch>::Own,
            ) {
                use $crate::common::{cache::Stored, half};
                let variant =
                    <$variant as $crate::variant::FromLaunch>::from_launch(p.attention.variant, &own);
                // SAFETY: the caller's promise.
                unsafe {
                    run::<
                        Stored<half::$half, { $crate::common::cache::BITS16 }>,
                        _,
                        true,
                        { SHAPE.registers()[1] },
                        { SHAPE.registers()[2] },
                        { SHAPE.stages },
                        { SHAPE.value_stages },
                        { $keys / 2 },
                        { $keys / 4 },
                        { $value_dim / 2 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

/// Of a table's rows those with a soft cap and nothing else.
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
                sm90::decode_mma::{producers, run, warps},
            };

            /// # Safety
            /// The parameters describe memory as `DecodeParams` says.
            #[::cuda_std::kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                only = [($dim, $heads), ($half, $elements)],
                max_threads = (warps($dim, $rows, BITS16) + producers($dim, $rows, BITS16)) * 32,
                min_blocks = 1,
                tensor_maps = maps
            )]
            pub unsafe fn entry(
                p: $crate::abi::DecodeParams,
                own: <$variant as $crate::variant::FromLaunch>::Own,
            ) {
                let variant =
                    <$variant as $crate::variant::FromLaunch>::from_launch(p.attention.variant, &own);
                // SAFETY: the caller's promise.
                unsafe {
                    run::<
                        half::$half,
                        $variant,
                        $dim,
                        $rows,
                        { warps($dim, $rows, BITS16) },
                        BITS16,
                        { $dim / 16 },
                        { $rows / 8 },
                        { $dim / 32 },
                    >(&p, maps, variant);
                }
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

/// Of a table's rows those with a soft cap and nothing else.
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
                common::half,
                sm90::decode_wgmma::wide::{Shape, run},
            };
            const SHAPE: Shape = Shape::new($rows, $keys, $dim, $stages, $ctas);

            /// # Safety
            /// The parameters describe memory as `DecodeParams` says.
            #[::cuda_std::kernel(
                name = ["decode_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                only = [($dim, $heads), ($half, $elements)],
                max_threads = SHAPE.threads(),
                min_blocks = SHAPE.ctas_per_sm,
                tensor_maps = maps
            )]
            pub unsafe fn entry(
                p: $crate::abi::DecodeParams,
                own: <$variant as $crate::variant::FromLaunch>::Own,
            ) {
                let variant =
                    <$variant as $crate::variant::FromLaunch>::from_launch(p.attention.variant, &own);
                // SAFETY: the caller's promise.
                unsafe {
                    run::<
                        half::$half,
                        $variant,
                        { SHAPE.registers().0 },
                        { SHAPE.registers().1 },
                        { SHAPE.stages },
                        $dim,
                        { $dim / 32 },
                        { $keys / 2 },
                        { $keys / 4 },
                        { $dim / 2 },
                    >(&p, maps, &variant, SHAPE);
                }
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

/// Of a table's rows those with a soft cap and nothing else.
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
                sm80::prefill::{Shape, run},
            };
            const SHAPE: Shape = Shape { keys: $keys, head_dim: $dim };

            /// # Safety
            /// The parameters describe memory as `GatherPrefillParams` says.
            #[::cuda_std::kernel(
                name = ["sm80_prefill_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                only = [($dim, $heads), ($half, $elements)],
                max_threads = SHAPE.threads(),
                min_blocks = 2
            )]
            pub unsafe fn entry(
                p: $crate::abi::GatherPrefillParams,
                own: <$variant as $crate::variant::FromLaunch>::Own,
            ) {
                let variant =
                    <$variant as $crate::variant::FromLaunch>::from_launch(p.attention.variant, &own);
                // SAFETY: the caller's promise.
                unsafe { run::<half::$half, _, { $keys / 2 }, { $dim / 2 }>(&p, &variant, SHAPE) };
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

/// Of a table's rows those with a soft cap and nothing else.
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
                common::half,
                sm80::decode::{Shape, run},
            };
            const SHAPE: Shape = Shape { head_dim: $dim };

            /// # Safety
            /// The parameters describe memory as `GatherDecodeParams` says.
            #[::cuda_std::kernel(
                name = ["sm80_decode_", $rows, "x", $keys, "_d", $dim, "_", $element, "_", $name],
                only = [($dim, $heads), ($half, $elements)],
                max_threads = SHAPE.threads(),
                min_blocks = 2
            )]
            pub unsafe fn entry(
                p: $crate::abi::GatherDecodeParams,
                own: <$variant as $crate::variant::FromLaunch>::Own,
            ) {
                let variant =
                    <$variant as $crate::variant::FromLaunch>::from_launch(p.attention.variant, &own);
                // SAFETY: the caller's promise.
                unsafe {
                    run::<half::$half, _, { $dim / 16 }, { $dim / 32 }, { SHAPE.ring() as usize }>(
                        &p, &variant, SHAPE,
                    );
                }
            }
        };
    };
    (@[$($flag:tt)*] $($row:tt)*) => {};
}

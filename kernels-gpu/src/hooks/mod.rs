//! Kernels of a variant: the kernels with a soft cap, compiled again with the variant's hooks instead.

mod entries;
#[cfg(not(target_arch = "nvptx64"))]
mod host;

#[cfg(not(target_arch = "nvptx64"))]
pub use host::{CheckOwn, Hooks, HooksName};

/// Instantiates kernels of a [variant](crate::variant::FromLaunch): one line in a crate that is compiled for GPUs by
/// `cuda_builder`, and also for the host, where it defines the [`Hooks`] to pass to `tandem_attn`.
///
/// ```
/// use kernels_gpu::{abi::VariantParams, math::Real, variant::{FromLaunch, Hook, Pair, Variant}, variant_kernels};
///
/// /// Logits that grow with the number of keys that a query may see.
/// #[derive(Clone, Copy)]
/// pub struct Growing(VariantParams);
///
/// impl Variant for Growing {
///     fn params(&self) -> &VariantParams {
///         &self.0
///     }
///
///     fn logit<R: Real>(&self, dot: R, at: Pair) -> impl Hook<R> {
///         let growth = 1.0 + at.position as f32 / 65536.0;
///         dot * R::from_f32(self.0.scale_log2 * growth)
///     }
/// }
///
/// impl FromLaunch for Growing {
///     type Own = ();
///
///     unsafe fn from_launch(params: VariantParams, _: &()) -> Self {
///         Self(params)
///     }
/// }
///
/// variant_kernels! { pub const GROWING: "growing" = [Prefill, DecodeMma, DecodeWgmma, Sm80Decode] of Growing; }
///
/// assert_eq!(GROWING.kernels().count(), 2 * (5 + 5 + 6 + 3));
/// ```
///
/// A hook that no kernel runs is a compile error, here one on keys:
///
/// ```compile_fail,E0080
/// use kernels_gpu::{abi::VariantParams, math::Real, variant::{FromLaunch, Hook, Key, Variant}, variant_kernels};
///
/// #[derive(Clone, Copy)]
/// pub struct Halved(VariantParams);
///
/// impl Variant for Halved {
///     fn params(&self) -> &VariantParams {
///         &self.0
///     }
///
///     fn key<R: Real>(&self, x: [R; 2], _: u32, _: Key) -> impl Hook<[R; 2]> {
///         x.map(|x| x * R::from_f32(0.5))
///     }
/// }
///
/// impl FromLaunch for Halved {
///     type Own = ();
///
///     unsafe fn from_launch(params: VariantParams, _: &()) -> Self {
///         Self(params)
///     }
/// }
///
/// variant_kernels! { pub const HALVED: "halved" = [Sm80Decode] of Halved; }
/// ```
///
/// So is `logits` without `logit`, which the other kernels run:
///
/// ```compile_fail,E0080
/// use kernels_gpu::{abi::VariantParams, variant::{FromLaunch, Hook, Pair, Variant}, variant_kernels};
///
/// #[derive(Clone, Copy)]
/// pub struct Four(VariantParams);
///
/// impl Variant for Four {
///     fn params(&self) -> &VariantParams {
///         &self.0
///     }
///
///     fn logits(&self, dots: [f32; 4], _: [Pair; 4]) -> impl Hook<[f32; 4]> {
///         dots
///     }
/// }
///
/// impl FromLaunch for Four {
///     type Own = ();
///
///     unsafe fn from_launch(params: VariantParams, _: &()) -> Self {
///         Self(params)
///     }
/// }
///
/// variant_kernels! { pub const FOUR: "four" = [Prefill] of Four; }
/// ```
///
/// Families are those of the registry. `Prefill`, `DecodeMma` (8 and 16 rows) and `DecodeWgmma` (64 and 128 rows) are
/// for Hopper; `Sm80Prefill` and `Sm80Decode` for GPUs from Ampere on. Each is compiled for all head dimensions and both 16-bit float types, unless
/// restricted by `where heads [128], elements [Bf16]`, which compiles faster.
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
            softmax: <$variant as $crate::variant::Variant>::SOFTMAX,
            check: $crate::CheckOwn::of::<$variant>(),
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

//! Whether a hook is the variant's own, read from its return type.

/// What a hook of a [`Variant`](super::Variant) returns: a `T`, or the private wrapper of the trait's own methods.
///
/// Executors and kernels leave out hooks that a variant does not implement. They see it in this type, so a hook cannot
/// be implemented and not run.
pub trait Hook<T>: Copy {
    /// Whether it is the result of a variant's own hook.
    const IS_OWN: bool;

    /// The result.
    fn plain(self) -> T;
}

impl<T: Copy> Hook<T> for T {
    const IS_OWN: bool = true;

    #[inline(always)]
    fn plain(self) -> T {
        self
    }
}

/// The result of a hook that the variant does not implement.
#[derive(Clone, Copy)]
pub(super) struct Unused<T>(pub(super) T);

impl<T: Copy> Hook<T> for Unused<T> {
    const IS_OWN: bool = false;

    #[inline(always)]
    fn plain(self) -> T {
        self.0
    }
}

/// Whether a hook without arguments is the variant's own.
pub(super) const fn own_0<'a, V: 'a, T, H: Hook<T>>(_: &impl Fn(&'a V) -> H) -> bool {
    H::IS_OWN
}

/// The same for a hook with one argument.
pub(super) const fn own_1<'a, V: 'a, A, T, H: Hook<T>>(_: &impl Fn(&'a V, A) -> H) -> bool {
    H::IS_OWN
}

/// The same for a hook with two arguments.
pub(super) const fn own_2<'a, V: 'a, A, B, T, H: Hook<T>>(_: &impl Fn(&'a V, A, B) -> H) -> bool {
    H::IS_OWN
}

/// The same for a hook with three arguments.
pub(super) const fn own_3<'a, V: 'a, A, B, C, T, H: Hook<T>>(
    _: &impl Fn(&'a V, A, B, C) -> H,
) -> bool {
    H::IS_OWN
}

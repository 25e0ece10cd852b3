//! Integer types of page ids and slots.

/// An integer that holds a page id or a slot, or a reference to one. Block tables are `Vec<usize>` in one program
/// and `u32` in another; slot mappings are often i64, with −1 for tokens that are not written. This trait is sealed.
pub trait Integer: Copy + Send + Sync + sealed::Sealed {
    /// The number itself: errors contain it, also if it is above `i64::MAX`.
    fn value(self) -> i128;
}

/// Reachable within this crate only, so that nobody else implements [`Integer`].
mod sealed {
    pub trait Sealed {}
}

macro_rules! integers {
    ($($integer:ty),+) => {$(
        impl sealed::Sealed for $integer {}
        impl Integer for $integer {
            #[inline(always)]
            fn value(self) -> i128 {
                self as i128
            }
        }
    )+};
}

integers!(i32, u32, i64, u64, isize, usize);

impl<T: sealed::Sealed> sealed::Sealed for &T {}

impl<T: Integer> Integer for &T {
    #[inline(always)]
    fn value(self) -> i128 {
        (*self).value()
    }
}

//! The integers in which page ids and slots are kept.

/// An integer that holds a page id or a slot, or a reference to one: block tables are `Vec<usize>` in one program
/// and `u32` in another, and slot mappings often i64 with −1 where nothing is to be written. The set is closed.
pub trait Integer: Copy + Send + Sync + sealed::Sealed {
    /// The number itself; what is above `i64::MAX`, and so no id, becomes that.
    fn value(self) -> i64;
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
            fn value(self) -> i64 {
                i64::try_from(self).unwrap_or(i64::MAX)
            }
        }
    )+};
}

integers!(i32, u32, i64, u64, isize, usize);

impl<T: sealed::Sealed> sealed::Sealed for &T {}

impl<T: Integer> Integer for &T {
    #[inline(always)]
    fn value(self) -> i64 {
        (*self).value()
    }
}

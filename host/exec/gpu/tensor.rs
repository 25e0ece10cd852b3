//! Tensors in device memory, as callers describe them.

use std::marker::PhantomData;

use kernels_gpu::divisor::Divisor;

use super::driver::DevicePtr;
use crate::{
    Error,
    checks::{check_dtype, check_extent},
    problem::{Dtype, ProblemError, Quantity},
};

/// The alignment of addresses for vector loads, in bytes.
pub(super) const VECTOR_BYTES: u32 = 16;

/// A tensor in device memory. It owns nothing: the memory may come from any CUDA crate.
///
/// ```
/// use tandem_attn::{gpu::DeviceTensor, problem::Dtype};
///
/// // The value part of a fused projection: [tokens, 8, 128] with rows of 6144 elements.
/// let v = DeviceTensor::new(0x7f00_0000_0000, Dtype::BF16, [17, 8, 128]).with_stride(0, 6144);
/// assert_eq!(v.strides, [6144, 128, 1]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTensor<const RANK: usize> {
    /// Device address of the first element.
    pub address: DevicePtr,
    /// Element type.
    pub dtype: Dtype,
    /// Extents, the slowest first.
    pub shape: [usize; RANK],
    /// Strides in elements.
    pub strides: [usize; RANK],
}

impl DeviceTensor<3> {
    /// `[tokens, q_heads, dim]` as `[tokens · kv_heads, group, dim]`, for
    /// page lists by head (`PagesByHead`). `None` where heads are not groups, or tokens have gaps between them.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn by_kv_head(&self, kv_heads: u32) -> Option<Self> {
        let ([tokens, q_heads, dim], kv_heads) = (self.shape, kv_heads as usize);
        let [token, head, element] = self.strides;
        let even = tokens < 2 || token == q_heads * head;
        if !even || kv_heads == 0 || !q_heads.is_multiple_of(kv_heads) {
            return None;
        }
        let group = q_heads / kv_heads;
        Some(Self {
            shape: [tokens * kv_heads, group, dim],
            strides: [group * head, head, element],
            ..*self
        })
    }
}

impl DeviceTensor<3> {
    /// So many neighbouring tokens as one, as [parts of several heads](crate::problem::Part::heads) count them.
    pub(super) fn tokens_together(&self, tensor: &'static str, heads: u32) -> Result<Self, Error> {
        if heads == 1 {
            return Ok(*self);
        }
        let ([tokens, of_token, dim], heads) = (self.shape, heads as usize);
        let [token, head, element] = self.strides;
        if token != of_token * head {
            return Err(Error::Stride {
                tensor,
                dimension: "tokens",
                got: token,
                rule: format!("{}, as in DeviceTensor::by_kv_head", of_token * head),
            });
        }
        Ok(Self {
            shape: [tokens / heads, of_token * heads, dim],
            strides: [token * heads, head, element],
            ..*self
        })
    }
}

impl DeviceTensor<3> {
    /// Some heads of each token: `[tokens, heads of the range, dim]`. `None` where there are no such heads.
    ///
    /// ```
    /// use tandem_attn::{gpu::DeviceTensor, problem::Dtype};
    ///
    /// let q = DeviceTensor::new(0x7f00_0000_0000, Dtype::BF16, [17, 8, 128]);
    /// let second = q.heads(4..8).expect("there are 8");
    /// assert_eq!((second.shape, second.address - q.address), ([17, 4, 128], 4 * 128 * 2));
    /// assert_eq!(q.heads(4..9), None);
    /// ```
    #[must_use]
    pub fn heads(&self, heads: std::ops::Range<u32>) -> Option<Self> {
        let (start, end) = (heads.start as usize, heads.end as usize);
        if start > end || end > self.shape[1] {
            return None;
        }
        Some(self.part(1, start..end))
    }
}

impl<const RANK: usize> DeviceTensor<RANK> {
    /// Some tokens, which are the first axis. `None` where there are no such tokens.
    ///
    /// ```
    /// use tandem_attn::{gpu::DeviceTensor, problem::Dtype};
    ///
    /// let out = DeviceTensor::new(0x7f00_0000_0000, Dtype::BF16, [17, 8, 128]);
    /// let last = out.tokens(12..17).expect("there are 17");
    /// assert_eq!((last.shape, last.address - out.address), ([5, 8, 128], 12 * 8 * 128 * 2));
    /// assert_eq!(out.tokens(12..18), None);
    /// ```
    #[must_use]
    pub fn tokens(&self, tokens: std::ops::Range<usize>) -> Option<Self> {
        let exists = tokens.start <= tokens.end && tokens.end <= *self.shape.first()?;
        exists.then(|| self.part(0, tokens))
    }

    /// A range of one axis, which has it.
    fn part(mut self, axis: usize, range: std::ops::Range<usize>) -> Self {
        self.address += (range.start * self.strides[axis]) as u64 * u64::from(self.dtype.bytes());
        self.shape[axis] = range.len();
        self
    }

    /// A dense tensor.
    #[must_use]
    pub const fn new(address: DevicePtr, dtype: Dtype, shape: [usize; RANK]) -> Self {
        let mut strides = [1; RANK];
        let mut axis = RANK;
        while axis > 1 {
            axis -= 1;
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        Self {
            address,
            dtype,
            shape,
            strides,
        }
    }

    /// The same with another stride of one axis.
    #[must_use]
    pub const fn with_stride(mut self, axis: usize, stride: usize) -> Self {
        self.strides[axis] = stride;
        self
    }

    /// Whether the tensor has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// All but the address.
    pub(super) const fn layout(&self) -> (Dtype, [usize; RANK], [usize; RANK]) {
        (self.dtype, self.shape, self.strides)
    }

    pub(super) fn check_address(&self, tensor: &'static str, align: u32) -> Result<(), Error> {
        check_address(tensor, self.address, self.is_empty(), align)
    }

    /// Checks that the axes from `first` on are dense.
    pub(super) fn check_dense(&self, tensor: &'static str, first: usize) -> Result<(), Error> {
        let mut dense = 1;
        for axis in (first..RANK).rev() {
            let got = self.strides[axis];
            // The stride of an axis with one element does not matter.
            if got != dense && self.shape[axis] > 1 {
                return Err(Error::Stride {
                    tensor,
                    dimension: match (axis + 1 == RANK, axis) {
                        (true, _) => "the elements of a row",
                        (false, 1) => "heads",
                        (false, _) => "tokens",
                    },
                    got,
                    rule: format!("{dense}"),
                });
            }
            dense *= self.shape[axis];
        }
        Ok(())
    }

    pub(super) fn check_f32(&self, tensor: &'static str) -> Result<(), Error> {
        check_dtype(tensor, self.dtype, &[Dtype::F32], "F32")
    }

    pub(super) fn check_16_bits(&self, tensor: &'static str) -> Result<(), Error> {
        check_16_bits(tensor, self.dtype)
    }

    pub(super) fn check_extent(
        &self,
        tensor: &'static str,
        dimension: &'static str,
        axis: usize,
        expected: usize,
        of: &str,
    ) -> Result<(), Error> {
        check_extent(tensor, dimension, self.shape[axis], expected, of)
    }
}

impl DeviceTensor<3> {
    /// Checks that tokens are aligned for vector loads, and that no token reaches into the next.
    pub(super) fn check_rows(&self, tensor: &'static str) -> Result<(), Error> {
        let (got, row) = (self.strides[0], self.shape[1] * self.shape[2]);
        // The stride of a single token does not matter.
        if got.is_multiple_of(8) && (got >= row || self.shape[0] <= 1) {
            return Ok(());
        }
        Err(Error::Stride {
            tensor,
            dimension: "tokens",
            got,
            rule: format!("a multiple of 8 and at least {row}"),
        })
    }
}

/// `len` values of type `T` in device memory; `T` is plain data of the crate's contract with the device.
///
/// ```
/// # use tandem_attn::gpu::DeviceArray;
/// let slots = DeviceArray::<u32>::new(0x7f00_0000_0000, 17);
/// ```
#[derive(Debug, PartialEq, Eq)]
pub struct DeviceArray<T> {
    /// Device address of the first value.
    pub address: DevicePtr,
    /// Number of values.
    pub len: usize,
    values: PhantomData<fn() -> T>,
}

// Not derived: a derive would require the same traits of `T`.
impl<T> Clone for DeviceArray<T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceArray<T> {}

impl<T> DeviceArray<T> {
    /// From an address and a number of values.
    #[must_use]
    pub const fn new(address: DevicePtr, len: usize) -> Self {
        Self {
            address,
            len,
            values: PhantomData,
        }
    }

    pub(super) fn check_address(&self, tensor: &'static str, align: u32) -> Result<(), Error> {
        check_address(tensor, self.address, self.len == 0, align)
    }
}

/// Checks the type of what kernels compute with.
pub(super) fn check_16_bits(tensor: &'static str, got: Dtype) -> Result<(), Error> {
    check_dtype(tensor, got, &[Dtype::BF16, Dtype::F16], "BF16 or F16")
}

pub(super) fn check_address(
    tensor: &'static str,
    address: DevicePtr,
    is_empty: bool,
    align: u32,
) -> Result<(), Error> {
    if is_empty {
        Ok(())
    } else if address == 0 {
        Err(Error::NullPointer { tensor })
    } else if !address.is_multiple_of(align.into()) {
        Err(Error::Misaligned {
            tensor,
            address,
            align,
        })
    } else {
        Ok(())
    }
}

/// The largest number that kernels divide.
pub(super) const COUNTED: u32 = Divisor::LIMIT - 1;

/// Converts a number to the 32 bits of kernel parameters, if it is at most `limit`.
pub(super) fn fits(what: Quantity, got: usize, limit: u32) -> Result<u32, ProblemError> {
    match u32::try_from(got) {
        Ok(fitting) if fitting <= limit => Ok(fitting),
        _ => Err(what.too_large(got as u64, limit.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The error says what lies that far apart, and not which axis it is.
    #[test]
    fn a_stride_is_named_by_what_it_leads_over() {
        let q = DeviceTensor::new(0x7f00_0000_0000, Dtype::BF16, [17, 8, 128]);
        let said = |tensor: DeviceTensor<3>, first| {
            tensor.check_dense("q", first).unwrap_err().to_string()
        };
        assert!(
            said(q.with_stride(2, 2), 1)
                .contains("a stride of 2 elements between the elements of a row: it must be 1")
        );
        assert!(said(q.with_stride(1, 120), 1).contains("between heads: it must be 128"));
        assert!(said(q.with_stride(0, 9), 0).contains("between tokens: it must be 1024"));
        assert_eq!(q.with_stride(0, 9).check_dense("q", 1), Ok(()));
    }
}

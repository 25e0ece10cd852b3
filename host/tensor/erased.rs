//! Tensors whose element type is known only at run time.

use super::{Element, ShapeError, Slice, SliceMut};
use crate::problem::Dtype;

/// A tensor in host memory with read access: elements of any type, a shape, and strides in elements.
///
/// The constructors check that every index of the shape is inside the elements.
///
/// ```
/// use tandem_attn::{half::bf16, problem::Dtype, tensor::TensorRef};
///
/// // The queries of a fused projection: 3 tokens in rows of 6 heads, of which 4 are query heads.
/// let qkv = vec![bf16::ZERO; 3 * 6 * 64];
/// let q = TensorRef::strided(&qkv, [3, 4, 64], [6 * 64, 64, 1])?;
/// assert_eq!((q.dtype(), q.shape()), (Dtype::BF16, [3, 4, 64]));
/// // Bytes from a file or another library.
/// let bytes = [0_u32; 8 * 64];
/// let rows = TensorRef::from_bytes(Dtype::F16, bytemuck::cast_slice(&bytes), [4, 4, 64])?;
/// assert_eq!(rows.strides(), [256, 64, 1]);
/// # Ok::<(), tandem_attn::tensor::ShapeError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct TensorRef<'a, const RANK: usize> {
    elements: Slice<'a>,
    layout: Layout<RANK>,
}

/// As [`TensorRef`], with write access.
#[derive(Debug)]
pub struct TensorMut<'a, const RANK: usize> {
    elements: SliceMut<'a>,
    layout: Layout<RANK>,
}

/// Extents, the slowest first, and strides in elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Layout<const RANK: usize> {
    shape: [usize; RANK],
    strides: [usize; RANK],
}

impl<const RANK: usize> Layout<RANK> {
    const fn dense(shape: [usize; RANK]) -> Self {
        let mut strides = [1_usize; RANK];
        let mut axis = RANK;
        while axis > 1 {
            axis -= 1;
            strides[axis - 1] = strides[axis].saturating_mul(shape[axis]);
        }
        Self { shape, strides }
    }

    /// Checks that this number of elements is enough.
    fn within(self, got: usize) -> Result<Self, ShapeError> {
        let axes = self.shape.iter().zip(self.strides);
        let needed = match self.shape.contains(&0) {
            true => 0,
            false => axes.fold(1, |reach: usize, (extent, stride)| {
                reach.saturating_add((extent - 1).saturating_mul(stride))
            }),
        };
        match got >= needed {
            true => Ok(self),
            false => Err(ShapeError::TooShort { got, needed }),
        }
    }

    const fn swapped(mut self, a: usize, b: usize) -> Self {
        (self.shape[a], self.shape[b]) = (self.shape[b], self.shape[a]);
        (self.strides[a], self.strides[b]) = (self.strides[b], self.strides[a]);
        self
    }
}

impl<'a, const RANK: usize> TensorRef<'a, RANK> {
    /// A dense tensor at the start of some elements.
    ///
    /// # Errors
    /// [`ShapeError::TooShort`].
    pub fn new<T: Element>(elements: &'a [T], shape: [usize; RANK]) -> Result<Self, ShapeError> {
        Self::strided(elements, shape, Layout::dense(shape).strides)
    }

    /// A tensor with gaps between its rows, or with its axes in another order than its memory.
    ///
    /// # Errors
    /// [`ShapeError::TooShort`].
    pub fn strided<T: Element>(
        elements: &'a [T],
        shape: [usize; RANK],
        strides: [usize; RANK],
    ) -> Result<Self, ShapeError> {
        Ok(Self {
            layout: Layout { shape, strides }.within(elements.len())?,
            elements: T::erase(elements),
        })
    }

    /// A dense tensor in bytes of the machine's order.
    ///
    /// # Errors
    /// [`ShapeError::Bytes`], [`ShapeError::TooShort`].
    pub fn from_bytes(
        dtype: Dtype,
        bytes: &'a [u8],
        shape: [usize; RANK],
    ) -> Result<Self, ShapeError> {
        let got = bytes.len();
        let elements = Slice::from_bytes(dtype, bytes).ok_or(ShapeError::Bytes { got, dtype })?;
        Ok(Self {
            layout: Layout::dense(shape).within(got / dtype.bytes() as usize)?,
            elements,
        })
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.elements.dtype()
    }

    /// Extents, the slowest first.
    #[must_use]
    pub const fn shape(&self) -> [usize; RANK] {
        self.layout.shape
    }

    /// Strides, in elements.
    #[must_use]
    pub const fn strides(&self) -> [usize; RANK] {
        self.layout.strides
    }

    /// The same elements with two axes exchanged: a pool of `[pages, kv_heads, page_size, head_dim]` becomes
    /// one of `[pages, page_size, kv_heads, head_dim]`.
    ///
    /// # Panics
    /// If there is no such axis.
    #[must_use]
    pub const fn swap_axes(mut self, a: usize, b: usize) -> Self {
        self.layout = self.layout.swapped(a, b);
        self
    }

    pub(crate) const fn elements(&self) -> Slice<'a> {
        self.elements
    }
}

impl<'a, const RANK: usize> TensorMut<'a, RANK> {
    /// A dense tensor at the start of some elements.
    ///
    /// # Errors
    /// [`ShapeError::TooShort`].
    pub fn new<T: Element>(
        elements: &'a mut [T],
        shape: [usize; RANK],
    ) -> Result<Self, ShapeError> {
        Self::strided(elements, shape, Layout::dense(shape).strides)
    }

    /// A tensor with gaps between its rows, or with its axes in another order than its memory.
    ///
    /// # Errors
    /// [`ShapeError::TooShort`].
    pub fn strided<T: Element>(
        elements: &'a mut [T],
        shape: [usize; RANK],
        strides: [usize; RANK],
    ) -> Result<Self, ShapeError> {
        Ok(Self {
            layout: Layout { shape, strides }.within(elements.len())?,
            elements: T::erase_mut(elements),
        })
    }

    /// A dense tensor in bytes of the machine's order.
    ///
    /// # Errors
    /// [`ShapeError::Bytes`], [`ShapeError::TooShort`].
    pub fn from_bytes(
        dtype: Dtype,
        bytes: &'a mut [u8],
        shape: [usize; RANK],
    ) -> Result<Self, ShapeError> {
        let got = bytes.len();
        let elements = SliceMut::from_bytes(dtype, bytes);
        Ok(Self {
            layout: Layout::dense(shape).within(got / dtype.bytes() as usize)?,
            elements: elements.ok_or(ShapeError::Bytes { got, dtype })?,
        })
    }

    /// The element type.
    #[must_use]
    pub fn dtype(&self) -> Dtype {
        self.view().dtype()
    }

    /// Extents, the slowest first.
    #[must_use]
    pub const fn shape(&self) -> [usize; RANK] {
        self.layout.shape
    }

    /// Strides, in elements.
    #[must_use]
    pub const fn strides(&self) -> [usize; RANK] {
        self.layout.strides
    }

    /// As [`TensorRef::swap_axes`].
    ///
    /// # Panics
    /// If there is no such axis.
    #[must_use]
    pub const fn swap_axes(mut self, a: usize, b: usize) -> Self {
        self.layout = self.layout.swapped(a, b);
        self
    }

    /// The same tensor with read access.
    #[must_use]
    pub fn view(&self) -> TensorRef<'_, RANK> {
        TensorRef {
            elements: self.elements.as_slice(),
            layout: self.layout,
        }
    }

    pub(crate) fn into_elements(self) -> SliceMut<'a> {
        self.elements
    }
}

impl<'a> TensorMut<'a, 3> {
    /// With an axis of one element before the last.
    pub(crate) fn with_axis(self) -> TensorMut<'a, 4> {
        let ([a, b, c], [of_a, of_b, of_c]) = (self.shape(), self.layout.strides);
        TensorMut {
            elements: self.elements,
            layout: Layout {
                shape: [a, b, 1, c],
                strides: [of_a, of_b, c, of_c],
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use crate::tensor::F8E4M3;

    #[test]
    fn a_tensor_lies_within_its_elements() {
        let elements = [0.0_f32; 24];
        let dense = TensorRef::new(&elements, [2, 3, 4]).unwrap();
        assert_eq!(dense.strides(), [12, 4, 1]);
        let short = |needed| ShapeError::TooShort { got: 24, needed };
        let fails = |shape, strides| TensorRef::strided(&elements, shape, strides).unwrap_err();
        assert_eq!(TensorRef::new(&elements, [5, 5]).unwrap_err(), short(25));
        // 2 · 8 + 3 · 2 + 1 + 1 elements: just enough, and one too few.
        assert!(TensorRef::strided(&elements, [3, 4, 2], [8, 2, 1]).is_ok());
        assert_eq!(fails([3, 4, 2], [8, 2, 2]), short(25));
        assert_eq!(
            fails([usize::MAX, 2, 1], [usize::MAX, 1, 1]),
            short(usize::MAX)
        );
        // An empty tensor needs no elements.
        assert!(TensorRef::strided(&elements, [0, 9], [1000, 1]).is_ok());
        assert!(TensorRef::new::<bf16>(&[], [7, 0]).is_ok());
    }

    #[test]
    fn elements_keep_their_type() {
        assert_eq!(
            TensorRef::new(&[f16::ONE; 4], [4]).unwrap().dtype(),
            Dtype::F16
        );
        let mut bytes = [0x38_u8; 8];
        let mut tensor = TensorMut::new(bytemuck::cast_slice_mut::<_, F8E4M3>(&mut bytes), [2, 4]);
        assert_eq!(tensor.as_mut().unwrap().dtype(), Dtype::F8E4M3);
        let swapped = tensor.unwrap().swap_axes(0, 1);
        assert_eq!((swapped.shape(), swapped.strides()), ([4, 2], [1, 4]));
        assert_eq!(swapped.view().strides(), [1, 4]);
    }

    #[test]
    fn bytes_are_elements_where_they_are_aligned_and_whole() {
        let words = [0x3f80_0000_u32; 4];
        let bytes: &[u8] = bytemuck::cast_slice(&words);
        let ones = TensorRef::from_bytes(Dtype::F32, bytes, [2, 2]).unwrap();
        assert!(matches!(ones.elements(), Slice::F32([1.0, 1.0, 1.0, 1.0])));
        for (dtype, bytes) in [(Dtype::F32, &bytes[..15]), (Dtype::BF16, &bytes[1..3])] {
            let got = bytes.len();
            let error = TensorRef::from_bytes(dtype, bytes, [1]).unwrap_err();
            assert_eq!(error, ShapeError::Bytes { got, dtype });
        }
        let mut bytes = [0_u32; 2];
        let short = TensorMut::from_bytes(Dtype::F16, bytemuck::cast_slice_mut(&mut bytes), [5]);
        assert_eq!(
            short.unwrap_err(),
            ShapeError::TooShort { got: 4, needed: 5 }
        );
    }
}

//! The columns of heads as slabs, in memory and in a box.

use crate::problem::{Dtype, Padding};

/// The columns of a head, or of several heads that are read as one, as slabs.
#[derive(Clone, Copy, Debug)]
pub struct Columns {
    /// Elements of a slab.
    pub width: u32,
    pub slabs: u32,
    /// Elements from one slab to the next. Slabs of padded heads may overlap.
    pub step: u32,
    /// Elements of a slab in shared memory: missing ones are zeros.
    pub boxed: u32,
    /// Slabs in shared memory, likewise.
    pub boxed_slabs: u32,
}

impl Columns {
    /// Of heads that have a kernel of their dimension: slabs of 128 bytes, or of a whole row.
    pub fn whole(dim: u32, dtype: Dtype) -> Self {
        let width = slab(dim, dtype);
        Self {
            width,
            slabs: dim / width,
            step: width,
            boxed: width,
            boxed_slabs: dim / width,
        }
    }

    /// Of 16-bit heads that a kernel pads.
    pub fn padded(padding: Padding) -> Self {
        debug_assert!(!padding.is_cut(), "such heads are copied row by row");
        Self {
            width: padding.dim.min(64),
            slabs: padding.slabs,
            step: padding.step,
            boxed: 64,
            boxed_slabs: padding.kernel_dim / 64,
        }
    }

    pub const fn elements(&self) -> u32 {
        (self.slabs - 1) * self.step + self.width
    }

    /// Elements between heads whose slabs all follow one another; none if slabs overlap or have gaps, or if kernels add some:
    /// a box would have slabs of the next head, and kernels step by as many slabs as they have.
    pub const fn dense(&self) -> Option<u32> {
        match self.step == self.width && self.slabs == self.boxed_slabs {
            true => Some(self.slabs * self.width),
            false => None,
        }
    }
}

/// Elements of a line in shared memory: 128 bytes, or a row if that is less.
fn slab(dim: u32, dtype: Dtype) -> u32 {
    dim.min(128 / dtype.bytes())
}

//! Descriptions of tensors for the tensor memory accelerator (sm_90).

use std::ffi::{c_uint, c_void};

use super::driver::{self, Check, DevicePtr, cuTensorMapEncodeTiled};
use crate::{Error, problem::Dtype};

/// How rows of a box are spread over the banks of shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Swizzle {
    /// As in global memory.
    None = 0,
    /// 16-byte pieces within 32 bytes.
    Bytes32 = 1,
    /// 16-byte pieces within 64 bytes.
    Bytes64 = 2,
    /// 16-byte pieces within 128 bytes: what wgmma reads without conflicts.
    Bytes128 = 3,
}

impl Swizzle {
    /// The widest inner row of a box, in bytes.
    const fn span(self) -> u64 {
        match self {
            Self::None => u64::MAX,
            Self::Bytes32 => 32,
            Self::Bytes64 => 64,
            Self::Bytes128 => 128,
        }
    }
}

/// A tensor of rank 1 to 5 and the box that one instruction moves. The fastest dimension comes first.
///
/// Strides need not grow from dimension to dimension: a head can be split into half rows, or a page into
/// groups of tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorMap<'a> {
    /// Names the tensor in errors.
    pub name: &'static str,
    /// Device address.
    pub address: DevicePtr,
    /// Element type.
    pub dtype: Dtype,
    /// Extents in elements.
    pub dims: &'a [u64],
    /// Strides in bytes of all dimensions but the first, which is dense.
    pub strides: &'a [u64],
    /// Extents of the box in elements.
    pub box_dims: &'a [u32],
    /// Layout of the box in shared memory.
    pub swizzle: Swizzle,
}

/// `CUtensorMap` with the alignment that the driver asks for.
#[repr(C, align(128))]
struct Encoded([u64; 16]);

impl TensorMap<'_> {
    /// The 128 bytes that a kernel takes, as a parameter or in memory aligned to 64 bytes.
    ///
    /// Boxes that reach over the tensor's edge read zeros there. L2 promotion is the inner row of the boxes in use, 128
    /// or 64 bytes: with 256 bytes, each line was requested twice, and decode took up to 7 % longer.
    ///
    /// # Errors
    /// [`Error::TensorMap`] if tensor maps cannot describe the tensor, [`Error::NullPointer`], and
    /// [`Error::OldDriver`], [`Error::NoDriver`] or [`Error::NoDevice`] without a driver that knows tensor maps and shows a GPU.
    pub fn encode(&self) -> Result<[u64; 16], Error> {
        self.check()?;
        driver::initialise(0)?;
        let mut map = Encoded([0; 16]);
        let element_strides = [1; 5];
        let data_type: c_uint = match self.dtype {
            Dtype::F8E4M3 | Dtype::F8E5M2 => 0,
            Dtype::F16 => 6,
            Dtype::F32 => 7,
            Dtype::BF16 => 9,
        };
        const NO_INTERLEAVE: c_uint = 0;
        const L2_64B: c_uint = 1;
        const L2_128B: c_uint = 2;
        let inner = self.box_dims[0] * self.dtype.bytes();
        let promotion = if inner > 64 { L2_128B } else { L2_64B };
        const FILL_ZEROS: c_uint = 0;
        // SAFETY: all arrays have an entry for each dimension, the map has size and alignment of a
        // `CUtensorMap`, and nothing is read through the tensor's address.
        let code = unsafe {
            cuTensorMapEncodeTiled(
                map.0.as_mut_ptr().cast::<c_void>(),
                data_type,
                self.dims.len() as u32,
                std::ptr::with_exposed_provenance_mut(self.address as usize),
                self.dims.as_ptr(),
                self.strides.as_ptr(),
                self.box_dims.as_ptr(),
                element_strides.as_ptr(),
                NO_INTERLEAVE,
                self.swizzle as c_uint,
                promotion,
                FILL_ZEROS,
            )
        };
        code.check("cuTensorMapEncodeTiled")?;
        Ok(map.0)
    }

    fn check(&self) -> Result<(), Error> {
        let tensor = self.name;
        let require = |holds: bool, what, got: u64, rule| {
            if holds {
                Ok(())
            } else {
                Err(Error::TensorMap {
                    tensor,
                    what,
                    got,
                    rule,
                })
            }
        };
        let rank = self.dims.len();
        require((1..=5).contains(&rank), "the rank", rank as u64, "1 to 5")?;
        require(
            self.strides.len() + 1 == rank,
            "the number of strides",
            self.strides.len() as u64,
            "one less than the rank",
        )?;
        require(
            self.box_dims.len() == rank,
            "the rank of the box",
            self.box_dims.len() as u64,
            "that of the tensor",
        )?;
        if self.address == 0 {
            return Err(Error::NullPointer { tensor });
        }
        require(
            self.address.is_multiple_of(16),
            "the address",
            self.address,
            "a multiple of 16",
        )?;
        for &dim in self.dims {
            require((1..=1 << 32).contains(&dim), "an extent", dim, "1 to 2^32")?;
        }
        for &stride in self.strides {
            let fits = stride.is_multiple_of(16) && stride < 1 << 40;
            require(
                fits,
                "a stride in bytes",
                stride,
                "a multiple of 16 below 2^40",
            )?;
        }
        for &extent in self.box_dims {
            require(
                (1..=256).contains(&extent),
                "an extent of the box",
                extent.into(),
                "1 to 256",
            )?;
        }
        let inner = u64::from(self.box_dims[0]) * u64::from(self.dtype.bytes());
        require(
            inner.is_multiple_of(16),
            "the inner row of the box in bytes",
            inner,
            "a multiple of 16",
        )?;
        require(
            inner <= self.swizzle.span(),
            "the inner row of the box in bytes",
            inner,
            "within the span of the swizzle",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Pages of 16 tokens, 8 heads of 128 in bf16: half rows of 64 elements, as prefill loads them.
    const PAGES: TensorMap = TensorMap {
        name: "k",
        address: 1 << 20,
        dtype: Dtype::BF16,
        dims: &[64, 8, 16, 2, 1000],
        strides: &[2048, 128, 16384, 32768],
        box_dims: &[64, 8, 2, 2, 1],
        swizzle: Swizzle::Bytes128,
    };

    fn refused(map: TensorMap<'_>) -> (&'static str, u64) {
        match map.check() {
            Err(Error::TensorMap { what, got, .. }) => (what, got),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_page_pool_passes() {
        assert_eq!(PAGES.check(), Ok(()));
    }

    #[test]
    fn each_limit_is_checked() {
        let map = PAGES;
        assert_eq!(
            refused(TensorMap {
                dims: &[],
                strides: &[],
                box_dims: &[],
                ..map
            }),
            ("the rank", 0)
        );
        assert_eq!(
            refused(TensorMap {
                dims: &[1; 6],
                strides: &[16; 5],
                box_dims: &[1; 6],
                ..map
            }),
            ("the rank", 6)
        );
        assert_eq!(
            refused(TensorMap {
                strides: &[16; 3],
                ..map
            }),
            ("the number of strides", 3)
        );
        assert_eq!(
            refused(TensorMap {
                box_dims: &[64; 4],
                ..map
            }),
            ("the rank of the box", 4)
        );
        assert_eq!(refused(TensorMap { address: 8, ..map }), ("the address", 8));
        assert_eq!(
            refused(TensorMap {
                dims: &[64, 8, 0, 2, 1000],
                ..map
            }),
            ("an extent", 0)
        );
        assert_eq!(
            refused(TensorMap {
                strides: &[2040, 128, 16384, 32768],
                ..map
            }),
            ("a stride in bytes", 2040)
        );
        assert_eq!(
            refused(TensorMap {
                strides: &[1 << 40, 128, 16384, 32768],
                ..map
            }),
            ("a stride in bytes", 1 << 40)
        );
        assert_eq!(
            refused(TensorMap {
                box_dims: &[64, 257, 2, 2, 1],
                ..map
            }),
            ("an extent of the box", 257)
        );
        assert_eq!(
            refused(TensorMap {
                box_dims: &[12, 8, 2, 2, 1],
                ..map
            }),
            ("the inner row of the box in bytes", 24)
        );
        assert_eq!(
            refused(TensorMap {
                swizzle: Swizzle::Bytes64,
                ..map
            }),
            ("the inner row of the box in bytes", 128)
        );
        assert_eq!(
            TensorMap { address: 0, ..map }.check(),
            Err(Error::NullPointer { tensor: "k" })
        );
    }
}

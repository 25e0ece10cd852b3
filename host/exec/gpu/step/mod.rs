//! The step around attention, on the GPU: see [`step`](crate::step).

mod logits;
mod qkv;
mod rows;
mod sample;

pub use qkv::{DeviceRope, QkNorm, QkvStep};

use kernels_gpu::step::VECTOR;

use super::{
    DeviceTensor, Gpu,
    launch::Launch,
    tensor::{COUNTED, VECTOR_BYTES, fits},
};
use crate::{
    Error,
    checks::{check_same, extent},
    problem::{Dtype, Quantity},
};

impl Gpu {
    /// The launch of a kernel of a step. On Hopper it may start while the launch before it on the stream still runs: these
    /// kernels begin by waiting for its end.
    fn step_launch(&self, blocks: u32, threads: u32) -> Launch {
        Launch {
            overlap: self.overlaps(),
            ..Launch::new(blocks, threads)
        }
    }
}

/// Checks that rows of 16-bit elements are dense, consist of whole vectors, and are aligned to vectors.
fn check_rows<const RANK: usize>(
    name: &'static str,
    tensor: &DeviceTensor<RANK>,
    dtype: Dtype,
) -> Result<(), Error> {
    tensor.check_16_bits(name)?;
    check_same(name, tensor.dtype, "the input", dtype)?;
    tensor.check_dense(name, RANK - 1)?;
    tensor.check_address(name, VECTOR_BYTES)?;
    let width = tensor.shape[RANK - 1];
    if width == 0 || !width.is_multiple_of(VECTOR as usize) {
        let rule = format!("a multiple of {VECTOR}");
        return Err(extent(name, "elements in a row", width, rule));
    }
    for axis in 0..RANK - 1 {
        vectors(name, tensor.strides[axis])?;
    }
    Ok(())
}

/// A stride of elements, in vectors.
fn vectors(tensor: &'static str, got: usize) -> Result<u32, Error> {
    if !got.is_multiple_of(VECTOR as usize) {
        return Err(Error::Stride {
            tensor,
            dimension: "rows",
            got,
            rule: format!("a multiple of {VECTOR}"),
        });
    }
    Ok(fits(Quantity::Stride("a stride"), got, u32::MAX)? / VECTOR)
}

/// Vectors of all rows.
fn count(tokens: usize, width: usize) -> Result<u32, Error> {
    let vectors = tokens.saturating_mul(width / VECTOR as usize);
    Ok(fits(
        Quantity::Batch("tokens × width / 8"),
        vectors,
        COUNTED,
    )?)
}

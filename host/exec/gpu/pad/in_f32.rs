//! Queries and outputs in F32 of heads that are padded: queries are rounded before they are padded, and merges write padded
//! outputs in F32, which are copied back in one launch for each slab.

use bytemuck::Zeroable;
use kernels_gpu::{abi::PadParams, divisor::Divisor, passes::pad::CHUNK};

use super::super::{
    DeviceTensor, RunTensors, Workspace,
    in_f32::{Rounding, check},
    tensor::{COUNTED, fits},
};
use crate::{
    Error,
    problem::{Padding, Quantity},
};

/// The most slabs of a padded head.
const SLABS: usize = 4;

/// What a run with padded heads does beside it for tensors in F32.
pub(super) struct InF32 {
    /// The queries in 16 bits, if they are rounded.
    q: Option<DeviceTensor<3>>,
    pub(super) rounding: Option<Rounding>,
    /// Outputs of 16 bits that no kernel writes, if those of the run are F32: of unpadded and of padded heads.
    never_written: Option<[DeviceTensor<3>; 2]>,
    /// The copies of the outputs, if they are F32. Those of slabs that the heads lack have no chunks.
    pub(super) back: Option<[PadParams; SLABS]>,
}

impl InF32 {
    /// `padded` has the outputs with padded heads.
    pub(super) fn new(
        workspace: &Workspace,
        padding: &Padding,
        tensors: &RunTensors<'_>,
        padded: &DeviceTensor<3>,
    ) -> Result<Self, Error> {
        let spec = &workspace.spec;
        let tokens = tensors.q.shape[0];
        let shape = [tokens, spec.q_heads as usize, padding.dim as usize];
        let mut converted = Self {
            q: None,
            rounding: None,
            never_written: None,
            back: None,
        };
        if spec.rounds_queries() {
            check("q", tensors.q, shape, spec.q_dtype)?;
            let q = workspace.queries(tokens)?;
            converted.rounding = Some(Rounding::new(tensors.q, &q)?);
            converted.q = Some(q);
        }
        if spec.has_f32_outputs() {
            check("out", tensors.out, shape, spec.out_dtype)?;
            let dims = [padding.dim, padding.kernel_dim];
            converted.never_written = Some(dims.map(|dim| workspace.never_written(tokens, dim)));
            converted.back = Some(copies(padding, padded, tensors.out)?);
        }
        Ok(converted)
    }

    /// The queries with heads that are not padded, in 16 bits.
    pub(super) fn q(&self, tensors: &RunTensors<'_>) -> DeviceTensor<3> {
        self.q.unwrap_or(*tensors.q)
    }

    /// The outputs with heads that are not padded, in 16 bits.
    pub(super) fn out(&self, tensors: &RunTensors<'_>) -> DeviceTensor<3> {
        self.never_written.map_or(*tensors.out, |[own, _]| own)
    }

    /// The outputs with padded heads, in 16 bits.
    pub(super) fn padded_out(&self, padded: &DeviceTensor<3>) -> DeviceTensor<3> {
        self.never_written.map_or(*padded, |[_, padded]| padded)
    }

    /// Whether merges write all outputs.
    pub(super) const fn merges(&self) -> bool {
        self.back.is_some()
    }
}

/// The elements of each slab that the one before has not: their first in the head, their first in the padded head, and their
/// number.
fn own_columns(padding: &Padding) -> impl Iterator<Item = [u32; 3]> {
    let Padding {
        dim, slabs, step, ..
    } = *padding;
    (0..slabs).map(move |slab| {
        let known = if slab == 0 { 0 } else { 64 - step };
        let first = slab * step + known;
        [first, slab * 64 + known, dim.min(slab * step + 64) - first]
    })
}

/// Copies of padded outputs to their places. The kernel moves 16 bits, so that an F32 is two elements, and takes heads whose
/// slabs are 64 elements apart as they are.
fn copies(
    padding: &Padding,
    padded: &DeviceTensor<3>,
    out: &DeviceTensor<3>,
) -> Result<[PadParams; SLABS], Error> {
    const HALVES: u32 = 2;
    let [tokens, heads, kernel_dim] = padded.shape;
    let halves = |extent: usize| {
        fits(
            Quantity::Stride("the token stride of out"),
            extent.saturating_mul(HALVES as usize),
            u32::MAX,
        )
    };
    let mut copies = [PadParams::zeroed(); SLABS];
    for (copy, [to, from, columns]) in copies.iter_mut().zip(own_columns(padding)) {
        let chunks_per_head = columns * HALVES / CHUNK;
        let chunks = tokens
            .saturating_mul(heads)
            .saturating_mul(chunks_per_head as usize);
        *copy = PadParams {
            from: padded.address + u64::from(from) * 4,
            to: out.address + u64::from(to) * 4,
            chunks: fits(
                Quantity::Batch("tokens × heads × head dimension / 4"),
                chunks,
                COUNTED,
            )?,
            chunks_per_head: Divisor::new(chunks_per_head),
            heads: Divisor::new(heads as u32),
            from_token: halves(padded.strides[0])?,
            from_head: kernel_dim as u32 * HALVES,
            to_token: halves(out.strides[0])?,
            to_head: padding.dim * HALVES,
            dim: columns * HALVES,
            step: 64,
            back: 1,
        };
    }
    Ok(copies)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::problem::Spec;

    #[test]
    fn the_columns_of_all_slabs_are_the_head() {
        for dim in (16..=256).step_by(16) {
            let Some(padding) = Padding::of(&Spec::new(4, 2, dim)) else {
                continue;
            };
            let columns: Vec<_> = own_columns(&padding).collect();
            assert!(columns.len() <= SLABS, "{padding:?}");
            let mut next = 0;
            for [first, place, count] in columns {
                assert_eq!(first, next, "{padding:?}");
                assert_eq!(
                    place,
                    kernels_gpu::passes::pad::place(first, padding.step),
                    "{padding:?}"
                );
                assert!(count > 0 && count.is_multiple_of(4), "{padding:?}");
                next += count;
            }
            assert_eq!(next, dim);
        }
    }
}

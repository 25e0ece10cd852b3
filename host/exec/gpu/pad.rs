//! Heads whose dimension lies between those of the kernels.
//!
//! Keys and values stay in place. Tensor maps read them in overlapping slabs, without a byte of a neighbouring head; loaders
//! that copy row by row end the last slab with zeros.
//! Queries are copied to padded heads before the run, and outputs are copied back after it. Kernels that were compiled
//! for the head dimension read the given queries directly. They also write the given outputs directly, unless other
//! launches write padded outputs of the same tokens. If all launches of a run are such, nothing is copied.

mod in_f32;

use std::{ops::Range, ptr};

use kernels_gpu::{
    abi::PadParams,
    divisor::Divisor,
    passes::pad::{CHUNK, THREADS},
    registry::{Element, Op},
};

use self::in_f32::InF32;
use super::{
    DeviceTensor, Gpu, RunTensors, Stream, Workspace,
    launch::Launch,
    steps::Unpadded,
    tensor::{COUNTED, VECTOR_BYTES, fits},
};
use crate::{
    Error,
    checks::check_same,
    problem::{Padding, Quantity},
};

/// Queries or outputs of a run, and their padded form.
struct Pad<'a> {
    name: &'static str,
    tensor: &'a DeviceTensor<3>,
    padded: DeviceTensor<3>,
    back: bool,
}

impl Pad<'_> {
    /// Checks the tensor, which the run itself does not see, and makes the parameters to copy some of its tokens.
    fn parameters(&self, padding: &Padding, some: &Range<usize>) -> Result<PadParams, Error> {
        let Self {
            name,
            tensor,
            padded,
            back,
        } = *self;
        let [tokens, heads, _] = padded.shape;
        let dim = padding.dim as usize;
        tensor.check_extent(name, "tokens", 0, tokens, "in q")?;
        tensor.check_extent(name, "query heads", 1, heads, "in the spec")?;
        tensor.check_extent(name, "elements in a head", 2, dim, "in the spec")?;
        tensor.check_dense(name, 1)?;
        tensor.check_address(name, VECTOR_BYTES)?;
        tensor.check_rows(name)?;
        let (from, to) = match back {
            false => (tensor, &padded),
            true => (&padded, tensor),
        };
        let chunks_per_head = to.shape[2] as u32 / CHUNK;
        let chunks = some.len() * heads * chunks_per_head as usize;
        let first =
            |tensor: &DeviceTensor<3>| tensor.address + (some.start * tensor.strides[0]) as u64 * 2;
        let wide = |stride: usize| fits(Quantity::Stride("the token stride"), stride, u32::MAX);
        Ok(PadParams {
            from: first(from),
            to: first(to),
            chunks: fits(
                Quantity::Batch("tokens × heads × head dimension / 8"),
                chunks,
                COUNTED,
            )?,
            chunks_per_head: Divisor::new(chunks_per_head),
            heads: Divisor::new(heads as u32),
            from_token: wide(from.strides[0])?,
            from_head: from.shape[2] as u32,
            to_token: wide(to.strides[0])?,
            to_head: to.shape[2] as u32,
            dim: padding.dim,
            step: padding.step,
            back: back.into(),
        })
    }
}

impl Gpu {
    /// [`run_with`](Self::run_with) of heads that are padded, for all launches or some.
    ///
    /// # Safety
    /// As [`run_with`](Self::run_with).
    pub(super) unsafe fn run_padded(
        &self,
        workspace: &mut Workspace,
        padding: &Padding,
        tensors: &RunTensors<'_>,
        stream: Stream,
    ) -> Result<(), Error> {
        let tokens = tensors.q.shape[0];
        let [q, out] = workspace.padded(tokens)?;
        let in_f32 = InF32::new(workspace, padding, tensors, &out)?;
        let (given_q, given_out) = (in_f32.q(tensors), in_f32.out(tensors));
        let out_of_kernels = in_f32.padded_out(&out);
        check_same("q", given_q.dtype, "the spec's", q.dtype)?;
        check_same("out", given_out.dtype, "the spec's", out_of_kernels.dtype)?;
        let pads = [
            Pad {
                name: "q",
                tensor: &given_q,
                padded: q,
                back: false,
            },
            Pad {
                name: "out",
                tensor: &given_out,
                padded: out_of_kernels,
                back: true,
            },
        ];
        // The plans of a captured graph are not known yet.
        let apart = match workspace.captured() || in_f32.merges() {
            true => None,
            false => workspace.launch_plan.padded.clone(),
        };
        let some = match &apart {
            Some(tokens) => tokens.start as usize..tokens.end as usize,
            None => 0..tokens,
        };
        let [before, behind] = pads.map(|pad| pad.parameters(padding, &some));
        let (before, behind) = (before?, behind?);
        let inner = RunTensors {
            q: &q,
            out: &out_of_kernels,
            merged: in_f32.merges().then_some(&out),
            unpadded: Some(Unpadded {
                q: given_q,
                out: apart.map(|_| given_out),
                given: given_out,
            }),
            ..*tensors
        };
        // SAFETY: the caller's promises; what is between is the workspace's own.
        unsafe {
            self.ready(workspace, &inner, stream)?;
            if let Some(rounding) = &in_f32.rounding {
                self.round(rounding, stream)?;
            }
            if workspace.run.reads_padded() {
                self.pad(&before, false, stream)?;
            }
            self.launch_run(workspace, stream)?;
            if !workspace.run.writes_padded() {
                return Ok(());
            }
            // In a graph, the last launch may have no work, and end before the launches that it would wait for.
            let overlap = self.overlaps() && !workspace.captured() && workspace.run.ends_decodes();
            match &in_f32.back {
                Some(back) => back
                    .iter()
                    .zip(0..)
                    .try_for_each(|(params, slab)| self.pad(params, overlap && slab == 0, stream)),
                None => self.pad(&behind, overlap, stream),
            }
        }
    }

    /// Copies between the two forms, in the current context, which must be this GPU's. With `overlap`, the launch may
    /// begin before the previous one ends, and waits for it.
    ///
    /// # Safety
    /// The parameters describe memory as [`PadParams`] says.
    unsafe fn pad(&self, params: &PadParams, overlap: bool, stream: Stream) -> Result<(), Error> {
        if params.chunks == 0 {
            return Ok(());
        }
        let kernel = self.pass(Op::Pad, Element::Any)?;
        let mut launch = Launch::new(params.chunks.div_ceil(THREADS), THREADS);
        launch.overlap = overlap;
        // SAFETY: the kernel takes `PadParams`, and the caller vouches for what they point to.
        unsafe { launch.make(kernel, [(&raw const *params).cast(), ptr::null()], stream) }
    }
}

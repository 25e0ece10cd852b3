//! Queries and outputs in F32, with keys and values of fewer bits.
//!
//! Kernels read 16-bit queries, so a small kernel rounds them before the run. Outputs come from partial states, which
//! are F32: every row has one, and the merging kernel writes it without rounding. Heads that are padded are rounded first and
//! then padded; their outputs are copied back in F32 (`pad.rs`).

use std::ptr;

use kernels_gpu::{
    abi::NarrowParams,
    divisor::Divisor,
    passes::narrow::{CHUNK, THREADS},
    registry::Op,
};

use super::{
    DeviceTensor, Gpu, RunTensors, Stream, Workspace,
    launch::Launch,
    registry::element,
    tensor::{COUNTED, VECTOR_BYTES, fits},
};
use crate::{
    Error,
    checks::check_same,
    problem::{Dtype, Quantity, Spec},
};

/// Checks a tensor that attention kernels do not see.
pub(super) fn check(
    name: &'static str,
    tensor: &DeviceTensor<3>,
    shape: [usize; 3],
    dtype: Dtype,
) -> Result<(), Error> {
    check_same(name, tensor.dtype, "the spec's", dtype)?;
    tensor.check_extent(name, "tokens", 0, shape[0], "in q")?;
    tensor.check_extent(name, "query heads", 1, shape[1], "in the spec")?;
    tensor.check_extent(name, "elements in a head", 2, shape[2], "in the spec")?;
    tensor.check_dense(name, 1)?;
    tensor.check_address(name, VECTOR_BYTES)?;
    tensor.check_rows(name)
}

/// The launch that rounds queries to 16 bits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rounding {
    params: NarrowParams,
    to: Dtype,
}

impl Rounding {
    /// From checked queries in F32 to dense ones of the same shape.
    pub(super) fn new(from: &DeviceTensor<3>, to: &DeviceTensor<3>) -> Result<Self, Error> {
        let [tokens, heads, dim] = from.shape;
        let per_token = heads * dim / CHUNK as usize;
        let what = Quantity::Batch("tokens × heads × head dimension / 8");
        let params = NarrowParams {
            from: from.address,
            to: to.address,
            chunks: fits(what, tokens.saturating_mul(per_token), COUNTED)?,
            chunks_per_token: Divisor::new(fits(what, per_token, COUNTED)?),
            from_token: fits(
                Quantity::Stride("the token stride of q"),
                from.strides[0],
                u32::MAX,
            )?,
            reserved: 0,
        };
        let to = to.dtype;
        Ok(Self { params, to })
    }
}

impl Gpu {
    /// [`run_with`](Self::run_with) of queries or outputs in F32.
    ///
    /// # Safety
    /// As [`run_with`](Self::run_with).
    pub(super) unsafe fn run_in_f32(
        &self,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        stream: Stream,
    ) -> Result<(), Error> {
        let Spec {
            q_heads,
            head_dim_qk,
            head_dim_v,
            q_dtype,
            out_dtype,
            ..
        } = workspace.spec;
        let tokens = tensors.q.shape[0];
        let shape = |dim: u32| [tokens, q_heads as usize, dim as usize];
        check("q", tensors.q, shape(head_dim_qk), q_dtype)?;
        check("out", tensors.out, shape(head_dim_v), out_dtype)?;
        let (mut q, mut out) = (*tensors.q, *tensors.out);
        let mut inner = *tensors;
        let mut rounding = None;
        if workspace.spec.rounds_queries() {
            q = workspace.queries(tokens)?;
            rounding = Some(Rounding::new(tensors.q, &q)?);
        }
        if workspace.spec.has_f32_outputs() {
            out = workspace.never_written(tokens, head_dim_v);
            inner.merged = Some(tensors.out);
        }
        (inner.q, inner.out) = (&q, &out);
        // SAFETY: the caller's promises; what is between is the workspace's own.
        unsafe {
            self.ready(workspace, &inner, stream)?;
            if let Some(rounding) = rounding {
                self.round(&rounding, stream)?;
            }
            self.launch_run(workspace, stream)
        }
    }

    /// Rounds queries to 16 bits, in the current context, which must be this GPU's.
    ///
    /// # Safety
    /// The queries are in valid memory, and so is the room for the rounded ones, until the work on the stream is done.
    pub(super) unsafe fn round(&self, rounding: &Rounding, stream: Stream) -> Result<(), Error> {
        let Rounding { params, to } = rounding;
        if params.chunks == 0 {
            return Ok(());
        }
        let kernel = self.pass(Op::Narrow, element(*to))?;
        let launch = Launch::new(params.chunks.div_ceil(THREADS), THREADS);
        // SAFETY: the kernel takes `NarrowParams`, and the caller vouches for what they point to.
        unsafe { launch.make(kernel, [(&raw const *params).cast(), ptr::null()], stream) }
    }
}

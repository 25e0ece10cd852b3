//! Merging results of attention of the same queries to different keys.

use std::ptr;

use kernels_gpu::{
    abi::{MAX_RESULTS, ResultMergeParams},
    divisor::Divisor,
    passes::results::{CHUNK, THREADS},
    registry::Op,
};

use super::{
    DeviceTensor, Gpu, Stream,
    driver::Current,
    launch::Launch,
    registry::element,
    tensor::{COUNTED, VECTOR_BYTES, fits},
};
use crate::{
    Error,
    checks::{check_dtype, check_same, extent},
    exec::check_merged_heads,
    problem::{Dtype, Quantity},
};

impl Gpu {
    /// Merges results of attention of the same queries to different keys, as if all keys had been seen at once: keys of which some
    /// came from host memory later, context in other pages, or parts of a prompt on other GPUs.
    ///
    /// `results` are 1 to 8 outputs `[tokens, q_heads, head_dim_v]` with their LSEs `[tokens, q_heads]`, as [`run`](Self::run)
    /// writes them, merged in this order. `out` and `lse`, if it is wanted, are likewise. All outputs have the type of `out`:
    /// BF16, F16, or F32, which loses nothing. A result whose LSE is −∞ saw no key; its output is not used. No key may be
    /// in two runs. Sinks count in every run, so let only one of them have a spec [with sinks](crate::problem::Spec::with_sinks).
    /// Results of a variant [without a softmax](crate::problem::Variant::adds_up) are sums, with LSEs of 0: add them instead.
    ///
    /// `out` may be the output of a result, with the same strides. The same call on the CPU is
    /// [`Cpu::merge_results`](crate::Cpu::merge_results).
    ///
    /// # Safety
    /// - All tensors are in this GPU's memory as described, and stay until the work on `stream` is done. What is written is not
    ///   touched by others meanwhile; `lse` is not the LSE of a result.
    /// - `stream` is a stream of the device's primary context, or null (the default stream). If it is being captured, the graph
    ///   is not launched after `self` or the memory is gone.
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor ([`Error::Extent`], [`Error::DtypesDiffer`], …), before anything is
    /// launched; [`Error::Driver`] if the launch fails.
    pub unsafe fn merge_results(
        &self,
        results: &[(DeviceTensor<3>, DeviceTensor<2>)],
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        stream: Stream,
    ) -> Result<(), Error> {
        let params = parameters(results, out, lse)?;
        if params.chunks == 0 {
            return Ok(());
        }
        let kernel = self.pass(Op::MergeResults, element(out.dtype))?;
        let launch = Launch::new(params.chunks.div_ceil(THREADS), THREADS);
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the kernel takes `ResultMergeParams`, and the caller vouches for what they point to.
        unsafe { launch.make(kernel, [(&raw const params).cast(), ptr::null()], stream) }
    }
}

/// Checks the call and makes the parameters of the launch.
fn parameters(
    results: &[(DeviceTensor<3>, DeviceTensor<2>)],
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<ResultMergeParams, Error> {
    let [tokens, q_heads, head_dim] = out.shape;
    check_merged_heads("out", q_heads, head_dim)?;
    let possible = [Dtype::BF16, Dtype::F16, Dtype::F32];
    check_dtype("out", out.dtype, &possible, "BF16, F16 or F32")?;
    if !(1..=MAX_RESULTS).contains(&results.len()) {
        let rule = format!("1 to {MAX_RESULTS}: merge more of them in several calls");
        return Err(extent("the call", "results", results.len(), rule));
    }
    let stride = |name, got| fits(Quantity::Stride(name), got, u32::MAX);
    let check_out = |name, tensor: &DeviceTensor<3>| {
        tensor.check_dense(name, 1)?;
        tensor.check_rows(name)?;
        tensor.check_address(name, VECTOR_BYTES)
    };
    let check_lse = |name, tensor: &DeviceTensor<2>| {
        tensor.check_f32(name)?;
        tensor.check_extent(name, "tokens", 0, tokens, "in out")?;
        tensor.check_extent(name, "query heads", 1, q_heads, "in out")?;
        tensor.check_dense(name, 0)?;
        tensor.check_address(name, 4)
    };
    check_out("out", out)?;
    if let Some(lse) = lse {
        check_lse("lse", lse)?;
    }
    let (mut out_of, mut lse_of) = ([0; MAX_RESULTS], [0; MAX_RESULTS]);
    let mut token_stride_of = [0; MAX_RESULTS];
    for (index, (out_of_one, lse_of_one)) in results.iter().enumerate() {
        let name = "the output of a result";
        check_same(name, out_of_one.dtype, "out's", out.dtype)?;
        out_of_one.check_extent(name, "tokens", 0, tokens, "in out")?;
        out_of_one.check_extent(name, "query heads", 1, q_heads, "in out")?;
        out_of_one.check_extent(name, "elements in a head", 2, head_dim, "in out")?;
        check_out(name, out_of_one)?;
        check_lse("the LSE of a result", lse_of_one)?;
        out_of[index] = out_of_one.address;
        lse_of[index] = lse_of_one.address;
        token_stride_of[index] = stride("the token stride of a result", out_of_one.strides[0])?;
    }
    let chunks_per_row = q_heads * head_dim / CHUNK as usize;
    let what = Quantity::Batch("tokens × heads × head dimension / 8");
    Ok(ResultMergeParams {
        out_of,
        lse_of,
        token_stride_of,
        out: out.address,
        lse: lse.map_or(0, |lse| lse.address),
        chunks: fits(what, tokens.saturating_mul(chunks_per_row), COUNTED)?,
        chunks_per_row: Divisor::new(fits(what, chunks_per_row, COUNTED)?),
        chunks_per_head: Divisor::new(head_dim as u32 / CHUNK),
        q_heads: q_heads as u32,
        out_token_stride: stride("the token stride of out", out.strides[0])?,
        results: results.len() as u32,
    })
}

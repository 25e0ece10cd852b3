//! Merging partial states on the GPU.

#[cfg(test)]
mod tests;

use kernels_gpu::{
    abi::{LaunchRecord, MergeParams, MergeRow},
    divisor::Divisor,
    passes::merge::{CHUNK, FEW, FEW_CHUNKS, MANY, SHARED_BYTES, THREADS},
    registry::Op,
};

use super::{
    DeviceArray, DeviceTensor, Gpu,
    launch::Launch,
    registry::element,
    steps::{Parameters, Step},
    tensor::{COUNTED, VECTOR_BYTES, fits},
};
use crate::{
    Error,
    checks::check_dtype,
    exec::check_merged_heads,
    plan::launched::merging::shape,
    problem::{Dtype, Quantity},
};

/// Partial states in device memory, both dense and f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialStates {
    /// `[slots, q_heads, head_dim_v]`, normalised; the head dimension is a multiple of 8.
    pub out: DeviceTensor<3>,
    /// `[slots, q_heads]`, base 2; −∞ if a state saw no key (its output is then not read).
    pub lse: DeviceTensor<2>,
}

impl PartialStates {
    /// Checks that the states, and `lse` if given, are F32.
    pub(super) fn check_f32(&self, lse: Option<&DeviceTensor<2>>) -> Result<(), Error> {
        self.out.check_f32("partial_out")?;
        self.lse.check_f32("partial_lse")?;
        lse.map_or(Ok(()), |lse| lse.check_f32("lse"))
    }
}

impl Gpu {
    /// Checks [`merge_states`](Self::merge_states) and makes its launch. The record says how many of `rows` there are
    /// when it runs; sinks must be checked already. `most_slots` is the number of slots of the longest row, if that is
    /// known.
    #[expect(clippy::too_many_arguments, reason = "what the kernel takes")]
    pub(super) fn prepare_merge(
        &self,
        partials: &PartialStates,
        rows: DeviceArray<MergeRow>,
        merge_slots: DeviceArray<u32>,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        sinks: Option<DeviceArray<f32>>,
        record: Option<DeviceArray<LaunchRecord>>,
        most_slots: Option<u32>,
    ) -> Result<Step, Error> {
        let mut parameters = parameters(partials, rows, merge_slots, out, lse)?;
        let kernel = |shape| self.pass(Op::Merge(shape), element(out.dtype));
        let registers = kernel(FEW)?.info.registers;
        let (shape, warps) = shape(
            parameters.chunks,
            most_slots,
            registers,
            self.multiprocessors,
        );
        let kernel = kernel(shape)?;
        let (threads, chunks) = match warps {
            0 => (THREADS, THREADS),
            _ => (warps * FEW_CHUNKS, FEW_CHUNKS),
        };
        let mut launch = Launch::new(parameters.chunks.div_ceil(chunks), threads);
        if kernel.info.op != Op::Merge(MANY) {
            launch.shared = threads * SHARED_BYTES;
        }
        parameters.sinks = sinks.map_or(0, |sinks| sinks.address);
        parameters.record = record.map_or(0, |record| record.address);
        Ok(Step {
            kernel: *kernel,
            launch,
            part: 0,
            heads: 1,
            parameters: Parameters::Merge(parameters),
        })
    }
}

/// Checks the call and makes the parameters of the launch.
fn parameters(
    partials: &PartialStates,
    rows: DeviceArray<MergeRow>,
    merge_slots: DeviceArray<u32>,
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<MergeParams, Error> {
    let [slots, q_heads, head_dim] = partials.out.shape;
    check_merged_heads("partial_out", q_heads, head_dim)?;
    partials.check_f32(lse)?;
    let possible = [Dtype::BF16, Dtype::F16, Dtype::F32];
    check_dtype("out", out.dtype, &possible, "BF16, F16 or F32")?;

    let of_partials = "in partial_out";
    partials
        .lse
        .check_extent("partial_lse", "slots", 0, slots, of_partials)?;
    partials
        .lse
        .check_extent("partial_lse", "query heads", 1, q_heads, of_partials)?;
    out.check_extent("out", "query heads", 1, q_heads, of_partials)?;
    out.check_extent("out", "elements in a head", 2, head_dim, of_partials)?;
    if let Some(lse) = lse {
        lse.check_extent("lse", "tokens", 0, out.shape[0], "in out")?;
        lse.check_extent("lse", "query heads", 1, q_heads, of_partials)?;
    }

    partials.out.check_dense("partial_out", 0)?;
    partials.lse.check_dense("partial_lse", 0)?;
    // There may be gaps between tokens, but not between heads.
    out.check_dense("out", 1)?;
    out.check_rows("out")?;
    if let Some(lse) = lse {
        lse.check_dense("lse", 0)?;
    }

    partials.out.check_address("partial_out", VECTOR_BYTES)?;
    partials.lse.check_address("partial_lse", 4)?;
    rows.check_address("rows", size_of::<MergeRow>() as u32)?;
    merge_slots.check_address("merge_slots", 4)?;
    out.check_address("out", VECTOR_BYTES)?;
    if let Some(lse) = lse {
        lse.check_address("lse", 4)?;
    }

    // The kernels divide their indices.
    fits(
        Quantity::Batch("output tokens × query heads"),
        out.shape[0].saturating_mul(q_heads),
        COUNTED,
    )?;
    let chunks_per_row = q_heads * head_dim / CHUNK;
    Ok(MergeParams {
        partial_out: partials.out.address,
        partial_lse: partials.lse.address,
        rows: rows.address,
        merge_slots: merge_slots.address,
        out: out.address,
        lse: lse.map_or(0, |lse| lse.address),
        record: 0,
        sinks: 0,
        chunks: fits(
            Quantity::Batch("merged rows × heads × head dimension / 8"),
            rows.len.saturating_mul(chunks_per_row),
            COUNTED,
        )?,
        chunks_per_row: Divisor::new(fits(
            Quantity::Heads("query heads × head dimension / 8"),
            chunks_per_row,
            COUNTED,
        )?),
        chunks_per_head: Divisor::new((head_dim / CHUNK) as u32),
        q_heads: q_heads as u32,
        out_token_stride: fits(
            Quantity::Stride("the token stride of out"),
            out.strides[0],
            u32::MAX,
        )?,
        add_up: 0,
        sink_count: Divisor::new(q_heads as u32),
        reserved: 0,
    })
}

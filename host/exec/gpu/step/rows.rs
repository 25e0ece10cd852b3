//! Operations on single tokens: normalisation, gates, embeddings.

use kernels_gpu::{
    abi::{EmbedParams, GateParams, NormParams},
    divisor::Divisor,
    registry::Op,
    step::{VECTOR, embed, gate, norm},
};

use super::{
    super::{
        DeviceArray, DeviceTensor, Gpu, Stream,
        registry::element,
        tensor::{COUNTED, fits},
    },
    check_rows, count, vectors,
};
use crate::{
    Error,
    checks::extent,
    problem::Quantity,
    step::{Activation, RmsNorm},
};

impl Gpu {
    /// The longest row of [`rms_norm`](Self::rms_norm), in elements.
    pub const MOST_NORMED: usize =
        (norm::MOST * norm::VECTORS[norm::VECTORS.len() - 1] * VECTOR) as usize;

    /// Normalises the rows of `x` into `out`, both `[tokens, width]` in BF16 or F16; `weight` is `[width]`. With a
    /// `residual` of that shape, the rows are first added to it. It keeps the rounded sums, and these are normalised.
    /// Token strides are multiples of 8; `out` may be `x`. A row has at most [`MOST_NORMED`](Self::MOST_NORMED) elements.
    ///
    /// The same call on the CPU is [`cpu::rms_norm`](crate::step::cpu::rms_norm).
    ///
    /// # Safety
    /// - All tensors are in this GPU's memory as described, until the work on `stream` is done. Nothing else reads or writes the
    ///   outputs meanwhile. Outputs overlap nothing, except that `out` may be exactly `x`.
    /// - `stream` is a stream of the device's primary context, or null (the default stream). If it is being
    ///   captured, the graph is not launched after `self` was dropped or the memory was freed.
    ///
    /// # Errors
    /// A variant for each thing that can be wrong with a tensor, before anything is launched; [`Error::Driver`] if the
    /// launch fails.
    pub unsafe fn rms_norm(
        &self,
        norm: RmsNorm,
        x: &DeviceTensor<2>,
        weight: &DeviceTensor<1>,
        residual: Option<&DeviceTensor<2>>,
        out: &DeviceTensor<2>,
        stream: Stream,
    ) -> Result<(), Error> {
        let [tokens, width] = x.shape;
        check_rows("x", x, x.dtype)?;
        check_rows("the weights", weight, x.dtype)?;
        weight.check_extent("the weights", "elements", 0, width, "in x")?;
        for (name, tensor) in [("out", Some(out)), ("the residual", residual)] {
            let Some(tensor) = tensor else { continue };
            check_rows(name, tensor, x.dtype)?;
            tensor.check_extent(name, "tokens", 0, tokens, "in x")?;
            tensor.check_extent(name, "elements in a row", 1, width, "in x")?;
        }
        if width > Self::MOST_NORMED {
            let rule = format!("at most {}", Self::MOST_NORMED);
            return Err(extent("x", "elements in a row", width, rule));
        }
        let of_row = count(1, width)?;
        // With few rows, the work per thread limits the time; with many, fewer threads per row already fill the GPU.
        let few = tokens <= self.multiprocessors as usize;
        let wanted = if few { 1 } else { 2 };
        let fitting = |&&vectors: &&u32| vectors >= wanted && of_row <= vectors * norm::MOST;
        let per_thread = norm::VECTORS.iter().find(fitting).copied();
        let per_thread = per_thread.expect("the longest row fits");
        let op = Op::RmsNorm {
            vectors: per_thread,
        };
        let kernel = self.pass(op, element(x.dtype))?;
        let threads = of_row.div_ceil(per_thread).next_multiple_of(32);
        let mut launch = self.step_launch(
            fits(Quantity::Batch("tokens"), tokens, i32::MAX as u32)?,
            threads,
        );
        launch.shared = norm::SHARED_BYTES;
        let parameters = NormParams {
            x: x.address,
            weight: weight.address,
            residual: residual.map_or(0, |residual| residual.address),
            out: out.address,
            x_token: vectors("x", x.strides[0])?,
            residual_token: residual.map_or(Ok(0), |residual| {
                vectors("the residual", residual.strides[0])
            })?,
            out_token: vectors("out", out.strides[0])?,
            vectors: of_row,
            eps: norm.eps,
            offset: norm.offset,
            inverse_width: 1.0 / width as f32,
            reserved: 0,
        };
        // SAFETY: the kernel takes `NormParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &parameters, stream) }
    }

    /// Applies the activation to the first half of each row of `gate_up` (`[tokens, 2 · width]` in BF16 or F16), multiplies it by the
    /// second half, and writes the product to `out` (`[tokens, width]`). Token strides are multiples of 8.
    ///
    /// The same call on the CPU is [`cpu::gate`](crate::step::cpu::gate).
    ///
    /// # Safety
    /// As [`rms_norm`](Self::rms_norm), and `out` overlaps nothing.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn gate(
        &self,
        activation: Activation,
        gate_up: &DeviceTensor<2>,
        out: &DeviceTensor<2>,
        stream: Stream,
    ) -> Result<(), Error> {
        let [tokens, width] = out.shape;
        check_rows("gate_up", gate_up, gate_up.dtype)?;
        check_rows("out", out, gate_up.dtype)?;
        gate_up.check_extent("gate_up", "tokens", 0, tokens, "in out")?;
        let both = width.saturating_mul(2);
        gate_up.check_extent(
            "gate_up",
            "elements in a row",
            1,
            both,
            "twice those of out",
        )?;
        let kernel = self.pass(Op::Gate, element(out.dtype))?;
        let parameters = GateParams {
            source: gate_up.address,
            out: out.address,
            source_token: vectors("gate_up", gate_up.strides[0])?,
            out_token: vectors("out", out.strides[0])?,
            vectors: count(tokens, width)?,
            gelu: u32::from(activation == Activation::GeluTanh),
            per_token: Divisor::new(count(1, width)?),
            reserved: 0,
        };
        let of_block = gate::THREADS * gate::PER_THREAD;
        let launch = self.step_launch(parameters.vectors.div_ceil(of_block), gate::THREADS);
        // SAFETY: the kernel takes `GateParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &parameters, stream) }
    }

    /// Writes the rows of `table` (`[vocabulary, width]` in BF16 or F16) with the indices `ids`, multiplied by `scale`, to `out`
    /// (`[tokens, width]`). A token whose id is not in the table gets zeros, which serves as padding in a captured graph.
    ///
    /// The same call on the CPU is [`cpu::embed`](crate::step::cpu::embed).
    ///
    /// # Safety
    /// As [`rms_norm`](Self::rms_norm), and `out` overlaps nothing.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn embed(
        &self,
        table: &DeviceTensor<2>,
        ids: DeviceArray<u32>,
        scale: f32,
        out: &DeviceTensor<2>,
        stream: Stream,
    ) -> Result<(), Error> {
        let [vocabulary, width] = table.shape;
        check_rows("the table", table, table.dtype)?;
        check_rows("out", out, table.dtype)?;
        out.check_extent("out", "tokens", 0, ids.len, "in the ids")?;
        out.check_extent("out", "elements in a row", 1, width, "in the table")?;
        ids.check_address("ids", 4)?;
        let kernel = self.pass(Op::Embed, element(out.dtype))?;
        let parameters = EmbedParams {
            table: table.address,
            ids: ids.address,
            out: out.address,
            table_row: vectors("the table", table.strides[0])?,
            out_token: vectors("out", out.strides[0])?,
            vocabulary: fits(Quantity::Table("rows of the table"), vocabulary, COUNTED)?,
            vectors: count(ids.len, width)?,
            scale,
            per_token: Divisor::new(count(1, width)?),
        };
        let of_block = embed::THREADS * embed::PER_THREAD;
        let launch = self.step_launch(parameters.vectors.div_ceil(of_block), embed::THREADS);
        // SAFETY: the kernel takes `EmbedParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &parameters, stream) }
    }
}

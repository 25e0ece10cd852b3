//! Biases and penalties of logits, and log-probabilities.

use kernels_gpu::{
    abi::{AdjustParams, LogProbsParams},
    registry::{Element, Op},
    step::{
        VECTOR,
        sample::{LOG_PROBS, adjust, log_probs},
    },
};

use super::super::{
    DeviceArray, DeviceTensor, Gpu, Stream,
    tensor::{VECTOR_BYTES, fits},
};
use crate::{
    Error,
    checks::{check_extent, extent},
    problem::{Dtype, Quantity},
    step::{AdjustRow, AdjustToken, LogProb, LogProbRow},
};

impl Gpu {
    /// Adds biases to logits (`[…, vocabulary]` in F32) and applies penalties, as [`Penalties`](crate::step::Penalties) says. Tokens
    /// keep the logits as they were, for [`restore`](Self::restore). A row's newest token is one of `ids`.
    ///
    /// The same call on the CPU is [`cpu::adjust`](crate::step::cpu::adjust), with the same bits.
    ///
    /// # Safety
    /// As [`rms_norm`](Self::rms_norm). Rows name distinct rows of the logits; their tokens, and one more behind them, are among
    /// `tokens` and in no other row; a row has each token once; newest tokens are among `ids`.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn adjust(
        &self,
        logits: &DeviceTensor<2>,
        rows: DeviceArray<AdjustRow>,
        tokens: DeviceArray<AdjustToken>,
        ids: DeviceArray<u32>,
        stream: Stream,
    ) -> Result<(), Error> {
        ids.check_address("ids", 4)?;
        // SAFETY: the caller's promise.
        unsafe { self.adjust_rows(logits, rows, tokens, ids.address, false, stream) }
    }

    /// Writes the logits back that [`adjust`](Self::adjust) changed.
    ///
    /// # Safety
    /// As [`adjust`](Self::adjust), which was called before with the same rows and tokens.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn restore(
        &self,
        logits: &DeviceTensor<2>,
        rows: DeviceArray<AdjustRow>,
        tokens: DeviceArray<AdjustToken>,
        stream: Stream,
    ) -> Result<(), Error> {
        // SAFETY: the caller's promise. No ids are read.
        unsafe { self.adjust_rows(logits, rows, tokens, 0, true, stream) }
    }

    /// # Safety
    /// As [`adjust`](Self::adjust) or [`restore`](Self::restore).
    unsafe fn adjust_rows(
        &self,
        logits: &DeviceTensor<2>,
        rows: DeviceArray<AdjustRow>,
        tokens: DeviceArray<AdjustToken>,
        ids: u64,
        restore: bool,
        stream: Stream,
    ) -> Result<(), Error> {
        check(logits)?;
        rows.check_address("rows", VECTOR_BYTES)?;
        tokens.check_address("tokens", VECTOR_BYTES)?;
        // Each row has one token more than its list.
        if tokens.len < rows.len {
            let rule = format!("at least one for each of {} rows", rows.len);
            return Err(extent("tokens", "tokens", tokens.len, rule));
        }
        let parameters = AdjustParams {
            logits: logits.address,
            rows: rows.address,
            tokens: tokens.address,
            ids,
            row: logits.strides[0] as u64,
            vocabulary: logits.shape[1] as u32,
            restore: restore.into(),
        };
        let kernel = self.pass(Op::Adjust, Element::F32)?;
        let blocks = fits(Quantity::Batch("rows"), rows.len, i32::MAX as u32)?;
        let launch = self.step_launch(blocks, adjust::THREADS);
        // SAFETY: the kernel takes `AdjustParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &parameters, stream) }
    }

    /// Log-probabilities of rows of logits (`[…, vocabulary]` in F32), as [`cpu::log_probs`](crate::step::cpu::log_probs) says:
    /// that of the row's token in `ids`, then those of the most probable tokens. The row stride is a multiple of 8. Exponentials and
    /// logarithms are the GPU's: values differ from the CPU's by 1e-5 at most, tokens do not.
    ///
    /// # Safety
    /// As [`rms_norm`](Self::rms_norm), and `out` overlaps nothing. Rows are among those of the logits and of `ids`.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn log_probs(
        &self,
        logits: &DeviceTensor<2>,
        rows: DeviceArray<LogProbRow>,
        ids: DeviceArray<u32>,
        out: DeviceArray<LogProb>,
        stream: Stream,
    ) -> Result<(), Error> {
        check(logits)?;
        check_extent("ids", "rows", ids.len, logits.shape[0], "in logits")?;
        let results = rows.len.saturating_mul(LOG_PROBS as usize);
        check_extent("out", "results", out.len, results, "of all rows")?;
        rows.check_address("rows", 8)?;
        ids.check_address("ids", 4)?;
        out.check_address("out", 8)?;
        let parameters = LogProbsParams {
            logits: logits.address,
            rows: rows.address,
            ids: ids.address,
            out: out.address,
            row: logits.strides[0] as u64,
            vocabulary: logits.shape[1] as u32,
            reserved: 0,
        };
        let kernel = self.pass(Op::LogProbs, Element::F32)?;
        let blocks = fits(Quantity::Batch("rows"), rows.len, i32::MAX as u32)?;
        let mut launch = self.step_launch(blocks, log_probs::THREADS);
        launch.shared = log_probs::SHARED_BYTES;
        // SAFETY: the kernel takes `LogProbsParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &parameters, stream) }
    }
}

/// Logits in single precision.
fn check(logits: &DeviceTensor<2>) -> Result<(), Error> {
    match logits.dtype {
        Dtype::F32 => check_logits(logits),
        got => Err(Error::Dtype {
            tensor: "logits",
            got,
            expected: "F32",
        }),
    }
}

/// Logits in rows that begin at vectors.
pub(super) fn check_logits(logits: &DeviceTensor<2>) -> Result<(), Error> {
    let [rows, vocabulary] = logits.shape;
    logits.check_dense("logits", 1)?;
    logits.check_address("logits", VECTOR_BYTES)?;
    if !(1..=Gpu::MOST_SAMPLED).contains(&vocabulary) {
        let rule = format!("between 1 and {}", Gpu::MOST_SAMPLED);
        return Err(extent("logits", "elements in a row", vocabulary, rule));
    }
    let row = logits.strides[0];
    if rows > 1 && !row.is_multiple_of(VECTOR as usize) {
        return Err(Error::Stride {
            tensor: "logits",
            dimension: "rows",
            got: row,
            rule: format!("a multiple of {VECTOR}"),
        });
    }
    Ok(())
}

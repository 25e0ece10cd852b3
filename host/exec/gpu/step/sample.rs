//! A token from each row of logits.

use kernels_gpu::{
    abi::SampleParams,
    registry::Op,
    step::sample::{CLUSTER, MOST, SHARED_BYTES, THREADS},
};

use super::{
    super::{
        DeviceArray, DeviceTensor, Gpu, Stream,
        registry::element,
        tensor::{VECTOR_BYTES, fits},
    },
    logits::check_logits,
};
use crate::{
    Error,
    checks::check_extent,
    problem::{Dtype, Quantity},
    step::Draw,
};

impl Gpu {
    /// The largest vocabulary of [`sample`](Self::sample).
    pub const MOST_SAMPLED: usize = MOST as usize;

    /// Draws a token from each row of `logits` (`[rows, vocabulary]` in BF16, F16 or F32) into `ids` (`[rows]`), as the row
    /// of `draws` says. The row stride is a multiple of 8.
    /// A row has at most [`MOST_SAMPLED`](Self::MOST_SAMPLED) tokens.
    ///
    /// The token of a request does not depend on other rows. The same call on the CPU is
    /// [`cpu::sample`](crate::step::cpu::sample). Its exponentials and logarithms differ in their last bits, so in rare cases
    /// the token differs, too.
    ///
    /// # Safety
    /// As [`rms_norm`](Self::rms_norm), and `ids` overlaps nothing.
    ///
    /// # Errors
    /// As [`rms_norm`](Self::rms_norm).
    pub unsafe fn sample(
        &self,
        logits: &DeviceTensor<2>,
        draws: DeviceArray<Draw>,
        ids: DeviceArray<u32>,
        stream: Stream,
    ) -> Result<(), Error> {
        let [rows, vocabulary] = logits.shape;
        let last_bit = match logits.dtype {
            Dtype::BF16 => 16,
            Dtype::F16 => 13,
            Dtype::F32 => 0,
            got => {
                return Err(Error::Dtype {
                    tensor: "logits",
                    got,
                    expected: "BF16, F16 or F32",
                });
            }
        };
        check_logits(logits)?;
        check_extent("draws", "rows", draws.len, rows, "in logits")?;
        check_extent("ids", "rows", ids.len, rows, "in logits")?;
        draws.check_address("draws", VECTOR_BYTES)?;
        ids.check_address("ids", 4)?;
        let kernel = self.pass(Op::Sample, element(logits.dtype))?;
        let parameters = SampleParams {
            logits: logits.address,
            draws: draws.address,
            ids: ids.address,
            row: logits.strides[0] as u64,
            vocabulary: vocabulary as u32,
            last_bit,
        };
        // Only Hopper's build of the kernel has clusters.
        let cluster = if self.arch() == "sm_90a" { CLUSTER } else { 1 };
        let rows = fits(Quantity::Batch("rows"), rows, i32::MAX as u32 / CLUSTER)?;
        let mut launch = self.step_launch(rows * cluster, THREADS);
        (launch.shared, launch.cluster) = (SHARED_BYTES, cluster);
        // SAFETY: the kernel takes `SampleParams`, and the caller vouches for what they point to.
        unsafe { self.launch(kernel, &launch, &parameters, stream) }
    }
}

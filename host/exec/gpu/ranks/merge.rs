//! The launch that merges the results of ranks.

use std::{mem::offset_of, ops::Range, time::Duration};

use kernels_gpu::{
    abi::{MAX_GROUP, RankControl, RankMergeParams},
    divisor::Divisor,
    passes::ranks::{BLOCKS, CHUNK, THREADS},
    registry::Op,
};

use super::{
    super::{
        DevicePtr, DeviceTensor, Gpu,
        driver::Device,
        launch::Launch,
        module::Kernel,
        registry::element,
        tensor::{COUNTED, VECTOR_BYTES, fits},
    },
    Rank,
};
use crate::{
    Error,
    checks::{check_same, extent},
    problem::{Dtype, Quantity},
    shard::RankError,
};

/// A launch that was checked.
pub(super) struct RankStep {
    pub(super) kernel: Kernel,
    pub(super) launch: Launch,
    pub(super) parameters: RankMergeParams,
}

/// A rank's part in merges, independent of how the results are exchanged.
pub(super) struct Merge {
    pub(super) q_heads: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: Dtype,
    pub(super) ranks: usize,
    pub(super) rank: u32,
    pub(super) device: Device,
    /// Address of its [`RankControl`].
    pub(super) control: DevicePtr,
    pub(super) timeout: Duration,
}

impl Merge {
    /// Checks a launch and makes it, for the rows of `out`, or for no rows if there is no `out`. `states` are the
    /// addresses of a rank's outputs and LSEs, `signals` says which word of its memory is written.
    #[expect(clippy::too_many_arguments, reason = "what the kernel takes")]
    pub(super) fn prepare(
        &self,
        gpu: &Gpu,
        rows: Range<usize>,
        out: Option<&DeviceTensor<3>>,
        lse: Option<&DeviceTensor<2>>,
        mode: u32,
        states: &dyn Fn(usize) -> [DevicePtr; 2],
        signals: &dyn Fn(usize) -> DevicePtr,
    ) -> Result<RankStep, Error> {
        if gpu.device != self.device {
            return Err(RankError::OtherDevice {
                rank: self.rank,
                got: gpu.device.unsigned_abs(),
                expected: self.device.unsigned_abs(),
            }
            .into());
        }
        if let Some(out) = out {
            check(self, &rows, out, lse)?;
        }
        let per_row = self.q_heads * self.head_dim / CHUNK as usize;
        let what = Quantity::Batch("merged rows × heads × head dimension / 8");
        let chunks = fits(what, rows.len().saturating_mul(per_row), COUNTED)?;
        let of_each = |value: &dyn Fn(usize) -> u64| {
            let mut all = [0; MAX_GROUP];
            for (rank, place) in all.iter_mut().enumerate().take(self.ranks) {
                *place = value(rank);
            }
            all
        };
        let parameters = RankMergeParams {
            out_of: of_each(&|rank| states(rank)[0]),
            lse_of: of_each(&|rank| states(rank)[1]),
            signals: of_each(signals),
            control: self.control,
            out: out.map_or(0, |out| out.address),
            lse: lse.map_or(0, |lse| lse.address),
            timeout_ns: self.timeout.as_nanos().try_into().unwrap_or(u64::MAX),
            chunks,
            chunks_per_row: Divisor::new(fits(what, per_row, COUNTED)?),
            chunks_per_head: Divisor::new(self.head_dim as u32 / CHUNK),
            q_heads: self.q_heads as u32,
            out_token_stride: match out {
                Some(out) => fits(
                    Quantity::Stride("the token stride of out"),
                    out.strides[0],
                    u32::MAX,
                )?,
                None => 0,
            },
            first_token: rows.start as u32,
            ranks: self.ranks as u32,
            rank: self.rank,
            mode,
            reserved: 0,
        };
        let kernel = *gpu.pass(Op::MergeRanks, element(self.dtype))?;
        // At most as many CTAs as are resident: later CTAs of a large merge must not wait for the other ranks again.
        let most = gpu.multiprocessors * BLOCKS;
        let blocks = chunks.div_ceil(THREADS).clamp(1, most);
        Ok(RankStep {
            kernel,
            launch: Launch::new(blocks, THREADS),
            parameters,
        })
    }
}

impl Rank {
    /// A launch that reads the results of this turn directly from the memory of all ranks.
    pub(super) fn prepare(
        &self,
        gpu: &Gpu,
        rows: Range<usize>,
        out: Option<&DeviceTensor<3>>,
        lse: Option<&DeviceTensor<2>>,
        mode: u32,
    ) -> Result<RankStep, Error> {
        let (group, own) = (&*self.group, self.rank as usize);
        let word = (offset_of!(RankControl, signals) + own * size_of::<[u32; 8]>()) as u64;
        let signals = |rank: usize| match rank == own {
            true => 0,
            false => group.control(rank) + word,
        };
        let merge = Merge {
            q_heads: group.q_heads,
            head_dim: group.head_dim,
            dtype: group.dtype,
            ranks: group.members.len(),
            rank: self.rank,
            device: group.members[own].device,
            control: group.control(own),
            timeout: group.timeout,
        };
        let states = |rank: usize| group.results(rank, self.turn);
        merge.prepare(gpu, rows, out, lse, mode, &states, &signals)
    }
}

/// Checks that the rows are among the tokens of a tensor.
pub(super) fn check_rows(rows: &Range<usize>, tokens: usize, of: &str) -> Result<(), Error> {
    if rows.start <= rows.end && rows.end <= tokens {
        return Ok(());
    }
    let rule = format!("a range up to {tokens}, as in {of}");
    Err(extent("the rows to merge", "tokens", rows.end, rule))
}

/// Checks that the output has these rows and the heads of the group.
fn check(
    group: &Merge,
    rows: &Range<usize>,
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<(), Error> {
    let of_group = "in the group of ranks";
    check_same("out", out.dtype, "the group of ranks", group.dtype)?;
    out.check_extent("out", "query heads", 1, group.q_heads, of_group)?;
    out.check_extent("out", "elements in a head", 2, group.head_dim, of_group)?;
    let tokens = out.shape[0];
    check_rows(rows, tokens, "out")?;
    out.check_dense("out", 1)?;
    let (row, stride) = (group.q_heads * group.head_dim, out.strides[0]);
    if !stride.is_multiple_of(CHUNK as usize) || stride < row {
        return Err(Error::Stride {
            tensor: "out",
            dimension: "tokens",
            got: stride,
            rule: format!("a multiple of {CHUNK} and at least {row}"),
        });
    }
    out.check_address("out", VECTOR_BYTES)?;
    let Some(lse) = lse else { return Ok(()) };
    lse.check_f32("lse")?;
    lse.check_extent("lse", "tokens", 0, tokens, "in out")?;
    lse.check_extent("lse", "query heads", 1, group.q_heads, of_group)?;
    lse.check_dense("lse", 0)?;
    lse.check_address("lse", 4)
}

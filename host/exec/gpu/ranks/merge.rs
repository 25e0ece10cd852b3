//! The launch that merges.

use std::{mem::offset_of, ops::Range};

use kernels_gpu::{
    abi::{MAX_GROUP, RankControl, RankMergeParams},
    divisor::Divisor,
    passes::ranks::{BLOCKS, CHUNK, THREADS},
    registry::Op,
};

use super::{
    super::{
        DeviceTensor, Gpu,
        launch::Launch,
        module::Kernel,
        registry::element,
        tensor::{COUNTED, VECTOR_BYTES, fits},
    },
    Group, Rank,
};
use crate::{Error, problem::Dtype, shard::RankError};

/// A launch that was checked.
pub(super) struct RankStep {
    pub(super) kernel: Kernel,
    pub(super) launch: Launch,
    pub(super) parameters: RankMergeParams,
}

impl Rank {
    /// All checks of a launch, and the launch that they allow: of the rows of `out`, of none where there is no `out`.
    pub(super) fn prepare(
        &self,
        gpu: &Gpu,
        rows: Range<usize>,
        out: Option<&DeviceTensor<3>>,
        lse: Option<&DeviceTensor<2>>,
        mode: u32,
    ) -> Result<RankStep, Error> {
        let (group, own) = (&*self.group, self.rank as usize);
        let expected = group.members[own].device;
        if gpu.device != expected {
            return Err(RankError::OtherDevice {
                rank: self.rank,
                got: gpu.device.unsigned_abs(),
                expected: expected.unsigned_abs(),
            }
            .into());
        }
        if let Some(out) = out {
            check(group, &rows, out, lse)?;
        }
        let per_row = group.q_heads * group.head_dim / CHUNK as usize;
        let what = "merged rows × heads × head dimension / 8";
        let chunks = fits(what, rows.len().saturating_mul(per_row), COUNTED)?;
        let of_each = |value: &dyn Fn(usize) -> u64| {
            let mut all = [0; MAX_GROUP];
            for (rank, place) in all.iter_mut().enumerate().take(group.members.len()) {
                *place = value(rank);
            }
            all
        };
        let word = (offset_of!(RankControl, told) + own * size_of::<[u32; 8]>()) as u64;
        let tells = |rank: usize| match rank == own {
            true => 0,
            false => group.control(rank) + word,
        };
        let parameters = RankMergeParams {
            out_of: of_each(&|rank| group.results(rank, self.turn)[0]),
            lse_of: of_each(&|rank| group.results(rank, self.turn)[1]),
            tells: of_each(&tells),
            control: group.control(own),
            out: out.map_or(0, |out| out.address),
            lse: lse.map_or(0, |lse| lse.address),
            timeout_ns: group.timeout.as_nanos().try_into().unwrap_or(u64::MAX),
            chunks,
            chunks_per_row: Divisor::new(fits(what, per_row, COUNTED)?),
            chunks_per_head: Divisor::new(group.head_dim as u32 / CHUNK),
            q_heads: group.q_heads as u32,
            out_token_stride: match out {
                Some(out) => fits("the token stride of out", out.strides[0], u32::MAX)?,
                None => 0,
            },
            first_token: rows.start as u32,
            ranks: group.members.len() as u32,
            rank: self.rank,
            mode,
            reserved: 0,
        };
        let kernel = *gpu.pass(Op::MergeRanks, element(group.dtype))?;
        // No more than are resident: what follows of a large merge is not to wait for others again.
        let most = gpu.multiprocessors * BLOCKS;
        let blocks = chunks.div_ceil(THREADS).clamp(1, most);
        Ok(RankStep {
            kernel,
            launch: Launch::new(blocks, THREADS),
            parameters,
        })
    }
}

/// Whether the rows of the output are there, and of the group's heads.
fn check(
    group: &Group,
    rows: &Range<usize>,
    out: &DeviceTensor<3>,
    lse: Option<&DeviceTensor<2>>,
) -> Result<(), Error> {
    let of_group = "in the group of ranks";
    if out.dtype != group.dtype {
        return Err(Error::DtypesDiffer {
            tensor: "out",
            got: out.dtype,
            other: "the group of ranks",
            expected: group.dtype,
        });
    }
    out.check_extent("out", "query heads", 1, group.q_heads, of_group)?;
    out.check_extent("out", "elements in a head", 2, group.head_dim, of_group)?;
    let tokens = out.shape[0];
    if rows.start > rows.end || rows.end > tokens {
        return Err(Error::Extent {
            tensor: "the rows to merge",
            dimension: "tokens",
            got: rows.end,
            rule: format!("a range up to {tokens}, as in out"),
        });
    }
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
    if lse.dtype != Dtype::F32 {
        return Err(Error::Dtype {
            tensor: "lse",
            got: lse.dtype,
            expected: "F32",
        });
    }
    lse.check_extent("lse", "tokens", 0, tokens, "in out")?;
    lse.check_extent("lse", "query heads", 1, group.q_heads, of_group)?;
    lse.check_dense("lse", 0)?;
    lse.check_address("lse", 4)
}

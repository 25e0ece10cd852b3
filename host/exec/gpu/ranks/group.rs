//! Groups of ranks, and their memory.

use std::{sync::Arc, time::Duration};

use kernels_gpu::abi::{MAX_GROUP, RankControl};

use super::{
    super::{
        DevicePtr, DeviceTensor, Gpu,
        driver::{
            Check, Code, Current, Device, cuCtxEnablePeerAccess, cuCtxSynchronize,
            cuDeviceCanAccessPeer,
        },
        resources::{DeviceMemory, OwnedStream, PrimaryContext},
        tensor::check_16_bits,
    },
    Rank,
    board::Board,
};
use crate::{
    Error,
    checks::extent,
    problem::{Dtype, Spec},
    shard::{RankError, ShardError},
};

/// Options of a group of ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankOptions {
    /// The maximum time that a rank waits for another rank, on the host or on the GPU, before it returns an error.
    pub timeout: Duration,
    /// The maximum time that [`Gpu::nccl_rank`] waits for the other ranks, whose processes may start later.
    pub start: Duration,
}

impl Default for RankOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(800),
            start: Duration::from_secs(60),
        }
    }
}

impl RankOptions {
    /// With another maximum time to wait for other ranks.
    #[must_use]
    pub const fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// With another maximum time to wait for the other ranks of a group over NCCL to join.
    #[must_use]
    pub const fn with_start(mut self, start: Duration) -> Self {
        self.start = start;
        self
    }
}

/// What the ranks of a group have in common.
pub(super) struct Group {
    pub(super) q_heads: usize,
    pub(super) head_dim: usize,
    pub(super) dtype: Dtype,
    /// Maximum number of query tokens of a run.
    pub(super) tokens: usize,
    pub(super) timeout: Duration,
    pub(super) members: Vec<Member>,
    pub(super) board: Board,
}

/// A rank's memory, which all ranks read.
pub(super) struct Member {
    pub(super) device: Device,
    /// A stream to write to this rank's memory while its kernels wait.
    pub(super) stream: OwnedStream,
    pub(super) memory: DeviceMemory,
    pub(super) context: PrimaryContext,
}

/// The results of a rank before they are merged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankTensors {
    /// `[tokens, q_heads, head_dim_v]`.
    pub out: DeviceTensor<3>,
    /// `[tokens, q_heads]` F32, natural log.
    pub lse: DeviceTensor<2>,
}

impl RankTensors {
    /// Outputs of `[tokens, q_heads, head_dim_v]` and LSEs, dense at two addresses.
    pub(super) const fn at([out, lse]: [DevicePtr; 2], dtype: Dtype, shape: [usize; 3]) -> Self {
        Self {
            out: DeviceTensor::new(out, dtype, shape),
            lse: DeviceTensor::new(lse, Dtype::F32, [shape[0], shape[1]]),
        }
    }
}

/// Bytes of a rank's memory in front of its results.
const CONTROL_BYTES: usize = size_of::<RankControl>().next_multiple_of(256);

impl Gpu {
    /// Makes a group of ranks, one on each of the GPUs, for results of up to this number of query tokens of these heads (those of a
    /// [share](crate::shard::Share)). For tests, two ranks may be on one GPU. Then wait for the streams of both between
    /// [`Rank::signal`] and [`Rank::merge`], because a waiting merge may take the SMs that the attention needs.
    ///
    /// # Errors
    /// [`RankError::Group`], [`RankError::NoPeerAccess`], [`Error::Dtype`] for outputs of other than 16 bits,
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn ranks(
        gpus: &[&Self],
        spec: &Spec,
        tokens: usize,
        options: &RankOptions,
    ) -> Result<Vec<Rank>, Error> {
        if gpus.is_empty() || gpus.len() > MAX_GROUP {
            let (got, most) = (gpus.len(), MAX_GROUP);
            return Err(RankError::Group { got, most }.into());
        }
        check_heads(spec, gpus.len() as u32)?;
        for gpu in gpus {
            for other in gpus.iter().filter(|other| other.device != gpu.device) {
                gpu.see(other)?;
            }
        }
        let (q_heads, head_dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
        let rows = tokens * q_heads;
        let bytes = CONTROL_BYTES + 2 * (out_bytes(rows, head_dim) + lse_bytes(rows));
        let member = |gpu: &&Self| {
            let context = PrimaryContext::retain(gpu.device)?;
            Ok(Member {
                device: gpu.device,
                stream: OwnedStream::new(&context)?,
                memory: DeviceMemory::zeroed(context.raw(), bytes)?,
                context,
            })
        };
        let members = gpus.iter().map(member).collect::<Result<Vec<_>, Error>>()?;
        let group = Arc::new(Group {
            q_heads,
            head_dim,
            dtype: spec.out_dtype,
            tokens,
            timeout: options.timeout,
            board: Board::new(members.len()),
            members,
        });
        let rank = |rank| Rank {
            group: Arc::clone(&group),
            rank,
            steps: 0,
            agreed: 0,
            announced: 0,
            turn: 0,
        };
        Ok((0..gpus.len() as u32).map(rank).collect())
    }

    /// Lets kernels on this GPU read and write the other one's memory.
    fn see(&self, other: &Self) -> Result<(), Error> {
        /// `CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED`.
        const ALREADY: Code = Code(704);
        let mut possible = 0;
        // SAFETY: writes one integer.
        unsafe { cuDeviceCanAccessPeer(&mut possible, self.device, other.device) }
            .check("cuDeviceCanAccessPeer")?;
        if possible == 0 {
            return Err(RankError::NoPeerAccess {
                from: self.device.unsigned_abs(),
                to: other.device.unsigned_abs(),
            }
            .into());
        }
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: both contexts are retained.
        match unsafe { cuCtxEnablePeerAccess(other.context.raw(), 0) } {
            ALREADY => Ok(()),
            code => code.check("cuCtxEnablePeerAccess"),
        }
    }
}

/// Checks that results of these heads can be merged over a number of ranks.
pub(super) fn check_heads(spec: &Spec, ranks: u32) -> Result<(), Error> {
    spec.check()?;
    if spec.variant.adds_up && ranks > 1 {
        return Err(ShardError::NoSoftmax { keys: ranks }.into());
    }
    crate::exec::check_merged_heads(
        "partial_out",
        spec.q_heads as usize,
        spec.head_dim_v as usize,
    )?;
    check_16_bits("the out of a rank", spec.out_dtype)
}

/// Checks that a group made for this number of tokens has room for the results.
pub(super) fn check_tokens(got: usize, most: usize) -> Result<(), Error> {
    if got <= most {
        return Ok(());
    }
    let rule = format!("at most {most}, for which the group was made");
    Err(extent("the results of a rank", "tokens", got, rule))
}

fn out_bytes(rows: usize, head_dim: usize) -> usize {
    (rows * head_dim * 2).next_multiple_of(256)
}

fn lse_bytes(rows: usize) -> usize {
    (rows * 4).next_multiple_of(256)
}

impl Group {
    pub(super) fn control(&self, rank: usize) -> DevicePtr {
        self.members[rank].memory.address()
    }

    /// The places of a rank's results in a turn: outputs, then LSEs.
    pub(super) fn results(&self, rank: usize, turn: usize) -> [DevicePtr; 2] {
        let rows = self.tokens * self.q_heads;
        let (out, lse) = (out_bytes(rows, self.head_dim), lse_bytes(rows));
        let out_at = self.control(rank) + (CONTROL_BYTES + turn * (out + lse)) as u64;
        [out_at, out_at + out as u64]
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A kernel on one GPU may still read the memory of another GPU, and freeing memory waits only for its own GPU.
        for member in &self.members {
            if let Ok(_current) = Current::enter(member.context.raw()) {
                // SAFETY: waits; kernels wait for no rank longer than the timeout.
                let _ = unsafe { cuCtxSynchronize() };
            }
        }
    }
}

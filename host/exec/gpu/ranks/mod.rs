//! Several GPUs of one process: what they computed from keys of their own is merged by direct reads.
//!
//! A group of [`Rank`]s is made once, for the largest step. Each rank runs its [share](crate::shard::Share) on its own GPU,
//! stream and, as a rule, thread:
//!
//! ```no_run
//! use tandem_attn::{Error, exec::gpu::{Gpu, RankOptions, RunTensors, Workspace}, problem::Spec};
//!
//! # fn layer(_: &Gpu) -> (Workspace, RunTensors<'static>) { unimplemented!() }
//! let gpus = [Gpu::new(0)?, Gpu::new(1)?];
//! let spec = Spec::new(32, 8, 128);
//! let ranks = Gpu::ranks(&gpus.each_ref(), &spec, 256, &RankOptions::default())?;
//! std::thread::scope(|threads| {
//!     for (gpu, mut rank) in gpus.iter().zip(ranks) {
//!         threads.spawn(move || -> Result<(), Error> {
//!             let stream = gpu.stream()?;
//!             let (mut workspace, tensors) = layer(gpu); // the rank's share, uploaded
//!             rank.announce(64)?; // once per step
//!             unsafe { rank.run(gpu, &mut workspace, &tensors, 0..64, *stream)? }; // once per layer
//!             stream.synchronize()?;
//!             rank.check() // a rank that failed is an error on all
//!         });
//!     }
//! });
//! # Ok::<(), Error>(())
//! ```

mod board;
mod merge;
mod nccl;

use std::{ops::Range, sync::Arc, time::Duration};

use kernels_gpu::{
    abi::{MAX_GROUP, RankControl},
    passes::ranks::{MERGE, SIGNAL, WAIT},
};

use super::{
    DevicePtr, DeviceTensor, Gpu, Graph, RunTensors, Stream, Workspace,
    driver::{
        Check, Code, Current, Device, cuCtxEnablePeerAccess, cuDeviceCanAccessPeer, cuMemcpyDtoH,
        cuMemcpyHtoD,
    },
    resources::{DeviceMemory, OwnedStream, PrimaryContext},
};
use crate::{
    Error,
    problem::{Dtype, Spec},
    shard::RankError,
};
use board::Board;
pub use nccl::{NcclId, NcclRank};

/// How a group of ranks behaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankOptions {
    /// How long a rank waits for another one, on the host or on the GPU, before that is an error.
    pub timeout: Duration,
}

impl Default for RankOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_millis(800),
        }
    }
}

impl RankOptions {
    /// With another time to wait for others.
    #[must_use]
    pub const fn with_timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }
}

/// What ranks of a group have in common.
struct Group {
    q_heads: usize,
    head_dim: usize,
    dtype: Dtype,
    /// The most of a run.
    tokens: usize,
    timeout: Duration,
    members: Vec<Member>,
    board: Board,
}

/// A rank's memory, which all ranks read.
struct Member {
    device: Device,
    memory: DeviceMemory,
    context: PrimaryContext,
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

/// One rank of a group, made by [`Gpu::ranks`].
///
/// Results lie in two buffers in turn. Runs and merges of all ranks come in the same order; a captured graph has an even
/// number of them, which [`Rank::capture`] sees to.
pub struct Rank {
    group: Arc<Group>,
    rank: u32,
    /// Announcements, and how many of them the others agreed with.
    steps: u64,
    agreed: u64,
    announced: usize,
    /// The buffer of the next results.
    turn: usize,
}

/// Bytes of a rank's memory before its results.
const CONTROL_BYTES: usize = size_of::<RankControl>().next_multiple_of(256);

impl Gpu {
    /// A group of ranks, one on each of the GPUs, for results of up to so many query tokens of these heads (those of a
    /// [share](crate::shard::Share)). Two ranks may be on one GPU, which is for tests: wait for the streams of both between
    /// [`Rank::signal`] and [`Rank::merge`] then, for a merge that waits may take the room of the attention that it waits for.
    ///
    /// # Errors
    /// [`RankError::Group`], [`RankError::NoPeerAccess`], [`Error::Dtype`] for outputs of other than 16 bits,
    /// [`Error::Driver`].
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
        check_heads(spec)?;
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

/// Whether results of these heads are merged.
fn check_heads(spec: &Spec) -> Result<(), Error> {
    spec.check()?;
    crate::exec::check_merged_heads(spec.q_heads as usize, spec.head_dim_v as usize)?;
    match spec.out_dtype {
        Dtype::BF16 | Dtype::F16 => Ok(()),
        got => Err(Error::Dtype {
            tensor: "the out of a rank",
            got,
            expected: "BF16 or F16",
        }),
    }
}

fn out_bytes(rows: usize, head_dim: usize) -> usize {
    (rows * head_dim * 2).next_multiple_of(256)
}

fn lse_bytes(rows: usize) -> usize {
    (rows * 4).next_multiple_of(256)
}

impl Group {
    fn control(&self, rank: usize) -> DevicePtr {
        self.members[rank].memory.address()
    }

    /// Where the results of a rank lie in a turn: outputs, then LSEs.
    fn results(&self, rank: usize, turn: usize) -> [DevicePtr; 2] {
        let rows = self.tokens * self.q_heads;
        let (out, lse) = (out_bytes(rows, self.head_dim), lse_bytes(rows));
        let out_at = self.control(rank) + (CONTROL_BYTES + turn * (out + lse)) as u64;
        [out_at, out_at + out as u64]
    }
}

impl Rank {
    /// Its number.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.rank
    }

    /// Says how many query tokens the next runs have: once for each step, on all ranks. It does not wait; the first run
    /// behind it waits until all ranks have announced, and compares.
    ///
    /// # Errors
    /// [`Error::Extent`] where the group was made for fewer.
    pub fn announce(&mut self, tokens: usize) -> Result<(), Error> {
        if tokens > self.group.tokens {
            return Err(Error::Extent {
                tensor: "the results of a rank",
                dimension: "tokens",
                got: tokens,
                rule: format!(
                    "at most {}, for which the group was made",
                    self.group.tokens
                ),
            });
        }
        self.steps += 1;
        self.announced = tokens;
        self.group.board.announce(self.rank, self.steps, tokens);
        Ok(())
    }

    /// Attention of the plan in the workspace, a [share](crate::shard::Share)'s, as [`Gpu::run_with`]; then the results of
    /// all ranks are merged. Of `tensors.out` and `tensors.lse` the tokens in `rows` are written: all of them on every
    /// rank, or on each rank the ones that it goes on with.
    ///
    /// # Safety
    /// As [`Gpu::run_with`]. All ranks of the group make the same runs in the same order, and are not waited for on the
    /// stream of another.
    ///
    /// # Errors
    /// As [`Gpu::run_with`]; a [`RankError`] where ranks disagree, before anything is launched. An error of one rank ends
    /// the wait of the others.
    pub unsafe fn run(
        &mut self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        rows: Range<usize>,
        stream: Stream,
    ) -> Result<(), Error> {
        let tokens = tensors.q.shape[0];
        self.agree(tokens)?;
        let state = self.results(tokens);
        let own = RunTensors {
            out: &state.out,
            lse: Some(&state.lse),
            ..*tensors
        };
        let launched = self
            .prepare(
                gpu,
                rows,
                Some(tensors.out),
                tensors.lse,
                SIGNAL | WAIT | MERGE,
            )
            .and_then(|mut merge| {
                // SAFETY: the caller's promises; the results are not read by others before the signal.
                unsafe {
                    gpu.run_with(workspace, &own, stream)?;
                    merge.launch.overlap = gpu.overlaps() && workspace.run.is_in_line();
                    gpu.launch(&merge.kernel, &merge.launch, &merge.parameters, stream)
                }
            });
        self.turn ^= 1;
        launched.inspect_err(|error| self.stop(&error.to_string()))
    }

    /// Where this rank's results go before they are merged: for attention by other calls than [`run`](Self::run).
    #[must_use]
    pub fn results(&self, tokens: usize) -> RankTensors {
        let Group {
            q_heads,
            head_dim,
            dtype,
            ..
        } = *self.group;
        let [out, lse] = self.group.results(self.rank as usize, self.turn);
        RankTensors {
            out: DeviceTensor::new(out, dtype, [tokens, q_heads, head_dim]),
            lse: DeviceTensor::new(lse, Dtype::F32, [tokens, q_heads]),
        }
    }

    /// Tells the other ranks that the results are there, when the stream comes to it.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub unsafe fn signal(&mut self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        let step = self.prepare(gpu, 0..0, None, None, SIGNAL)?;
        // SAFETY: the caller's promises.
        unsafe { gpu.launch(&step.kernel, &step.launch, &step.parameters, stream) }
    }

    /// Merges the results of all ranks, each of which [signalled](Self::signal) or will; the next results go to the other
    /// buffer.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub unsafe fn merge(
        &mut self,
        gpu: &Gpu,
        rows: Range<usize>,
        out: &DeviceTensor<3>,
        lse: Option<&DeviceTensor<2>>,
        stream: Stream,
    ) -> Result<(), Error> {
        self.agree(out.shape[0])?;
        let step = self.prepare(gpu, rows, Some(out), lse, WAIT | MERGE)?;
        self.turn ^= 1;
        // SAFETY: the caller's promises.
        unsafe { gpu.launch(&step.kernel, &step.launch, &step.parameters, stream) }
    }

    /// Captures runs in a graph that may be launched any number of times: on all ranks as often. Where their number is
    /// odd, a merge of nothing is added.
    ///
    /// # Errors
    /// The error of `work`, or [`Error::Driver`].
    pub fn capture(
        &mut self,
        gpu: &Gpu,
        stream: &OwnedStream,
        work: impl FnOnce(&mut Self, Stream) -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        self.settle(gpu, **stream)?;
        stream.capture(|stream| {
            work(self, stream)?;
            self.settle(gpu, stream)
        })
    }

    /// Makes the number of runs even, as it is to be where a graph begins: on all ranks, or on none.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn settle(&mut self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        match self.turn {
            0 => Ok(()),
            _ => self.barrier(gpu, stream),
        }
    }

    /// Merges nothing: the stream goes on when all ranks have come to this point. It counts as a run.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn barrier(&mut self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        let step = self.prepare(gpu, 0..0, None, None, SIGNAL | WAIT | MERGE)?;
        self.turn ^= 1;
        // SAFETY: it reads and writes the group's own memory alone.
        unsafe { gpu.launch(&step.kernel, &step.launch, &step.parameters, stream) }
    }

    /// Whether all merges that are done had the results of all ranks. Call it when the stream was waited for; kernels
    /// wait for no rank longer than [`RankOptions::timeout`].
    ///
    /// # Errors
    /// [`RankError::Late`], [`RankError::Failed`]; [`Error::Driver`], also for errors of earlier work.
    pub fn check(&self) -> Result<(), Error> {
        let member = &self.group.members[self.rank as usize];
        let mut words = [0_u32; 4];
        let _current = Current::enter(member.context.raw())?;
        // SAFETY: the control begins with as many words.
        unsafe {
            cuMemcpyDtoH(
                words.as_mut_ptr().cast(),
                self.group.control(self.rank as usize),
                size_of_val(&words),
            )
        }
        .check("cuMemcpyDtoH")?;
        let [_, _, missed, _] = words;
        match missed {
            0 => Ok(()),
            kernels_gpu::passes::ranks::STOPPED => Err(self.group.board.failure(self.rank).into()),
            rank => Err(RankError::Late {
                rank: self.rank,
                missing: rank - 1,
                waited_ms: self.group.timeout.as_millis() as u64,
            }
            .into()),
        }
    }

    /// Says that this rank will not go on: the others get [`RankError::Failed`] at once, on the host and on their GPUs.
    pub fn stop(&self, reason: &str) {
        self.group.board.stop(self.rank, reason);
        for (rank, member) in self.group.members.iter().enumerate() {
            if rank == self.rank as usize {
                continue;
            }
            let word = self.group.control(rank) + core::mem::offset_of!(RankControl, stop) as u64;
            let by = self.rank + 1;
            if let Ok(_current) = Current::enter(member.context.raw()) {
                // SAFETY: a word of the group's memory. Where the driver refuses, the wait ends by its timeout.
                let _ = unsafe { cuMemcpyHtoD(word, (&raw const by).cast(), size_of::<u32>()) };
            }
        }
    }

    /// Waits until all ranks have announced, once for each announcement.
    fn agree(&mut self, tokens: usize) -> Result<(), Error> {
        if tokens != self.announced || self.steps == 0 {
            return Err(RankError::NotAnnounced {
                rank: self.rank,
                tokens,
                announced: self.announced,
            }
            .into());
        }
        if self.agreed < self.steps {
            let board = &self.group.board;
            board.agree(self.rank, self.steps, tokens, self.group.timeout)?;
            self.agreed = self.steps;
        }
        Ok(())
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stop("its thread panicked");
        } else {
            // Whoever still waits for its announcement need not; kernels that wait for it end by their timeout.
            self.group.board.stop(self.rank, "it was dropped");
        }
    }
}

impl std::fmt::Debug for Rank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Rank")
            .field("rank", &self.rank)
            .field("of", &self.group.members.len())
            .field("tokens", &self.group.tokens)
            .finish_non_exhaustive()
    }
}

// A rank goes to the thread that runs it.
const _: fn() = || {
    const fn sendable<T: Send>() {}
    sendable::<Rank>();
};

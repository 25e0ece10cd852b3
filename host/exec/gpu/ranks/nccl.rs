//! Ranks in separate processes, with NCCL, which is opened at run time.
//!
//! A run gathers the results of all ranks by one collective, and merges them with the kernel that otherwise reads them from
//! the other GPUs. Communicators do not block: all waits for other ranks poll, and end after a time limit.

mod library;

use std::{
    ops::Range,
    time::{Duration, Instant},
};

use kernels_gpu::{
    abi::{MAX_GROUP, RankControl},
    passes::ranks::MERGE,
};

use self::library::{Comm, IN_PROGRESS, Nccl, SUCCESS};
use super::{
    super::{
        Gpu, RunTensors, Stream, Workspace,
        driver::{
            Check, Code, Current, Device, cuMemcpyDtoHAsync, cuMemcpyHtoDAsync, cuStreamQuery,
            cuStreamSynchronize,
        },
        resources::{DeviceMemory, OwnedStream, PrimaryContext},
    },
    RankOptions, RankTensors,
    merge::{Merge, check_rows},
};
use crate::{
    Error,
    problem::{Dtype, Spec},
    shard::RankError,
};

pub use library::NcclId;

/// One rank of a group whose ranks may be in other processes. Results are the same bits as by [direct
/// reads](super::Rank).
///
/// Dropping it aborts its collectives that are under way. [Wait](NcclRank::wait) for them before.
pub struct NcclRank {
    nccl: &'static Nccl,
    comm: Comm,
    rank: u32,
    ranks: u32,
    q_heads: usize,
    head_dim: usize,
    dtype: Dtype,
    tokens: usize,
    announced: Option<usize>,
    timeout: Duration,
    device: Device,
    stream: OwnedStream,
    memory: DeviceMemory,
    // Declared after the objects that live in it, so that it is released after them.
    context: PrimaryContext,
}

// SAFETY: a communicator may be used by any thread, one at a time, which `&mut` sees to.
unsafe impl Send for NcclRank {}

/// Bytes before the results: the control of the kernel, and announcements.
const CONTROL_BYTES: usize = size_of::<RankControl>().next_multiple_of(256);
const NOTE_BYTES: usize = 256;

impl Gpu {
    /// Joins a group of ranks over NCCL, for results of up to this number of query tokens of these heads. All ranks call it, with
    /// the [`NcclId`] that one of them made.
    ///
    /// # Errors
    /// [`RankError::NoNccl`] where the library is missing, [`RankError::Nccl`] for what it says,
    /// [`RankError::Collective`] where others do not call it within [`RankOptions::start`], [`RankError::Number`]; as
    /// [`Gpu::ranks`].
    pub fn nccl_rank(
        &self,
        id: &NcclId,
        [rank, ranks]: [u32; 2],
        spec: &Spec,
        tokens: usize,
        options: &RankOptions,
    ) -> Result<NcclRank, Error> {
        let nccl = library::open()?;
        let (got, most) = (ranks as usize, MAX_GROUP);
        if got == 0 || got > most {
            return Err(RankError::Group { got, most }.into());
        }
        if rank >= ranks {
            return Err(RankError::Number { rank, ranks }.into());
        }
        super::check_heads(spec, ranks)?;
        let context = PrimaryContext::retain(self.device)?;
        let _current = Current::enter(context.raw())?;
        let (q_heads, head_dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
        let state = state_bytes(tokens, q_heads, head_dim);
        let bytes = CONTROL_BYTES + NOTE_BYTES + (1 + ranks as usize) * state;
        let mut made = NcclRank {
            nccl,
            comm: Comm::NONE,
            rank,
            ranks,
            q_heads,
            head_dim,
            dtype: spec.out_dtype,
            tokens,
            announced: None,
            timeout: options.start,
            device: self.device,
            stream: OwnedStream::new(&context)?,
            memory: DeviceMemory::zeroed(context.raw(), bytes)?,
            context,
        };
        // SAFETY: one communicator for this rank, on the device of the current context.
        let code = unsafe { nccl.init(&mut made.comm, ranks, id, rank) };
        made.settled("ncclCommInitRankConfig", code)?;
        made.timeout = options.timeout;
        Ok(made)
    }
}

/// Bytes of the results of `tokens` tokens: outputs, then LSEs.
fn state_bytes(tokens: usize, q_heads: usize, head_dim: usize) -> usize {
    lse_at(tokens, q_heads, head_dim) + (tokens * q_heads * 4).next_multiple_of(16)
}

fn lse_at(tokens: usize, q_heads: usize, head_dim: usize) -> usize {
    (tokens * q_heads * head_dim * 2).next_multiple_of(16)
}

impl NcclRank {
    /// Announces the number of query tokens of the next runs, and waits until all ranks have announced the same: once
    /// for each step.
    ///
    /// # Errors
    /// [`RankError::Disagree`] on all ranks, [`RankError::Collective`], [`RankError::Nccl`], [`Error::Extent`].
    pub fn announce(&mut self, tokens: usize) -> Result<(), Error> {
        super::check_tokens(tokens, self.tokens)?;
        let _current = Current::enter(self.context.raw())?;
        let notes = self.memory.address() + CONTROL_BYTES as u64;
        let said = tokens as u64;
        let own = u64::from(self.rank) * 8;
        let mut all = [0_u64; MAX_GROUP];
        // All on this stream: the default stream waits for blocking streams, and so for runs on them whose other ranks
        // never come.
        let stream = *self.stream;
        // SAFETY: words of our memory; the stream is ours and idle. What is not pinned was read when the call returns.
        let code = unsafe {
            cuMemcpyHtoDAsync(notes + own, (&raw const said).cast(), 8, stream)
                .check("cuMemcpyHtoDAsync")?;
            let nccl = self.nccl;
            nccl.all_gather(notes + own, notes, 8, self.comm, stream)
        };
        self.settled("ncclAllGather", code)?;
        // SAFETY: the stream is ours.
        unsafe { self.wait(stream) }?;
        // SAFETY: so many words; they are waited for.
        unsafe {
            let bytes = 8 * self.ranks as usize;
            cuMemcpyDtoHAsync(all.as_mut_ptr().cast(), notes, bytes, stream)
                .check("cuMemcpyDtoHAsync")?;
            cuStreamSynchronize(stream).check("cuStreamSynchronize")?;
        }
        let all = &all[..self.ranks as usize];
        if let Some(other) = all.iter().position(|&its| its != said) {
            return Err(RankError::Disagree {
                rank: self.rank,
                tokens,
                other: other as u32,
                other_tokens: all[other] as usize,
            }
            .into());
        }
        self.announced = Some(tokens);
        Ok(())
    }

    /// As [`Rank::run`](super::Rank::run).
    ///
    /// # Safety
    /// As there. The rank lives until the work on the stream is done ([`wait`](Self::wait)): dropping it cuts collectives
    /// off, and the results are then wrong without an error. This holds for launches of a graph that captured the run, too.
    ///
    /// # Errors
    /// As there; [`RankError::Nccl`].
    pub unsafe fn run(
        &mut self,
        gpu: &Gpu,
        workspace: &mut Workspace,
        tensors: &RunTensors<'_>,
        rows: Range<usize>,
        stream: Stream,
    ) -> Result<(), Error> {
        let tokens = tensors.q.shape[0];
        if self.announced != Some(tokens) {
            return Err(RankError::NotAnnounced {
                rank: self.rank,
                tokens,
                announced: self.announced.unwrap_or(0),
            }
            .into());
        }
        check_rows(&rows, tokens, "q")?;
        let (heads, dim) = (self.q_heads, self.head_dim);
        let bytes = state_bytes(tokens, heads, dim);
        let own = self.memory.address() + (CONTROL_BYTES + NOTE_BYTES) as u64;
        let lse_at = lse_at(tokens, heads, dim) as u64;
        let state = RankTensors::at([own, own + lse_at], self.dtype, [tokens, heads, dim]);
        let gathered = own + state_bytes(self.tokens, heads, dim) as u64;
        let merge = Merge {
            q_heads: heads,
            head_dim: dim,
            dtype: self.dtype,
            ranks: self.ranks as usize,
            rank: self.rank,
            device: self.device,
            control: self.memory.address(),
            timeout: self.timeout,
        };
        let of = |rank: usize| gathered + (rank * bytes) as u64;
        let states = |rank: usize| [of(rank), of(rank) + lse_at];
        let step = merge.prepare(
            gpu,
            rows,
            Some(tensors.out),
            tensors.lse,
            MERGE,
            &states,
            &|_| 0,
        )?;
        let own_tensors = RunTensors {
            out: &state.out,
            lse: Some(&state.lse),
            ..*tensors
        };
        let _current = Current::enter(self.context.raw())?;
        // SAFETY: the caller's promises; our memory has a state for each rank.
        unsafe {
            gpu.run_with(workspace, &own_tensors, stream)?;
            let code = self
                .nccl
                .all_gather(own, gathered, bytes, self.comm, stream);
            self.settled("ncclAllGather", code)?;
            gpu.launch(&step.kernel, &step.launch, &step.parameters, stream)
        }
    }

    /// Waits until the work on the stream is done, up to the timeout. A rank that does not come ends the group.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, or null, and lives until the call returns.
    ///
    /// # Errors
    /// [`RankError::Collective`], [`RankError::Nccl`], [`Error::Driver`].
    pub unsafe fn wait(&mut self, stream: Stream) -> Result<(), Error> {
        let _current = Current::enter(self.context.raw())?;
        let begin = Instant::now();
        loop {
            // SAFETY: the caller's promise.
            match unsafe { cuStreamQuery(stream) } {
                Code::NOT_READY => {}
                code => return code.check("cuStreamQuery"),
            }
            self.healthy()?;
            self.in_time(begin)?;
        }
    }

    /// Checks for an error that NCCL found asynchronously.
    fn healthy(&mut self) -> Result<i32, Error> {
        // SAFETY: the communicator lives.
        let found = unsafe { self.nccl.async_error(self.comm) };
        match found {
            SUCCESS | IN_PROGRESS => Ok(found),
            code => {
                self.abort();
                Err(self.nccl.error("ncclCommGetAsyncError", code).into())
            }
        }
    }

    /// Waits until a call that NCCL began has been queued.
    fn settled(&mut self, call: &'static str, code: i32) -> Result<(), Error> {
        let begin = Instant::now();
        match code {
            SUCCESS | IN_PROGRESS => {}
            code => return Err(self.nccl.error(call, code).into()),
        }
        if code == SUCCESS {
            return Ok(());
        }
        while self.healthy()? == IN_PROGRESS {
            self.in_time(begin)?;
            std::thread::yield_now();
        }
        Ok(())
    }

    fn in_time(&mut self, begin: Instant) -> Result<(), Error> {
        let waited = begin.elapsed();
        if waited <= self.timeout {
            return Ok(());
        }
        self.abort();
        Err(RankError::Collective {
            rank: self.rank,
            waited_ms: waited.as_millis() as u64,
        }
        .into())
    }

    /// Aborts the communicator and its work on the GPU for good.
    fn abort(&mut self) {
        self.announced = None;
        // SAFETY: it is not used behind this.
        unsafe {
            self.nccl
                .abort(std::mem::replace(&mut self.comm, Comm::NONE))
        }
    }
}

impl Drop for NcclRank {
    fn drop(&mut self) {
        if let Ok(_current) = Current::enter(self.context.raw()) {
            self.abort();
        }
    }
}

impl std::fmt::Debug for NcclRank {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NcclRank")
            .field("rank", &self.rank)
            .field("of", &self.ranks)
            .finish_non_exhaustive()
    }
}

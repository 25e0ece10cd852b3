//! Several GPUs of one process, whose results over different keys are merged by direct reads.
//!
//! A group of [`Rank`]s is made once, for the largest step. Each rank runs its [share](crate::shard::Share) on its own GPU and
//! stream, usually in its own thread:
//!
//! ```no_run
//! use tandem_attn::{Error, gpu::{Gpu, RankOptions, RunTensors, Workspace}, problem::Spec};
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
//!             rank.check() // if a rank failed, all ranks get an error
//!         });
//!     }
//! });
//! # Ok::<(), Error>(())
//! ```

mod board;
mod group;
mod merge;
mod nccl;

use std::{ops::Range, sync::Arc};

use kernels_gpu::{
    abi::RankControl,
    passes::ranks::{MERGE, SIGNAL, WAIT},
};

use super::{
    DeviceTensor, Gpu, Graph, RunTensors, Stream, Workspace,
    driver::{Check, Current, cuMemcpyDtoH, cuMemcpyHtoDAsync, cuStreamSynchronize},
    resources::OwnedStream,
};
use crate::{Error, shard::RankError};
use group::{Group, check_heads, check_tokens};
pub use group::{RankOptions, RankTensors};
use merge::check_rows;
pub use nccl::{NcclId, NcclRank};

/// One rank of a group, made by [`Gpu::ranks`].
///
/// Results alternate between two buffers. All ranks must make the same runs and merges in the same order. A captured graph must have an
/// even number of them; [`Rank::capture`] ensures this.
pub struct Rank {
    group: Arc<Group>,
    rank: u32,
    /// Number of announcements, and how many of them the others agreed with.
    steps: u64,
    agreed: u64,
    announced: usize,
    /// The buffer of the next results.
    turn: usize,
}

impl Rank {
    /// Its number.
    #[must_use]
    pub const fn number(&self) -> u32 {
        self.rank
    }

    /// Announces the number of query tokens of the next runs. Call it once per step on all ranks. It does not wait. The next run
    /// waits until all ranks have announced, and compares the numbers.
    ///
    /// # Errors
    /// [`Error::Extent`] if the group was made for fewer tokens.
    pub fn announce(&mut self, tokens: usize) -> Result<(), Error> {
        check_tokens(tokens, self.group.tokens)?;
        self.steps += 1;
        self.announced = tokens;
        self.group.board.announce(self.rank, self.steps, tokens);
        Ok(())
    }

    /// Computes the attention of the plan in the workspace, which is that of a [share](crate::shard::Share), as [`Gpu::run_with`]
    /// does. Then it merges the results of all ranks. Only the tokens in `rows` of `tensors.out` and `tensors.lse` are written:
    /// all tokens on every rank, or on each rank only those that it needs.
    ///
    /// # Safety
    /// As [`Gpu::run_with`]. All ranks of the group make the same runs in the same order. The stream of a rank must not wait for
    /// that of another.
    ///
    /// # Errors
    /// As [`Gpu::run_with`]; a [`RankError`] if ranks disagree, before anything is launched. An error of one rank ends
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
        self.agree(tokens).inspect_err(|error| match error {
            // The group has stopped already, or the other ranks compare the numbers themselves.
            Error::Rank(RankError::Failed { .. } | RankError::Disagree { .. }) => {}
            _ => self.stop(&error.to_string()),
        })?;
        let state = self.results(tokens)?;
        let own = RunTensors {
            out: &state.out,
            lse: Some(&state.lse),
            ..*tensors
        };
        let (out, mode) = (Some(tensors.out), SIGNAL | WAIT | MERGE);
        // The other ranks have no results behind these tokens either, but `out` may have more.
        let launched = check_rows(&rows, tokens, "q")
            .and_then(|()| self.prepare(gpu, rows, out, tensors.lse, mode))
            .and_then(|mut merge| {
                // SAFETY: the caller's promises; the results are not read by others before the signal.
                unsafe {
                    gpu.run_with(workspace, &own, stream)?;
                    // In a graph, the last launch may have no work, and end before the launches that it would wait for.
                    let waits = !workspace.captured() && workspace.run.is_in_line();
                    merge.launch.overlap = gpu.overlaps() && waits;
                    gpu.launch(&merge.kernel, &merge.launch, &merge.parameters, stream)
                }
            });
        self.turn ^= 1;
        launched.inspect_err(|error| self.stop(&error.to_string()))
    }

    /// The memory for this rank's results before the merge, for attention by other calls than [`run`](Self::run).
    ///
    /// # Errors
    /// [`Error::Extent`] if the group was made for fewer tokens.
    pub fn results(&self, tokens: usize) -> Result<RankTensors, Error> {
        check_tokens(tokens, self.group.tokens)?;
        let Group {
            q_heads,
            head_dim,
            dtype,
            ..
        } = *self.group;
        let places = self.group.results(self.rank as usize, self.turn);
        Ok(RankTensors::at(places, dtype, [tokens, q_heads, head_dim]))
    }

    /// Signals to the other ranks that the results are ready, in the order of the stream.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// [`RankError::OtherDevice`]; [`Error::Driver`]. The others then wait until their timeout, unless [`stop`](Self::stop) is
    /// called.
    pub unsafe fn signal(&mut self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        let step = self.prepare(gpu, 0..0, None, None, SIGNAL)?;
        // SAFETY: the caller's promises.
        unsafe { gpu.launch(&step.kernel, &step.launch, &step.parameters, stream) }
    }

    /// Merges the results of all ranks, after each rank has [signalled](Self::signal). The next results use the other
    /// buffer.
    ///
    /// # Safety
    /// As [`run`](Self::run).
    ///
    /// # Errors
    /// As [`run`](Self::run), but the others are not stopped: they wait until their timeout, unless [`stop`](Self::stop) is
    /// called.
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
        // SAFETY: the caller's promises.
        unsafe { gpu.launch(&step.kernel, &step.launch, &step.parameters, stream) }?;
        self.turn ^= 1;
        Ok(())
    }

    /// Captures runs in a CUDA graph. It may be launched any number of times, equally often on all ranks. If the number of runs is
    /// odd, an empty merge is added.
    ///
    /// # Errors
    /// The error of `work`, or [`Error::Driver`].
    pub fn capture(
        &mut self,
        gpu: &Gpu,
        stream: &OwnedStream,
        work: impl FnOnce(&mut Self, Stream) -> Result<(), Error>,
    ) -> Result<Graph, Error> {
        // SAFETY: the stream owns its handle, which the driver keeps until the work on it is done.
        unsafe { self.settle(gpu, **stream) }?;
        let before = self.turn;
        let captured = stream.capture(|stream| {
            work(self, stream)?;
            // SAFETY: as above.
            unsafe { self.settle(gpu, stream) }
        });
        if captured.is_err() {
            // Nothing ran, so the other ranks still expect the next results in the same buffer.
            self.turn = before;
        }
        captured
    }

    /// Makes the number of runs even, as it must be where a graph begins. Call it on all ranks or on none.
    ///
    /// # Safety
    /// As [`barrier`](Self::barrier).
    ///
    /// # Errors
    /// As [`barrier`](Self::barrier).
    pub unsafe fn settle(&mut self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        match self.turn {
            0 => Ok(()),
            // SAFETY: the caller's promise.
            _ => unsafe { self.barrier(gpu, stream) },
        }
    }

    /// An empty merge: the stream continues when all ranks have reached this point. It counts as a run.
    ///
    /// # Safety
    /// `stream` is a stream of the device's primary context, or null, and lives until the work on it is done. Its work is
    /// ordered after earlier runs of this rank. It must not wait for the stream of another rank.
    ///
    /// # Errors
    /// [`RankError::OtherDevice`]; [`Error::Driver`]. The others then wait until their timeout, unless [`stop`](Self::stop) is
    /// called.
    pub unsafe fn barrier(&mut self, gpu: &Gpu, stream: Stream) -> Result<(), Error> {
        let step = self.prepare(gpu, 0..0, None, None, SIGNAL | WAIT | MERGE)?;
        // SAFETY: it reads and writes the group's own memory alone; the stream as the caller promises.
        unsafe { gpu.launch(&step.kernel, &step.launch, &step.parameters, stream) }?;
        self.turn ^= 1;
        Ok(())
    }

    /// Checks that all completed merges had the results of all ranks. Call it after waiting for the stream. Kernels
    /// wait for a rank at most [`RankOptions::timeout`].
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

    /// Stops the group: the other ranks get [`RankError::Failed`] at once, on the host and on their GPUs.
    pub fn stop(&self, reason: &str) {
        self.group.board.stop(self.rank, reason);
        for (rank, member) in self.group.members.iter().enumerate() {
            if rank == self.rank as usize {
                continue;
            }
            let word = self.group.control(rank) + core::mem::offset_of!(RankControl, stop) as u64;
            let by = self.rank + 1;
            if let Ok(_current) = Current::enter(member.context.raw()) {
                let stream = *member.stream;
                // Not on the default stream: it waits for blocking streams, and so for the kernels that wait for this
                // rank.
                // SAFETY: a word of the group's memory. Where the driver refuses, the wait ends by its timeout.
                unsafe {
                    let _ =
                        cuMemcpyHtoDAsync(word, (&raw const by).cast(), size_of::<u32>(), stream);
                    let _ = cuStreamSynchronize(stream);
                }
            }
        }
    }

    /// Waits until all ranks have announced: once for each announcement.
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
            // Other hosts stop waiting for its announcement at once. Kernels that wait for it end by their timeout.
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

// A rank can be sent to the thread that runs it.
const _: fn() = || {
    const fn sendable<T: Send>() {}
    sendable::<Rank>();
};

//! `merge_ranks`: ⊕ over the results of several GPUs, each for its own keys, read directly from their memory.
//!
//! Each rank's attention writes its outputs and LSEs to memory that all ranks can read. This kernel follows on the same
//! stream. It signals the other ranks (a system-scope release store to their memory), waits until all have signalled,
//! reads their results and merges them in the order of the ranks, so the result depends only on the states. A rank
//! polls its own memory, and writes a single word to each other rank.
//!
//! *Rounds* are counted on the device, so a captured graph can be launched any number of times. Results alternate
//! between two buffers. A rank that refills a buffer has completed a merge since it was last used, so every other rank
//! has passed the merge that read it.
//!
//! A wait ends after a timeout or at the host's request. The rank then records which rank it missed; neither this merge
//! nor later ones write anything.
//!
//! A thread merges a *chunk* of 8 elements. The loads from all ranks are issued before the first result is used: NVLink
//! needs many bytes in flight.

/// Elements per thread and iteration.
pub const CHUNK: u32 = 8;

/// Threads of a block.
pub const THREADS: u32 = 256;

/// Resident blocks per SM.
pub const BLOCKS: u32 = 3;

/// Flag of [`RankMergeParams::mode`](crate::abi::RankMergeParams::mode): signal the other ranks.
pub const SIGNAL: u32 = 1;

/// Flag: merge, and advance to the next round.
pub const MERGE: u32 = 2;

/// Flag: wait for the other ranks before merging. Not needed if a collective has gathered their results.
pub const WAIT: u32 = 4;

/// In [`RankControl::missed`](crate::abi::RankControl::missed): the host stopped the wait.
pub const STOPPED: u32 = u32::MAX;

/// The kernels, one per 16-bit float type: `merge_ranks_<element>`.
#[cfg(not(target_arch = "nvptx64"))]
pub const ROWS: &[crate::registry::KernelInfo] = {
    use crate::common::half::half_row;
    crate::each_half! { list half_row { "merge_ranks_", Passes Sm80 MergeRanks, THREADS, BLOCKS } }
};

#[cfg(target_arch = "nvptx64")]
mod device {
    use cuda_std::{
        atomic::{self, Acquire, Gpu, Relaxed, Release, Sys},
        barrier,
        prelude::*,
        special,
    };

    use super::{BLOCKS, CHUNK, MERGE, SIGNAL, STOPPED, THREADS, WAIT};
    use crate::{
        abi::{MAX_GROUP, RankControl, RankMergeParams},
        common::{
            half::{Half, half_entry},
            state::{Merger, State, natural},
        },
    };

    /// Polls between checks of the clock and of the host's stop word.
    const PATIENCE: u32 = 32;

    /// Address of a field of [`RankControl`].
    macro_rules! field {
        ($params:ident.$field:ident) => {
            ($params.control + core::mem::offset_of!(RankControl, $field) as u64) as *mut u32
        };
    }

    /// The word in this rank's memory that another rank writes; each word has a sector of its own.
    #[inline(always)]
    fn signal_of(params: &RankMergeParams, rank: u32) -> *const u32 {
        let first = core::mem::offset_of!(RankControl, signals) as u64;
        let sector = size_of::<[u32; 8]>() as u64;
        (params.control + first + u64::from(rank) * sector) as *const u32
    }

    /// Signals the other ranks that the results of previous kernels on the stream are available.
    ///
    /// # Safety
    /// As [`RankMergeParams`] says; one thread per rank comes here.
    #[inline(always)]
    unsafe fn signal(params: &RankMergeParams, to: u32, round: u32) {
        let mut rank = 0;
        while rank < MAX_GROUP {
            if to == rank as u32 && params.signals[rank] != 0 {
                // SAFETY: the caller's promise.
                unsafe { atomic::store::<Release, Sys, _>(params.signals[rank] as *mut u32, round) }
            }
            rank += 1;
        }
    }

    /// Waits until a rank has signalled; false if the wait timed out or was stopped.
    ///
    /// # Safety
    /// As [`RankMergeParams`] says.
    #[inline(always)]
    unsafe fn wait_for(params: &RankMergeParams, rank: u32, round: u32) -> bool {
        let signal = signal_of(params, rank);
        let begin = special::globaltimer();
        let mut polls = 0_u32;
        loop {
            // SAFETY: the caller's promise.
            let seen = unsafe { atomic::load::<Acquire, Sys, _>(signal) };
            if seen.wrapping_sub(round) as i32 >= 0 {
                return true;
            }
            polls += 1;
            if polls % PATIENCE == 0 {
                // SAFETY: as above.
                let stopped = unsafe { atomic::load::<Relaxed, Sys, _>(field!(params.stop)) };
                let late = special::globaltimer().wrapping_sub(begin) > params.timeout_ns;
                if stopped != 0 || late {
                    let why = if stopped != 0 { STOPPED } else { rank + 1 };
                    // SAFETY: as above.
                    unsafe { atomic::store::<Relaxed, Gpu, _>(field!(params.missed), why) };
                    return false;
                }
            }
        }
    }

    /// Loads a chunk of a rank's output, and its LSE.
    ///
    /// # Safety
    /// As [`RankMergeParams`] says.
    #[inline(always)]
    unsafe fn load(out: u64, lse: u64, chunk: u64, head: u64) -> ([u32; 4], f32) {
        // Not the read-only path: other GPUs wrote this while the kernel was waiting.
        // SAFETY: the caller's promise.
        unsafe {
            (
                ptr::load_u32x4((out + chunk * 16) as *const u32),
                ptr::load_f32((lse + head * 4) as *const f32),
            )
        }
    }

    /// Merges the chunks of a thread.
    ///
    /// # Safety
    /// As [`RankMergeParams`] says; all ranks have signalled, and a barrier completed since.
    #[inline(always)]
    unsafe fn merge<T: Half>(params: &RankMergeParams) {
        let step = thread::grid_dim_x() * THREADS;
        let mut at = thread::index_1d();
        while at < params.chunks {
            let (row, in_row) = params.chunks_per_row.div_rem(at);
            let (head, in_head) = params.chunks_per_head.div_rem(in_row);
            let token = u64::from(params.first_token + row);
            let chunk = token * u64::from(params.chunks_per_row.get()) + u64::from(in_row);
            let log = token * u64::from(params.q_heads) + u64::from(head);
            let mut loaded = [([0; 4], f32::NEG_INFINITY); MAX_GROUP];
            let mut rank = 0;
            while rank < MAX_GROUP {
                if (rank as u32) < params.ranks {
                    // SAFETY: the caller's promise.
                    loaded[rank] =
                        unsafe { load(params.out_of[rank], params.lse_of[rank], chunk, log) };
                }
                rank += 1;
            }
            let mut merger = Merger::EMPTY;
            rank = 0;
            while rank < MAX_GROUP {
                if (rank as u32) < params.ranks {
                    let (pairs, lse) = loaded[rank];
                    let ([a, b], [c, d]) = (T::unpack(pairs[0]), T::unpack(pairs[1]));
                    let ([e, f], [g, h]) = (T::unpack(pairs[2]), T::unpack(pairs[3]));
                    merger.push(State {
                        out: [a, b, c, d, e, f, g, h],
                        lse: lse * core::f32::consts::LOG2_E,
                    });
                }
                rank += 1;
            }
            let State { out: v, lse } = merger.finish();
            let element = token * u64::from(params.out_token_stride) + u64::from(in_row * CHUNK);
            let pairs = [
                T::pack(v[0], v[1]),
                T::pack(v[2], v[3]),
                T::pack(v[4], v[5]),
                T::pack(v[6], v[7]),
            ];
            // SAFETY: only this thread writes the chunk.
            unsafe {
                ptr::store_u32x4((params.out + element * 2) as *mut u32, pairs);
                if in_head == 0 && params.lse != 0 {
                    ptr::store_f32((params.lse + log * 4) as *mut f32, natural(lse));
                }
            }
            at += step;
        }
    }

    /// # Safety
    /// As [`RankMergeParams`] says; states and output are of the type `T`.
    #[inline(always)]
    unsafe fn run<T: Half>(params: &RankMergeParams) {
        // Dependent launch: wait for the attention whose results are signalled, and for the merge of the last round.
        #[cfg(target_feature = "sm_90a")]
        cuda_std::griddep::wait();
        let thread = thread::thread_idx_x();
        // SAFETY: the caller's promises.
        unsafe {
            // A rank that missed another one does nothing more. Atomic loads, because other blocks may write both words
            // meanwhile: `missed` at a timeout, and `round` by the last block, once this block has read it.
            let read = |word| atomic::load::<Relaxed, Gpu, _>(word as *const u32);
            let failed = read(field!(params.missed)) != 0;
            let round = read(field!(params.round)).wrapping_add(1);
            let (waits, first) = (thread < params.ranks, thread::block_idx_x() == 0);
            if params.mode & SIGNAL != 0 && waits && first && !failed {
                signal(params, thread, round);
            }
            if params.mode & MERGE == 0 {
                return;
            }
            let mut missed = failed;
            if params.mode & WAIT != 0 && waits && !failed && thread != params.rank {
                missed = !wait_for(params, thread, round);
            }
            if barrier::bar_any(0, THREADS, missed) {
                return;
            }
            merge::<T>(params);
            // The last block advances the round: by then all blocks have read it.
            if thread == 0 {
                let blocks = thread::grid_dim_x();
                let before = atomic::fetch_add::<Relaxed, Gpu, _>(field!(params.blocks), 1);
                if before == blocks - 1 {
                    atomic::store::<Relaxed, Gpu, _>(field!(params.blocks), 0);
                    atomic::store::<Relaxed, Gpu, _>(field!(params.round), round);
                }
            }
        }
    }

    crate::each_half! { items half_entry { "merge_ranks_", THREADS, BLOCKS, run(RankMergeParams) } }
}

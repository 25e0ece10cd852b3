//! Errors of ranks that run.

use thiserror::Error;

/// Errors of a group of ranks. Each rank of the group gets an error of its own.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RankError {
    /// A group of no ranks, or of more ranks than can be merged.
    #[error("a group of {got} ranks: use 1 to {most}, which is what can be merged")]
    Group {
        /// Ranks given.
        got: usize,
        /// The maximum.
        most: usize,
    },
    /// A number that no rank of the group has.
    #[error("rank {rank} of a group of {ranks}: their numbers are 0 to {}", .ranks - 1)]
    Number {
        /// The number given.
        rank: u32,
        /// Ranks of the group.
        ranks: u32,
    },
    /// A GPU cannot read another one's memory.
    #[error(
        "GPU {from} cannot read the memory of GPU {to}: choose GPUs that `nvidia-smi topo -p2p r` shows as OK, or \
         distribute heads, which needs no exchange"
    )]
    NoPeerAccess {
        /// The ordinal of the GPU that would read.
        from: u32,
        /// The ordinal of the other one.
        to: u32,
    },
    /// A call with another GPU than the rank's.
    #[error("rank {rank} is on GPU {expected}, but the call is for GPU {got}: use the rank's GPU")]
    OtherDevice {
        /// The rank.
        rank: u32,
        /// The ordinal of the GPU given.
        got: u32,
        /// The ordinal of its own.
        expected: u32,
    },
    /// Ranks that announced different sizes. Nothing was launched.
    #[error(
        "rank {rank} announced {tokens} query tokens, but rank {other} announced {other_tokens}: run shares of one \
         batch on all ranks of a group"
    )]
    Disagree {
        /// The rank.
        rank: u32,
        /// Its query tokens.
        tokens: usize,
        /// The other one.
        other: u32,
        /// That one's query tokens.
        other_tokens: usize,
    },
    /// A run without an announcement, or of another size than was announced. Nothing was launched.
    #[error(
        "rank {rank} runs {tokens} query tokens, but announced {announced}: call Rank::announce once for each step, \
         on all ranks"
    )]
    NotAnnounced {
        /// The rank.
        rank: u32,
        /// Query tokens of the run.
        tokens: usize,
        /// Query tokens announced.
        announced: usize,
    },
    /// A rank that did not announce its size in time. Nothing was launched.
    #[error("rank {rank} waited {waited_ms} ms for rank {missing} to announce its sizes")]
    Silent {
        /// The rank that waited.
        rank: u32,
        /// The one that it waited for.
        missing: u32,
        /// How long.
        waited_ms: u64,
    },
    /// A rank did not arrive at a merge in time. This rank's results since then are not valid.
    #[error(
        "rank {rank} waited {waited_ms} ms on its GPU for rank {missing}, which did not arrive: nothing was merged \
         since then; find out what happened to it, and make a new group"
    )]
    Late {
        /// The rank that waited.
        rank: u32,
        /// The one that did not come.
        missing: u32,
        /// How long.
        waited_ms: u64,
    },
    /// Another rank failed and stopped the group. Results since then are not valid.
    #[error(
        "rank {failed} failed ({reason}), so rank {rank} no longer waits for it: make a new group"
    )]
    Failed {
        /// The rank that would wait.
        rank: u32,
        /// The one that failed.
        failed: u32,
        /// What it said.
        reason: String,
    },
    /// There is no NCCL on this machine.
    #[error(
        "no NCCL: tried {searched} ({reason}). Install libnccl2, or name the file in TANDEM_LIBNCCL; ranks of one process \
         need none (Gpu::ranks)"
    )]
    NoNccl {
        /// The file that was tried.
        searched: String,
        /// What the loader said.
        reason: String,
    },
    /// NCCL refused a call, or found an error since.
    #[error("{call} failed: {text} ({code}); NCCL_DEBUG=WARN says more")]
    Nccl {
        /// The function called.
        call: &'static str,
        /// NCCL's code.
        code: i32,
        /// NCCL's words for it.
        text: String,
    },
    /// Ranks did not arrive at a collective in time. The group has ended.
    #[error(
        "rank {rank} waited {waited_ms} ms for the others in a collective: find out which one failed, and make a \
         new group"
    )]
    Collective {
        /// The rank that waited.
        rank: u32,
        /// How long.
        waited_ms: u64,
    },
}

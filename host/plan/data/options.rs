//! Options of the planner.

use serde::{Deserialize, Serialize};

use super::{Bound, MergeMode, PodMode, Tile};

/// Options of the planner. The defaults give the best speed.
///
/// ```
/// use tandem_attn::plan::{PlanOptions, SplitMode};
///
/// // The results of a request do not depend on the rest of the batch.
/// let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 512 });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanOptions {
    /// How decodes that share prefixes are packed.
    pub packing: PackRule,
    /// How items are split along their keys.
    pub split: SplitMode,
    /// One tile for all decodes, instead of the planner's choice.
    pub decode_tile: Option<Tile>,
    /// Where partial states are merged.
    pub merge_mode: MergeMode,
    /// How the prefills and decodes of a hybrid batch run. It also says whether wide shared prefixes of decodes may be read side
    /// by side with their other keys (with `PodMode::Auto` if it is faster, with `PodMode::Fused` wherever possible).
    pub pod: PodMode,
    /// Number of prefill CTAs in fused hybrid batches, 1 to the number of SMs; other numbers count as the nearest of these. None: the
    /// planner chooses. Other batches do not depend on it. Refused, whatever the batch, for heads of which one kernel runs both operations
    /// by tickets: there is no such number.
    pub prefill_ctas: Option<u32>,
    /// The bound of the workspace. To stay within it, the planner shares fewer prefixes and splits less.
    pub bound: Option<Bound>,
}

impl PlanOptions {
    /// With decodes that share prefixes packed by this rule.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_packing(mut self, packing: PackRule) -> Self {
        self.packing = packing;
        self
    }

    /// With items split along their keys in this way.
    #[must_use]
    pub const fn with_split(mut self, split: SplitMode) -> Self {
        self.split = split;
        self
    }

    /// With one tile for all decodes, or with the planner's choice.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn with_decode_tile(mut self, tile: impl Into<Option<Tile>>) -> Self {
        self.decode_tile = tile.into();
        self
    }

    /// With partial states merged in this way.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_merge_mode(mut self, merge_mode: MergeMode) -> Self {
        self.merge_mode = merge_mode;
        self
    }

    /// With this way to run the prefills and decodes of a hybrid batch.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_pod(mut self, pod: PodMode) -> Self {
        self.pod = pod;
        self
    }

    /// With this number of prefill CTAs in fused hybrid batches, or with the planner's choice.
    #[must_use]
    pub fn with_prefill_ctas(mut self, ctas: impl Into<Option<u32>>) -> Self {
        self.prefill_ctas = ctas.into();
        self
    }

    /// With the bound of a workspace, or without one.
    #[must_use]
    pub fn with_bound(mut self, bound: impl Into<Option<Bound>>) -> Self {
        self.bound = bound.into();
        self
    }

    /// Whether wide prefixes of decodes may be read side by side with the other keys.
    pub(crate) fn reads_prefixes_beside(&self) -> bool {
        self.packing == PackRule::Fastest
            && self.split == SplitMode::Makespan
            && self.decode_tile.is_none()
            && matches!(self.pod, PodMode::Auto | PodMode::Fused)
    }
}

/// How decodes that share prefixes are packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum PackRule {
    /// The least time: as [`Exact`](Self::Exact), or in joint tiles, whose rows see different keys, where the
    /// device has kernels for them. Those may read a shared prefix more often.
    #[default]
    Fastest,
    /// The fewest bytes, for the real element types, group size and query tile. All rows of a tile see the
    /// same keys.
    Exact,
    /// Every row block on its own.
    Off,
}

/// How items are split along their keys (split-KV).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SplitMode {
    /// Such that the last resident CTA finishes as early as possible.
    #[default]
    Makespan,
    /// At multiples of `tokens` keys, whatever else is in the batch. The results of a request are bitwise independent of the rest of
    /// the batch. Requests then share no tile, whatever the packing: each reads a shared prefix for itself.
    ///
    /// A prefill with at least 8,192 rows (query tokens times query heads) has work for many CTAs without a split. It is
    /// split at the first multiple that is 32,768 keys or more, and at the multiples of that.
    ///
    /// With a window, a decode begins in the page of the first key that a row of its tile sees, at most 63 keys before that key.
    ///
    /// The kernel also depends on the request only. Prefills of 65 to 4,096 query tokens and decodes of up to 8 rows use kernels
    /// that can share SMs, even if the batch is not hybrid, if the GPU has such kernels for the heads. With a
    /// [`decode_tile`](PlanOptions::decode_tile) or `MergeMode::Fused`, all kernels are those that run alone. Only plans with equal
    /// options give the same results.
    Fixed {
        /// Keys per piece; a multiple of the page size.
        tokens: u32,
    },
    /// No splits.
    Off,
}

impl SplitMode {
    /// Whether results are not to depend on the rest of the batch.
    pub(crate) const fn is_fixed(self) -> bool {
        matches!(self, Self::Fixed { .. })
    }
}

//! What is asked of a planner.

use serde::{Deserialize, Serialize};

use super::{Bound, MergeMode, PodMode, Tile};

/// Choices of a plan; the default is what serves best.
///
/// ```
/// use tandem_attn::plan::{PlanOptions, SplitMode};
///
/// // Results of a request that do not depend on the rest of the batch.
/// let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 512 });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PlanOptions {
    /// How decodes that share prefixes are packed.
    pub packing: PackRule,
    /// How items are cut along their keys.
    pub split: SplitMode,
    /// One tile for all decodes instead of the selector's choice.
    pub decode_tile: Option<Tile>,
    /// Who merges partial states.
    pub merge_mode: MergeMode,
    /// How the prefills and the decodes of a hybrid batch run, and whether wide prefixes that decodes share may be read side
    /// by side with their other keys (`PodMode::Auto`, and `PodMode::Fused` wherever that can be).
    pub pod: PodMode,
    /// Prefill CTAs beside decodes where they are fused; none: as the planner thinks best.
    pub prefill_ctas: Option<u32>,
    /// Keep the plan within a workspace: what does not fit is packed and cut less.
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

    /// With items cut along their keys like this.
    #[must_use]
    pub const fn with_split(mut self, split: SplitMode) -> Self {
        self.split = split;
        self
    }

    /// With one tile for all decodes, or the selector's choice.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn with_decode_tile(mut self, tile: impl Into<Option<Tile>>) -> Self {
        self.decode_tile = tile.into();
        self
    }

    /// With partial states merged by these.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_merge_mode(mut self, merge_mode: MergeMode) -> Self {
        self.merge_mode = merge_mode;
        self
    }

    /// With the prefills and the decodes of a hybrid batch run like this.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_pod(mut self, pod: PodMode) -> Self {
        self.pod = pod;
        self
    }

    /// With so many prefill CTAs beside decodes where they are fused, or as many as the planner thinks best.
    #[must_use]
    pub fn with_prefill_ctas(mut self, ctas: impl Into<Option<u32>>) -> Self {
        self.prefill_ctas = ctas.into();
        self
    }

    /// Within a workspace, or without a bound.
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

/// How items are cut along their keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SplitMode {
    /// So that the last resident CTA finishes as early as it can.
    #[default]
    Makespan,
    /// At multiples of so many keys, whatever else is in the batch: results are bitwise independent of it. No
    /// tile is shared between requests then, whatever the packing: a shared prefix is read by each.
    ///
    /// A prefill that has at least 8,192 rows (query tokens times query heads) has work for many CTAs without a cut. It is
    /// cut at the first multiple that is 32,768 keys or more, and at the multiples of that.
    ///
    /// Kernels follow from the request, too: those that can share SMs with others compute it also where it is alone
    /// (65 to 4,096 query tokens, and decodes of up to 8 rows, where a GPU has such kernels for the heads). A
    /// [`decode_tile`](PlanOptions::decode_tile) or `MergeMode::Fused` asks for those that run alone. Results are the
    /// same among plans of equal options.
    Fixed {
        /// Keys of a piece, a multiple of the page size.
        tokens: u32,
    },
    /// Not at all.
    Off,
}

impl SplitMode {
    /// Whether results are not to depend on the rest of the batch.
    pub(crate) const fn is_fixed(self) -> bool {
        matches!(self, Self::Fixed { .. })
    }
}

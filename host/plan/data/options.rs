//! What is asked of a planner.

use serde::{Deserialize, Serialize};

use super::{Bound, MergeMode, PodMode, Tile};

/// Choices of a plan; the default is what serves best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// How decodes that share prefixes are packed.
    pub packing: PackRule,
    /// How items are cut along their keys.
    pub split: SplitMode,
    /// One tile for all decodes instead of the selector's choice.
    pub decode_tile: Option<Tile>,
    /// Who merges partial states.
    pub merge_mode: MergeMode,
    /// How the prefills and the decodes of a hybrid batch run.
    pub pod: PodMode,
    /// Prefill CTAs beside decodes where they are fused; none: as the planner thinks best.
    pub prefill_ctas: Option<u32>,
    /// Keep the plan within a workspace: what does not fit is packed and cut less.
    pub bound: Option<Bound>,
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
    Fixed {
        /// Keys per chunk, a multiple of the page size.
        tokens: u32,
    },
    /// Not at all.
    Off,
}

impl SplitMode {
    /// Whether results are not to depend on the company.
    pub(crate) const fn is_fixed(self) -> bool {
        matches!(self, Self::Fixed { .. })
    }
}

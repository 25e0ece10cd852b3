//! What a caller can choose of a plan.

use serde::{Deserialize, Serialize};

use super::{
    Bound, MergeMode, PackRule, SplitMode, Tile,
    pod::{PodMode, TicketPolicy},
};

/// Choices of a plan; the default is what serves best.
///
/// ```
/// use tandem_attn::plan::{PlanOptions, SplitMode};
///
/// // Results of a request that do not depend on its company.
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
    /// How the prefills and the decodes of a hybrid batch run.
    pub pod: PodMode,
    /// How they take turns on an SM where they are fused.
    pub tickets: TicketPolicy,
    /// Prefill CTAs beside decodes where they are fused; none: as the planner thinks best.
    pub prefill_ctas: Option<u32>,
    /// Keep the plan within a workspace: what does not fit is packed and cut less.
    pub bound: Option<Bound>,
}

impl PlanOptions {
    /// With decodes that share prefixes packed by this rule.
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
    #[must_use]
    pub fn with_decode_tile(mut self, tile: impl Into<Option<Tile>>) -> Self {
        self.decode_tile = tile.into();
        self
    }

    /// With partial states merged by these.
    #[must_use]
    pub const fn with_merge_mode(mut self, merge_mode: MergeMode) -> Self {
        self.merge_mode = merge_mode;
        self
    }

    /// With the prefills and the decodes of a hybrid batch run like this.
    #[must_use]
    pub const fn with_pod(mut self, pod: PodMode) -> Self {
        self.pod = pod;
        self
    }

    /// With turns on an SM taken like this where prefills and decodes are fused.
    #[must_use]
    pub const fn with_tickets(mut self, tickets: TicketPolicy) -> Self {
        self.tickets = tickets;
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
}

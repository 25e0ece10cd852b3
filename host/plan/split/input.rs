//! What the splitter reads.

use crate::plan::{
    data::{Chunk, CtaSplit, PlanOptions, PodMode, PodPlan, Rules, SplitMode},
    model::{CostModel, Model, TileTable},
};

/// What the splitter reads beside the drafts.
#[derive(Clone, Copy)]
pub struct SplitInput<'a> {
    pub mode: SplitMode,
    /// The keys of a piece, in place of the splitter's balance.
    pub chunk: Option<fn(&Chunk) -> u32>,
    pub cost: &'a CostModel,
    pub tiles: &'a TileTable,
    /// Prefills and decodes run side by side.
    pub hybrid: bool,
    /// Both run on the same SMs: how fast a decode CTA is there depends on the prefill beside it.
    pub shared_sms: bool,
    /// What prefills take beside the decodes, in parts of what they take alone.
    pub prefill_slower: f64,
    /// Keys that a section of prefills reads, all heads of them: what a third of L2 holds.
    pub section_keys: u32,
    pub kv_heads: u32,
    /// CTAs of each operation, where they share SMs.
    pub ctas: Option<CtaSplit>,
}

impl<'a> SplitInput<'a> {
    /// For drafts in these tiles.
    pub fn new(
        model: &'a Model,
        tiles: &'a TileTable,
        options: &PlanOptions,
        rules: &Rules,
        pod: Option<&PodPlan>,
    ) -> Self {
        let ctas = pod
            .map(|pod| pod.ctas)
            .filter(|&ctas| ctas != CtaSplit::default());
        let config = model.config(pod).filter(|config| !config.shares.is_empty());
        let slower = config.zip(ctas).map(|(config, ctas)| {
            config.prefill_slower(config.share(ctas.prefill, model.device.sms))
        });
        Self {
            mode: options.split,
            chunk: rules.chunk,
            cost: &model.cost,
            tiles,
            // One after the other, each has the device to itself.
            hybrid: pod.is_some_and(|pod| pod.mode != PodMode::Serial),
            shared_sms: pod.is_some_and(|pod| pod.config.is_some()),
            section_keys: (model.device.l2_bytes / 3 / model.spec.kv_bytes_per_token().max(1))
                as u32,
            kv_heads: model.spec.kv_heads,
            prefill_slower: slower.unwrap_or(1.0),
            ctas,
        }
    }
}

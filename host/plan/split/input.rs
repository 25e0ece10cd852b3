//! What the splitter reads.

use crate::plan::{
    data::{Chunk, CtaSplit, PlanOptions, PodMode, PodPlan, Rules, SplitMode},
    model::{CostModel, Model, TileTable},
};

/// What the splitter reads, in addition to the drafts.
#[derive(Clone, Copy)]
pub struct SplitInput<'a> {
    pub mode: SplitMode,
    /// A rule for the keys of a piece, instead of balancing.
    pub chunk: Option<fn(&Chunk) -> u32>,
    pub cost: &'a CostModel,
    pub tiles: &'a TileTable,
    /// Whether prefills and decodes run at the same time.
    pub hybrid: bool,
    /// Whether both run side by side, by a configuration of the device: on the same SMs, or on SMs of their own.
    pub side_by_side: bool,
    /// Whether they do on the same SMs. The speed of a decode CTA then depends on the prefill CTA beside it. Elsewhere CTAs of
    /// decodes share an SM with each other.
    pub co_resident: bool,
    /// How many times as long prefills take beside the decodes as the cost model says.
    pub prefill_slower: f64,
    /// Keys of all KV heads that fit into a third of L2: the size of a section of prefills.
    pub section_keys: u32,
    pub kv_heads: u32,
    /// Number of CTAs of each operation, if they share SMs.
    pub ctas: Option<CtaSplit>,
}

impl<'a> SplitInput<'a> {
    /// The input for drafts in the given tiles.
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
            // In serial mode, each operation has the device to itself.
            hybrid: pod.is_some_and(|pod| pod.mode != PodMode::Serial),
            side_by_side: pod.is_some_and(|pod| pod.config.is_some()),
            co_resident: model.config(pod).is_some_and(|config| !config.is_apart()),
            section_keys: (model.device.l2_bytes / 3 / model.spec.kv_bytes_per_token().max(1))
                as u32,
            kv_heads: model.spec.kv_heads,
            prefill_slower: slower.unwrap_or(1.0)
                / model.device.prefill.part_of(model.spec.head_dim_qk),
            ctas,
        }
    }
}

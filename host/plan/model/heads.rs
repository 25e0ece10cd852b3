//! The tiles and costs for some heads on a device.

use std::sync::Arc;

use super::{
    CostModel, DeviceDescription, PodConfig, TileTable,
    tiles::{KernelRule, SharedKernels},
};
use crate::{
    plan::data::{PlanError, PlanOptions, PodPlan},
    problem::Spec,
};

/// What depends only on heads, device and options. A planner keeps it from batch to batch.
#[derive(Debug)]
pub struct Model {
    pub device: Arc<DeviceDescription>,
    pub spec: Spec,
    rule: KernelRule,
    /// Row blocks of at most this many query tokens are decodes: none if only prefill kernels hold the heads, all if the
    /// heads have only decode kernels.
    pub most_decode_tokens: u32,
    /// The same in a batch whose row blocks are all longer than that or, with 8-bit keys, have at most the rows of the device's
    /// `decode_max_rows`.
    pub most_tokens_of_decodes: u32,
    pub tiles: TileTable,
    /// `tiles` with a kernel that shares SMs for decodes of the fewest rows, and the most keys of all units with which decodes
    /// take it. None if they never do, and with fixed splits.
    pub few_keys: Option<(TileTable, u64)>,
    /// `tiles` with smaller tiles of decodes, and the most units of a batch, and keys of these, with which decodes take
    /// those. None if they never do, and with fixed splits.
    pub smaller: Option<(TileTable, [u64; 2])>,
    /// `tiles` with a larger tile for all decodes, where all have more rows than those of `tiles`. None if there is no such
    /// tile, and with fixed splits.
    pub larger: Option<TileTable>,
    /// `tiles` with the prefill tile of the longest prompts for all. None if there is no other prefill tile, and with
    /// fixed splits, where only the length of a request decides.
    pub wide: Option<TileTable>,
    /// The kernels of `tiles` that can share SMs. With fixed splits, they also run alone.
    pub shared: Option<SharedKernels>,
    /// The kernels of each configuration of the fused form. None if it has no kernels for the heads or, with fixed
    /// splits, if requests have other kernels alone.
    pub fused_tiles: Vec<Option<TileTable>>,
    pub cost: CostModel,
}

impl Model {
    pub fn new(
        spec: &Spec,
        device: &DeviceDescription,
        options: &PlanOptions,
    ) -> Result<Self, PlanError> {
        let rule = KernelRule::from(options);
        spec.check()?;
        device.check()?;
        device.supports_with(spec, rule.decode_tile)?;
        let (tiles, shared) = TileTable::by_rule(device, spec, rule)?;
        let fused = |index: usize, config: &PodConfig| {
            let fused = || TileTable::fused(device, spec, rule.decode_tile, config);
            match &shared {
                _ if !rule.fixed => fused(),
                Some(shared) if shared.config == index => Some(shared.co_resident.clone()),
                // On SMs of their own all kernels are those that run alone.
                _ if config.is_apart() => fused().map(|_| tiles.clone()),
                _ => None,
            }
        };
        let configs = device.pod.configs.iter().enumerate();
        let most_decode_tokens = match (tiles.has_decodes(), tiles.has_prefills()) {
            (false, _) => 0,
            (true, true) => device.decode_max_tokens,
            (true, false) => u32::MAX,
        };
        let in_rows = match rule.fixed {
            true => 0,
            false => tiles.most_tokens_of_decodes(device, spec),
        };
        let cost = CostModel::new(device, spec);
        let [few_keys, smaller, larger] = tiles.others(device, spec, options);
        let few_keys = few_keys.and_then(|table| {
            let most = cost.few_keys(table.narrowest())?;
            Some((table, (most * f64::from(device.sms)) as u64))
        });
        let smaller = smaller.and_then(|smaller| {
            let most = cost.smaller(tiles.widest())?;
            let most = most.map(|most| (most * f64::from(device.sms)) as u64);
            Some((smaller, most))
        });
        Ok(Self {
            larger,
            spec: *spec,
            rule,
            few_keys,
            smaller,
            most_decode_tokens,
            most_tokens_of_decodes: most_decode_tokens.max(in_rows),
            fused_tiles: configs
                .map(|(index, config)| fused(index, config))
                .collect(),
            shared,
            wide: tiles.wide().filter(|_| !rule.fixed),
            tiles,
            cost,
            device: Arc::new(device.clone()),
        })
    }

    /// Whether the model was made from these arguments.
    pub fn is_of(&self, spec: &Spec, device: &DeviceDescription, options: &PlanOptions) -> bool {
        self.spec == *spec && self.rule == options.into() && *self.device == *device
    }

    /// The configuration in which a hybrid batch runs fused.
    pub fn config(&self, pod: Option<&PodPlan>) -> Option<&PodConfig> {
        Some(&self.device.pod.configs[pod?.config? as usize])
    }

    /// The tiles for the mode of a hybrid batch.
    pub fn tiles_of(&self, pod: Option<&PodPlan>) -> &TileTable {
        let config = pod.and_then(|pod| pod.config).map(|config| config as usize);
        let fused = config.and_then(|config| self.fused_tiles.get(config)?.as_ref());
        fused.unwrap_or(&self.tiles)
    }
}

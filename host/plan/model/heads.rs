//! What follows from heads and device: tiles and costs.

use super::{CostModel, DeviceDescription, PodConfig, TileTable};
use crate::{
    plan::data::{PlanError, PodPlan, Tile},
    problem::Spec,
};

/// What follows from heads, device and options alone; a planner keeps it from batch to batch.
#[derive(Debug)]
pub struct Model {
    pub device: DeviceDescription,
    pub spec: Spec,
    decode_tile: Option<Tile>,
    /// Row blocks of at most so many query tokens are decodes: none where only prefill kernels were compiled for the
    /// heads, all where only decode kernels were.
    pub most_decode_tokens: u32,
    pub tiles: TileTable,
    /// For each configuration of the fused form; none where it has no kernels for the heads.
    pub fused_tiles: Vec<Option<TileTable>>,
    pub cost: CostModel,
}

impl Model {
    pub fn new(
        spec: &Spec,
        device: &DeviceDescription,
        decode_tile: Option<Tile>,
    ) -> Result<Self, PlanError> {
        spec.check()?;
        device.check()?;
        device.supports_with(spec, decode_tile)?;
        let fused = |config: &PodConfig| TileTable::fused(device, spec, decode_tile, config);
        let tiles = TileTable::new(device, spec, decode_tile)?;
        Ok(Self {
            spec: *spec,
            decode_tile,
            most_decode_tokens: match (tiles.has_decodes(), tiles.prefills().is_empty()) {
                (true, false) => device.decode_max_tokens,
                (true, true) => u32::MAX,
                (false, _) => 0,
            },
            tiles,
            fused_tiles: device.pod.configs.iter().map(fused).collect(),
            cost: CostModel::new(device, spec),
            device: device.clone(),
        })
    }

    /// Whether it was made from these.
    pub fn is_of(
        &self,
        spec: &Spec,
        device: &DeviceDescription,
        decode_tile: Option<Tile>,
    ) -> bool {
        self.spec == *spec && self.decode_tile == decode_tile && self.device == *device
    }

    /// The configuration in which a hybrid batch runs fused.
    pub fn config(&self, pod: Option<&PodPlan>) -> Option<&PodConfig> {
        Some(&self.device.pod.configs[pod?.config? as usize])
    }

    /// The tiles of a hybrid batch's mode.
    pub fn tiles_of(&self, pod: Option<&PodPlan>) -> &TileTable {
        let config = pod.and_then(|pod| pod.config).map(|config| config as usize);
        let fused = config.and_then(|config| self.fused_tiles.get(config)?.as_ref());
        fused.unwrap_or(&self.tiles)
    }
}

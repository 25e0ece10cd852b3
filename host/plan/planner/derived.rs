//! What a planner keeps from batch to batch: what follows from heads, device and options alone.

use crate::{
    plan::{
        DeviceDescription, PlanError, Tile,
        cost::CostModel,
        pod::{PodConfig, PodPlan},
        tiles::TileTable,
    },
    problem::Spec,
};

#[derive(Debug)]
pub struct Derived {
    pub device: DeviceDescription,
    pub spec: Spec,
    decode_tile: Option<Tile>,
    pub tiles: TileTable,
    /// For each configuration of the fused form; none where it has no kernels for the heads.
    pub fused_tiles: Vec<Option<TileTable>>,
    pub cost: CostModel,
}

impl Derived {
    pub fn new(
        spec: &Spec,
        device: &DeviceDescription,
        decode_tile: Option<Tile>,
    ) -> Result<Self, PlanError> {
        spec.check()?;
        device.check()?;
        device.supports_with(spec, decode_tile)?;
        let fused = |config: &PodConfig| TileTable::fused(device, spec, decode_tile, config);
        Ok(Self {
            spec: *spec,
            decode_tile,
            tiles: TileTable::new(device, spec, decode_tile)?,
            fused_tiles: device.pod.configs.iter().map(fused).collect(),
            cost: CostModel::new(device, spec),
            device: device.clone(),
        })
    }

    /// Whether it was derived from these.
    pub fn is_of(
        &self,
        spec: &Spec,
        device: &DeviceDescription,
        decode_tile: Option<Tile>,
    ) -> bool {
        self.spec == *spec && self.decode_tile == decode_tile && self.device == *device
    }

    /// The tiles of a hybrid batch's mode.
    pub fn tiles(&self, pod: Option<&PodPlan>) -> &TileTable {
        let config = pod.and_then(|pod| pod.config).map(|config| config as usize);
        let fused = config.and_then(|config| self.fused_tiles.get(config)?.as_ref());
        fused.unwrap_or(&self.tiles)
    }
}

//! The launches that a captured graph has, whatever the plan. Needs no GPU.

use kernels_gpu::abi::LaunchRecord;

use super::agenda::Agenda;
use crate::{
    Error,
    plan::{DeviceDescription, Kernel, Plan, Tile, tiles::TileTable},
    problem::Spec,
};

/// What tells two attention launches of a run apart, whatever the plan: a captured graph has one for each key
/// of its [`LaunchSet`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LaunchKey {
    /// The kernel.
    pub kernel: Kernel,
    /// Its tile.
    pub tile: Tile,
    /// Query heads that share a tile.
    pub pack: u32,
    /// The part of the batch: parts have their own page pools.
    pub part: u32,
}

/// The launches that a captured graph shall have. Plans that need another one are refused.
///
/// A launch without work costs a graph about two microseconds, so name what plans will need and not more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchSet {
    pub(super) keys: Vec<LaunchKey>,
    /// Prefill and decode that are one launch, by their places among the keys.
    pub(super) pairs: Vec<[usize; 2]>,
}

impl LaunchSet {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            keys: Vec::new(),
            pairs: Vec::new(),
        }
    }

    /// What any plan of decodes needs: a launch for each tile that decodes of these heads can have.
    ///
    /// # Errors
    /// [`PlanError::NoTile`](crate::plan::PlanError::NoTile).
    pub fn decodes(device: &DeviceDescription, spec: &Spec) -> Result<Self, Error> {
        let tiles = TileTable::new(device, spec, None, None)?;
        let tiles = tiles.all(Kernel::Decode).into_iter();
        let key = |tile| LaunchKey {
            kernel: Kernel::Decode,
            tile,
            pack: spec.group(),
            part: 0,
        };
        Ok(Self {
            keys: tiles.map(key).collect(),
            pairs: Vec::new(),
        })
    }

    /// What any plan of one part needs: prefills, decodes, and both together in whatever form.
    ///
    /// # Errors
    /// [`PlanError::NoTile`](crate::plan::PlanError::NoTile).
    pub fn all(device: &DeviceDescription, spec: &Spec) -> Result<Self, Error> {
        let mut set = Self::new();
        set.add(&TileTable::new(device, spec, None, None)?, spec);
        for config in &device.pod.configs {
            let prefill = (config.prefill, config.prefill_pack);
            if let Ok(tiles) = TileTable::new(device, spec, config.decode, Some(prefill)) {
                set.add(&tiles, spec);
            }
        }
        Ok(set)
    }

    fn add(&mut self, tiles: &TileTable, spec: &Spec) {
        let key = |kernel, tile, pack| LaunchKey {
            kernel,
            tile,
            pack,
            part: 0,
        };
        let decodes = tiles.all(Kernel::Decode).into_iter();
        let decodes = decodes.map(|tile| key(Kernel::Decode, tile, spec.group()));
        let prefills = tiles.prefills().iter();
        let prefills = prefills.map(|step| key(Kernel::Prefill, step.tile, step.pack));
        for key in decodes.chain(prefills) {
            if !self.keys.contains(&key) {
                self.keys.push(key);
            }
        }
    }

    /// Also what this plan needs.
    #[must_use]
    pub fn and(mut self, plan: &Plan) -> Self {
        let mut agenda = Agenda::default();
        agenda.fill(plan, plan.merge_mode);
        for launch in &agenda.launches {
            if !self.keys.contains(&launch.key) {
                self.keys.push(launch.key);
            }
        }
        if agenda.tickets.is_some() {
            let keys: Vec<_> = agenda.launches.iter().map(|launch| launch.key).collect();
            for [prefill, decode] in pairs(&keys) {
                let place = |key| self.keys.iter().position(|known| *known == key);
                let pair = [keys[prefill], keys[decode]].map(|key| place(key).unwrap_or(0));
                // Each launch is one of one pair at most.
                if !self
                    .pairs
                    .iter()
                    .flatten()
                    .any(|place| pair.contains(place))
                {
                    self.pairs.push(pair);
                }
            }
        }
        self
    }

    /// Also this launch.
    #[must_use]
    pub fn with(mut self, key: LaunchKey) -> Self {
        if !self.keys.contains(&key) {
            self.keys.push(key);
        }
        self
    }

    /// The launches.
    #[must_use]
    pub fn keys(&self) -> &[LaunchKey] {
        &self.keys
    }

    /// For each launch of the set what it has to do, and last what the merging kernel has to do.
    pub(super) fn records(
        &self,
        agenda: &Agenda,
        records: &mut [LaunchRecord],
    ) -> Result<(), Error> {
        records.fill(LaunchRecord::default());
        for launch in &agenda.launches {
            let known = self.keys.iter().position(|key| *key == launch.key);
            let Some(at) = known else {
                return Err(Error::NotCaptured {
                    launch: format!("{:?}", launch.key),
                });
            };
            records[at] = LaunchRecord {
                first: launch.first,
                count: launch.items,
                long: launch.long.into(),
                reserved: 0,
            };
        }
        records[self.keys.len()].count = agenda.left;
        Ok(())
    }
}

/// Which of a run's launches are a prefill and the decode that goes with it in one kernel.
pub(super) fn pairs(keys: &[LaunchKey]) -> Vec<[usize; 2]> {
    let of = |kernel, part| {
        let wanted = move |key: &LaunchKey| key.kernel == kernel && key.part == part;
        keys.iter().position(wanted)
    };
    let parts = keys
        .iter()
        .map(|key| key.part)
        .max()
        .map_or(0, |last| last + 1);
    let pair = |part| Some([of(Kernel::Prefill, part)?, of(Kernel::Decode, part)?]);
    (0..parts).filter_map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        exec::gpu::agenda::tests::{agenda, plan},
        plan::MergeMode,
    };

    #[test]
    fn a_launch_set_has_a_record_for_each_launch_or_says_what_is_missing() {
        let decodes = plan(&[1, 1], MergeMode::Kernel);
        let device = DeviceDescription::named("h200").unwrap();
        let set = LaunchSet::decodes(&device, &decodes.spec).unwrap();
        let mut records = vec![LaunchRecord::default(); set.keys().len() + 1];
        set.records(&agenda(&decodes), &mut records).unwrap();
        let items: u32 = records[..set.keys().len()].iter().map(|r| r.count).sum();
        assert_eq!(items, decodes.items.len() as u32);
        assert_eq!(records[set.keys().len()].count, decodes.merges.len() as u32);

        let hybrid = plan(&[1, 100], MergeMode::Kernel);
        let error = set.records(&agenda(&hybrid), &mut records).unwrap_err();
        assert!(matches!(error, Error::NotCaptured { .. }), "{error}");
        let all = LaunchSet::all(&device, &hybrid.spec).unwrap();
        let mut records = vec![LaunchRecord::default(); all.keys().len() + 1];
        all.records(&agenda(&hybrid), &mut records).unwrap();
        let own = LaunchSet::new().and(&hybrid);
        own.records(&agenda(&hybrid), &mut records).unwrap();
        assert_eq!(own.clone().and(&hybrid), own);
    }
}

//! The launches that captured CUDA graphs contain, which are the same for all plans. Needs no GPU.

mod subset;

use kernels_gpu::{
    abi::LaunchRecord,
    registry::{Arch, KernelId, Loads, Op},
};

pub(super) use self::subset::LaunchSubset;
use super::{
    launch_key::{LaunchKey, no_records, pairs},
    launch_plan::{GroupLaunch, LaunchPlan},
};
use crate::{
    Error,
    plan::{
        DeviceDescription, MergeMode, Plan, PlanOptions, SplitMode, pod::PodConfig,
        tiles::TileTable,
    },
    problem::Spec,
};

/// The key of a launch for part 0. None if the device is not a GPU: then there is no kernel.
fn of_part_0(kernel: Option<KernelId>, pack: u32) -> Option<LaunchKey> {
    kernel.map(|kernel| LaunchKey {
        kernel,
        pack,
        part: 0,
        heads: 1,
    })
}

/// The launches that a captured CUDA graph contains. A plan that needs another launch is refused.
///
/// A launch without work costs about two microseconds, so include only launches that plans will need, or capture graphs
/// with [the launches that a plan needs](super::Workspace::launch_only_needed).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LaunchSet {
    pub(super) keys: Vec<LaunchKey>,
    /// Pairs of a prefill and a decode that are one launch, by their indices among the keys.
    pub(super) pairs: Vec<[usize; 2]>,
    /// Where states are merged, whatever the plan says. `Auto` means the merging kernel.
    pub(super) merge_mode: MergeMode,
}

impl LaunchSet {
    /// An empty set.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            keys: Vec::new(),
            pairs: Vec::new(),
            merge_mode: MergeMode::Auto,
        }
    }

    /// The launches for any plan of decodes with the default options: one for each kernel that decodes of these heads can have.
    /// For other options see [`decodes_with`](Self::decodes_with).
    ///
    /// # Errors
    /// As [`decodes_with`](Self::decodes_with).
    pub fn decodes(device: &DeviceDescription, spec: &Spec) -> Result<Self, Error> {
        Self::decodes_with(device, spec, &PlanOptions::default())
    }

    /// The launches for any plan of decodes with these options. Decodes use other kernels with fixed splits, or with one tile for
    /// all decodes. The set also has kernels that share SMs, for wide prefixes that are read side by side with the
    /// other keys, unless the options have `PodMode::Serial`. Of heads whose decodes run as prefills, it has the prefills.
    ///
    /// # Errors
    /// [`Error::Problem`] for an invalid specification, [`PlanError::NoTile`](crate::plan::PlanError::NoTile),
    /// [`Error::NoInstance`] where prefills of Ampere run the decodes.
    pub fn decodes_with(
        device: &DeviceDescription,
        spec: &Spec,
        options: &PlanOptions,
    ) -> Result<Self, Error> {
        spec.check()?;
        let mut set = Self::new();
        let alone = TileTable::of_options(device, spec, options)?;
        if !alone.has_decodes() {
            check_records(&alone)?;
        }
        set.add_decodes(&alone);
        for tiles in alone.others(device, spec, options).iter().flatten() {
            set.add_decodes(tiles);
        }
        if options.reads_prefixes_beside() {
            let configs = device.pod.configs.iter();
            // Prefixes are read beside decodes of one token, in tiles of the fewest rows that hold one.
            let holds =
                |config: &&PodConfig| config.decode.is_some_and(|tile| tile.m >= spec.group());
            let rows = |config: &PodConfig| config.decode.map(|tile| tile.m);
            let shared = configs.filter(|config| config.shares_sms()).filter(holds);
            let fewest = shared.clone().map(rows).min();
            for config in shared.filter(|config| Some(rows(config)) == fewest) {
                if let Some(tiles) = TileTable::fused(device, spec, None, config) {
                    set.add_tiles(&tiles);
                }
            }
        }
        Ok(set)
    }

    /// The launches for any plan of one part: prefills, decodes and hybrid batches, also with fixed splits. Prefill and decode in one
    /// kernel with tickets are included where plans have no other form that shares SMs; elsewhere, with
    /// `PodMode::Tickets`, [`and`](Self::and) adds them for a given plan.
    ///
    /// # Errors
    /// [`Error::Problem`] for an invalid specification, [`PlanError::NoTile`](crate::plan::PlanError::NoTile).
    pub fn all(device: &DeviceDescription, spec: &Spec) -> Result<Self, Error> {
        spec.check()?;
        let mut set = Self::new();
        let tables = |by_tickets| {
            let configs = device.pod.configs.iter();
            let configs = configs.filter(move |config| config.by_tickets == by_tickets);
            configs.filter_map(|config| TileTable::fused(device, spec, None, config))
        };
        let (tables, mut in_one): (Vec<_>, _) = (tables(false).collect(), tables(true));
        let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 1 });
        let [alone, fixed] = [PlanOptions::default(), fixed]
            .map(|options| TileTable::of_options(device, spec, &options));
        let alone = alone?;
        let others = alone.others(device, spec, &PlanOptions::default());
        for tiles in others.iter().flatten() {
            set.add_decodes(tiles);
        }
        // Plans have one kernel with both operations only where two kernels do not share the GPU. On Ampere a prefill alone would be
        // a launch of that kernel, too, but graphs of prefills are refused there.
        let in_one = match tables.is_empty() && check_records(&alone).is_ok() {
            true => in_one.next(),
            false => None,
        };
        for tiles in [alone].into_iter().chain(tables).chain([fixed?]) {
            set.add_tiles(&tiles);
        }
        if let Some(tiles) = in_one {
            let mut both = Self::new();
            both.add_tiles(&tiles);
            set.add(both.keys.iter().copied());
            set.add_pairs(&both.keys);
        }
        Ok(set)
    }

    fn add_tiles(&mut self, tiles: &TileTable) {
        self.add_decodes(tiles);
        self.add_prefills(tiles);
    }

    fn add_prefills(&mut self, tiles: &TileTable) {
        let prefills = tiles.prefills().iter();
        self.add(prefills.filter_map(|step| of_part_0(step.kernel, step.pack)));
    }

    /// Of heads whose decodes run as prefills, the prefills.
    fn add_decodes(&mut self, tiles: &TileTable) {
        if !tiles.has_decodes() {
            self.add_prefills(tiles);
        }
        let (decodes, pack) = (tiles.decodes().iter(), tiles.decode_pack());
        self.add(decodes.filter_map(|choice| of_part_0(choice.kernel, pack)));
    }

    fn add(&mut self, keys: impl IntoIterator<Item = LaunchKey>) {
        for key in keys {
            if !self.keys.contains(&key) {
                self.keys.push(key);
            }
        }
    }

    /// Makes one launch of each prefill and decode among `keys` that one kernel can run together. The set has these keys.
    fn add_pairs(&mut self, keys: &[LaunchKey]) {
        for [prefill, decode] in pairs(keys) {
            let place = |key| self.keys.iter().position(|known| *known == key);
            let pair = [keys[prefill], keys[decode]].map(|key| place(key).unwrap_or(0));
            // A launch belongs to at most one pair.
            let mut paired = self.pairs.iter().flatten();
            if !paired.any(|place| pair.contains(place)) {
                self.pairs.push(pair);
            }
        }
    }

    /// Adds the launches that this plan needs. A plan that is not for a GPU adds nothing. Other sizes of batches may need other
    /// launches: few keys have another kernel than many, and [`decodes`](Self::decodes) has both.
    #[must_use]
    pub fn and(mut self, plan: &Plan) -> Self {
        let mut launch_plan = LaunchPlan::default();
        if launch_plan.fill(plan, plan.merge_mode).is_err() {
            return self;
        }
        let launches = launch_plan.launches.iter();
        let keys: Vec<_> = launches.map(|launch| launch.key).collect();
        self.add(keys.iter().copied());
        if launch_plan.tickets.is_some() {
            self.add_pairs(&keys);
        }
        self
    }

    /// Adds its prefills for part 1 of a batch of page lists by KV head ([`PagesByHead`](crate::kv::PagesByHead)) of a model with
    /// this number of KV heads: its prompts.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub fn with_prompts_of_heads(mut self, kv_heads: u32) -> Self {
        // Kernels with both operations run no prompts beside lists.
        let is_prefill = |&(place, key): &(usize, &LaunchKey)| {
            let paired = self.pairs.iter().flatten().any(|&other| other == place);
            key.part == 0 && key.kernel.info().op == Op::Prefill && !paired
        };
        let of_prompts = |(_, key): (usize, &LaunchKey)| LaunchKey {
            part: 1,
            heads: kv_heads,
            ..*key
        };
        let keys = self.keys.iter().enumerate();
        let prefills = keys.filter(is_prefill).map(of_prompts);
        let prefills: Vec<_> = prefills.collect();
        self.add(prefills);
        self
    }

    /// Adds this launch.
    #[cfg_attr(not(feature = "unstable"), doc(hidden))]
    #[must_use]
    pub fn with(mut self, key: LaunchKey) -> Self {
        self.add([key]);
        self
    }

    /// Where partial states are merged. This replaces the choice of the plans; the default is the kernel.
    #[cfg(feature = "unstable")]
    #[must_use]
    pub const fn with_merge_mode(mut self, merge_mode: MergeMode) -> Self {
        self.merge_mode = merge_mode;
        self
    }

    /// The launches.
    #[must_use]
    pub fn keys(&self) -> &[LaunchKey] {
        &self.keys
    }

    /// Whether it has prefills: without prompts, those that read wide prefixes for decodes.
    #[must_use]
    pub fn has_prefills(&self) -> bool {
        let is_prefill = |key: &LaunchKey| key.kernel.info().op == Op::Prefill;
        self.keys.iter().any(is_prefill)
    }

    /// The number of parts of a batch for which it has launches, from the first part on.
    pub(super) fn parts(&self) -> usize {
        let parts = self.keys.iter().map(|key| key.part as usize + 1);
        parts.max().unwrap_or(0)
    }

    /// The launch of the set that does the work of a plan's launch: with the same kernel, or with a kernel of another
    /// architecture that cuts its items.
    fn place(&self, launch: &GroupLaunch) -> Option<usize> {
        let LaunchKey {
            kernel,
            pack,
            part,
            heads,
        } = launch.key;
        let same = |key: &LaunchKey| {
            let info = key.kernel.info();
            info.loads == Loads::Rows
                && (info.multi_table || !launch.joint)
                && kernel.on(info.arch) == Some(key.kernel)
                && (key.pack, key.part, key.heads) == (pack, part, heads)
                && info.rows >= kernel.info().rows
        };
        let mut keys = self.keys.iter();
        let named = keys.clone().position(|key| *key == launch.key);
        named.or_else(|| keys.position(same))
    }

    /// Writes the record of each launch of the set, and last the record of the merging kernel.
    pub(super) fn records(
        &self,
        launch_plan: &LaunchPlan,
        records: &mut [LaunchRecord],
    ) -> Result<(), Error> {
        records.fill(LaunchRecord::default());
        for launch in &launch_plan.launches {
            let Some(at) = self.place(launch) else {
                return Err(Error::NotCaptured {
                    launch: format!(
                        "{} (LaunchSet::and adds the launches of a plan, LaunchSet::all has those of most plans)",
                        launch.key.words()
                    ),
                });
            };
            // A record holds one range of items: a second launch would overwrite the first.
            if records[at].count > 0 {
                return Err(Error::NotCaptured {
                    launch: format!(
                        "{:?} beside another that {} does",
                        launch.key, self.keys[at].kernel
                    ),
                });
            }
            records[at] = LaunchRecord {
                first: launch.first,
                count: launch.items,
                long: launch.long.into(),
                first_page: launch.converted.start,
                pages: launch.converted.len() as u32,
                kv_heads_together: launch.kv_heads_together,
                ..LaunchRecord::default()
            };
        }
        records[self.keys.len()].count = launch_plan.merging.left;
        Ok(())
    }

    /// The launches that have work, by their records. A pair is one launch: if one of the two has work, both are needed.
    pub(super) fn needed(&self, records: &[LaunchRecord]) -> LaunchSubset {
        let mut needed = LaunchSubset::of(&records[..=self.keys.len()]);
        for pair in &self.pairs {
            if pair.iter().any(|&place| needed.has(place)) {
                pair.iter().for_each(|&place| needed.add(place));
            }
        }
        needed
    }
}

/// Refuses prefills of Ampere, whose launches in a graph read no record of a plan.
fn check_records(tiles: &TileTable) -> Result<(), Error> {
    let mut kernels = tiles.prefills().iter().filter_map(|step| step.kernel);
    match kernels.find(|kernel| kernel.info().arch == Arch::Sm80) {
        Some(_) => Err(no_records()),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests;

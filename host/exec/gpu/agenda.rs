//! What a run launches, in which order: a plan as the GPU executor sees it. Needs no GPU.

use kernels_gpu::abi::{DIRECT, LaunchRecord, MergeRow, NO_MERGE, WorkItem};

use crate::{
    Error,
    plan::{DeviceDescription, Kernel, MergeMode, Plan, Tile, TileGroup, tiles::TileTable},
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
}

impl LaunchSet {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self { keys: Vec::new() }
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
                reserved: [0; 2],
            };
        }
        records[self.keys.len()].count = agenda.left;
        Ok(())
    }
}

/// Items that run together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct GroupLaunch {
    pub(super) key: LaunchKey,
    /// Among the items, in the agenda's order.
    pub(super) first: u32,
    pub(super) items: u32,
    /// Units that a CTA of the decode kernel claims at a time.
    pub(super) run: u32,
}

/// What the pool of a part must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PartNeeds {
    pub(super) page_size: u32,
    /// One past the largest page id.
    pub(super) pages: u32,
}

/// A plan's launches. Keeps its memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct Agenda {
    pub(super) launches: Vec<GroupLaunch>,
    /// The items in launch order, where that is not the plan's own.
    pub(super) items: Option<Vec<WorkItem>>,
    /// Whether decode merges what it can itself.
    pub(super) fused: bool,
    /// Merges for the merging kernel.
    pub(super) left: u32,
    /// Which merges these are; where not all of them are.
    pub(super) left_rows: Vec<MergeRow>,
    pub(super) total_q: u32,
    pub(super) parts: Vec<PartNeeds>,
    contiguous: Vec<bool>,
}

impl Agenda {
    /// Takes in a plan whose states are to be merged by `merge_mode`, if that is possible.
    pub(super) fn fill(&mut self, plan: &Plan, merge_mode: MergeMode) {
        self.total_q = plan.total_q;
        self.parts.clear();
        self.parts.extend(plan.parts.iter().map(|part| {
            let ids = plan
                .page_ids
                .get(part.pages.start as usize..part.pages.end as usize);
            let ids = ids.unwrap_or_default();
            PartNeeds {
                page_size: part.page_size,
                pages: ids
                    .iter()
                    .fold(0, |most, &id| most.max(id.saturating_add(1))),
            }
        }));
        self.order(plan);
        self.divide_merges(plan, merge_mode);
    }

    /// The launches: one for each group, or for each part in it.
    fn order(&mut self, plan: &Plan) {
        self.launches.clear();
        if plan.parts.len() == 1 {
            self.items = None;
            for group in &plan.groups {
                let items = plan.items_of(group);
                self.launches
                    .push(launch(group, group.items.start, items, 0));
            }
            return;
        }
        let mut ordered = self.items.take().unwrap_or_default();
        ordered.clear();
        for group in &plan.groups {
            for part in 0..plan.parts.len() as u32 {
                let first = ordered.len();
                let of_part = plan.items_of(group).iter().filter(|item| item.part == part);
                ordered.extend(of_part);
                if ordered.len() > first {
                    let items = &ordered[first..];
                    self.launches.push(launch(group, first as u32, items, part));
                }
            }
        }
        self.items = Some(ordered);
    }

    /// Decode can do the merges that all states of come from decode.
    fn divide_merges(&mut self, plan: &Plan, merge_mode: MergeMode) {
        self.left_rows.clear();
        self.contiguous.clear();
        self.contiguous.resize(plan.merges.len(), false);
        let mut any = false;
        for item in plan.items.iter().filter(|item| !item.is_gathered()) {
            if item.merge != NO_MERGE && item.slot != DIRECT {
                let merges = item.merge as usize..(item.merge + item.rows) as usize;
                if let Some(merges) = self.contiguous.get_mut(merges) {
                    merges.fill(true);
                    any = true;
                }
            }
        }
        // With several parts the states of one merge may come from both kinds.
        let mixed = any && plan.parts.len() > 1;
        self.fused = merge_mode == MergeMode::Fused && !mixed;
        if self.fused {
            let merges = plan.merges.iter().zip(&self.contiguous);
            let left = merges.filter(|(merge, contiguous)| **contiguous || merge.slots == 0);
            self.left_rows.extend(left.map(|(merge, _)| *merge));
            self.left = self.left_rows.len() as u32;
        } else {
            self.left = plan.merges.len() as u32;
        }
    }

    /// The rows of the merging kernel.
    pub(super) fn left_rows<'a>(&'a self, plan: &'a Plan) -> &'a [MergeRow] {
        if self.fused {
            &self.left_rows
        } else {
            &plan.merges
        }
    }
}

fn launch(group: &TileGroup, first: u32, items: &[WorkItem], part: u32) -> GroupLaunch {
    let keys: u64 = items.iter().map(|item| u64::from(item.kv_len())).sum();
    GroupLaunch {
        key: LaunchKey {
            kernel: group.kernel,
            tile: group.tile,
            pack: group.pack,
            part,
        },
        first,
        items: items.len() as u32,
        run: run_length(keys / items.len().max(1) as u64),
    }
}

/// Units that a CTA claims at a time: short ones by several, or the ticket is what takes time.
fn run_length(keys_per_item: u64) -> u32 {
    match keys_per_item {
        0..=64 => 8,
        _ => 1,
    }
}

//! Predicted times of items.

use crate::{
    plan::{
        data::{Kernel, Tile},
        draft::PartInput,
        model::{Contention, CostModel, Model},
    },
    problem::Spec,
};

/// Cut joint tiles read less evenly than whole ones. Cutting pays if a step takes more than this many times as long as
/// with evenly loaded CTAs.
pub const WORTH_CUTTING: f64 = 1.15;

/// The load of items. Times are in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// Time of all units together, and their number.
    pub work: u64,
    pub units: u64,
    /// Time of the longest unit.
    pub longest: u64,
    /// Additional time of each CTA if units are cut.
    pub to_cut: u64,
    /// Whether there are partial states even if no unit is cut.
    pub merged: bool,
    /// The row tiles in use: bit log₂ `m` is set.
    pub tiles: u32,
}

impl Load {
    pub fn and(self, other: &Self) -> Self {
        Self {
            work: self.work + other.work,
            units: self.units + other.units,
            longest: self.longest.max(other.longest),
            to_cut: self.to_cut.max(other.to_cut),
            merged: self.merged | other.merged,
            tiles: self.tiles | other.tiles,
        }
    }

    /// Time until the last CTA has finished and all states are merged: with units cut or whole, whichever is less.
    pub fn time_ps(&self, cost: &CostModel) -> u64 {
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        let spread = self.work / ctas;
        let apart = if self.merged { cost.apart_ps() } else { 0 };
        let whole = self.whole_ps(cost, ctas) + apart;
        let cut = (spread as f64 * WORTH_CUTTING) as u64 + self.to_cut + apart.max(cost.cut_ps());
        let launches = u64::from(self.tiles.count_ones().saturating_sub(1));
        let behind = if self.merged { cost.behind_ps() } else { 0 };
        whole.min(cut) + launches * (cost.launch_ps() + behind)
    }
}

impl Load {
    /// Time until the last unit has finished, if none is cut.
    fn whole_ps(&self, cost: &CostModel, ctas: u64) -> u64 {
        let tiles = (0..u32::BITS).filter(|bit| self.tiles >> bit & 1 != 0);
        let contentions = tiles.map(|bit| cost.contention(Kernel::Decode, 1 << bit));
        let contention = contentions.reduce(Contention::and).unwrap_or_default();
        // All CTAs that share the part of one are counted as if they were active all the time.
        let (ctas, share) = (
            ctas * u64::from(contention.ctas_sharing),
            u64::from(contention.ctas_sharing),
        );
        let unit = self.work * share / self.units.max(1);
        let (rounds, rest) = (self.units / ctas, self.units % ctas);
        let last = if rest > 0 {
            unit * 1000 / contention.speed(rest, ctas)
        } else {
            0
        };
        let longer =
            (self.longest * share).saturating_sub(unit) * 1000 / u64::from(contention.solo_speedup);
        let rounds = rounds * unit + last;
        if self.units <= ctas {
            rounds + longer
        } else {
            rounds.max(unit + longer)
        }
    }
}

/// Sums over items.
#[derive(Clone, Copy, Debug, Default)]
pub struct Items {
    pub load: Load,
    /// Keys read, counted once for each tile.
    pub keys: u64,
    pub states: u64,
}

impl Items {
    /// The bytes that they move.
    pub const fn bytes(&self, spec: &Spec) -> u64 {
        self.keys * spec.kv_bytes_per_token() + 2 * self.states * spec.partial_bytes_per_token()
    }
}

/// Items that differ in their keys only.
#[derive(Clone, Copy, Debug, Default)]
struct Alike {
    count: u64,
    keys: u64,
    most_keys: u64,
}

/// Costs of items with the same number of rows, in picoseconds.
#[derive(Clone, Copy, Debug)]
struct ItemCost {
    rows: u32,
    m: u32,
    units: u64,
    /// Tiles after the first.
    others: u64,
    /// Fixed cost of a unit that runs alone, and of one behind other units of its CTA.
    fixed: u64,
    queued: u64,
    key: u64,
    cached_key: u64,
    /// Cost of the partial states of all rows, and the fixed cost of a unit whose rows leave partial states.
    partials: u64,
    to_cut: u64,
    /// Items without partial states, and items with them.
    items: [Alike; 2],
}

/// Items by their number of rows, for the last few such numbers. Most items have as many rows as a recent one, so that
/// costs are computed once for all of them.
#[derive(Debug, Default)]
pub struct ItemCosts {
    recent: [Option<ItemCost>; 8],
    before: Items,
}

impl ItemCosts {
    /// Adds an item.
    #[inline(always)]
    pub fn add(&mut self, input: &PartInput<'_>, rows: u32, keys: u32, is_partial: bool) {
        let Self { recent, before } = self;
        let known = &mut recent[rows.ilog2() as usize % 8];
        if let Some(other) = known.take_if(|known| known.rows != rows) {
            other.add_to(before);
        }
        let cost = known.get_or_insert_with(|| ItemCost::new(input, rows));
        let items = &mut cost.items[usize::from(is_partial)];
        let keys = u64::from(keys);
        items.count += 1;
        items.keys += keys;
        items.most_keys = items.most_keys.max(keys);
    }

    /// Takes the sums over all items that were added.
    pub fn take(&mut self) -> Items {
        for cost in self.recent.iter_mut().flatten() {
            cost.add_to(&mut self.before);
            cost.items = Default::default();
        }
        std::mem::take(&mut self.before)
    }
}

impl ItemCost {
    fn new(input: &PartInput<'_>, rows: u32) -> Self {
        let Model { spec, cost, .. } = input.model;
        let tiles = input.tiles;
        let (group, per_tile) = (spec.group(), tiles.decode_tokens());
        let in_tile = rows.min(per_tile);
        let m = tiles.row_tile(in_tile);
        let tile = Tile { m, n: 0 };
        let fixed = |tokens| cost.fixed_ps(Kernel::Decode, tile, group, tokens);
        Self {
            rows,
            m,
            units: u64::from(cost.units_per_item(group)),
            others: u64::from(rows.div_ceil(per_tile)) - 1,
            fixed: fixed(0),
            queued: cost.queued_ps(Kernel::Decode, tile),
            key: cost.key_ps(Kernel::Decode, tile, group),
            cached_key: cost.cached_key_ps(Kernel::Decode, tile),
            partials: fixed(rows) - fixed(0),
            to_cut: fixed(in_tile),
            items: Default::default(),
        }
    }

    /// Adds the items to the sums.
    fn add_to(&self, all: &mut Items) {
        for (items, is_partial) in self.items.iter().zip([false, true]) {
            let Alike {
                count,
                keys,
                most_keys,
            } = *items;
            if count == 0 {
                continue;
            }
            let tiles = 1 + self.others;
            let partials = if is_partial { self.partials } else { 0 };
            let work = count * (tiles * self.queued + partials)
                + keys * (self.key + self.others * self.cached_key);
            all.load = all.load.and(&Load {
                work: work * self.units,
                units: count * tiles * self.units,
                longest: self.fixed + most_keys * self.key,
                to_cut: self.to_cut,
                merged: is_partial,
                tiles: 1 << self.m.ilog2(),
            });
            all.keys += keys * tiles;
            all.states += if is_partial {
                count * u64::from(self.rows)
            } else {
                0
            };
        }
    }
}

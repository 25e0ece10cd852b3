//! What items take.

use crate::plan::{
    data::{Kernel, Tile},
    draft::PartInput,
    model::{Contention, CostModel, Model},
};

/// A joint tile that is cut does not read as evenly as one that is not: cutting pays where a step takes so many times
/// what it takes with even CTAs.
pub const WORTH_CUTTING: f64 = 1.15;

/// What items take, in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Load {
    /// On all CTAs together, of so many units.
    pub work: u64,
    pub units: u64,
    /// Of the longest unit.
    pub longest: u64,
    /// More for each CTA, if units are cut.
    pub to_cut: u64,
    /// There are partial states even if none is.
    pub merged: bool,
    /// A bit for each row tile, by its logarithm.
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

    /// Until the last CTA is done and all is merged: with units cut, or as they are.
    pub fn time_ps(&self, cost: &CostModel) -> u64 {
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        let spread = self.work / ctas;
        let apart = if self.merged { cost.apart_ps() } else { 0 };
        let whole = self.whole_ps(cost, ctas) + apart;
        let cut = (spread as f64 * WORTH_CUTTING) as u64 + self.to_cut + apart.max(cost.cut_ps());
        let launches = u64::from(self.tiles.count_ones().saturating_sub(1));
        whole.min(cut) + launches * cost.launch_ps()
    }
}

impl Load {
    /// Until the last unit is done, if none is cut.
    fn whole_ps(&self, cost: &CostModel, ctas: u64) -> u64 {
        let tiles = (0..u32::BITS).filter(|bit| self.tiles >> bit & 1 != 0);
        let contentions = tiles.map(|bit| cost.contention(Kernel::Decode, 1 << bit));
        let contention = contentions.reduce(Contention::and).unwrap_or_default();
        // As if all CTAs that share an SM were there all the time.
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

/// What an item of so many rows takes, in picoseconds.
#[derive(Clone, Copy, Debug)]
pub struct ItemCost {
    pub rows: u32,
    pub m: u32,
    pub units: u64,
    /// Of one unit alone, and behind others.
    pub fixed: u64,
    pub queued: u64,
    pub key: u64,
    pub cached_key: u64,
    /// All its rows' partial states, and those of one tile with what a unit costs.
    pub partials: u64,
    pub to_cut: u64,
}

/// The last few answers: most items have as many rows as one that came shortly before.
#[derive(Debug, Default)]
pub struct ItemCosts([Option<ItemCost>; 8]);

impl ItemCosts {
    pub fn get(&mut self, input: &PartInput<'_>, rows: u32) -> &ItemCost {
        let known = &mut self.0[rows.ilog2() as usize % 8];
        if known.is_none_or(|known| known.rows != rows) {
            *known = None;
        }
        known.get_or_insert_with(|| {
            let Model { spec, cost, .. } = input.model;
            let tiles = input.tiles;
            let group = spec.group();
            let in_tile = rows.min(tiles.decode_tokens());
            let m = tiles.row_tile(in_tile);
            let tile = Tile { m, n: 0 };
            let fixed = |tokens| cost.fixed_ps(Kernel::Decode, tile, group, tokens);
            ItemCost {
                rows,
                m,
                units: u64::from(cost.units_per_item(group)),
                fixed: fixed(0),
                queued: cost.queued_ps(Kernel::Decode, tile),
                key: cost.key_ps(Kernel::Decode, tile, group),
                cached_key: cost.cached_key_ps(Kernel::Decode, tile),
                partials: fixed(rows) - fixed(0),
                to_cut: fixed(in_tile),
            }
        })
    }
}

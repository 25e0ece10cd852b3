//! What drafts ask of a CTA. Most drafts of a plan are of a few classes that differ in their keys only, so
//! costs are computed once for each class.

use crate::plan::{
    data::Kernel,
    draft::Draft,
    model::{Contention, CostModel},
};

/// A row tile gets a launch of its own if its units take this many times as long as starting one: SMs that
/// change from one kernel to the next stand still for a while.
const WORTH_A_LAUNCH: u64 = 3;

/// What a draft asks of a CTA, in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnitCost {
    pub launch: u32,
    pub units: u32,
    pub keys: u32,
    /// Whatever its keys: as a whole, and as one of several pieces.
    pub fixed: u64,
    pub fixed_cut: u64,
    pub key: u64,
    /// The shortest piece worth cutting: its keys take as long as what it costs anyway.
    pub shortest: u32,
}

impl UnitCost {
    pub const fn whole(&self) -> u64 {
        self.fixed + self.key * self.keys as u64
    }

    pub const fn cut(&self, keys: u32) -> u64 {
        self.fixed_cut + self.key * keys as u64
    }

    /// What can be cut is no longer than this when it is.
    pub const fn least_divisible(&self) -> u64 {
        self.cut(2 * self.shortest)
    }

    /// The longest unit that is left when the draft is cut into as many pieces as may be.
    pub const fn unsplittable(&self) -> u64 {
        match self.keys / self.shortest {
            0 | 1 => self.whole(),
            pieces => self.cut(self.keys / pieces),
        }
    }
}

/// Drafts that differ in their keys only.
#[derive(Clone, Copy, Debug)]
pub struct DraftClass {
    /// One of them.
    pub draft: Draft,
    /// What each of them asks, but for its keys.
    pub unit: UnitCost,
    pub count: u64,
    /// The keys of all, and of the one that has most.
    pub keys: u64,
    pub most_keys: u32,
}

impl DraftClass {
    /// A new class, of one draft.
    fn new(draft: &Draft, cost: &CostModel) -> Self {
        let keys = draft.kv_len();
        let mut class = Self {
            draft: *draft,
            unit: UnitCost::default(),
            count: 1,
            keys: u64::from(keys),
            most_keys: keys,
        };
        class.weigh(cost);
        class
    }

    /// Of all drafts of the class, with all their units.
    pub const fn work(&self) -> u64 {
        let UnitCost {
            units, fixed, key, ..
        } = self.unit;
        units as u64 * (self.count * fixed + key * self.keys)
    }

    /// The longest unit before any is cut.
    pub const fn longest(&self) -> u64 {
        self.unit.fixed + self.unit.key * self.most_keys as u64
    }

    fn holds(&self, draft: &Draft) -> bool {
        let like = |draft: &Draft| {
            let Draft {
                kernel,
                tile,
                pack,
                rows,
                leaves_partial,
                many_rows,
                page_size,
                ..
            } = *draft;
            let flags = (kernel, leaves_partial, many_rows);
            (rows, tile, pack, page_size, flags)
        };
        like(&self.draft) == like(draft)
    }

    /// With the rows of its tile known.
    fn weigh(&mut self, cost: &CostModel) {
        let Draft {
            kernel,
            tile,
            pack,
            rows,
            leaves_partial,
            ..
        } = self.draft;
        let fixed_cut = cost.fixed_ps(kernel, tile, pack, rows);
        let key = cost.key_ps(kernel, tile, pack).max(1);
        let shortest = u32::try_from(fixed_cut / key).unwrap_or(u32::MAX / 2);
        self.unit = UnitCost {
            units: cost.units_per_item(pack),
            fixed: cost.fixed_ps(kernel, tile, pack, if leaves_partial { rows } else { 0 }),
            fixed_cut,
            key,
            shortest: shortest
                .max(1)
                .next_multiple_of(self.draft.split_alignment()),
            keys: 0,
            launch: 0,
        };
    }
}

/// A draft's class, and what sets it apart.
#[derive(Clone, Copy, Debug)]
pub struct OfClass {
    pub class: u32,
    pub keys: u32,
    pub launch: u32,
}

/// The classes of a plan's drafts. Buffers are reused.
#[derive(Debug, Default)]
pub struct DraftClasses {
    /// Some may be alike: only the last ones are compared.
    pub classes: Vec<DraftClass>,
    pub of: Vec<OfClass>,
    /// Row tiles of the decodes, ascending, with the time that their units take together.
    row_tiles: Vec<(u32, u64)>,
    /// How the CTAs of decodes slow each other down.
    contention: Contention,
}

impl DraftClasses {
    /// Finds the classes of the drafts and what they ask. With `join`, tiles with little to do are joined to
    /// others; with `hybrid`, CTAs count as if each had its part of the device.
    pub fn find(&mut self, cost: &CostModel, drafts: &mut [Draft], join: bool, hybrid: bool) {
        self.classes.clear();
        self.of.clear();
        self.of.reserve(drafts.len());
        let mut recent = [u32::MAX; 8];
        for draft in &*drafts {
            let recent = &mut recent[draft.rows.ilog2() as usize % 8];
            let keys = draft.kv_len();
            let known = self.classes.get_mut(*recent as usize);
            if let Some(class) = known.filter(|class| class.holds(draft)) {
                class.count += 1;
                class.keys += u64::from(keys);
                class.most_keys = class.most_keys.max(keys);
            } else {
                *recent = self.classes.len() as u32;
                self.classes.push(DraftClass::new(draft, cost));
            }
            self.of.push(OfClass {
                class: *recent,
                keys,
                launch: 0,
            });
        }
        if join && self.join_tiles(cost) {
            for (draft, of) in drafts.iter_mut().zip(&self.of) {
                draft.tile.m = self.classes[of.class as usize].draft.tile.m;
            }
        }
        self.contention = Contention::NONE;
        if !hybrid {
            self.find_contention(cost);
        }
    }

    fn find_contention(&mut self, cost: &CostModel) {
        let decodes = self
            .classes
            .iter()
            .filter(|class| class.draft.is_gathered());
        let of = |class: &DraftClass| cost.contention(Kernel::Decode, class.draft.tile.m);
        self.contention = decodes.map(of).reduce(Contention::and).unwrap_or_default();
        let share = u64::from(self.contention.ctas_sharing);
        if share > 1 {
            for class in &mut self.classes {
                class.unit.key *= if class.draft.is_gathered() { share } else { 1 };
            }
        }
    }

    /// CTAs of a kernel that run at the same time, and how they slow each other down.
    pub fn ctas(&self, cost: &CostModel, kernel: Kernel) -> (u32, Contention) {
        let contention = match kernel {
            Kernel::Decode => self.contention,
            Kernel::Prefill => Contention::NONE,
        };
        (
            cost.resident_ctas(kernel) * contention.ctas_sharing,
            contention,
        )
    }

    /// The keys of all drafts, those of a draft once for each of its units.
    pub fn keys_of_units(&self) -> u64 {
        let keys = |class: &DraftClass| u64::from(class.unit.units) * class.keys;
        self.classes.iter().map(keys).sum()
    }

    /// What a draft asks.
    #[inline]
    pub fn unit_cost(&self, draft: u32) -> UnitCost {
        self.cost_of(&self.of[draft as usize])
    }

    /// What each draft asks.
    pub fn unit_costs(&self) -> impl Iterator<Item = UnitCost> {
        self.of.iter().map(|of| self.cost_of(of))
    }

    #[inline]
    fn cost_of(&self, of: &OfClass) -> UnitCost {
        UnitCost {
            keys: of.keys,
            launch: of.launch,
            ..self.classes[of.class as usize].unit
        }
    }

    /// Lets the decodes of a row tile that has little to do run in the next larger one that is there: rows
    /// that nobody has cost less than one more launch. Says whether any do.
    fn join_tiles(&mut self, cost: &CostModel) -> bool {
        self.row_tiles.clear();
        let gathered = |class: &&mut DraftClass| class.draft.is_gathered();
        for class in self.classes.iter_mut().filter(gathered) {
            let UnitCost {
                units,
                fixed_cut,
                key,
                ..
            } = class.unit;
            let time = u64::from(units) * (class.count * fixed_cut + key * class.keys);
            let m = class.draft.tile.m;
            match self.row_tiles.binary_search_by_key(&m, |tile| tile.0) {
                Ok(at) => self.row_tiles[at].1 += time,
                Err(at) => self.row_tiles.insert(at, (m, time)),
            }
        }
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        let mut joined = false;
        for larger in 1..self.row_tiles.len() {
            let ((m, time), next) = (self.row_tiles[larger - 1], self.row_tiles[larger].0);
            if time >= WORTH_A_LAUNCH * cost.launch_ps() * ctas {
                continue;
            }
            joined = true;
            self.row_tiles[larger].1 += time;
            for class in self.classes.iter_mut().filter(gathered) {
                if class.draft.tile.m == m {
                    class.draft.tile.m = next;
                    class.weigh(cost);
                }
            }
        }
        joined
    }
}

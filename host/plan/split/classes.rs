//! The cost of drafts. Most drafts of a plan fall into a few classes whose drafts differ only in their keys, so costs
//! are computed once for each class.

use crate::plan::{
    data::Kernel,
    draft::Draft,
    model::{Contention, CostModel},
};

/// The cost of a draft's units. Times are in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct UnitCost {
    pub launch: u32,
    pub units: u32,
    pub keys: u32,
    /// Fixed cost, which does not depend on the keys: of a whole draft, and of one of several pieces.
    pub fixed: u64,
    pub fixed_cut: u64,
    /// Time of the states of a piece that all CTAs bear together, and of those of a whole draft.
    pub states_cut: u64,
    pub states: u64,
    pub key: u64,
    /// The same, where no other unit reads the key at about the same time.
    pub key_apart: u64,
    /// Keys of the shortest piece worth cutting: they take as long as the fixed cost.
    pub shortest: u32,
}

impl UnitCost {
    pub const fn whole(&self) -> u64 {
        self.fixed + self.key * self.keys as u64
    }

    pub const fn cut(&self, keys: u32) -> u64 {
        self.fixed_cut + self.key * keys as u64
    }

    /// The cost of a piece with so many keys, which may be the whole draft.
    pub const fn piece(&self, keys: u32) -> u64 {
        match keys == self.keys {
            true => self.whole(),
            false => self.cut(keys),
        }
    }

    /// What is added to the time of all units if no other reads these keys at about the same time.
    pub const fn apart(&self, keys: u32) -> u64 {
        (self.key_apart - self.key) * keys as u64 * self.units as u64
    }

    /// An upper bound of [`unsplittable`](Self::unsplittable) for drafts that can be cut.
    pub const fn least_divisible(&self) -> u64 {
        self.cut(2 * self.shortest)
    }

    /// Cost of the longest piece if the draft is cut into as many pieces as possible.
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
    /// One of the drafts.
    pub draft: Draft,
    /// Cost of each draft; keys and launch are not set.
    pub unit: UnitCost,
    pub count: u64,
    /// Keys of all drafts, and of the draft with the most.
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

    /// Cost of all units of all drafts of the class.
    pub const fn work(&self) -> u64 {
        let UnitCost {
            units, fixed, key, ..
        } = self.unit;
        // A tile may have far more rows than queries, so the limit of a batch's operations is none of these times.
        let keys = key.saturating_mul(self.keys);
        (units as u64).saturating_mul(keys.saturating_add(self.count.saturating_mul(fixed)))
    }

    /// Cost of the longest unit if none is cut.
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
                heads,
                ..
            } = *draft;
            let flags = (kernel, leaves_partial, many_rows, heads);
            (rows, tile, pack, page_size, flags)
        };
        like(&self.draft) == like(draft)
    }

    /// Computes the cost for the row tile of `draft`.
    fn weigh(&mut self, cost: &CostModel) {
        let Draft {
            kernel,
            tile,
            pack,
            rows,
            leaves_partial,
            ..
        } = self.draft;
        let partial = if leaves_partial { rows } else { 0 };
        let fixed_cut = cost.own_ps(kernel, tile, pack, rows);
        let key = cost.key_ps(kernel, tile, pack).max(1);
        let key_apart = cost.key_apart_ps(kernel, tile, pack).max(1);
        let shortest = u32::try_from(fixed_cut / key).unwrap_or(u32::MAX / 2);
        self.unit = UnitCost {
            units: self.draft.units(cost),
            fixed: cost.own_ps(kernel, tile, pack, partial),
            fixed_cut,
            states: cost.states_ps(kernel, tile, pack, partial),
            states_cut: cost.states_ps(kernel, tile, pack, rows),
            key,
            key_apart,
            shortest: shortest
                .max(1)
                .next_multiple_of(self.draft.split_alignment()),
            keys: 0,
            launch: 0,
        };
    }
}

/// A draft's class, and what differs from draft to draft.
#[derive(Clone, Copy, Debug)]
pub struct OfClass {
    pub class: u32,
    pub keys: u32,
    pub launch: u32,
}

/// The classes of a plan's drafts. Buffers are reused.
#[derive(Debug, Default)]
pub struct DraftClasses {
    /// Some classes may be equal: a draft is only compared with recent ones.
    pub classes: Vec<DraftClass>,
    pub of: Vec<OfClass>,
    /// Row tiles of the decodes, ascending, with the time that their units take together.
    row_tiles: Vec<(u32, u64)>,
    /// How the CTAs of decodes slow each other down.
    contention: Contention,
}

impl DraftClasses {
    /// Finds the classes of the drafts and their costs. With `join`, row tiles with little work join larger ones. With
    /// `co_resident`, contention between CTAs is not counted: each has its part of an SM.
    pub fn find(&mut self, cost: &CostModel, drafts: &mut [Draft], join: bool, co_resident: bool) {
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
        if !co_resident {
            self.find_contention(cost);
        }
    }

    fn find_contention(&mut self, cost: &CostModel) {
        let decodes = self
            .classes
            .iter()
            .filter(|class| class.draft.is_gathered());
        let of = |class: &DraftClass| {
            cost.contention_of(Kernel::Decode, class.draft.tile, class.draft.pack)
        };
        self.contention = decodes.map(of).reduce(Contention::and).unwrap_or_default();
        let share = u64::from(self.contention.ctas_sharing);
        if share > 1 {
            for class in &mut self.classes {
                let times = if class.draft.is_gathered() { share } else { 1 };
                class.unit.key *= times;
                class.unit.key_apart *= times;
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

    /// Keys of all drafts, counted once for each unit.
    pub fn keys_of_units(&self) -> u64 {
        let keys = |class: &DraftClass| u64::from(class.unit.units) * class.keys;
        self.classes.iter().map(keys).sum()
    }

    /// Cost of a draft's units.
    #[inline]
    pub fn unit_cost(&self, draft: u32) -> UnitCost {
        self.cost_of(&self.of[draft as usize])
    }

    /// Cost of each draft's units.
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

    /// Moves the decodes of a row tile with little work to the next larger row tile in use: empty rows cost less than
    /// another launch. Returns whether any moved.
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
        let mut joined = false;
        for larger in 1..self.row_tiles.len() {
            let ((m, time), next) = (self.row_tiles[larger - 1], self.row_tiles[larger].0);
            if time >= cost.joined_ps(next) {
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

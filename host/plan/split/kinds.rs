//! What drafts ask of a CTA. Most drafts of a plan are of a few kinds that differ in their keys only, so
//! costs are computed once for each kind.

use crate::plan::{
    Kernel,
    cost::{Company, CostModel},
    draft::Draft,
};

/// A row tile gets a launch of its own if its units take this many times as long as starting one: SMs that
/// change from one kernel to the next stand still for a while.
const WORTH_A_LAUNCH: u64 = 3;

/// What a draft asks of a CTA, in picoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Load {
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

impl Load {
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
pub(super) struct Kind {
    /// One of them.
    pub draft: Draft,
    /// What each of them asks, but for its keys.
    pub load: Load,
    pub count: u64,
    /// The keys of all, and of the one that has most.
    pub keys: u64,
    pub most_keys: u32,
}

impl Kind {
    /// A new kind, of one draft.
    fn new(draft: &Draft, cost: &CostModel) -> Self {
        let keys = draft.kv_len();
        let mut kind = Self {
            draft: *draft,
            load: Load::default(),
            count: 1,
            keys: u64::from(keys),
            most_keys: keys,
        };
        kind.weigh(cost);
        kind
    }

    /// Of all drafts of the kind, with all their units.
    pub const fn work(&self) -> u64 {
        let Load {
            units, fixed, key, ..
        } = self.load;
        units as u64 * (self.count * fixed + key * self.keys)
    }

    /// The longest unit before any is cut.
    pub const fn longest(&self) -> u64 {
        self.load.fixed + self.load.key * self.most_keys as u64
    }

    fn holds(&self, draft: &Draft) -> bool {
        let like = |draft: &Draft| {
            let Draft {
                kernel,
                tile,
                pack,
                rows,
                leaves_partial,
                page_size,
                ..
            } = *draft;
            (rows, tile.m, pack, page_size, kernel, leaves_partial)
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
        self.load = Load {
            units: cost.units_per_item(pack),
            fixed: cost.fixed_ps(kernel, tile, pack, if leaves_partial { rows } else { 0 }),
            fixed_cut,
            key,
            shortest: shortest.max(1).next_multiple_of(granule(&self.draft)),
            keys: 0,
            launch: 0,
        };
    }
}

/// A draft's kind, and what sets it apart.
#[derive(Clone, Copy, Debug)]
pub(super) struct OfKind {
    pub kind: u32,
    pub keys: u32,
    pub launch: u32,
}

/// The kinds of a plan's drafts. Buffers are reused.
#[derive(Debug, Default)]
pub(super) struct Kinds {
    /// Some may be alike: only the last ones are compared.
    pub kinds: Vec<Kind>,
    pub of: Vec<OfKind>,
    /// Row tiles of the decodes, ascending, with the time that their units take together.
    row_tiles: Vec<(u32, u64)>,
    /// What the CTAs of decodes are to each other.
    company: Company,
}

impl Kinds {
    /// Finds the kinds of the drafts and what they ask. With `join`, tiles with little to do are joined to
    /// others; with `hybrid`, nobody knows what other CTAs leave.
    pub fn find(&mut self, cost: &CostModel, drafts: &mut [Draft], join: bool, hybrid: bool) {
        self.kinds.clear();
        self.of.clear();
        self.of.reserve(drafts.len());
        let mut recent = [u32::MAX; 8];
        for draft in &*drafts {
            let recent = &mut recent[draft.rows.ilog2() as usize % 8];
            let keys = draft.kv_len();
            let known = self.kinds.get_mut(*recent as usize);
            if let Some(kind) = known.filter(|kind| kind.holds(draft)) {
                kind.count += 1;
                kind.keys += u64::from(keys);
                kind.most_keys = kind.most_keys.max(keys);
            } else {
                *recent = self.kinds.len() as u32;
                self.kinds.push(Kind::new(draft, cost));
            }
            self.of.push(OfKind {
                kind: *recent,
                keys,
                launch: 0,
            });
        }
        if join && self.join_tiles(cost) {
            for (draft, of) in drafts.iter_mut().zip(&self.of) {
                draft.tile.m = self.kinds[of.kind as usize].draft.tile.m;
            }
        }
        self.company = Company::NONE;
        if !hybrid {
            self.find_company(cost);
        }
    }

    fn find_company(&mut self, cost: &CostModel) {
        let decodes = self.kinds.iter().filter(|kind| kind.draft.is_gathered());
        let of = |kind: &Kind| cost.company(Kernel::Decode, kind.draft.tile.m);
        self.company = decodes.map(of).reduce(Company::and).unwrap_or_default();
        let share = u64::from(self.company.share);
        if share > 1 {
            for kind in &mut self.kinds {
                kind.load.key *= if kind.draft.is_gathered() { share } else { 1 };
            }
        }
    }

    /// CTAs of a kernel that run at the same time, and what they are to each other.
    pub fn ctas(&self, cost: &CostModel, kernel: Kernel) -> (u32, Company) {
        let company = match kernel {
            Kernel::Decode => self.company,
            Kernel::Prefill => Company::NONE,
        };
        (cost.resident_ctas(kernel) * company.share, company)
    }

    /// What a draft asks.
    #[inline]
    pub fn load(&self, draft: u32) -> Load {
        self.load_of(&self.of[draft as usize])
    }

    /// What each draft asks.
    pub fn loads(&self) -> impl Iterator<Item = Load> {
        self.of.iter().map(|of| self.load_of(of))
    }

    #[inline]
    fn load_of(&self, of: &OfKind) -> Load {
        Load {
            keys: of.keys,
            launch: of.launch,
            ..self.kinds[of.kind as usize].load
        }
    }

    /// Lets the decodes of a row tile that has little to do run in the next larger one that is there: rows
    /// that nobody has cost less than one more launch. Says whether any do.
    fn join_tiles(&mut self, cost: &CostModel) -> bool {
        self.row_tiles.clear();
        let gathered = |kind: &&mut Kind| kind.draft.is_gathered();
        for kind in self.kinds.iter_mut().filter(gathered) {
            let Load {
                units,
                fixed_cut,
                key,
                ..
            } = kind.load;
            let time = u64::from(units) * (kind.count * fixed_cut + key * kind.keys);
            let m = kind.draft.tile.m;
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
            for kind in self.kinds.iter_mut().filter(gathered) {
                if kind.draft.tile.m == m {
                    kind.draft.tile.m = next;
                    kind.weigh(cost);
                }
            }
        }
        joined
    }
}

/// Cuts fall on multiples of this: whole pages, and no less than a matrix instruction's keys.
pub(in crate::plan) fn granule(draft: &Draft) -> u32 {
    granule_of(draft.page_size)
}

/// As [`granule`], for pages of so many tokens.
pub(in crate::plan) fn granule_of(page_size: u32) -> u32 {
    16u32.next_multiple_of(page_size)
}

//! Cutting items along their keys, and the order in which the pieces are launched.

use std::{cmp::Reverse, ops::Range};

use serde::{Deserialize, Serialize};

use super::{
    Kernel, Tile,
    balance::{Columns, gcd},
    cost::CostModel,
    draft::{Draft, Piece},
    tiles::TileTable,
};

/// How items are cut along their keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SplitMode {
    /// So that the last resident CTA finishes as early as it can.
    #[default]
    Makespan,
    /// FlashInfer's Algorithm 1: no chunk above the mean load of a CTA. For comparison.
    FlashInfer,
    /// At multiples of so many keys, whatever else is in the batch: results are bitwise independent of it.
    Fixed {
        /// Keys per chunk, a multiple of the page size.
        tokens: u32,
    },
    /// Not at all.
    Off,
}

/// Buffers that keep their memory from plan to plan.
#[derive(Debug, Default)]
pub(super) struct Splitter {
    /// The pieces, ascending by draft, then by key.
    pub pieces: Vec<Piece>,
    /// The launches, in launch order.
    pub launches: Vec<Launch>,
    pub outcome: Outcome,
    /// The pieces by [`piece_of`], launch after launch, each in the order in which it claims them.
    pub order: Vec<u64>,
    loads: Vec<Load>,
    columns: Columns,
    /// Place in launch order of the launches as they were found.
    rank: Vec<u32>,
    /// Launch and cost (the longest first), and the draft.
    sorted: Vec<(u64, u32)>,
    /// Pieces of the attempt at hand, of the best one, and those that were chosen.
    placed: Vec<Piece>,
    best: Vec<Piece>,
    chosen: Vec<Piece>,
    launch_order: Vec<(u64, u32)>,
    /// Row tiles of the decodes, ascending, with the time that their units take together.
    row_tiles: Vec<(u32, u64)>,
    /// Cost and index of the pieces of one column.
    column: Vec<(Reverse<u64>, u32)>,
    /// Where the pieces of each draft, or of each launch, go.
    next: Vec<u32>,
}

/// The items of one kernel with one tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Launch {
    pub kernel: Kernel,
    pub tile: Tile,
    pub pack: u32,
    pub pieces: u32,
    /// Its longest unit once it is cut, and before that, in picoseconds.
    longest: u64,
    longest_whole: u64,
    /// All its units before any is cut.
    work: u64,
}

/// The last few results of a function, by its arguments: most drafts are like one that came shortly before.
#[derive(Debug)]
struct Recent<K, V>([Option<(K, V)>; 8]);

impl<K: PartialEq, V: Copy> Recent<K, V> {
    const fn new() -> Self
    where
        K: Copy,
    {
        Self([None; 8])
    }

    /// `make()`, or what it was for the same key in the same slot.
    #[inline]
    fn get(&mut self, slot: u32, key: K, make: impl FnOnce() -> V) -> V {
        let entry = &mut self.0[slot as usize % 8];
        match entry {
            Some((known, value)) if *known == key => *value,
            _ => {
                let value = make();
                *entry = Some((key, value));
                value
            }
        }
    }
}

/// When each class is done, decode first, and how many units it has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub makespan_ps: [u64; 2],
    pub units: [u32; 2],
}

/// What a draft asks of a CTA, in picoseconds.
#[derive(Clone, Copy, Debug)]
struct Load {
    launch: u32,
    units: u32,
    /// Whatever its keys: as a whole, and as one of several pieces.
    fixed: u64,
    fixed_cut: u64,
    key: u64,
    keys: u32,
    /// The shortest piece worth cutting: its keys take as long as what it costs anyway.
    shortest: u32,
}

impl Load {
    const fn whole(&self) -> u64 {
        self.fixed + self.key * self.keys as u64
    }

    const fn cut(&self, keys: u32) -> u64 {
        self.fixed_cut + self.key * keys as u64
    }

    /// The longest unit that is left when the draft is cut into as many pieces as may be.
    const fn unsplittable(&self) -> u64 {
        match self.keys / self.shortest {
            0 | 1 => self.whole(),
            pieces => self.cut(self.keys / pieces),
        }
    }
}

/// Kernels whose items are balanced together: beside prefill, decodes have resident CTAs of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Class {
    Decode,
    Prefill,
}

impl Class {
    fn of(kernel: Kernel) -> Self {
        match kernel {
            Kernel::Decode => Self::Decode,
            Kernel::Prefill => Self::Prefill,
        }
    }
}

/// All loads of a class.
#[derive(Clone, Copy, Debug)]
struct ClassLoad {
    /// CTAs that run at the same time.
    ctas: u32,
    /// What the units of every item are a multiple of.
    units: u32,
    /// Of all units together: everything, and their keys.
    work: u64,
    keys: u64,
    /// Units before any is cut.
    count: u64,
    least_fixed: u64,
    longest: u64,
    longest_unsplittable: u64,
}

impl ClassLoad {
    const NONE: Self = Self {
        ctas: 1,
        units: 0,
        work: 0,
        keys: 0,
        count: 0,
        least_fixed: 0,
        longest: 0,
        longest_unsplittable: 0,
    };

    fn add(&mut self, load: &Load, ctas: u32) {
        let units = u64::from(load.units);
        self.least_fixed = if self.units == 0 {
            load.fixed
        } else {
            self.least_fixed.min(load.fixed)
        };
        self.ctas = ctas;
        if self.units != load.units {
            self.units = gcd(self.units, load.units);
        }
        self.count += units;
        self.work += units * load.whole();
        self.keys += units * load.key * u64::from(load.keys);
        self.longest = self.longest.max(load.whole());
        // A piece is shorter than two of the shortest: mostly that spares the exact answer.
        if load.whole().min(load.cut(2 * load.shortest)) > self.longest_unsplittable {
            self.longest_unsplittable = self.longest_unsplittable.max(load.unsplittable());
        }
    }

    /// Whether there is a unit for every CTA.
    fn fills(&self) -> bool {
        self.count >= u64::from(self.ctas)
    }

    /// No plan is done earlier: not with every CTA busy all the time, nor with the longest unit that cannot
    /// be cut. Every CTA that takes part pays the fixed cost of a unit at least once.
    fn bound(&self) -> u64 {
        let ctas = u64::from(self.ctas);
        let spread = (self.least_fixed + self.keys / ctas).min(self.work);
        (self.work / ctas)
            .max(self.longest_unsplittable)
            .max(spread)
    }
}

/// What the splitter reads beside the drafts.
#[derive(Clone, Copy)]
pub(super) struct SplitInput<'a> {
    pub mode: SplitMode,
    pub cost: &'a CostModel,
    pub tiles: &'a TileTable,
    /// Prefills and decodes are to run side by side.
    pub hybrid: bool,
}

/// Attempts to split aim at a makespan that grows by one part in so many.
const STEP: u64 = 64;

/// A row tile gets a launch of its own if its units take this many times as long as starting one: SMs that
/// change from one kernel to the next stand still for a while.
const WORTH_A_LAUNCH: u64 = 3;

/// Splits are not looked for where they could shorten a step by less than this part.
const GOOD_ENOUGH: f64 = 1.03;

impl Splitter {
    /// Cuts the drafts into pieces, chooses their key tiles, and orders them for launch.
    pub fn split(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) {
        let SplitInput { mode, cost, .. } = *input;
        if !matches!(mode, SplitMode::Fixed { .. }) {
            self.join_tiles(cost, drafts);
        }
        let classes = self.weigh(cost, drafts);
        self.outcome.makespan_ps = classes.map(|class| class.bound().max(class.longest));
        self.pieces.clear();
        match mode {
            SplitMode::Off => self.chunks(input, drafts, |_, _| u32::MAX),
            SplitMode::Fixed { tokens } => self.chunks(input, drafts, |_, _| tokens),
            SplitMode::FlashInfer => {
                let keys = |load: &Load| u64::from(load.units) * u64::from(load.keys);
                let total: u64 = self.loads.iter().map(keys).sum();
                self.chunks(input, drafts, |draft, _| {
                    let bound = total.div_ceil(u64::from(cost.resident_ctas(draft.kernel)));
                    let bound = u32::try_from(bound).unwrap_or(u32::MAX / 2);
                    bound.max(1).next_multiple_of(granule(draft))
                });
            }
            SplitMode::Makespan => self.balance_all(input, drafts, classes),
        }
        self.outcome.units = [0; 2];
        for piece in &self.pieces {
            let draft = piece.draft as usize;
            self.outcome.units[Class::of(drafts[draft].kernel) as usize] += self.loads[draft].units;
        }
        self.order_pieces();
    }

    /// Lets the decodes of a row tile that has little to do run in the next larger one that is there: rows
    /// that nobody has cost less than one more launch.
    fn join_tiles(&mut self, cost: &CostModel, drafts: &mut [Draft]) {
        self.row_tiles.clear();
        for draft in drafts.iter().filter(|draft| draft.is_gathered()) {
            let keys =
                cost.key_ps(draft.kernel, draft.tile, draft.pack) * u64::from(draft.kv_len());
            let unit = cost.fixed_ps(draft.kernel, draft.pack, draft.rows) + keys;
            let time = unit * u64::from(cost.units_per_item(draft.pack));
            match self
                .row_tiles
                .binary_search_by_key(&draft.tile.m, |tile| tile.0)
            {
                Ok(at) => self.row_tiles[at].1 += time,
                Err(at) => self.row_tiles.insert(at, (draft.tile.m, time)),
            }
        }
        let ctas = u64::from(cost.resident_ctas(Kernel::Decode));
        for larger in 1..self.row_tiles.len() {
            let ((m, time), next) = (self.row_tiles[larger - 1], self.row_tiles[larger].0);
            if time >= WORTH_A_LAUNCH * cost.launch_ps() * ctas {
                continue;
            }
            self.row_tiles[larger].1 += time;
            for draft in drafts.iter_mut().filter(|draft| draft.is_gathered()) {
                if draft.tile.m == m {
                    draft.tile.m = next;
                }
            }
        }
    }

    fn weigh(&mut self, cost: &CostModel, drafts: &[Draft]) -> [ClassLoad; 2] {
        let mut classes = [ClassLoad::NONE; 2];
        self.loads.clear();
        let mut recent = Recent::new();
        for draft in drafts {
            let Draft {
                kernel,
                tile,
                pack,
                rows,
                leaves_partial,
                page_size,
                ..
            } = *draft;
            let like = (kernel, tile.m, pack, rows, leaves_partial, page_size);
            let load = recent.get(rows.ilog2(), like, || {
                let fixed_cut = cost.fixed_ps(kernel, pack, rows);
                let key = cost.key_ps(kernel, tile, pack).max(1);
                let shortest = u32::try_from(fixed_cut / key).unwrap_or(u32::MAX / 2);
                Load {
                    launch: 0,
                    units: cost.units_per_item(pack),
                    fixed: cost.fixed_ps(kernel, pack, if leaves_partial { rows } else { 0 }),
                    fixed_cut,
                    key,
                    keys: 0,
                    shortest: shortest.max(1).next_multiple_of(granule(draft)),
                }
            });
            let load = Load {
                keys: draft.kv_len(),
                ..load
            };
            classes[Class::of(kernel) as usize].add(&load, cost.resident_ctas(kernel));
            self.loads.push(load);
        }
        classes
    }

    /// Gives every draft the key tile for pieces of about `keys` keys, and every tile its launch: those with
    /// the longest units first.
    fn choose_tiles(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        mut keys: impl FnMut(&Draft, &Load) -> u32,
    ) {
        let Self {
            launches,
            loads,
            rank,
            ..
        } = self;
        launches.clear();
        let mut recent = Recent::new();
        for (draft, load) in drafts.iter_mut().zip(loads.iter_mut()) {
            let expected = keys(draft, load).min(load.keys);
            let Draft {
                kernel,
                tile: Tile { m, n },
                pack,
                ..
            } = *draft;
            let like = (kernel, m, n, pack, expected);
            let (n, at) = recent.get(draft.rows.ilog2(), like, || {
                let n = match (kernel, input.mode) {
                    (Kernel::Prefill, _) => n,
                    // Whatever the company: neither its rows nor how far it shares the keys may matter.
                    (_, SplitMode::Fixed { tokens }) => input.tiles.common_key_tile(tokens),
                    _ => input.tiles.key_tile(m, expected),
                };
                (n, launch_for(launches, kernel, Tile { m, n }, pack))
            });
            draft.tile.n = n;
            load.launch = at as u32;
            let launch = &mut launches[at];
            launch.longest = launch.longest.max(load.whole().min(load.cut(expected)));
            launch.longest_whole = launch.longest_whole.max(load.whole());
            launch.work += u64::from(load.units) * load.whole();
        }
        let key = |launch: &Launch| {
            let Launch {
                longest,
                kernel,
                tile,
                pack,
                ..
            } = *launch;
            (Reverse(longest), kernel, tile, pack)
        };
        rank.clear();
        rank.extend(launches.iter().map(|launch| {
            launches
                .iter()
                .filter(|other| key(other) < key(launch))
                .count() as u32
        }));
        launches.sort_unstable_by_key(key);
        for load in loads.iter_mut() {
            load.launch = rank[load.launch as usize];
        }
    }

    /// Cuts every draft at multiples of a chunk, counted from the first key of its table.
    fn chunks(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        chunk: impl Fn(&Draft, &Load) -> u32,
    ) {
        self.choose_tiles(input, drafts, &chunk);
        for (index, (draft, load)) in drafts.iter().zip(&self.loads).enumerate() {
            let chunk = chunk(draft, load);
            let whole = draft.kv_begin / chunk == (draft.kv_end - 1) / chunk;
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let end = (begin / chunk + 1).saturating_mul(chunk).min(draft.kv_end);
                let cost = if whole {
                    load.whole()
                } else {
                    load.cut(end - begin)
                };
                self.pieces
                    .push(piece(index as u32, begin..end, load.launch, 0, cost));
                begin = end;
            }
        }
    }

    /// Balances the drafts over the resident CTAs.
    fn balance_all(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        classes: [ClassLoad; 2],
    ) {
        let bounds = classes.map(|class| class.bound());
        let mut recent = Recent::new();
        self.choose_tiles(input, drafts, |draft, load| {
            let class = Class::of(draft.kernel);
            let like = (class, load.fixed_cut, load.key);
            let fitting = recent.get(draft.rows.ilog2(), like, || {
                bounds[class as usize].saturating_sub(load.fixed_cut) / load.key
            });
            (fitting.min(u64::from(load.keys)) as u32).max(load.shortest)
        });
        self.chosen.clear();
        let mut balanced = [false; 2];
        for class in [Class::Decode, Class::Prefill] {
            balanced[class as usize] = self.balance(input, drafts, class, &classes);
        }
        for (index, (draft, load)) in drafts.iter().zip(&self.loads).enumerate() {
            if !balanced[Class::of(draft.kernel) as usize] {
                let keys = draft.kv_begin..draft.kv_end;
                self.pieces
                    .push(piece(index as u32, keys, load.launch, 0, load.whole()));
            }
        }
        if balanced != [false; 2] {
            self.chosen.append(&mut self.pieces);
            self.sort_by_draft(drafts.len());
        }
    }

    /// Adds the pieces of a class to the chosen ones, if cutting any of its drafts shortens the step.
    fn balance(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &[Draft],
        class: Class,
        classes: &[ClassLoad; 2],
    ) -> bool {
        let all = &classes[class as usize];
        let ClassLoad {
            ctas,
            units,
            work,
            longest,
            ..
        } = *all;
        let bound = all.bound();
        let good = (bound as f64 * GOOD_ENOUGH) as u64;
        // In any order, a unit starts no later than when all others are spread evenly; and no later than
        // when all launches up to its own are.
        if units == 0
            || work / u64::from(ctas) + longest <= good
            || self.launch_bound(class, ctas) <= good
        {
            return false;
        }
        self.sorted.clear();
        for (index, (draft, load)) in drafts.iter().zip(&self.loads).enumerate() {
            if Class::of(draft.kernel) == class {
                let key = u64::from(load.launch) << 56 | (COST_MASK - load.whole().min(COST_MASK));
                self.sorted.push((key, index as u32));
            }
        }
        self.sorted.sort_unstable();
        if self.list_bound(ctas) <= good {
            return false;
        }
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], &self.loads[index as usize]);
            self.placed.push(piece(
                index,
                draft.kv_begin..draft.kv_end,
                load.launch,
                0,
                load.whole(),
            ));
        }
        let whole = self.simulate(ctas, units);
        self.outcome.makespan_ps[class as usize] = whole;
        // Where no row is merged yet, cutting costs the step a merge.
        let merged = drafts.iter().any(|draft| draft.leaves_partial);
        let merge = if merged { 0 } else { input.cost.merge_ps() };
        if whole <= good + merge {
            return false;
        }
        // Prefills that are cut read more; beside decodes that is a price. Two full waves at most, and none
        // while the decodes fill the device for longer anyway.
        let mut most_units = u32::MAX;
        if class == Class::Prefill && input.hybrid {
            let decode = &classes[Class::Decode as usize];
            if decode.fills() && self.outcome.makespan_ps[Class::Decode as usize] >= whole {
                return false;
            }
            most_units = 2 * ctas;
        }
        let mut least = whole - merge;
        let mut found = false;
        for attempt in [Self::wrap, Self::fill] {
            let mut until = bound;
            while until < least && least > good {
                if attempt(self, drafts, ctas, units, until) && self.placed_units() <= most_units {
                    let makespan = self.simulate(ctas, units);
                    if makespan < least {
                        (least, found) = (makespan, true);
                        std::mem::swap(&mut self.placed, &mut self.best);
                    }
                    break;
                }
                until += until / STEP + 1;
            }
        }
        if found {
            self.outcome.makespan_ps[class as usize] = least;
            self.chosen.append(&mut self.best);
        }
        found
    }

    fn placed_units(&self) -> u32 {
        self.placed
            .iter()
            .map(|piece| self.loads[piece.draft as usize].units)
            .sum()
    }

    /// List scheduling of whole drafts is done by then, whatever their order within launches.
    fn launch_bound(&self, class: Class, ctas: u32) -> u64 {
        let ctas = u64::from(ctas);
        let of_class = |launch: &&Launch| Class::of(launch.kernel) == class;
        let (mut before, mut done) = (0, 0);
        for launch in self.launches.iter().filter(of_class) {
            before += launch.work;
            done = done.max(before + launch.longest_whole * (ctas - 1));
        }
        done / ctas
    }

    /// List scheduling of whole drafts is done by then: a unit starts no later than when all before it are
    /// spread evenly.
    fn list_bound(&self, ctas: u32) -> u64 {
        let ctas = u64::from(ctas);
        let (mut before, mut done) = (0, 0);
        for &(_, index) in &self.sorted {
            let load = &self.loads[index as usize];
            before += u64::from(load.units) * load.whole();
            done = done.max(before + load.whole() * (ctas - 1));
        }
        done / ctas
    }

    /// When the pieces in `self.placed` are done, claimed in launch order.
    fn simulate(&mut self, ctas: u32, units: u32) -> u64 {
        let Self {
            placed,
            loads,
            columns,
            launch_order,
            ..
        } = self;
        launch_order.clear();
        launch_order.extend(
            placed
                .iter()
                .enumerate()
                .map(|(at, piece)| (piece.order, at as u32)),
        );
        launch_order.sort_unstable();
        columns.reset(ctas, units);
        for &(_, at) in launch_order.iter() {
            let piece = &placed[at as usize];
            let load = &loads[piece.draft as usize];
            let keys = piece.kv_end - piece.kv_begin;
            let cost = if keys == load.keys {
                load.whole()
            } else {
                load.cut(keys)
            };
            columns.place(load.units, cost);
        }
        columns.makespan()
    }

    /// Tries to place everything so that it is done by `until`: fills the CTAs of one column after the other
    /// to the end and cuts what crosses over. The fewest pieces, where pieces are longer than columns.
    fn wrap(&mut self, drafts: &[Draft], ctas: u32, units: u32, until: u64) -> bool {
        self.placed.clear();
        if self
            .sorted
            .iter()
            .any(|&(_, index)| self.loads[index as usize].units != units)
        {
            return false;
        }
        // What is left beside whole columns takes the units of an item in several rounds.
        let (full, rest) = (ctas / units, ctas % units);
        let rounds = if rest > 0 {
            u64::from(units.div_ceil(rest))
        } else {
            u64::MAX
        };
        let room_in = |column: u32| if column < full { until } else { until / rounds };
        let columns = full + u32::from(rest > 0);
        let (mut column, mut used) = (0, 0);
        self.column.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], &self.loads[index as usize]);
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                if column == columns {
                    return false;
                }
                let room = room_in(column) - used;
                let rest = draft.kv_end - begin;
                let whole = begin == draft.kv_begin && load.whole() <= room;
                let fits = room.saturating_sub(load.fixed_cut) / load.key;
                let end = if whole || fits >= u64::from(rest) {
                    draft.kv_end
                } else {
                    // Leave enough for another piece.
                    let most =
                        (begin + fits as u32).min(draft.kv_end.saturating_sub(load.shortest));
                    cut_before(draft, most.max(draft.kv_begin))
                };
                if end < begin + load.shortest.min(rest) {
                    (column, used) = (column + 1, 0);
                    order_column(&mut self.column, &mut self.placed);
                    continue;
                }
                let cost = if whole {
                    load.whole()
                } else {
                    load.cut(end - begin)
                };
                self.column.push((Reverse(cost), self.placed.len() as u32));
                self.placed
                    .push(piece(index, begin..end, load.launch, 0, cost));
                used += cost;
                begin = end;
            }
        }
        order_column(&mut self.column, &mut self.placed);
        true
    }

    /// Tries to place everything so that it is done by `until`: a draft goes to the columns that are free
    /// first, and is cut where it would end too late there.
    fn fill(&mut self, drafts: &[Draft], ctas: u32, units: u32, until: u64) -> bool {
        self.columns.reset(ctas, units);
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], &self.loads[index as usize]);
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let room = self.columns.room(load.units, until);
                let rest = draft.kv_end - begin;
                let whole = begin == draft.kv_begin && load.whole() <= room;
                let fits = room.saturating_sub(load.fixed_cut) / load.key;
                let end = if whole || fits >= u64::from(rest) {
                    draft.kv_end
                } else {
                    cut_before(draft, begin + fits as u32)
                };
                if end < begin + load.shortest.min(rest) {
                    return false;
                }
                let cost = if whole {
                    load.whole()
                } else {
                    load.cut(end - begin)
                };
                let start = self.columns.place(load.units, cost);
                self.placed
                    .push(piece(index, begin..end, load.launch, start, cost));
                begin = end;
            }
        }
        true
    }

    /// The chosen pieces, by draft; those of one draft stand in the order of their keys already.
    fn sort_by_draft(&mut self, drafts: usize) {
        let Self {
            chosen,
            pieces,
            next,
            ..
        } = self;
        count(next, drafts, chosen.iter().map(|piece| piece.draft));
        pieces.resize(chosen.len(), Piece::default());
        for piece in chosen.iter() {
            let at = &mut next[piece.draft as usize];
            pieces[*at as usize] = *piece;
            *at += 1;
        }
    }

    /// The pieces in launch order.
    fn order_pieces(&mut self) {
        let Self {
            pieces,
            launches,
            order,
            next,
            ..
        } = self;
        count(
            next,
            launches.len(),
            pieces.iter().map(|piece| piece.launch()),
        );
        for (launch, bounds) in launches.iter_mut().zip(next.windows(2)) {
            launch.pieces = bounds[1] - bounds[0];
        }
        order.clear();
        order.resize(pieces.len(), 0);
        for (index, piece) in pieces.iter().enumerate() {
            let at = &mut next[piece.launch() as usize];
            order[*at as usize] = piece.order << PIECE_BITS | index as u64;
            *at += 1;
        }
        let mut rest = order.as_mut_slice();
        for launch in launches.iter() {
            let (pieces, others) = rest.split_at_mut(launch.pieces as usize);
            pieces.sort_unstable(); // a no-op where all are alike
            rest = others;
        }
    }
}

/// The launch of a kernel with a tile, a new one if there is none.
fn launch_for(launches: &mut Vec<Launch>, kernel: Kernel, tile: Tile, pack: u32) -> usize {
    let known = launches
        .iter()
        .position(|launch| (launch.kernel, launch.tile, launch.pack) == (kernel, tile, pack));
    known.unwrap_or_else(|| {
        launches.push(Launch {
            kernel,
            tile,
            pack,
            pieces: 0,
            longest: 0,
            longest_whole: 0,
            work: 0,
        });
        launches.len() - 1
    })
}

/// Where each of `buckets` begins when there is an element for every key.
fn count(begins: &mut Vec<u32>, buckets: usize, keys: impl Iterator<Item = u32>) {
    begins.clear();
    begins.resize(buckets + 1, 0);
    for key in keys {
        begins[key as usize + 1] += 1;
    }
    for bucket in 0..buckets {
        begins[bucket + 1] += begins[bucket];
    }
}

/// The bits of an entry of [`Splitter::order`] that hold the piece, and the most pieces of a plan.
const PIECE_BITS: u32 = 22;
pub(super) const MAX_PIECES: usize = 1 << PIECE_BITS;

/// The piece of an entry of [`Splitter::order`].
pub(super) const fn piece_of(order: u64) -> usize {
    order as usize & (MAX_PIECES - 1)
}

/// The bits of a sort key that hold the cost.
const COST_MASK: u64 = (1 << 56) - 1;

/// Times in a launch key are 64 ns apart, and at most this.
const TIME_MASK: u64 = (1 << 18) - 1;

/// A piece with its place in launch order: by launch, by the time when it starts, and the longest first.
fn piece(draft: u32, keys: Range<u32>, launch: u32, start: u64, cost: u64) -> Piece {
    let [start, cost] = [start, cost].map(|ps| (ps / 64_000).min(TIME_MASK));
    Piece {
        draft,
        kv_begin: keys.start,
        kv_end: keys.end,
        order: u64::from(launch) << 36 | start << 18 | (TIME_MASK - cost),
    }
}

/// Lets the longest pieces of a column start first: what starts late is then short, and may as well go to
/// another CTA. Empties the list.
fn order_column(column: &mut Vec<(Reverse<u64>, u32)>, placed: &mut [Piece]) {
    column.sort_unstable();
    let mut start = 0;
    for (Reverse(cost), at) in column.drain(..) {
        let Piece {
            draft,
            kv_begin,
            kv_end,
            ..
        } = placed[at as usize];
        let launch = placed[at as usize].launch();
        placed[at as usize] = piece(draft, kv_begin..kv_end, launch, start, cost);
        start += cost;
    }
}

/// Cuts fall on multiples of this: whole pages, and no less than a matrix instruction's keys.
fn granule(draft: &Draft) -> u32 {
    16u32.next_multiple_of(draft.page_size)
}

/// The last place to cut a draft at or before a key: between tiles, where that shortens the piece by a small
/// part only, else between parts of a tile.
fn cut_before(draft: &Draft, key: u32) -> u32 {
    let granule = granule(draft);
    let mut step = draft.tile.n.next_multiple_of(granule);
    while step > granule && u64::from(step) * STEP > u64::from(key - draft.kv_begin) {
        step = (step / 2).next_multiple_of(granule);
    }
    key / step * step
}

//! Cutting items along their keys, and the order in which the pieces are launched.

use std::{cmp::Reverse, ops::Range};

use serde::{Deserialize, Serialize};

use super::{
    Kernel, Tile,
    balance::{Columns, gcd},
    cost::CostModel,
    draft::{Draft, Piece},
    kinds::{Kind, Kinds, Load},
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
    /// The place of each piece among all in launch order.
    pub place: Vec<u32>,
    kinds: Kinds,
    tiles: Vec<KindTile>,
    /// Order within the launch and index of each piece, launch after launch.
    order: Vec<u64>,
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
    /// Cost and index of the pieces of one column.
    column: Vec<(Reverse<u64>, u32)>,
    /// Where the pieces of each draft, or of each launch, go.
    next: Vec<u32>,
}

/// The tile of a kind's drafts.
#[derive(Clone, Copy, Debug, Default)]
struct KindTile {
    /// Keys of a piece, if there are so many.
    wanted: u32,
    /// The last answer: for pieces of so many keys, this key tile and this launch.
    expected: u32,
    n: u32,
    launch: u32,
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

/// When each class is done, decode first, and how many units it has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub makespan_ps: [u64; 2],
    pub units: [u32; 2],
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

    fn add(&mut self, kind: &Kind, ctas: u32) {
        let Load {
            units, fixed, key, ..
        } = kind.load;
        self.least_fixed = if self.units == 0 {
            fixed
        } else {
            self.least_fixed.min(fixed)
        };
        self.ctas = ctas;
        self.units = gcd(self.units, units);
        self.count += kind.count * u64::from(units);
        self.work += kind.work();
        self.keys += u64::from(units) * key * kind.keys;
        self.longest = self.longest.max(kind.longest());
    }

    /// Whether there is a unit for every CTA.
    fn fills(&self) -> bool {
        self.count >= u64::from(self.ctas)
    }

    /// No plan is done earlier: not with every CTA busy all the time, nor with the longest unit that cannot
    /// be cut. Every CTA that takes part pays the fixed cost of a unit at least once.
    fn bound(&self) -> u64 {
        self.spread().max(self.longest_unsplittable)
    }

    /// The same, were every unit to be cut as one likes.
    fn spread(&self) -> u64 {
        let ctas = u64::from(self.ctas);
        let spread = (self.least_fixed + self.keys / ctas).min(self.work);
        spread.max(self.work / ctas)
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
    /// On the same SMs, where nobody knows how fast.
    pub shared_sms: bool,
}

/// Attempts to split aim at a makespan that grows by one part in so many.
const STEP: u64 = 64;

/// A row tile gets a launch of its own if its units take this many times as long as starting one: SMs that
/// change from one kernel to the next stand still for a while.
pub(super) const WORTH_A_LAUNCH: u64 = 3;

/// What shares its SM takes at most one part in so many of what is left for a CTA at a time.
const TAPER: u64 = 2;

/// And at least so many times what a piece costs whatever its keys.
const LEAST_PIECE: u32 = 6;

/// Splits are not looked for where they could shorten a step by less than this part.
const GOOD_ENOUGH: f64 = 1.03;

impl Splitter {
    /// Cuts the drafts into pieces, chooses their key tiles, and orders them for launch.
    pub fn split(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) {
        let SplitInput { mode, cost, .. } = *input;
        let join = !matches!(mode, SplitMode::Fixed { .. });
        self.kinds.find(cost, drafts, join);
        let classes = self.weigh(cost);
        self.outcome.makespan_ps = classes.map(|class| class.bound().max(class.longest));
        self.pieces.clear();
        match mode {
            SplitMode::Off => self.chunks(input, drafts, |_| u32::MAX),
            SplitMode::Fixed { tokens } => self.chunks(input, drafts, |_| tokens),
            SplitMode::FlashInfer => {
                let keys = |kind: &Kind| u64::from(kind.load.units) * kind.keys;
                let total: u64 = self.kinds.kinds.iter().map(keys).sum();
                self.chunks(input, drafts, |kind| {
                    let bound = total.div_ceil(u64::from(cost.resident_ctas(kind.draft.kernel)));
                    let bound = u32::try_from(bound).unwrap_or(u32::MAX / 2);
                    bound.max(1).next_multiple_of(granule(&kind.draft))
                });
            }
            SplitMode::Makespan => self.balance_all(input, drafts, classes),
        }
        self.outcome.units = [0; 2];
        for piece in &self.pieces {
            let draft = piece.draft as usize;
            self.outcome.units[Class::of(drafts[draft].kernel) as usize] +=
                self.kinds.load(piece.draft).units;
        }
        self.order_pieces();
    }

    /// What all drafts of each class ask.
    fn weigh(&self, cost: &CostModel) -> [ClassLoad; 2] {
        let mut classes = [ClassLoad::NONE; 2];
        for kind in &self.kinds.kinds {
            let kernel = kind.draft.kernel;
            classes[Class::of(kernel) as usize].add(kind, cost.resident_ctas(kernel));
        }
        // Rarely is one too long for the others.
        let spread = classes.map(|class| class.spread());
        let kinds = &self.kinds.kinds;
        let may_be_long = |kind: &Kind| {
            kind.longest().min(kind.load.least_divisible())
                > spread[Class::of(kind.draft.kernel) as usize]
        };
        if kinds.iter().any(may_be_long) {
            for (load, of) in self.kinds.loads().zip(&self.kinds.of) {
                let kernel = kinds[of.kind as usize].draft.kernel;
                let longest = &mut classes[Class::of(kernel) as usize].longest_unsplittable;
                if load.whole().min(load.least_divisible()) > *longest {
                    *longest = load.unsplittable().max(*longest);
                }
            }
        }
        classes
    }

    /// Gives every draft the key tile for pieces of about `keys` keys, and every tile its launch: those with
    /// the longest units first.
    fn choose_tiles(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        keys: impl Fn(&Kind) -> u32,
    ) {
        let Self {
            kinds,
            launches,
            rank,
            ..
        } = self;
        let Kinds { kinds, of, .. } = kinds;
        launches.clear();
        self.tiles.clear();
        self.tiles.extend(kinds.iter().map(|kind| KindTile {
            wanted: keys(kind),
            ..KindTile::default()
        }));
        for (draft, of) in drafts.iter_mut().zip(of.iter_mut()) {
            let chosen = &mut self.tiles[of.kind as usize];
            let expected = chosen.wanted.min(of.keys);
            if chosen.expected != expected {
                let Draft {
                    kernel,
                    tile: Tile { m, n },
                    pack,
                    ..
                } = *draft;
                let n = match (kernel, input.mode) {
                    (Kernel::Prefill, _) => n,
                    // Whatever the company: neither its rows nor how far it shares the keys may matter.
                    (_, SplitMode::Fixed { tokens }) => input.tiles.common_key_tile(tokens),
                    _ => input.tiles.key_tile(m, expected),
                };
                chosen.expected = expected;
                chosen.n = n;
                chosen.launch = launch_for(launches, kernel, Tile { m, n }, pack) as u32;
            }
            draft.tile.n = chosen.n;
            of.launch = chosen.launch;
            let load = &kinds[of.kind as usize].load;
            let whole = load.fixed + load.key * u64::from(of.keys);
            let launch = &mut launches[chosen.launch as usize];
            launch.longest = launch.longest.max(whole.min(load.cut(expected)));
            launch.longest_whole = launch.longest_whole.max(whole);
            launch.work += u64::from(load.units) * whole;
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
        for of in of.iter_mut() {
            of.launch = rank[of.launch as usize];
        }
    }

    /// Cuts every draft at multiples of a chunk, counted from the first key of its table.
    fn chunks(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        chunk: impl Fn(&Kind) -> u32,
    ) {
        self.choose_tiles(input, drafts, chunk);
        for (index, (draft, load)) in drafts.iter().zip(self.kinds.loads()).enumerate() {
            let chunk = self.tiles[self.kinds.of[index].kind as usize].wanted;
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
        self.choose_tiles(input, drafts, |kind| {
            let bound = bounds[Class::of(kind.draft.kernel) as usize];
            let fitting = bound.saturating_sub(kind.load.fixed_cut) / kind.load.key;
            u32::try_from(fitting)
                .unwrap_or(u32::MAX)
                .max(kind.load.shortest)
        });
        self.chosen.clear();
        let mut balanced = [false; 2];
        for class in [Class::Decode, Class::Prefill] {
            balanced[class as usize] = self.balance(input, drafts, class, &classes);
        }
        for (index, (draft, load)) in drafts.iter().zip(self.kinds.loads()).enumerate() {
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
        if class == Class::Decode && input.shared_sms && units > 0 {
            self.sort(drafts, class);
            self.taper(drafts, ctas);
            self.outcome.makespan_ps[class as usize] = self.simulate(ctas, units);
            self.chosen.append(&mut self.placed);
            return true;
        }
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
        self.sort(drafts, class);
        if self.list_bound(ctas) <= good {
            return false;
        }
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
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
        let joint = drafts.iter().any(Draft::is_joint);
        let merge = match (merged, joint) {
            (true, _) => 0,
            (false, true) => input.cost.apart_ps(),
            (false, false) => input.cost.merge_ps(),
        };
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

    /// The drafts of a class: launch after launch, the longest first.
    fn sort(&mut self, drafts: &[Draft], class: Class) {
        self.sorted.clear();
        for (index, (draft, load)) in drafts.iter().zip(self.kinds.loads()).enumerate() {
            if Class::of(draft.kernel) == class {
                let key = u64::from(load.launch) << 56 | (COST_MASK - load.whole().min(COST_MASK));
                self.sorted.push((key, index as u32));
            }
        }
        self.sorted.sort_unstable();
    }

    /// Cuts into ever shorter pieces: a CTA that shares its SM may be faster or slower than others by what the
    /// other kernel does there, and whoever is free claims the next piece.
    fn taper(&mut self, drafts: &[Draft], ctas: u32) {
        self.placed.clear();
        let mut left: u64 = 0;
        for &(_, index) in &self.sorted {
            let load = self.kinds.load(index);
            left += u64::from(load.units) * load.whole();
        }
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
            let least = load.shortest.saturating_mul(LEAST_PIECE);
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let time = left / (TAPER * u64::from(ctas));
                let keys = (time.saturating_sub(load.fixed_cut) / load.key).max(least.into());
                let mut end = draft.kv_end;
                if keys.saturating_add(least.into()) < u64::from(end - begin) {
                    end = cut_before(draft, begin + keys as u32).max(begin + granule(draft));
                }
                let cost = match end - begin == load.keys {
                    true => load.whole(),
                    false => load.cut(end - begin),
                };
                self.placed
                    .push(piece(index, begin..end, load.launch, 0, cost));
                left = left.saturating_sub(u64::from(load.units) * cost);
                begin = end;
            }
        }
    }

    fn placed_units(&self) -> u32 {
        self.placed
            .iter()
            .map(|piece| self.kinds.load(piece.draft).units)
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
            let load = self.kinds.load(index);
            before += u64::from(load.units) * load.whole();
            done = done.max(before + load.whole() * (ctas - 1));
        }
        done / ctas
    }

    /// When the pieces in `self.placed` are done, claimed in launch order.
    fn simulate(&mut self, ctas: u32, units: u32) -> u64 {
        let Self {
            placed,
            kinds,
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
            let load = kinds.load(piece.draft);
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
            .any(|&(_, index)| self.kinds.load(index).units != units)
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
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
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
            let (draft, load) = (&drafts[index as usize], self.kinds.load(index));
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
            place,
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
        place.clear();
        place.resize(pieces.len(), 0);
        for (at, &entry) in order.iter().enumerate() {
            place[entry as usize & (MAX_PIECES - 1)] = at as u32;
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

/// The bits of an entry of `Splitter::order` that hold the piece, and the most pieces of a plan.
const PIECE_BITS: u32 = 22;
pub(super) const MAX_PIECES: usize = 1 << PIECE_BITS;

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
pub(super) fn granule(draft: &Draft) -> u32 {
    granule_of(draft.page_size)
}

/// As [`granule`], for pages of so many tokens.
pub(super) fn granule_of(page_size: u32) -> u32 {
    16u32.next_multiple_of(page_size)
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

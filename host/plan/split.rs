//! Cutting items along their keys, and the order in which the pieces are launched.

use std::{cmp::Reverse, ops::Range};

use serde::{Deserialize, Serialize};

use super::{
    Kernel, Tile,
    balance::Columns,
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
    /// Kernel and tile of each launch, in launch order.
    pub launches: Vec<(Kernel, Tile)>,
    loads: Vec<Load>,
    /// Longest unit of each launch, and its place in launch order.
    longest: Vec<u64>,
    rank: Vec<u32>,
    columns: Columns,
    /// Launch and cost (the longest first), and the draft.
    sorted: Vec<(u64, u32)>,
    /// Pieces of the attempt at hand, of the best one, and those that were chosen.
    placed: Vec<Piece>,
    best: Vec<Piece>,
    chosen: Vec<Piece>,
    launch_order: Vec<(u64, u32)>,
    /// Cost and index of the pieces of one column.
    column: Vec<(Reverse<u64>, u32)>,
    /// Where the pieces of each draft go.
    next_piece: Vec<u32>,
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
            Kernel::Prefill | Kernel::PrefillPacked => Self::Prefill,
        }
    }
}

/// What the splitter reads beside the drafts.
#[derive(Clone, Copy)]
pub(super) struct SplitInput<'a> {
    pub mode: SplitMode,
    pub cost: &'a CostModel,
    pub tiles: &'a TileTable,
}

/// Attempts to split aim at a makespan that grows by one part in so many.
const STEP: u64 = 64;

/// Splits are not looked for where they could shorten a step by less than this part.
const GOOD_ENOUGH: f64 = 1.03;

impl Splitter {
    /// Cuts the drafts into pieces, chooses their key tiles, and orders them for launch.
    pub fn split(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) {
        let SplitInput { mode, cost, .. } = *input;
        self.weigh(cost, drafts);
        self.chosen.clear();
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
            SplitMode::Makespan => self.balance_all(input, drafts),
        }
        self.sort_by_draft(drafts.len());
    }

    fn weigh(&mut self, cost: &CostModel, drafts: &[Draft]) {
        self.loads.clear();
        self.loads.extend(drafts.iter().map(|draft| {
            let Draft {
                kernel, tile, rows, ..
            } = *draft;
            let fixed_cut = cost.fixed_ps(kernel, rows);
            let key = cost.key_ps(kernel, tile).max(1);
            let shortest = u32::try_from(fixed_cut / key).unwrap_or(u32::MAX / 2);
            Load {
                launch: 0,
                units: cost.units_per_item(kernel),
                fixed: cost.fixed_ps(kernel, if draft.leaves_partial { rows } else { 0 }),
                fixed_cut,
                key,
                keys: draft.kv_len(),
                shortest: shortest.max(1).next_multiple_of(granule(draft)),
            }
        }));
    }

    /// Gives every draft the key tile for pieces of about `keys` keys, and every tile its launch: those with
    /// the longest units first.
    fn choose_tiles(
        &mut self,
        tiles: &TileTable,
        drafts: &mut [Draft],
        keys: impl Fn(&Draft, &Load) -> u32,
    ) {
        let Self {
            launches,
            loads,
            longest,
            rank,
            ..
        } = self;
        launches.clear();
        longest.clear();
        for (draft, load) in drafts.iter_mut().zip(loads.iter_mut()) {
            let expected = keys(draft, load).min(load.keys);
            draft.tile.n = tiles.select(draft.kernel, draft.rows, expected).n;
            let launch = (draft.kernel, draft.tile);
            let at = launches
                .iter()
                .position(|other| *other == launch)
                .unwrap_or_else(|| {
                    launches.push(launch);
                    longest.push(0);
                    launches.len() - 1
                });
            load.launch = at as u32;
            longest[at] = longest[at].max(load.whole().min(load.cut(expected)));
        }
        rank.clear();
        let key = |at: usize| (Reverse(longest[at]), launches[at]);
        let before = |at: usize| {
            (0..launches.len())
                .filter(|&other| key(other) < key(at))
                .count()
        };
        rank.extend((0..launches.len()).map(|at| before(at) as u32));
        for load in loads.iter_mut() {
            load.launch = rank[load.launch as usize];
        }
        // The ranks are distinct, so each swap puts one launch where it belongs.
        for at in 0..launches.len() {
            while rank[at] as usize != at {
                let to = rank[at] as usize;
                launches.swap(at, to);
                rank.swap(at, to);
            }
        }
    }

    /// Cuts every draft at multiples of a chunk, counted from the first key of its table.
    fn chunks(
        &mut self,
        input: &SplitInput<'_>,
        drafts: &mut [Draft],
        chunk: impl Fn(&Draft, &Load) -> u32,
    ) {
        self.choose_tiles(input.tiles, drafts, &chunk);
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
                self.chosen
                    .push(piece(index as u32, begin..end, load.launch, 0, cost));
                begin = end;
            }
        }
    }

    /// Balances the drafts over the resident CTAs.
    fn balance_all(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) {
        let classes = [Class::Decode, Class::Prefill];
        let bounds = classes.map(|class| self.lower_bound(input.cost, drafts, class));
        self.choose_tiles(input.tiles, drafts, |draft, load| {
            let until = bounds[Class::of(draft.kernel) as usize];
            let keys = until.saturating_sub(load.fixed_cut) / load.key;
            (keys.min(u64::from(load.keys)) as u32).max(load.shortest)
        });
        for class in classes {
            self.balance(input.cost, drafts, class, bounds[class as usize]);
            self.chosen.append(&mut self.placed);
        }
    }

    /// No plan is done earlier: not with every CTA busy all the time, nor with the longest unit that cannot
    /// be cut. Every CTA that takes part pays the fixed cost of a unit at least once.
    fn lower_bound(&self, cost: &CostModel, drafts: &[Draft], class: Class) -> u64 {
        let (mut work, mut keys, mut least_fixed, mut longest, mut ctas) = (0, 0, u64::MAX, 0, 1);
        for (draft, load) in drafts.iter().zip(&self.loads) {
            if Class::of(draft.kernel) == class {
                let units = u64::from(load.units);
                work += units * load.whole();
                keys += units * load.key * u64::from(load.keys);
                least_fixed = least_fixed.min(load.fixed);
                longest = longest.max(load.unsplittable());
                ctas = u64::from(cost.resident_ctas(draft.kernel));
            }
        }
        let spread = least_fixed.saturating_add(keys / ctas).min(work);
        (work / ctas).max(longest).max(spread)
    }

    /// Places the drafts of a class into `self.placed`, cut so that all are done as early as possible.
    fn balance(&mut self, cost: &CostModel, drafts: &[Draft], class: Class, bound: u64) {
        self.placed.clear();
        self.sorted.clear();
        let (mut ctas, mut units) = (1, 0);
        for (index, (draft, load)) in drafts.iter().zip(&self.loads).enumerate() {
            if Class::of(draft.kernel) == class {
                let key = u64::from(load.launch) << 56 | (COST_MASK - load.whole().min(COST_MASK));
                self.sorted.push((key, index as u32));
                ctas = cost.resident_ctas(draft.kernel);
                units = gcd(units, load.units);
            }
        }
        self.sorted.sort_unstable();
        let good = (bound as f64 * GOOD_ENOUGH) as u64;
        if self.sorted.is_empty() || self.list_bound(ctas) <= good {
            return self.place_whole(drafts);
        }
        self.place_whole(drafts);
        let whole = self.simulate(ctas, units);
        // Where no row is merged yet, cutting costs the step a merge.
        let merged = drafts.iter().any(|draft| draft.leaves_partial);
        let merge = if merged { 0 } else { cost.merge_ps() };
        if whole <= good + merge {
            return;
        }
        std::mem::swap(&mut self.placed, &mut self.best);
        let mut least = whole - merge;
        for attempt in [Self::wrap, Self::fill] {
            let mut until = bound;
            while until < least {
                if attempt(self, drafts, ctas, units, until) {
                    let makespan = self.simulate(ctas, units);
                    if makespan < least {
                        least = makespan;
                        std::mem::swap(&mut self.placed, &mut self.best);
                    }
                    break;
                }
                until += until / STEP + 1;
            }
        }
        std::mem::swap(&mut self.placed, &mut self.best);
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

    /// List scheduling of whole drafts is done by then: a unit starts no later than when all before it are
    /// spread evenly.
    fn list_bound(&self, ctas: u32) -> u64 {
        let (mut before, mut done) = (0, 0);
        for &(_, index) in &self.sorted {
            let load = &self.loads[index as usize];
            before += u64::from(load.units) * load.whole();
            done = done.max((before - load.whole()) / u64::from(ctas) + load.whole());
        }
        done
    }

    fn place_whole(&mut self, drafts: &[Draft]) {
        self.placed.clear();
        for &(_, index) in &self.sorted {
            let (draft, load) = (&drafts[index as usize], &self.loads[index as usize]);
            let keys = draft.kv_begin..draft.kv_end;
            self.placed
                .push(piece(index, keys, load.launch, 0, load.whole()));
        }
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
            next_piece,
            ..
        } = self;
        next_piece.clear();
        next_piece.resize(drafts + 1, 0);
        for piece in chosen.iter() {
            next_piece[piece.draft as usize + 1] += 1;
        }
        for draft in 0..drafts {
            next_piece[draft + 1] += next_piece[draft];
        }
        pieces.clear();
        pieces.resize(chosen.len(), Piece::default());
        for piece in chosen.iter() {
            let at = &mut next_piece[piece.draft as usize];
            pieces[*at as usize] = *piece;
            *at += 1;
        }
    }
}

/// The bits of a sort key that hold the cost.
const COST_MASK: u64 = (1 << 56) - 1;

/// The largest time, in nanoseconds, that a launch key tells apart.
const TIME_MASK: u64 = (1 << 28) - 1;

/// A piece with its place in launch order: by launch, by the time when it starts, and the longest first.
fn piece(draft: u32, keys: Range<u32>, launch: u32, start: u64, cost: u64) -> Piece {
    let [start, cost] = [start, cost].map(|ps| (ps / 1000).min(TIME_MASK));
    Piece {
        draft,
        kv_begin: keys.start,
        kv_end: keys.end,
        order: u64::from(launch) << 56 | start << 28 | (TIME_MASK - cost),
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

fn gcd(a: u32, b: u32) -> u32 {
    if b == 0 { a } else { gcd(b, a % b) }
}

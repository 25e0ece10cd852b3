//! Cutting items along their keys, and the order in which the pieces are launched.

use std::cmp::Reverse;

use serde::{Deserialize, Serialize};

use self::{
    class::{Class, ClassLoad},
    kinds::{Kind, Kinds, granule},
    launch::{KindTile, count, piece},
};
use super::{
    Kernel,
    balance::Columns,
    cost::CostModel,
    draft::{Draft, Piece},
    pod::Seats,
    tiles::TileTable,
};

mod class;
mod even;
mod fill;
mod kinds;
mod launch;
mod makespan;
mod taper;
mod wrap;

pub(super) use kinds::granule_of;
pub(super) use launch::{Launch, MAX_PIECES};

/// How items are cut along their keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum SplitMode {
    /// So that the last resident CTA finishes as early as it can.
    #[default]
    Makespan,
    /// FlashInfer's Algorithm 1: no chunk above the mean load of a CTA. For comparison.
    FlashInfer,
    /// At multiples of so many keys, whatever else is in the batch: results are bitwise independent of it. No
    /// tile is shared between requests then, whatever the packing: a shared prefix is read by each.
    Fixed {
        /// Keys per chunk, a multiple of the page size.
        tokens: u32,
    },
    /// Not at all.
    Off,
}

impl SplitMode {
    /// Whether results are not to depend on the company.
    pub(super) const fn is_fixed(self) -> bool {
        matches!(self, Self::Fixed { .. })
    }
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

/// When each class is done, decode first, and how many units it has.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcome {
    pub makespan_ps: [u64; 2],
    pub units: [u32; 2],
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
    /// With so many CTAs of each.
    pub seats: Option<Seats>,
}

impl Splitter {
    /// Cuts the drafts into pieces, chooses their key tiles, and orders them for launch.
    pub fn split(&mut self, input: &SplitInput<'_>, drafts: &mut [Draft]) {
        let SplitInput { mode, cost, .. } = *input;
        self.kinds
            .find(cost, drafts, !mode.is_fixed(), input.hybrid);
        let classes = self.weigh(input);
        self.outcome.makespan_ps = classes.map(|class| class.bound().max(class.longest));
        self.pieces.clear();
        match mode {
            SplitMode::Off => self.chunks(input, drafts, |_| u32::MAX),
            SplitMode::Fixed { tokens } => self.chunks(input, drafts, |_| tokens),
            SplitMode::FlashInfer => {
                let keys = |kind: &Kind| u64::from(kind.load.units) * kind.keys;
                let total: u64 = self.kinds.kinds.iter().map(keys).sum();
                let ctas = [Kernel::Decode, Kernel::Prefill].map(|of| self.kinds.ctas(cost, of).0);
                self.chunks(input, drafts, |kind| {
                    let ctas = ctas[Class::of(kind.draft.kernel) as usize];
                    let bound = total.div_ceil(u64::from(ctas));
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
    fn weigh(&self, input: &SplitInput<'_>) -> [ClassLoad; 2] {
        let mut classes = [ClassLoad::NONE; 2];
        for kind in &self.kinds.kinds {
            let kernel = kind.draft.kernel;
            let (mut ctas, company) = self.kinds.ctas(input.cost, kernel);
            if let Some(seats) = input.seats {
                ctas = match kernel {
                    Kernel::Decode => seats.decode,
                    Kernel::Prefill => seats.prefill,
                };
            }
            classes[Class::of(kernel) as usize].add(kind, ctas, company);
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
}

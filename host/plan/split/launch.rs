//! Launches: the pieces of one kernel with one tile, and their order.

use std::{cmp::Reverse, ops::Range};

use kernels_gpu::registry::KernelId;

use super::{
    SplitInput, Splitter,
    kinds::{Kind, Kinds},
};
use crate::plan::{
    Kernel, Tile,
    draft::{Draft, Piece},
};

/// The pieces of a kind's drafts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct KindTile {
    /// Keys of a piece, if there are so many.
    pub(super) wanted: u32,
    /// Keys of a tile, and the launch.
    pub(super) n: u32,
    pub(super) launch: u32,
}

/// The items of one kernel with one tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::plan) struct Launch {
    pub kernel: Kernel,
    pub id: Option<KernelId>,
    pub tile: Tile,
    pub pack: u32,
    pub pieces: u32,
    /// Its longest unit once it is cut, and before that, in picoseconds.
    pub(super) longest: u64,
    pub(super) longest_whole: u64,
    /// All its units before any is cut.
    pub(super) work: u64,
}

impl Splitter {
    /// Gives every draft the tile of its kernel, for pieces of about `keys` keys, and every kernel its launch: those
    /// with the longest units first.
    pub(super) fn choose_tiles(
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
        for kind in kinds.iter() {
            let Draft {
                kernel,
                tile: Tile { m, n },
                pack,
                ..
            } = kind.draft;
            let n = match kernel {
                Kernel::Prefill => n,
                Kernel::Decode => input.tiles.decode(m).map_or(n, |choice| choice.tile.n),
            };
            let tile = Tile { m, n };
            let id = input.tiles.kernel(kernel, tile);
            self.tiles.push(KindTile {
                wanted: keys(kind),
                n,
                launch: launch_for(launches, kernel, id, tile, pack) as u32,
            });
        }
        for (draft, of) in drafts.iter_mut().zip(of.iter_mut()) {
            let chosen = self.tiles[of.kind as usize];
            let expected = chosen.wanted.min(of.keys);
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

    /// The pieces in launch order.
    pub(super) fn order_pieces(&mut self) {
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
fn launch_for(
    launches: &mut Vec<Launch>,
    kernel: Kernel,
    id: Option<KernelId>,
    tile: Tile,
    pack: u32,
) -> usize {
    let known = launches
        .iter()
        .position(|launch| (launch.kernel, launch.tile, launch.pack) == (kernel, tile, pack));
    known.unwrap_or_else(|| {
        launches.push(Launch {
            kernel,
            id,
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
pub(super) fn count(begins: &mut Vec<u32>, buckets: usize, keys: impl Iterator<Item = u32>) {
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

pub(in crate::plan) const MAX_PIECES: usize = 1 << PIECE_BITS;

/// Times in a launch key are 64 ns apart, and at most this.
const TIME_MASK: u64 = (1 << 18) - 1;

/// A piece with its place in launch order: by launch, by the time when it starts, and the longest first.
pub(super) fn piece(draft: u32, keys: Range<u32>, launch: u32, start: u64, cost: u64) -> Piece {
    let [start, cost] = [start, cost].map(|ps| (ps / 64_000).min(TIME_MASK));
    Piece {
        draft,
        kv_begin: keys.start,
        kv_end: keys.end,
        order: u64::from(launch) << 36 | start << 18 | (TIME_MASK - cost),
    }
}

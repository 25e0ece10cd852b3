//! Launches: the pieces of one kernel with one tile.

use std::cmp::Reverse;

use kernels_gpu::registry::KernelId;

use super::{
    classes::{DraftClass, DraftClasses},
    input::SplitInput,
};
use crate::plan::{
    data::{Kernel, Tile},
    draft::Draft,
};

/// The tile of a class's drafts.
#[derive(Clone, Copy, Debug, Default)]
struct ClassTile {
    /// Keys of a piece, if the draft has that many.
    wanted: u32,
    /// Keys of a tile, and index of the launch.
    n: u32,
    launch: u32,
}

/// The items of one kernel with one tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    pub kernel: Kernel,
    pub id: Option<KernelId>,
    pub tile: Tile,
    pub pack: u32,
    /// As [`Part::heads`](crate::problem::Part::heads).
    pub heads: u32,
    pub pieces: u32,
    /// As [`TileGroup::kv_heads_together`](crate::plan::TileGroup::kv_heads_together).
    pub kv_heads_together: u32,
    /// Time of its longest unit with cuts and without, in picoseconds.
    pub longest: u64,
    pub longest_whole: u64,
    /// Time of all its units if none is cut, in picoseconds.
    pub work: u64,
}

/// The launches of a plan. Buffers are reused.
#[derive(Debug, Default)]
pub struct Launches {
    /// In launch order.
    pub list: Vec<Launch>,
    /// The tile of each class.
    tiles: Vec<ClassTile>,
    /// For each launch as it was found, its place in launch order.
    rank: Vec<u32>,
}

impl Launches {
    /// Keys per piece that were chosen for a draft's class.
    pub fn wanted(&self, classes: &DraftClasses, draft: usize) -> u32 {
        self.tiles[classes.of[draft].class as usize].wanted
    }

    /// Assigns a key tile and a launch to every draft; launches with the longest units come first. `keys` is the number
    /// of keys per piece of a class.
    pub fn choose(
        &mut self,
        input: &SplitInput<'_>,
        classes: &mut DraftClasses,
        drafts: &mut [Draft],
        keys: impl Fn(&DraftClass) -> u32,
    ) {
        let Self { list, tiles, rank } = self;
        let DraftClasses { classes, of, .. } = classes;
        list.clear();
        tiles.clear();
        for class in classes.iter() {
            let Draft {
                kernel,
                tile: Tile { m, n },
                pack,
                heads,
                ..
            } = class.draft;
            let n = match kernel {
                Kernel::Prefill => n,
                Kernel::Decode => input.tiles.decode(m).map_or(n, |choice| choice.tile.n),
            };
            let tile = Tile { m, n };
            let id = input.tiles.kernel(kernel, tile);
            tiles.push(ClassTile {
                wanted: keys(class),
                n,
                launch: launch_for(list, (kernel, id), tile, [pack, heads]) as u32,
            });
        }
        for (draft, of) in drafts.iter_mut().zip(of.iter_mut()) {
            let chosen = tiles[of.class as usize];
            let expected = chosen.wanted.min(of.keys);
            draft.tile.n = chosen.n;
            of.launch = chosen.launch;
            let unit = &classes[of.class as usize].unit;
            let whole = unit.fixed + unit.key * u64::from(of.keys);
            let launch = &mut list[chosen.launch as usize];
            launch.longest = launch.longest.max(whole.min(unit.cut(expected)));
            launch.longest_whole = launch.longest_whole.max(whole);
            let work = u64::from(unit.units).saturating_mul(whole);
            launch.work = launch.work.saturating_add(work);
        }
        let key = |launch: &Launch| {
            let Launch {
                longest,
                kernel,
                tile,
                pack,
                heads,
                ..
            } = *launch;
            (Reverse(longest), kernel, tile, pack, heads)
        };
        rank.clear();
        rank.extend(
            list.iter()
                .map(|launch| list.iter().filter(|other| key(other) < key(launch)).count() as u32),
        );
        list.sort_unstable_by_key(key);
        for of in of.iter_mut() {
            of.launch = rank[of.launch as usize];
        }
    }
}

/// Index of the launch of a kernel with a tile; adds a launch if there is none.
fn launch_for(
    launches: &mut Vec<Launch>,
    (kernel, id): (Kernel, Option<KernelId>),
    tile: Tile,
    [pack, heads]: [u32; 2],
) -> usize {
    let known = launches.iter().position(|launch| {
        let heads_of = [launch.pack, launch.heads];
        (launch.kernel, launch.tile, heads_of) == (kernel, tile, [pack, heads])
    });
    known.unwrap_or_else(|| {
        launches.push(Launch {
            kernel,
            id,
            tile,
            pack,
            heads,
            pieces: 0,
            kv_heads_together: 0,
            longest: 0,
            longest_whole: 0,
            work: 0,
        });
        launches.len() - 1
    })
}

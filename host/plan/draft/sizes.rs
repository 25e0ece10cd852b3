//! Chooses the tiles of the prefills of a batch: the tile for the length of each prompt, or the tile of the longest
//! prompts for all.

use std::cmp::Reverse;

use super::{BatchInput, Draft};
use crate::plan::{
    data::Kernel,
    model::{CtaTimeline, TileTable},
};

/// Fixed cost of a tile (start and end) in picoseconds: of a usual one, and of a wide one. With these and [`WIDE`] the choice
/// was 0.06 % slower than the better one in the mean of 66 batches (docs/notes/prefill.md).
const ENDS: [u64; 2] = [2_600_000, 3_200_000];

/// Time of the keys in a wide tile, in percent of what the cost model says.
const WIDE: u64 = 93;

/// Wide tiles for all are chosen if they save more than 1/128 of the time.
const MARGIN: u64 = 128;

/// With more units per CTA than this, it does not matter how units are distributed: the time is the work divided by the
/// CTAs.
const MOST_UNITS: u64 = 12;

/// Compares the two choices of tiles. Buffers are reused.
#[derive(Debug, Default)]
pub struct PrefillSizes {
    drafts: Vec<Draft>,
    /// Cost and number of the units of each draft.
    units: Vec<(Reverse<u64>, u32)>,
    timeline: CtaTimeline,
}

impl PrefillSizes {
    /// The tiles with which the prefills of a batch finish earlier.
    pub fn choose<'a>(
        &mut self,
        input: &BatchInput<'a>,
        tiles: &'a TileTable,
        wide: &'a TileTable,
    ) -> &'a TileTable {
        let differ = input.parts(tiles).any(|part| part.differs_in(wide));
        let mut sooner = || {
            let [usual, all_wide] = [self.time(input, tiles, false), self.time(input, wide, true)];
            all_wide < usual - usual / MARGIN
        };
        if differ && sooner() { wide } else { tiles }
    }

    /// Predicted time of all prefills in picoseconds, if the longest units start first.
    fn time<'a>(&mut self, input: &BatchInput<'a>, tiles: &'a TileTable, wide: bool) -> u64 {
        let Self {
            drafts,
            units,
            timeline,
        } = self;
        drafts.clear();
        for part in input.parts(tiles) {
            part.draft_contiguous(drafts);
        }
        let cost = &input.model.cost;
        units.clear();
        units.extend(drafts.iter().map(|draft| {
            let Draft { tile, pack, .. } = *draft;
            let of_item = draft.units(cost);
            let keys = u64::from(draft.kv_len().next_multiple_of(tile.n));
            let rows = keys * cost.key_ps(Kernel::Prefill, tile, pack);
            let (rows, ends) = match wide {
                true => (rows * WIDE / 100, ENDS[1]),
                false => (rows, ENDS[0]),
            };
            (Reverse(rows + ends), of_item)
        }));
        let ctas = cost.resident_ctas(Kernel::Prefill);
        let count: u64 = units.iter().map(|&(_, units)| u64::from(units)).sum();
        let kinds = drafts.iter().map(|draft| (draft.tile, draft.pack));
        let first = drafts.first().map(|draft| (draft.tile, draft.pack));
        let launches = u64::from(kinds.map(Some).any(|kind| kind != first)) * cost.launch_ps();
        let busy = if count > MOST_UNITS * u64::from(ctas) {
            let work = units.iter().map(|(cost, units)| cost.0 * u64::from(*units));
            work.sum::<u64>() / u64::from(ctas)
        } else {
            units.sort_unstable();
            timeline.reset(ctas, 1);
            units.iter().for_each(|(cost, units)| {
                timeline.place(*units, cost.0);
            });
            timeline.makespan()
        };
        busy + launches
    }
}

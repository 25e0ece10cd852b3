//! Rows of latent attention that two items share, each with a part of their keys. The unit of the item that ends last merges both
//! states from its registers, and no launch follows for them.

use kernels_gpu::abi::{NO_MERGE, PieceOf, QueryRow, WorkItem};

use crate::plan::data::{Plan, TileGroup};

/// Rows of a tile whose outputs a warp has. A partial state has no room for more in the order of registers.
const OF_WARP: u32 = 16;

/// The tiles of a token of latent attention, as the planner divides its heads: as few as can hold all, and of equal size. How many, and
/// the heads of each.
pub(crate) const fn tiles_of(q_heads: u32, rows: u32) -> [u32; 2] {
    let tiles = q_heads.div_ceil(rows);
    [tiles, q_heads.div_ceil(tiles)]
}

/// Which rows of a plan are such. Keeps its memory from plan to plan.
#[derive(Debug, Default)]
pub(crate) struct Pieces {
    /// By row: the word that stands for its merge, or [`NO_MERGE`]. Empty if there are no such rows.
    words: Vec<u32>,
    /// By slot: the item that writes it, and the row's index.
    writers: Vec<Option<(u32, u32)>>,
}

impl Pieces {
    pub(crate) fn clear(&mut self) {
        self.words.clear();
    }

    /// The word for a row's merge, if the row is one of two pieces.
    pub(crate) fn word(&self, row: usize) -> Option<u32> {
        self.words
            .get(row)
            .copied()
            .filter(|&word| word != NO_MERGE)
    }

    /// Whether some of these items are pieces.
    pub(crate) fn are_among(&self, items: &[WorkItem]) -> bool {
        let gathered = |item: &&WorkItem| item.is_gathered();
        let mut items = items.iter().filter(gathered);
        items.any(|item| self.word(item.rows_begin as usize).is_some())
    }

    /// Finds these rows, and says for each merge whether it is left to the merging kernel: all but theirs are. Returns whether there
    /// are any.
    pub(crate) fn find(&mut self, plan: &Plan, leaves: &mut [bool]) -> bool {
        self.clear();
        let mut any = false;
        leaves.fill(true);
        if plan.merges.iter().all(|merge| merge.slots != 2) {
            return any;
        }
        self.words.resize(plan.rows.len(), NO_MERGE);
        self.writers.clear();
        self.writers.resize(plan.slots as usize, None);
        for (index, item) in (0..).zip(&plan.items) {
            if item.is_gathered() && !item.is_joint() {
                for (row, at) in plan.rows_of(item).iter().zip(item.rows_begin..) {
                    if let Some(writer) = self.writers.get_mut(row.slot as usize) {
                        *writer = Some((index, at));
                    }
                }
            }
        }
        for group in &plan.groups {
            let merges = group.id.filter(|id| id.with_pieces().is_some());
            let Some(info) = merges.map(|id| id.info()) else {
                continue;
            };
            let [tiles, heads] = tiles_of(plan.spec.q_heads, info.rows);
            if !plan.spec.q_heads.is_multiple_of(heads) {
                continue;
            }
            for item in plan.items_of(group) {
                let Some((merge, second)) = self.second(plan, group, item, [tiles, heads]) else {
                    continue;
                };
                any = true;
                let begins = [item, second].map(|item| item.rows_begin);
                for (piece, begin) in (0..).zip(begins) {
                    let rows = begin as usize..(begin + item.rows) as usize;
                    self.words[rows].fill(PieceOf { merge, piece }.word());
                }
                for row in plan.rows_of(item) {
                    leaves[row.merge as usize] = false;
                }
            }
        }
        any
    }

    /// If an item is the first of two pieces: the merge of its first row, and the other piece.
    fn second<'a>(
        &self,
        plan: &'a Plan,
        group: &TileGroup,
        item: &WorkItem,
        [tiles, heads]: [u32; 2],
    ) -> Option<(u32, &'a WorkItem)> {
        let whole = (item.rows * heads).is_multiple_of(OF_WARP);
        // A tile's rows follow each other in a state only if it has all heads, or one token.
        let follow = tiles == 1 || item.rows == 1;
        if !item.is_gathered() || item.is_joint() || !whole || !follow {
            return None;
        }
        let rows = plan.rows_of(item);
        let first = rows.first().filter(|row| row.merge < PieceOf::MERGES)?;
        // The item that has the other state of a row, at the same place among its rows.
        let other = |(at, row): (u32, &QueryRow)| {
            let merge = plan.merges.get(row.merge as usize)?;
            let &[own, next] = plan
                .merge_slots
                .get(merge.slots_begin as usize..)?
                .get(..merge.slots as usize)?
            else {
                return None;
            };
            let (index, of) = (*self.writers.get(next as usize)?)?;
            let there = &plan.items[index as usize];
            let slots_follow = own == row.slot && own == first.slot + at && next == own + item.rows;
            let same_rows = there.rows == item.rows && there.rows_begin + at == of;
            (slots_follow && same_rows).then_some(index)
        };
        let mut others = (0..).zip(rows).map(other);
        // One launch has both, or launches of one kernel for several parts.
        let index = others.next()??;
        let same = group.items.contains(&index) && others.all(|other| other == Some(index));
        same.then(|| (first.merge, &plan.items[index as usize]))
    }
}

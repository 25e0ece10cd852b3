//! Cutting items along their keys.

use serde::{Deserialize, Serialize};

use super::{
    cost::CostModel,
    draft::{Draft, Piece},
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
    pub pieces: Vec<Piece>,
    /// Cost of a unit of each piece, in picoseconds.
    pub costs: Vec<u64>,
}

impl Splitter {
    /// Cuts the drafts into pieces, ascending by draft, then by key.
    pub fn split(&mut self, mode: SplitMode, drafts: &[Draft], cost: &CostModel) {
        self.pieces.clear();
        self.costs.clear();
        match mode {
            SplitMode::Off => self.chunks(drafts, cost, |_| u32::MAX),
            SplitMode::Fixed { tokens } => self.chunks(drafts, cost, |_| tokens),
            SplitMode::FlashInfer | SplitMode::Makespan => {
                let total: u64 = drafts
                    .iter()
                    .map(|draft| {
                        u64::from(cost.units_per_item(draft.kernel)) * u64::from(draft.kv_len())
                    })
                    .sum();
                self.chunks(drafts, cost, |draft| {
                    let bound = total
                        .div_ceil(u64::from(cost.resident_ctas(draft.kernel)))
                        .max(1);
                    let align = draft
                        .page_size
                        .max(draft.tile.n)
                        .next_multiple_of(draft.page_size);
                    u32::try_from(bound)
                        .unwrap_or(u32::MAX - align)
                        .next_multiple_of(align)
                });
            }
        }
    }

    /// Cuts every draft at multiples of a chunk, counted from its table's first key.
    fn chunks(&mut self, drafts: &[Draft], cost: &CostModel, chunk: impl Fn(&Draft) -> u32) {
        for (index, draft) in drafts.iter().enumerate() {
            let chunk = chunk(draft);
            let whole = draft.kv_begin / chunk == (draft.kv_end - 1) / chunk;
            let fixed = cost.fixed_ps(draft.kernel, if whole { 0 } else { draft.rows });
            let key = cost.key_ps(draft.kernel, draft.tile);
            let mut begin = draft.kv_begin;
            while begin < draft.kv_end {
                let end = (begin / chunk + 1).saturating_mul(chunk).min(draft.kv_end);
                self.pieces.push(Piece {
                    draft: index as u32,
                    kv_begin: begin,
                    kv_end: end,
                });
                self.costs.push(fixed + key * u64::from(end - begin));
                begin = end;
            }
        }
    }
}

//! Decodes first, and prompts only as far as the time between tokens allows.

use super::Policy;
use crate::{Draft, attention::Chunk, cost::CostModel};

/// Keeps the time between tokens below a target: after all decodes, a chunk goes in only as large as the
/// cost model says the target allows.
///
/// Prompts do not starve: after `patience` steps in which one could have had a chunk and got none, it gets
/// a tile whatever the target says. A prompt of P tokens at the head of the queue is therefore done after
/// at most ⌈P / tile⌉ · (patience + 1) steps, as far as pages and the token budget allow.
#[derive(Clone, Debug)]
pub struct DecodePriority {
    cost: CostModel,
    target_ns: f64,
    patience: u32,
    starved: u32,
}

impl DecodePriority {
    /// With the time between tokens to keep, in nanoseconds, and a patience of 8 steps.
    #[must_use]
    pub const fn new(cost: CostModel, target_ns: f64) -> Self {
        Self {
            cost,
            target_ns,
            patience: 8,
            starved: 0,
        }
    }

    /// With another patience.
    #[must_use]
    pub const fn with_patience(mut self, steps: u32) -> Self {
        self.patience = steps;
        self
    }

    /// The largest chunk, in whole tiles (decodes included), that keeps the target; 0 where none does.
    fn allowed(&self, draft: &Draft<'_>, pending: u32) -> u32 {
        let decodes = draft.tokens();
        let most = pending.min(draft.tokens_left());
        let tile = self.cost.tile();
        let mut shape = draft.shape().clone();
        let last = shape.chunks.len();
        shape.chunks.push(Chunk { tokens: 0, keys: 0 });
        let mut fits = |tokens: u32| {
            // Where the chunk starts is known only once it is put in: the end of its prompt is the worst.
            shape.chunks[last] = Chunk {
                tokens,
                keys: pending.max(tokens),
            };
            self.cost.step(&shape).last_stage_ns() <= self.target_ns
        };
        let tokens_of = |tiles: u32| (tiles * tile).saturating_sub(decodes).min(most);
        let (mut low, mut high) = (0, (decodes + most).div_ceil(tile));
        while low < high {
            let middle = (low + high).div_ceil(2);
            let tokens = tokens_of(middle);
            if tokens == 0 || fits(tokens) {
                low = middle;
            } else {
                high = middle - 1;
            }
        }
        tokens_of(low)
    }
}

impl Policy for DecodePriority {
    fn name(&self) -> &'static str {
        "decode-priority"
    }

    fn compose(&mut self, draft: &mut Draft<'_>) {
        let prefills = draft.next_prefill().is_some();
        let starving = prefills && self.starved >= self.patience;
        // Where decodes alone fill the step, one that starves needs a place among them.
        let tile = self.cost.tile();
        let (places, room) = (draft.requests_left(), draft.tokens_left());
        if starving {
            let reserved = tile.min(room / 2).max(1).min(room);
            draft.decode((places - 1).min(room - reserved));
        } else {
            draft.decode(u32::MAX);
        }
        // Without decodes nobody waits for a token, and the step may be as long as the budget lets it.
        let alone = draft.tokens() == 0 && draft.decodes_ready() == 0;
        let mut progress = false;
        while let Some(pending) = draft.next_prefill() {
            let mut tokens = if alone {
                draft.tokens_left()
            } else {
                self.allowed(draft, pending)
            };
            if tokens == 0 && starving && !progress {
                tokens = tile;
            }
            if tokens == 0 || draft.prefill(tokens) == 0 {
                break;
            }
            progress = true;
        }
        if starving && !progress {
            // No pages for it: the place that was kept is the decodes' again.
            draft.decode(u32::MAX);
        }
        self.starved = if progress || !prefills {
            0
        } else {
            self.starved + 1
        };
    }
}

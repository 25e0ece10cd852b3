//! Decodes first; prompts only as far as the target time between tokens allows.

use super::Policy;
use crate::{Draft, attention::Chunk, cost::CostModel};

/// Keeps the time between tokens below a target. After all decodes, it adds the largest chunk with which the cost model
/// predicts that the step meets the target. In a pipeline the step passes all stages in this time. When chunks begin there,
/// decodes may wait longer, for a step whose stages take longer than those of their own last one.
///
/// Prompts do not starve. After `patience` steps in which a prompt could have had a chunk and got none, it gets a tile
/// regardless of the target. A prompt of P tokens at the head of the queue therefore takes at most ⌈P / tile⌉ ·
/// (patience + 1) steps, if pages and the token budget allow.
#[derive(Clone, Debug)]
pub struct DecodePriority {
    cost: CostModel,
    target_ns: f64,
    patience: u32,
    starved: u32,
}

impl DecodePriority {
    /// A policy with a target time between tokens in nanoseconds, and a patience of 8 steps.
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

    /// The largest chunk, in whole tiles (decodes included), that meets the target; 0 if none does.
    fn allowed(&self, draft: &mut Draft<'_>, pending: u32) -> u32 {
        let decodes = draft.tokens();
        let most = pending.min(draft.tokens_left());
        let tile = self.cost.tile();
        let first = draft.next_prefill_position().unwrap_or(0);
        let mut shape = draft.shape().clone();
        let last = shape.chunks.len();
        shape.chunks.push(Chunk { tokens: 0, keys: 0 });
        let mut fits = |tokens: u32| {
            let keys = first + tokens;
            shape.chunks[last] = Chunk { tokens, keys };
            self.cost.pass_ns(&shape) <= self.target_ns
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
        // Decodes alone may fill the step, so a starving prompt needs a reserved place.
        let tile = self.cost.tile();
        let (places, room) = (draft.requests_left(), draft.tokens_left());
        if starving {
            let reserved = tile.min(room / 2).max(1).min(room);
            draft.decode((places - 1).min(room - reserved));
        } else {
            draft.decode(u32::MAX);
        }
        // Without decodes no request waits for a next token, so the step may use the whole budget. Those of the steps under way
        // in a pipeline follow this one through the stages.
        let alone =
            draft.tokens() == 0 && draft.decodes_ready() == 0 && draft.decodes_under_way() == 0;
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
            // There are no pages for the prompt, so decodes get the reserved place.
            draft.decode(u32::MAX);
        }
        self.starved = if progress || !prefills {
            0
        } else {
            self.starved + 1
        };
    }
}

//! Orca's iteration-level scheduling: whole prompts together with decodes.

use super::Policy;
use crate::Draft;

/// Requests join and leave at every step. A prompt is computed whole, in the same step as the decodes of other
/// requests.
///
/// A prompt longer than the token budget takes several steps.
#[derive(Clone, Copy, Debug)]
pub struct Orca {
    prompts_per_step: u32,
}

impl Orca {
    /// A policy with at most `prompts_per_step` prompts in a step; one is the best case of this scheduler.
    #[must_use]
    pub const fn new(prompts_per_step: u32) -> Self {
        Self { prompts_per_step }
    }
}

impl Default for Orca {
    fn default() -> Self {
        Self::new(u32::MAX)
    }
}

impl Policy for Orca {
    fn name(&self) -> &'static str {
        "orca"
    }

    fn compose(&mut self, draft: &mut Draft<'_>) {
        draft.decode(u32::MAX);
        for _ in 0..self.prompts_per_step {
            let Some(tokens) = draft.next_prefill() else {
                break;
            };
            // The first prompt is cut to the room there is: decodes may never leave room for the whole of it.
            let alone = draft.shape().chunks.is_empty();
            if !(alone || tokens <= draft.tokens_left()) || draft.prefill(tokens) == 0 {
                break;
            }
        }
    }
}

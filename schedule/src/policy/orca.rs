//! Orca's iteration-level scheduling: whole prompts beside decodes.

use super::Policy;
use crate::Draft;

/// Requests join and leave at every step; a prompt is computed whole, beside the decodes of the others.
///
/// A prompt above the token budget takes several steps.
#[derive(Clone, Copy, Debug)]
pub struct Orca {
    prompts_per_step: u32,
}

impl Orca {
    /// With at most so many prompts in a step; one is the scheduler's best case.
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
            // Waiting for a step with room would be waiting for ever where decodes never leave it.
            let alone = draft.shape().chunks.is_empty();
            if !(alone || tokens <= draft.tokens_left()) || draft.prefill(tokens) == 0 {
                break;
            }
        }
    }
}

//! Sarathi-Serve: a token budget per step, without stalls of decodes.

use super::Policy;
use crate::Draft;

/// Adds running decodes first, then chunks of running prompts, then new prompts, until the step's token budget
/// ([`Limits::step_tokens`](crate::Limits::step_tokens)) is spent. No decode waits for a prompt. The budget should
/// exceed the number of running requests: if decodes alone spend it, prompts wait.
#[derive(Clone, Copy, Debug, Default)]
pub struct SarathiServe;

impl Policy for SarathiServe {
    fn name(&self) -> &'static str {
        "sarathi-serve"
    }

    fn compose(&mut self, draft: &mut Draft<'_>) {
        draft.decode(u32::MAX);
        while draft.prefill(u32::MAX) > 0 {}
    }
}

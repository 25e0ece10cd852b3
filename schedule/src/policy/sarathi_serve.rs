//! Sarathi-Serve: a token budget, and nobody stalls.

use super::Policy;
use crate::Draft;

/// Running decodes first, then running prompts in chunks, then new ones, until the step's token budget
/// ([`Limits::step_tokens`](crate::Limits::step_tokens)) is spent. No decode waits for a prompt, so the
/// budget should be above the requests that may run: where decodes alone spend it, prompts wait for them.
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

//! Prefill first, as vLLM scheduled originally.

use super::Policy;
use crate::Draft;

/// Computes whole prompts, in separate steps, as soon as there is room for them. Decodes run only when no prompt can
/// run. The first token comes early, but running requests stall.
///
/// A prompt longer than the token budget takes several steps, with no decodes in between.
#[derive(Clone, Copy, Debug, Default)]
pub struct PrefillFirst;

impl Policy for PrefillFirst {
    fn name(&self) -> &'static str {
        "prefill-first"
    }

    fn compose(&mut self, draft: &mut Draft<'_>) {
        while let Some(tokens) = draft.next_prefill() {
            let whole = tokens <= draft.tokens_left() || draft.tokens() == 0;
            if !whole || draft.prefill(tokens) == 0 {
                break;
            }
        }
        if draft.tokens() == 0 {
            draft.decode(u32::MAX);
        }
    }
}

//! Penalties of tokens that a text has already.

use std::ops::Range;

use kernels_gpu::abi::{AdjustRow, NO_TOKEN};
use serde::{Deserialize, Serialize};

use super::StepError;

/// What lowers the logits of tokens that a text has already, as in OpenAI's interface and in vLLM.
///
/// The repetition penalty comes first: it divides positive logits and multiplies others. Then `frequency` is subtracted as often as
/// the text behind the prompt has the token, and `presence` once if it has it.
///
/// ```
/// use tandem_attn::step::{AdjustToken, Penalties, cpu};
///
/// let penalties = Penalties { presence: 0.5, frequency: 0.25, ..Penalties::NONE };
/// let mut logits = [1.0_f32, 2.0, 3.0];
/// // Token 2 was generated twice. The last token is room for one that only the device knows.
/// let seen = |token, seen| AdjustToken { token, bias: 0.0, seen, logit: 0.0 };
/// let mut tokens = [seen(2, 2), seen(0, 0)];
/// let row = penalties.row(0, 0..1, None);
/// cpu::adjust(&mut logits, 3, &[row], &mut tokens, &[])?;
/// assert_eq!(logits, [1.0, 2.0, 2.0]);
/// cpu::restore(&mut logits, 3, &[row], &tokens)?;
/// assert_eq!(logits, [1.0, 2.0, 3.0]);
/// # Ok::<(), tandem_attn::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Penalties {
    /// −2 to 2; 0: none.
    pub presence: f32,
    /// −2 to 2; 0: none.
    pub frequency: f32,
    /// 0.01 to 100; 1: none. It counts tokens of the prompt, too.
    pub repetition: f32,
}

impl Default for Penalties {
    fn default() -> Self {
        Self::NONE
    }
}

impl Penalties {
    /// No penalty.
    pub const NONE: Self = Self {
        presence: 0.0,
        frequency: 0.0,
        repetition: 1.0,
    };

    /// # Errors
    /// [`StepError::Sampling`] for a number out of its range.
    pub fn check(&self) -> Result<(), StepError> {
        let subtracted = -2.0..=2.0;
        for (what, got) in [
            ("presence_penalty", self.presence),
            ("frequency_penalty", self.frequency),
        ] {
            StepError::sampling(what, got, subtracted.contains(&got), "between -2 and 2")?;
        }
        let got = self.repetition;
        let holds = (0.01..=100.0).contains(&got);
        StepError::sampling("repetition_penalty", got, holds, "between 0.01 and 100")
    }

    /// A row of logits with these penalties. `tokens` are its [`AdjustToken`](super::AdjustToken)s, each token once; behind them
    /// is room for one more. `newest` is the index of a token that they do not count yet, among the ids of the call.
    #[must_use]
    pub fn row(&self, row: u32, tokens: Range<u32>, newest: Option<u32>) -> AdjustRow {
        AdjustRow {
            row,
            first: tokens.start,
            end: tokens.end,
            newest: newest.unwrap_or(NO_TOKEN),
            presence: self.presence,
            frequency: self.frequency,
            repetition: [self.repetition, 1.0 / self.repetition],
        }
    }
}

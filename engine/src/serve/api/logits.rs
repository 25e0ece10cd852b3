//! What a request says about logits: biases, and log-probabilities that it asks for.

use serde_json::Value;
use tandem_attn::step::MOST_TOP;

use super::Kind;
use crate::serve::{
    fields::{self, Fields},
    refusal::Refusal,
};

/// Each step copies them to the device.
const MOST_BIASES: usize = 1024;

/// How many of the most probable tokens come with each token's log-probability; none if there are to be none.
pub(super) fn log_probs(kind: Kind, fields: &mut Fields) -> Result<Option<u32>, Refusal> {
    let top = |value: &Value| fields::whole(value).filter(|&top| top <= MOST_TOP);
    let rule = format!("give a number of most likely tokens, at most {MOST_TOP}");
    if kind == Kind::Completion {
        let given = fields.take("logprobs", &rule, |value| match value {
            Value::Bool(false) => Some(None),
            value => top(value).map(Some),
        })?;
        return Ok(given.flatten());
    }
    let wanted = fields.flag("logprobs")?.unwrap_or(false);
    let top = fields.take("top_logprobs", &rule, top)?.unwrap_or(0);
    if top > 0 && !wanted {
        let message = format!("top_logprobs is {top} without logprobs: set logprobs to true");
        return Err(Refusal::of("top_logprobs", message));
    }
    Ok(wanted.then_some(top))
}

/// Numbers that are added to the logits of tokens.
pub(super) fn biases(fields: &mut Fields) -> Result<Vec<(u32, f32)>, Refusal> {
    let rule = format!(
        "give an object with up to {MOST_BIASES} token ids, each with a number from -100 to 100"
    );
    let read = |value: &Value| {
        let biases = value.as_object()?;
        let one = |(id, bias): (&String, &Value)| {
            let bias = bias.as_f64().filter(|bias| bias.abs() <= 100.0)?;
            Some((id.parse().ok()?, bias as f32))
        };
        let few = biases.len() <= MOST_BIASES;
        few.then(|| biases.iter().map(one).collect())?
    };
    Ok(fields.take("logit_bias", &rule, read)?.unwrap_or_default())
}

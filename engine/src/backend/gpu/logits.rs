//! Rows of logits in device memory.

use tandem_attn::exec::gpu::Gpu;

use crate::{Architecture, Error};

/// Elements from a row of logits to the next. [`Gpu::sample`] reads vectors of 8 elements, so rows begin at multiples of 8.
pub(super) const fn stride(vocabulary: usize) -> usize {
    vocabulary.next_multiple_of(8)
}

/// The first rows of logits, without the gaps between them.
pub(super) fn dense(mut logits: Vec<f32>, rows: usize, vocabulary: usize) -> Vec<f32> {
    for row in 1..rows {
        let from = row * stride(vocabulary);
        logits.copy_within(from..from + vocabulary, row * vocabulary);
    }
    logits.truncate(rows * vocabulary);
    logits
}

/// Refuses a vocabulary that [`Gpu::sample`] does not take, before memory is allocated.
pub(super) fn check(a: &Architecture) -> Result<(), Error> {
    match a.vocabulary <= Gpu::MOST_SAMPLED {
        true => Ok(()),
        false => Err(Error::Unsupported {
            field: "vocab_size",
            got: a.vocabulary.to_string(),
            rule: format!(
                "supported on a GPU: 1 to {}; the CPU has no such limit",
                Gpu::MOST_SAMPLED
            ),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logits_leave_without_the_gaps_between_their_rows() {
        let rows = [1.0, 2.0, 3.0].map(|row| [[row; 5].as_slice(), &[-1.0; 3]].concat());
        let [first, second, _] = [1.0, 2.0, 3.0].map(|row| [row; 5]);
        assert_eq!(dense(rows.concat(), 2, 5), [first, second].concat());
        assert_eq!(dense(vec![4.0; 24], 3, 8), [4.0; 24]);
        assert_eq!(dense(rows.concat(), 0, 5), [0.0; 0]);
    }

    #[test]
    fn a_vocabulary_that_cannot_be_sampled_is_refused_at_load() {
        let config = |vocabulary: usize| {
            let json = serde_json::json!({
                "model_type": "llama", "vocab_size": vocabulary, "hidden_size": 64, "intermediate_size": 64,
                "num_hidden_layers": 1, "num_attention_heads": 1, "max_position_embeddings": 64,
            });
            Architecture::from_json(&json.to_string()).expect("a sound configuration")
        };
        check(&config(Gpu::MOST_SAMPLED)).expect("as many as the kernel takes");
        let refused = check(&config(Gpu::MOST_SAMPLED + 1)).unwrap_err();
        assert_eq!(
            refused.to_string(),
            "the model has vocab_size = 327681; supported on a GPU: 1 to 327680; the CPU has no such limit"
        );
    }
}

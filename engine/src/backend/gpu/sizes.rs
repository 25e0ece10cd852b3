//! The sizes of a model for which there are kernels.

use tandem_attn::exec::gpu::Gpu;

use crate::{Architecture, Error};

/// Elements that the kernels around attention read at a time: rows consist of whole vectors.
const VECTOR: usize = 8;
/// Elements of a head that rotary embedding turns come in pairs of vectors.
const TURNED: u32 = 16;

/// Refuses sizes that kernels do not take, before memory is allocated. Otherwise the first step would.
pub(super) fn check(a: &Architecture) -> Result<(), Error> {
    for kind in &a.kinds {
        let (turned, heads) = (kind.rope.dim, a.spec().head_dim_qk);
        if turned != heads && !turned.is_multiple_of(TURNED) {
            return Err(Error::Unsupported {
                field: "partial_rotary_factor",
                got: (f64::from(turned) / f64::from(heads)).to_string(),
                rule: format!(
                    "that turns {turned} elements of each head; supported on a GPU: multiples of {TURNED}; the CPU has no \
                     such limit"
                ),
            });
        }
    }
    let any = usize::MAX;
    for (field, got, step, most) in [
        ("vocab_size", a.vocabulary, 1, Gpu::MOST_SAMPLED),
        ("hidden_size", a.hidden, VECTOR, Gpu::MOST_NORMED),
        ("intermediate_size", a.intermediate, VECTOR, any),
    ] {
        if got.is_multiple_of(step) && got <= most {
            continue;
        }
        let rule = match (step, most) {
            (1, most) => format!("1 to {most}"),
            (step, most) if most == any => format!("multiples of {step}"),
            (step, most) => format!("multiples of {step} up to {most}"),
        };
        return Err(Error::Unsupported {
            field,
            got: got.to_string(),
            rule: format!("supported on a GPU: {rule}; the CPU has no such limit"),
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_kernels_are_refused_at_load() {
        let of = |sizes: [usize; 3]| {
            let [vocabulary, hidden, intermediate] = sizes;
            let json = serde_json::json!({
                "model_type": "llama", "vocab_size": vocabulary, "hidden_size": hidden,
                "intermediate_size": intermediate, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 64,
                "max_position_embeddings": 64,
            });
            check(&Architecture::from_json(&json.to_string()).expect("a sound configuration"))
        };
        of([Gpu::MOST_SAMPLED, Gpu::MOST_NORMED, 8]).expect("as many as the kernels take");
        let part = |part: f64| {
            let json = serde_json::json!({
                "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64,
                "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 64, "max_position_embeddings": 64,
                "partial_rotary_factor": part,
            });
            check(&Architecture::from_json(&json.to_string()).expect("a sound configuration"))
        };
        part(0.25).expect("16 elements");
        assert_eq!(
            part(0.375).unwrap_err().to_string(),
            "the model has partial_rotary_factor = 0.375; that turns 24 elements of each head; supported on a GPU: multiples of \
             16; the CPU has no such limit"
        );
        of([381, 64, 1 << 22]).expect("rows of logits have gaps between them");
        for (sizes, message) in [
            (
                [Gpu::MOST_SAMPLED + 1, 64, 64],
                "the model has vocab_size = 327681; supported on a GPU: 1 to 327680; the CPU has no such limit",
            ),
            (
                [300, 60, 64],
                "the model has hidden_size = 60; supported on a GPU: multiples of 8 up to 32768; the CPU has no such limit",
            ),
            (
                [300, 32_776, 64],
                "the model has hidden_size = 32776; supported on a GPU: multiples of 8 up to 32768; the CPU has no such limit",
            ),
            (
                [300, 64, 1001],
                "the model has intermediate_size = 1001; supported on a GPU: multiples of 8; the CPU has no such limit",
            ),
        ] {
            assert_eq!(of(sizes).unwrap_err().to_string(), message);
        }
    }
}

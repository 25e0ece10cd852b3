//! Options that no family has: one that is ignored would give a wrong text.

use tandem_attn::step::Activation;

use super::fields::Config;
use crate::{Error, family::Traits};

/// Ignoring an option that changes the result would give a wrong text, so it is refused.
pub(super) fn refuse_unknown(config: &Config, traits: &Traits) -> Result<(), Error> {
    let refuse = |field, got: String, rule: &str| {
        let rule = rule.to_owned();
        Err(Error::Unsupported { field, got, rule })
    };
    if let Some(quantised) = &config.quantization_config {
        let method = quantised
            .get("quant_method")
            .map_or("something", |name| name.as_str().unwrap_or("something"));
        return refuse(
            "quantization_config",
            method.to_owned(),
            "use the model in BF16",
        );
    }
    if config.attention_bias == Some(true) && !traits.qkv_bias && !traits.attention_bias {
        return refuse(
            "attention_bias",
            "true".to_owned(),
            "this family has no biases of attention",
        );
    }
    if config.mlp_bias == Some(true) {
        return refuse(
            "mlp_bias",
            "true".to_owned(),
            "supported: feed-forward parts without biases",
        );
    }
    if config.use_bidirectional_attention == Some(true) {
        return refuse(
            "use_bidirectional_attention",
            "true".to_owned(),
            "supported: causal models",
        );
    }
    if let Some(cap) = config.final_logit_softcapping {
        return refuse(
            "final_logit_softcapping",
            cap.to_string(),
            "supported: logits without a cap",
        );
    }
    let names: &[&str] = match traits.activation {
        Activation::GeluTanh => &["gelu_pytorch_tanh"],
        _ => &["silu", "swish"],
    };
    let named = [&config.hidden_act, &config.hidden_activation];
    let other = named
        .into_iter()
        .flatten()
        .find(|name| !names.contains(&name.as_str()));
    match other {
        Some(got) => refuse(
            "hidden_act",
            got.clone(),
            &format!("this family has {}", names[0]),
        ),
        None => Ok(()),
    }
}

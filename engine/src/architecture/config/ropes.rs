//! Rotary embeddings of a configuration.

use tandem_attn::step::{Rope, RopeScaling, Yarn};

use super::fields::{Config, RopeFields, RopeParameters};
use crate::{Error, family::Traits};

/// The rotary embeddings of layers without and with a sliding window.
pub(super) fn ropes(config: &Config, traits: &Traits, head_dim: u32) -> Result<[Rope; 2], Error> {
    let rope = |fields: &RopeFields| rope(config, traits, head_dim, fields);
    let local_theta = config.rope_local_base_freq.or(Some(10000.0));
    let theta = match traits.local_rope {
        true => [config.rope_theta, local_theta],
        false => [config.rope_theta; 2],
    };
    let usual = |kind: usize, fields: &RopeFields| RopeFields {
        rope_theta: fields.rope_theta.or(theta[kind]),
        ..fields.clone()
    };
    let of_all = |fields: &RopeFields| match traits.local_rope {
        true => [usual(0, fields), usual(1, &RopeFields::default())],
        false => [usual(0, fields), usual(1, fields)],
    };
    let Some(new) = &config.rope_parameters else {
        let old = config.rope_scaling.clone().unwrap_or_default();
        let [global, local] = of_all(&old);
        return Ok([rope(&global)?, rope(&local)?]);
    };
    let by_kind = [&new.full_attention, &new.sliding_attention];
    let [global, local] = match by_kind {
        [None, None] => of_all(&new.all),
        _ => [0, 1].map(|kind| {
            usual(
                kind,
                by_kind[kind].as_ref().unwrap_or(&RopeFields::default()),
            )
        }),
    };
    let ropes = [rope(&global)?, rope(&local)?];
    if let Some(old) = &config.rope_scaling {
        let old = RopeFields {
            rope_theta: old.rope_theta.or(global.rope_theta),
            ..old.clone()
        };
        if rope(&old)? != ropes[0] {
            let kind = old.rope_type.or(old.old_type);
            return Err(Error::Unsupported {
                field: "rope_scaling",
                got: kind.unwrap_or_else(|| "default".to_owned()),
                rule: "rope_parameters says otherwise: give one of them".to_owned(),
            });
        }
    }
    Ok(ropes)
}

/// Elements of a head that are turned: the first ones.
fn turned(config: &Config, head_dim: u32, fields: &RopeFields) -> Result<u32, Error> {
    let part = fields.partial_rotary_factor;
    let part = part.or(config.partial_rotary_factor).unwrap_or(1.0);
    // Rounded down, as in `transformers`.
    let turned = (f64::from(head_dim) * part) as u32;
    match part <= 1.0 && turned > 0 && turned.is_multiple_of(2) {
        true => Ok(turned),
        false => Err(Error::Unsupported {
            field: "partial_rotary_factor",
            got: part.to_string(),
            rule: format!(
                "give the part of the {head_dim} elements of a head that is turned: an even number of them"
            ),
        }),
    }
}

/// Whether there is one set of fields for each kind of layer.
const fn is_by_kind(parameters: &RopeParameters) -> bool {
    parameters.full_attention.is_some() || parameters.sliding_attention.is_some()
}

fn refuse_outer<T>(outer: u32, rule: String) -> Result<T, Error> {
    Err(Error::Unsupported {
        field: "original_max_position_embeddings",
        got: outer.to_string(),
        rule,
    })
}

fn rope(
    config: &Config,
    traits: &Traits,
    head_dim: u32,
    fields: &RopeFields,
) -> Result<Rope, Error> {
    let need = |field: &'static str, value: Option<f64>| {
        value.ok_or_else(|| Error::Missing {
            field,
            model_type: config.model_type.clone(),
        })
    };
    let factor = || need("rope_scaling.factor", fields.factor);
    let original_positions = || {
        let inner = fields.original_max_position_embeddings;
        let positions = match (inner, config.original_max_position_embeddings) {
            (Some(inner), Some(outer)) if inner != outer => {
                return refuse_outer(
                    outer,
                    format!("that of the scaling is {inner}: give one of them"),
                );
            }
            // `transformers` does not read it then.
            (None, Some(outer)) if config.rope_parameters.as_ref().is_some_and(is_by_kind) => {
                return refuse_outer(
                    outer,
                    "rope_parameters are given for each kind of layer: give it there".to_owned(),
                );
            }
            (inner, outer) => inner.or(outer),
        };
        let positions = positions.or(config.max_position_embeddings).map(f64::from);
        need("rope_scaling.original_max_position_embeddings", positions)
            .map(|positions| positions as u32)
    };
    if let (Some(kind), Some(old)) = (&fields.rope_type, &fields.old_type)
        && kind != old
    {
        return Err(Error::Unsupported {
            field: "rope_scaling.type",
            got: old.clone(),
            rule: format!("rope_type is {kind}: give one of them"),
        });
    }
    let kind = fields.rope_type.as_ref().or(fields.old_type.as_ref());
    let scaling = match kind.map(String::as_str) {
        None | Some("default") => RopeScaling::None,
        Some("linear") => RopeScaling::Linear { factor: factor()? },
        Some("llama3") => RopeScaling::Llama3 {
            factor: factor()?,
            low_freq_factor: need("rope_scaling.low_freq_factor", fields.low_freq_factor)?,
            high_freq_factor: need("rope_scaling.high_freq_factor", fields.high_freq_factor)?,
            original_positions: original_positions()?,
        },
        Some("yarn") => {
            let usual = Yarn::new(factor()?, original_positions()?);
            RopeScaling::Yarn(Yarn {
                beta_fast: fields.beta_fast.unwrap_or(usual.beta_fast),
                beta_slow: fields.beta_slow.unwrap_or(usual.beta_slow),
                attention_factor: fields.attention_factor,
                mscale: fields.mscale,
                mscale_all_dim: fields.mscale_all_dim,
                truncate: fields.truncate.unwrap_or(usual.truncate),
                ..usual
            })
        }
        Some(other) => {
            return Err(Error::Unsupported {
                field: "rope_scaling.rope_type",
                got: other.to_owned(),
                rule: "supported: default, linear, llama3, yarn".to_owned(),
            });
        }
    };
    let theta = fields.rope_theta.unwrap_or(traits.defaults.rope_theta);
    let turned = turned(config, head_dim, fields)?;
    Ok(Rope::new(turned, theta).with_scaling(scaling))
}

//! Numbers of heads in an input file: sinks and slopes of linear biases.

use std::{collections::HashMap, f32::consts::LOG2_E};

use safetensors::{Dtype as FileDtype, SafeTensors, tensor::TensorView};
use tandem_attn::{problem::Spec, tensor::Element, variants::ALIBI};

use super::tensors::elements;
use crate::tensors::Given;

/// Tensors that metadata cannot hold.
const TENSORS: [&str; 2] = ["sinks", "alibi_slopes"];

/// What FlashInfer notes where there is nothing.
pub(super) const NOTHING: &str = "NONE";

/// The largest slope: multiplied by any distance and by log₂e it is finite.
const MOST_SLOPE: f32 = 1e28;

/// Reads what the file has, and adds to the specification what goes with it.
pub(super) fn read(
    file: &SafeTensors<'_>,
    metadata: &HashMap<String, String>,
    spec: &mut Spec,
) -> Result<Given, String> {
    if let Some(name) = TENSORS
        .into_iter()
        .find(|&name| metadata.get(name).is_some_and(|note| note != NOTHING))
    {
        return Err(format!(
            "{name} is in the metadata: give it as a tensor of one number for each query head"
        ));
    }
    let heads = spec.q_heads as usize;
    let [sinks, slopes] = TENSORS.map(|name| numbers(file, name, heads, "one for each query head"));
    let given = Given {
        sinks: sinks?,
        slopes: slopes?,
    };
    if let Some(sinks) = &given.sinks {
        // Kernels multiply by log₂e.
        if let Some(sink) = sinks.iter().find(|sink| !(**sink * LOG2_E).is_finite()) {
            return Err(format!("sinks has {sink}: give numbers of at most 2.3e38"));
        }
        *spec = spec.with_sinks();
    }
    if given.slopes.is_some() {
        if spec.variant.soft_cap.is_some() {
            return Err(
                "alibi_slopes and logits_soft_cap are there, and attention takes one of them: leave one out"
                    .into(),
            );
        }
        *spec = spec.with_hooks(&ALIBI);
    }
    if let Some(slope) = given
        .slopes
        .iter()
        .flatten()
        .find(|slope| slope.abs() > MOST_SLOPE)
    {
        return Err(format!(
            "alibi_slopes has {slope}: give numbers of at most {MOST_SLOPE:e}"
        ));
    }
    Ok(given)
}

/// The numbers of a tensor that may be there, as many as `count`. A tensor without dimensions has one number.
fn numbers(
    file: &SafeTensors<'_>,
    name: &str,
    count: usize,
    rule: &str,
) -> Result<Option<Vec<f32>>, String> {
    let Ok(view) = file.tensor(name) else {
        return Ok(None);
    };
    let got = view.shape();
    if got.len() > 1 || got.iter().product::<usize>() != count {
        return Err(format!("{name} has shape {got:?}: give {rule}"));
    }
    let numbers = numbers_of(&view, name)?;
    match numbers.iter().find(|number| !number.is_finite()) {
        Some(number) => Err(format!("{name} has {number}: give finite numbers")),
        None => Ok(Some(numbers)),
    }
}

/// The numbers of a tensor in f32.
pub(super) fn numbers_of(view: &TensorView<'_>, name: &str) -> Result<Vec<f32>, String> {
    match view.dtype() {
        FileDtype::F32 => Ok(elements(view)),
        FileDtype::F16 => Ok(widened::<half::f16>(view)),
        FileDtype::BF16 => Ok(widened::<half::bf16>(view)),
        other => Err(format!(
            "{name} is {other:?}: convert it to F32, F16 or BF16"
        )),
    }
}

fn widened<T: Element>(view: &TensorView<'_>) -> Vec<f32> {
    let values: Vec<T> = elements(view);
    values.into_iter().map(|value| value.to_f32()).collect()
}

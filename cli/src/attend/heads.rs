//! Numbers of heads in an input file: sinks, slopes of linear biases, and scales of 8-bit keys and values.

use std::{collections::HashMap, f32::consts::LOG2_E};

use safetensors::{Dtype as FileDtype, SafeTensors, tensor::TensorView};
use tandem_attn::{problem::Spec, tensor::Element, variants::ALIBI};

use super::tensors::elements;
use crate::tensors::Given;

/// Tensors that metadata cannot hold.
const TENSORS: [&str; 2] = ["sinks", "alibi_slopes"];

/// What FlashInfer notes where there is nothing.
const NOTHING: &str = "NONE";

/// The largest slope: multiplied by any distance and by log₂e it is finite.
const MOST_SLOPE: f32 = 1e28;

/// The names of the scales of keys and of values.
const SCALES: [&str; 2] = ["k_scale", "v_scale"];

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
    let [sinks, slopes] =
        TENSORS.map(|name| numbers(file, name, &[heads], "one for each query head"));
    let given = Given {
        sinks: sinks?,
        slopes: slopes?,
        scales: scales(file, metadata, spec)?,
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

/// The scales of keys and values: as many of both. None if all are 1.
fn scales(
    file: &SafeTensors<'_>,
    metadata: &HashMap<String, String>,
    spec: &Spec,
) -> Result<Option<[Vec<f32>; 2]>, String> {
    let kv_heads = spec.kv_heads as usize;
    let [k, v] = SCALES.map(|name| scale(file, metadata, name, kv_heads));
    let (mut k, mut v) = (k?, v?);
    let is_one = |scales: &[f32]| scales.iter().all(|&scale| scale == 1.0);
    let Some(name) = [&k, &v]
        .into_iter()
        .zip(SCALES)
        .find_map(|(scales, name)| (!is_one(scales)).then_some(name))
    else {
        return Ok(None);
    };
    if spec.kv_dtype.bytes() != 1 {
        return Err(format!(
            "{name} is there and k_cache is {:?}: only 8-bit keys and values have scales; multiply sm_scale by k_scale, and o by \
             v_scale",
            spec.kv_dtype
        ));
    }
    let count = k.len().max(v.len());
    for scales in [&mut k, &mut v] {
        if scales.len() < count {
            *scales = vec![scales[0]; count];
        }
    }
    Ok(Some([k, v]))
}

/// The scales of one name, from a tensor or from the metadata.
fn scale(
    file: &SafeTensors<'_>,
    metadata: &HashMap<String, String>,
    name: &str,
    kv_heads: usize,
) -> Result<Vec<f32>, String> {
    let of_tensor = numbers(file, name, &[1, kv_heads], "one, or one for each KV head")?;
    let note = metadata.get(name).filter(|note| *note != NOTHING);
    let scales = match (of_tensor, note) {
        (None, None) => vec![1.0],
        (Some(scales), None) => scales,
        (None, Some(text)) => {
            let number = text.trim().parse();
            vec![number.map_err(|_| format!("metadata {name} is {text:?}: give a number"))?]
        }
        (Some(_), Some(_)) => {
            return Err(format!(
                "{name} is there as a tensor and in the metadata: leave one out"
            ));
        }
    };
    match scales
        .iter()
        .find(|scale| !(scale.is_normal() && **scale > 0.0))
    {
        Some(scale) => Err(format!("{name} has {scale}: give positive numbers")),
        None => Ok(scales),
    }
}

/// The numbers of a tensor that may be there, as many as one of `counts`. A tensor without dimensions has one number.
fn numbers(
    file: &SafeTensors<'_>,
    name: &str,
    counts: &[usize],
    rule: &str,
) -> Result<Option<Vec<f32>>, String> {
    let Ok(view) = file.tensor(name) else {
        return Ok(None);
    };
    let got = view.shape();
    if got.len() > 1 || !counts.contains(&got.iter().product()) {
        return Err(format!("{name} has shape {got:?}: give {rule}"));
    }
    let numbers = match view.dtype() {
        FileDtype::F32 => elements(&view),
        FileDtype::F16 => widened::<half::f16>(&view),
        FileDtype::BF16 => widened::<half::bf16>(&view),
        other => {
            return Err(format!(
                "{name} is {other:?}: convert it to F32, F16 or BF16"
            ));
        }
    };
    match numbers.iter().find(|number| !number.is_finite()) {
        Some(number) => Err(format!("{name} has {number}: give finite numbers")),
        None => Ok(Some(numbers)),
    }
}

fn widened<T: Element>(view: &TensorView<'_>) -> Vec<f32> {
    let values: Vec<T> = elements(view);
    values.into_iter().map(|value| value.to_f32()).collect()
}

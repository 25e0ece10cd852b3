//! The step around attention on the CPU, against its formulas in f64 and against `transformers`.

use crate::numeric;

#[path = "../../common/steps.rs"]
mod steps;

mod fixtures;
mod heads;
mod logits;
mod refused;
mod rows;
mod sampling;

//! Arguments that both scheduler commands share: a model on a machine, counts, a trace.

use std::path::{Path, PathBuf};

use tandem_attn::problem::PageTable;
use tandem_schedule::{
    Hardware, ModelDescription, ScheduleError,
    cost::{Correction, CostModel, Parallel},
    trace::Trace,
};

use crate::{Failure, cache_type, input, workload::json};

/// A model on a machine, for both scheduler commands.
#[derive(Clone, Debug, clap::Args)]
pub struct Machine {
    #[arg(long, value_name = "NAME|FILE", default_value = "llama-3-8b", help = models())]
    model: String,
    #[arg(long, value_name = "NAME|FILE", default_value = "h200", help = hardware())]
    device: String,
    /// Number of GPUs that share each layer
    #[arg(long, value_name = "GPUS", default_value_t = 1, value_parser = at_least_1)]
    tensor: u32,
    /// Number of pipeline stages
    #[arg(long, value_name = "STAGES", default_value_t = 1, value_parser = at_least_1)]
    pipeline: u32,
    #[command(flatten)]
    cache_type: cache_type::Flag,
    /// JSON file with measured times that correct the cost model
    #[arg(long, value_name = "FILE")]
    correction: Option<PathBuf>,
}

/// What `--model` takes.
pub(crate) fn models() -> String {
    let names: Vec<_> = ModelDescription::names().collect();
    format!(
        "{}, or a JSON file that describes a model (docs/guide/workloads.md)",
        names.join(", ")
    )
}

/// What `--device` takes.
pub(crate) fn hardware() -> String {
    let names: Vec<_> = Hardware::names().collect();
    format!(
        "{}, or a JSON file that describes the hardware (docs/guide/workloads.md)",
        names.join(", ")
    )
}

impl Machine {
    /// The files that these arguments read.
    pub(crate) fn files(&self) -> Vec<PathBuf> {
        let named = [&self.model, &self.device]
            .into_iter()
            .filter(|name| is_file(name));
        named
            .map(PathBuf::from)
            .chain(self.correction.clone())
            .collect()
    }

    /// The cost model.
    ///
    /// # Errors
    /// An unknown name, a file that cannot be read, or a model that does not fit.
    pub fn cost(&self) -> Result<CostModel, Failure> {
        let model = if is_file(&self.model) {
            described(self.model.as_ref(), ModelDescription::from_json)?
        } else {
            ModelDescription::named(&self.model)?
        };
        let hardware = if is_file(&self.device) {
            described(self.device.as_ref(), Hardware::from_json)?
        } else {
            Hardware::named(&self.device)?
        };
        let parallel = Parallel {
            tensor: self.tensor,
            pipeline: self.pipeline,
        };
        let cost = CostModel::new(&model, &hardware, parallel)?;
        let cost = cost.with_cache_type(self.cache_type.into())?;
        Ok(match &self.correction {
            None => cost,
            Some(path) => {
                let correction = correction(path, &cost)?;
                cost.with_correction(&correction)
            }
        })
    }
}

/// Reads a correction and checks that it is for the model, machine and caches of a cost model.
pub(crate) fn correction(path: &Path, cost: &CostModel) -> Result<Correction, Failure> {
    let correction = described(path, Correction::from_json)?;
    let checked = correction.check(cost);
    checked.map_err(|error| {
        let flag = match &error {
            ScheduleError::OtherOrigin { what, .. } => what,
            _ => "cache-type",
        };
        Failure::Input(format!("{}: {error} (--{flag})", path.display()))
    })?;
    Ok(correction)
}

/// Reads a description from a file; errors name the file.
pub(crate) fn described<T>(
    path: &Path,
    from_json: fn(&str) -> Result<T, ScheduleError>,
) -> Result<T, Failure> {
    let text = input::text(path, input::MOST_JSON)?;
    // Report invalid JSON with its line first.
    let _: serde_json::Value = json::read(&path.display().to_string(), &text)?;
    let described = from_json(&text);
    described.map_err(|error| Failure::Input(format!("{}: {error}", path.display())))
}

pub(crate) fn is_file(name: &str) -> bool {
    name.ends_with(".json")
}

/// Maximum of all counts: sums of several fit 32 bits.
const MOST: u32 = 1 << 24;

/// Parses a count that may be 0.
pub(crate) fn at_most(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(count @ 0..=MOST) => Ok(count),
        _ => Err(format!("give a whole number up to {MOST}")),
    }
}

/// Parses a count that must be at least 1.
pub(crate) fn at_least_1(text: &str) -> Result<u32, String> {
    count_to(MOST, text)
}

/// Parses the tokens of a page: page tables have no larger pages.
pub(crate) fn page_tokens(text: &str) -> Result<u32, String> {
    count_to(PageTable::MAX_PAGE_SIZE, text)
}

fn count_to(most: u32, text: &str) -> Result<u32, String> {
    let count = text.parse().ok().filter(|count| (1..=most).contains(count));
    count.ok_or_else(|| format!("give a whole number from 1 to {most}"))
}

pub(crate) fn positive(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value > 0.0 && f64::is_finite(value) => Ok(value),
        _ => Err("give a positive number".to_owned()),
    }
}

pub(super) fn not_negative(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(value) if value >= 0.0 && f64::is_finite(value) => Ok(value),
        _ => Err("give 0 or a positive number".to_owned()),
    }
}

/// Reads a trace from a file.
pub(crate) fn read_trace(path: &Path) -> Result<Trace, Failure> {
    let text = input::text(path, input::MOST_TRACE)?;
    Ok(Trace::parse(&text, &path.display().to_string())?)
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    /// The names of all fields, those of inner objects included.
    fn fields(value: &Value, names: &mut Vec<String>) {
        for (name, value) in value.as_object().into_iter().flatten() {
            names.push(name.clone());
            fields(value, names);
        }
    }

    #[test]
    fn the_guide_has_every_field_of_a_description() {
        let guide = include_str!("../../../docs/guide/workloads.md");
        let mut names = Vec::new();
        let model = ModelDescription::named("llama-3-8b").unwrap();
        fields(&serde_json::to_value(model).unwrap(), &mut names);
        let hardware = Hardware::named("h200").unwrap();
        fields(&serde_json::to_value(hardware).unwrap(), &mut names);
        assert!(names.len() > 15, "{names:?}");
        for name in names {
            let mut forms = [format!("`{name}`"), format!(".{name}`")].into_iter();
            assert!(forms.any(|form| guide.contains(&form)), "{name}");
        }
    }
}

//! Results as a table.

use super::{CaseResult, ResultFile};
use crate::table::{Table, WIDTH, digits, scaled, wrap};

/// Results as a table of less than 100 columns.
#[must_use]
pub fn render(file: &ResultFile) -> String {
    let ceilings = &file.ceilings;
    let units = Units::of(file);
    let machine = &file.machine;
    let mut text = format!(
        "{}, {} ({}), {}\nlimits measured in this run: read {}, copy {}, multiply-add {}\n",
        file.program,
        machine.name,
        machine.details,
        file.date,
        scaled(ceilings.read_bytes_per_s, "B/s"),
        scaled(ceilings.copy_bytes_per_s, "B/s"),
        ceilings.multiply_add(),
    );
    if !file.options.is_empty() {
        text += &format!("with {}\n", file.options.join(" "));
    }
    text.push('\n');
    let with_read = file.results.iter().any(|result| result.read.is_some());
    let mut table = Table::new([
        "case",
        "µs",
        "±%",
        if with_read { "read µs" } else { "warm µs" },
        units.bytes_name,
        units.flops_name,
        "% limit",
        "plan µs",
        "error",
    ]);
    let mut left_out = String::new();
    for result in &file.results {
        match row(result, file, &units, with_read) {
            Some(row) => table.push(row),
            None => {
                let reason = result.skipped.as_deref().unwrap_or("not run");
                let line = format!("left out: {}: {reason}", name(result));
                left_out += &wrap(&line, WIDTH, "  ");
                left_out.push('\n');
            }
        }
    }
    text += &table.render();
    text += &left_out;
    text += "\nµs: median with flushed caches, ± half the interquartile range. Bytes: each key and value once.\n\
             % limit: the least time by the read and multiply-add limits, over the time taken.\n";
    text += match with_read {
        true => "read: a plain read of as many bytes, flushed as well.\n",
        false => {
            "warm: the median of runs one after the other, whose caches are as the last left them.\n"
        }
    };
    text +=
        "error: of outputs and LSEs, sampled against f64, as a share of what rounding allows.\n";
    text
}

/// Name of the case, with the implementation if it is not tandem.
fn name(result: &CaseResult) -> String {
    if result.implementation == "tandem" {
        result.case.clone()
    } else {
        format!("{} [{}]", result.case, result.implementation)
    }
}

/// A row of the table; none if there are no times.
fn row(
    result: &CaseResult,
    file: &ResultFile,
    units: &Units,
    with_read: bool,
) -> Option<Vec<String>> {
    let times = result.times()?;
    let seconds = times.median_us / 1e6;
    let least = file.ceilings.least_seconds(result.bytes, result.flops);
    Some(vec![
        name(result),
        digits(times.median_us),
        digits(100.0 * times.spread()),
        match with_read {
            true => result.read,
            false => result.warm,
        }
        .map_or(String::new(), |stats| digits(stats.median_us)),
        digits(result.bytes as f64 / seconds / units.bytes),
        digits(result.flops as f64 / seconds / units.flops),
        format!("{:.0}", 100.0 * least / seconds),
        result
            .plan
            .map_or(String::new(), |plan| digits(plan.median_us)),
        result
            .errors
            .map_or(String::new(), |errors| digits(errors.of_bound())),
    ])
}

/// Units: giga on a CPU, tera on a GPU.
struct Units {
    bytes: f64,
    bytes_name: &'static str,
    flops: f64,
    flops_name: &'static str,
}

impl Units {
    fn of(file: &ResultFile) -> Self {
        let (bytes, bytes_name) = if file.ceilings.read_bytes_per_s < 1e12 {
            (1e9, "GB/s")
        } else {
            (1e12, "TB/s")
        };
        let (flops, flops_name) = if file.ceilings.flops_per_s < 1e13 {
            (1e9, "GFLOP/s")
        } else {
            (1e12, "TFLOP/s")
        };
        Self {
            bytes,
            bytes_name,
            flops,
            flops_name,
        }
    }
}

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
    text += &energies(file);
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

/// Energy of the runs as a table of its own; empty if none was measured.
fn energies(file: &ResultFile) -> String {
    let mut table = Table::new(["energy of a run", "mJ", "W", "pJ/FLOP", "pJ/B", "runs"]);
    let mut from_power = false;
    let mut any = false;
    for result in &file.results {
        let Some(energy) = result.energy else {
            continue;
        };
        any = true;
        from_power |= energy.from_power;
        table.push([
            name(result),
            digits(1e3 * energy.joules),
            digits(energy.watts),
            digits(energy.picojoules_per(result.flops)),
            digits(energy.picojoules_per(result.bytes)),
            energy.runs.to_string(),
        ]);
    }
    if !any {
        return String::new();
    }
    let mut text = format!("\n{}", table.render());
    text += "W: mean of the wall-clock time of runs without a pause, caches warm; mJ: that energy for a run.\n";
    text += "Both are of the whole board.\n";
    if from_power {
        text += "This GPU counts no energy: power was read during the runs, which is less exact.\n";
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        backend::{Ceilings, Machine},
        bench::{Energy, Stats, results},
    };

    #[test]
    fn energy_has_a_table_of_its_own() {
        let text = r#"{"case": "one", "implementation": "tandem", "heads": "1/1 × 64 bf16", "page_size": 16, "requests": 1,
            "query_tokens": 1, "bytes": 1000000000, "flops": 2000000000, "plan": null, "flushed": null, "warm": null,
            "errors": null, "skipped": null}"#;
        let mut result: CaseResult = serde_json::from_str(text).unwrap();
        result.warm = Some(Stats::of(vec![100.0]));
        let mut file = ResultFile {
            format: results::FORMAT.to_owned(),
            program: "tandem".to_owned(),
            date: String::new(),
            machine: Machine {
                backend: "gpu".to_owned(),
                name: "GPU".to_owned(),
                details: String::new(),
            },
            ceilings: Ceilings {
                read_bytes_per_s: 4e12,
                copy_bytes_per_s: 4e12,
                flops_per_s: 8e14,
                flops_from_description: false,
            },
            options: Vec::new(),
            results: vec![result],
        };
        assert!(!render(&file).contains("energy"));
        file.results[0].energy = Some(Energy {
            joules: 0.05,
            watts: 512.0,
            runs: 20_480,
            seconds: 2.0,
            from_power: true,
        });
        let text = render(&file);
        let row: Vec<_> = text
            .lines()
            .skip_while(|line| !line.starts_with("energy"))
            .nth(1)
            .unwrap()
            .split_whitespace()
            .collect();
        // 0.05 J for 10⁹ bytes are 50 pJ for each.
        assert_eq!(row, ["one", "50.0", "512", "25.0", "50.0", "20480"]);
        assert!(text.contains("counts no energy"), "{text}");
        let written = file.to_json();
        let read: ResultFile = serde_json::from_str(&written).unwrap();
        assert_eq!(read, file);
    }
}

//! `tandem doctor`: what this machine has, what will run where, and how to fix what is missing.

mod findings;
mod library;

use std::path::PathBuf;

use serde::Serialize;

use crate::{
    Failure,
    failure::{OF_MODELS, install_with},
    output::{self, Files, Force},
    table::{WIDTH, wrap},
};
use findings::{cpu, driver_finding, gpu_finding, kernels, libraries, memory_of, program};

const EXAMPLES: &str = "\
Examples:
  tandem doctor
  tandem doctor --json doctor.json";

/// Examine this machine: driver, GPU, kernels, libraries, CPU, and how to fix what is missing.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Write the findings as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

/// Status of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// Present and used.
    Ok,
    /// Absent, but not needed by anything requested.
    Absent,
    /// Prevents something from running.
    Problem,
}

/// A line of the report.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    what: &'static str,
    state: State,
    found: String,
    /// How to fix it.
    advice: Option<String>,
}

/// The file that `--json` writes.
#[derive(Clone, Debug, Serialize)]
struct Report {
    format: &'static str,
    program: String,
    findings: Vec<Finding>,
    /// What can run, and where.
    runs: Vec<(&'static str, String)>,
}

/// Runs the subcommand.
///
/// # Errors
/// An output that cannot be written.
pub fn run(args: &Args) -> Result<(), Failure> {
    Files::new().writes(&args.json).check(args.force)?;
    let report = examine();
    if let Some(path) = &args.json {
        let json = serde_json::to_string_pretty(&report).expect("plain data") + "\n";
        output::write_file(path, json.as_bytes())?;
    }
    output::print(&render(&report));
    Ok(())
}

fn examine() -> Report {
    let driver = library::driver();
    let gpus = driver
        .as_ref()
        .map_or(Vec::new(), |driver| driver.gpus.clone());
    let (kernels, place) = kernels(&gpus);
    let mut findings = vec![program(), cpu(), memory_of()];
    findings.push(driver_finding(&driver));
    findings.extend(
        gpus.iter()
            .enumerate()
            .map(|(index, gpu)| gpu_finding(index, gpu)),
    );
    findings.push(kernels);
    findings.extend(libraries(!gpus.is_empty()));
    let nowhere = |features| format!("nowhere: {}", install_with(features));
    let of_models = match cfg!(feature = "engine") {
        true => place.to_owned(),
        false => nowhere(OF_MODELS),
    };
    let of_traces = match cfg!(feature = "emulator") {
        true => "an emulated GPU, on the CPU".to_owned(),
        false => nowhere("emulator"),
    };
    let runs = vec![
        ("demo, attend, bench", place.to_owned()),
        (
            "plan, serve-sim, chunk-size",
            "the CPU, for any device".to_owned(),
        ),
        (
            "roofline, compare",
            "the CPU, on files of results".to_owned(),
        ),
        ("generate, serve", of_models),
        ("trace", of_traces),
    ];
    Report {
        format: "tandem-doctor-1",
        program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
        findings,
        runs,
    }
}

fn render(report: &Report) -> String {
    let mut text = String::new();
    let mut paragraph = |mark: &str, what: &str, found: &str| {
        let line = format!("{mark} {what:<9} {found}");
        text += &wrap(&line, WIDTH, "            ");
        text.push('\n');
    };
    for Finding {
        what,
        state,
        found,
        advice,
    } in &report.findings
    {
        let mark = match state {
            State::Ok => "+",
            State::Absent => "-",
            State::Problem => "!",
        };
        paragraph(mark, what, found);
        if let Some(advice) = advice {
            paragraph(" ", "", &format!("→ {advice}"));
        }
    }
    text += "\nWhat runs where:\n";
    for (what, place) in &report.runs {
        text += &wrap(&format!("  {what:<28} {place}"), WIDTH, &" ".repeat(31));
        text.push('\n');
    }
    text + "\n+ there, - not there, ! in the way\n"
}

#[cfg(test)]
mod tests {
    use super::{
        library::{Driver, GpuFacts},
        *,
    };

    #[test]
    fn a_report_says_what_is_there_and_what_to_do() {
        let report = examine();
        let found = |what: &str| report.findings.iter().find(|finding| finding.what == what);
        for what in [
            "program", "CPU", "memory", "driver", "kernels", "cuBLAS", "NCCL",
        ] {
            assert!(found(what).is_some(), "{what}");
        }
        for Finding {
            what,
            state,
            advice,
            ..
        } in &report.findings
        {
            assert!(
                *state != State::Problem || advice.is_some(),
                "{what}: what to do?"
            );
        }
        let text = render(&report);
        assert!(
            text.lines().all(|line| line.chars().count() < 100),
            "{text}"
        );
    }

    #[test]
    fn cublas_is_needed_by_the_commands_of_models() {
        let cublas = libraries(true).remove(0);
        let needed = cublas
            .advice
            .is_none_or(|advice| advice.contains("generate, serve"));
        assert!(needed || cfg!(not(feature = "engine")));
        let runs = examine().runs;
        let of_models = runs.iter().find(|(what, _)| what.contains("generate"));
        let nowhere = of_models.expect("a line").1.starts_with("nowhere");
        assert_eq!(nowhere, cfg!(not(feature = "engine")));
    }

    #[test]
    fn a_driver_that_does_not_start_is_in_the_way() {
        let driver = Driver {
            name: "libcuda.so.1".to_owned(),
            version: 13000,
            error: Some("no device".to_owned()),
            gpus: Vec::new(),
        };
        let finding = driver_finding(&Ok(driver.clone()));
        assert_eq!(finding.state, State::Problem);
        assert!(finding.found.contains("no device"), "{}", finding.found);
        let works = driver_finding(&Ok(Driver {
            error: None,
            ..driver
        }));
        assert_eq!(
            (works.state, works.found.as_str()),
            (State::Ok, "libcuda.so.1, for CUDA 13.0")
        );
        let old = GpuFacts {
            name: "old".to_owned(),
            compute: (7, 5),
            multiprocessors: 40,
            memory_bytes: 16 << 30,
        };
        assert_eq!(gpu_finding(0, &old).state, State::Problem);
    }

    /// It named a call of the library, and the CPU as the only place.
    #[cfg(feature = "cuda")]
    #[test]
    fn a_gpu_without_machine_code_is_used_with_a_flag() {
        let error = tandem_attn::Error::NoMachineCode {
            device: "B200".to_owned(),
            compute: (10, 0),
            arch: "sm_80",
            family: "step",
            refused: None,
        };
        let (finding, place) = findings::not_loaded("sm_80", &error);
        assert_eq!(finding.state, State::Problem);
        let advice = finding.advice.expect("advice");
        assert!(advice.ends_with("allow it with --compile-ptx"), "{advice}");
        assert!(place.contains("--compile-ptx"), "{place}");
    }
}

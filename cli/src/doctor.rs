//! `tandem doctor`: what this machine has, what will run where, and what to do about what is missing.

mod library;

use std::path::PathBuf;

use serde::Serialize;
use tandem_attn::exec::Cpu;

use crate::{
    Failure, backend, memory,
    output::{self, Files, Force},
    table::{WIDTH, counted, scaled, wrap},
};
use library::{Driver, GpuFacts};

const EXAMPLES: &str = "\
Examples:
  tandem doctor
  tandem doctor --json doctor.json";

/// Look at this machine: driver, GPU, kernels, libraries, CPU, and what to do about what is missing.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Write the findings as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    #[command(flatten)]
    force: Force,
}

/// How a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum State {
    /// There, and used.
    Ok,
    /// Not there; nothing that was asked for needs it.
    Absent,
    /// In the way of something that could run.
    Problem,
}

/// A line of the report.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    what: &'static str,
    state: State,
    found: String,
    /// What to do about it.
    advice: Option<String>,
}

/// What `--json` writes.
#[derive(Clone, Debug, Serialize)]
struct Report {
    format: &'static str,
    program: String,
    findings: Vec<Finding>,
    /// What runs, and where.
    runs: Vec<[&'static str; 2]>,
}

/// Runs it.
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
    let kernels = kernels(&gpus);
    let on_gpu = kernels.state == State::Ok && !gpus.is_empty();
    let mut findings = vec![program(), cpu(), memory_of()];
    findings.push(driver_finding(&driver));
    findings.extend(
        gpus.iter()
            .enumerate()
            .map(|(index, gpu)| gpu_finding(index, gpu)),
    );
    findings.push(kernels);
    findings.extend(libraries(!gpus.is_empty()));
    let place = if on_gpu {
        "GPU 0, or the CPU with --backend cpu"
    } else {
        "the CPU"
    };
    Report {
        format: "tandem-doctor-1",
        program: format!("tandem {}", env!("CARGO_PKG_VERSION")),
        findings,
        runs: vec![
            ["demo, attend, bench", place],
            ["plan, serve-sim, chunk-size", "the CPU, for any device"],
            ["roofline, compare", "the CPU, on files of results"],
        ],
    }
}

fn program() -> Finding {
    let cuda = cfg!(feature = "cuda");
    let slow = cfg!(debug_assertions);
    Finding {
        what: "program",
        state: if slow { State::Problem } else { State::Ok },
        found: format!(
            "tandem {}, {} feature cuda, {}, for {}-{}",
            env!("CARGO_PKG_VERSION"),
            if cuda { "with the" } else { "without the" },
            if slow { "not optimised" } else { "optimised" },
            std::env::consts::ARCH,
            std::env::consts::OS
        ),
        advice: slow.then(|| {
            "build with --release: what the CPU computes is many times slower without it".to_owned()
        }),
    }
}

fn cpu() -> Finding {
    let instructions = Cpu::new().instruction_set();
    let threads = rayon::current_num_threads();
    let portable = instructions.contains("portable");
    Finding {
        what: "CPU",
        state: if portable && cfg!(target_arch = "x86_64") {
            State::Problem
        } else {
            State::Ok
        },
        found: format!(
            "{}, {}, computes with {instructions} (it has {})",
            backend::processor(),
            counted(threads, "thread"),
            features().join(", ")
        ),
        advice: (portable && cfg!(target_arch = "x86_64"))
            .then(|| "AVX2 and FMA are not there: attention on this CPU is slow".to_owned()),
    }
}

/// What matters to attention of what the CPU says it has.
fn features() -> Vec<&'static str> {
    let mut features = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        for (name, there) in [
            ("AVX2", is_x86_feature_detected!("avx2")),
            ("FMA", is_x86_feature_detected!("fma")),
            ("F16C", is_x86_feature_detected!("f16c")),
            ("AVX-512F", is_x86_feature_detected!("avx512f")),
            ("AVX-512BF16", is_x86_feature_detected!("avx512bf16")),
        ] {
            if there {
                features.push(name);
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    features.push("NEON");
    if features.is_empty() {
        features.push("nothing beyond the baseline");
    }
    features
}

fn memory_of() -> Finding {
    let free = memory::available();
    Finding {
        what: "memory",
        state: State::Ok,
        found: format!("{} can be taken by this process", scaled(free as f64, "B")),
        advice: None,
    }
}

fn driver_finding(driver: &Result<Driver, String>) -> Finding {
    match driver {
        Ok(Driver { name, version, error: None, .. }) => Finding {
            what: "driver",
            state: State::Ok,
            found: format!("{name}, for CUDA {}.{}", version / 1000, version % 1000 / 10),
            advice: None,
        },
        Ok(Driver { name, error: Some(error), .. }) => Finding {
            what: "driver",
            state: State::Problem,
            found: format!("{name} is there and does not start: {error}"),
            advice: Some(
                "see that the kernel module is loaded (nvidia-smi) and that this user and container may use \
                 /dev/nvidia*"
                    .to_owned(),
            ),
        },
        Err(tried) => Finding {
            what: "driver",
            state: State::Absent,
            found: format!("none: {tried}"),
            advice: Some(
                "for an NVIDIA GPU install its driver (libcuda.so.1 comes with it), in a container pass the GPU on \
                 (--gpus all); TANDEM_LIBCUDA names a library in an unusual place"
                    .to_owned(),
            ),
        },
    }
}

fn gpu_finding(index: usize, gpu: &GpuFacts) -> Finding {
    let (major, minor) = gpu.compute;
    let old = major < 8;
    Finding {
        what: "GPU",
        state: if old { State::Problem } else { State::Ok },
        found: format!(
            "{index}: {}, compute capability {major}.{minor}, {} SMs, {}",
            gpu.name,
            gpu.multiprocessors,
            scaled(gpu.memory_bytes as f64, "B")
        ),
        advice: old.then(|| {
            "kernels are for compute capability 8.0 and newer: use --backend cpu".to_owned()
        }),
    }
}

#[cfg(not(feature = "cuda"))]
fn kernels(gpus: &[GpuFacts]) -> Finding {
    Finding {
        what: "kernels",
        state: if gpus.is_empty() {
            State::Absent
        } else {
            State::Problem
        },
        found: "none in this program".to_owned(),
        advice: Some("build with --features cuda to run on NVIDIA GPUs".to_owned()),
    }
}

#[cfg(feature = "cuda")]
fn kernels(gpus: &[GpuFacts]) -> Finding {
    use tandem_attn::exec::gpu::{Gpu, MODULES};

    let mut inside: Vec<String> = Vec::new();
    let mut only_ptx = false;
    for module in MODULES {
        let machine_code = module.cubin.is_some();
        only_ptx |= !machine_code;
        let form = if machine_code { "machine code" } else { "PTX" };
        let line = format!("{} as {form}", module.arch);
        if !inside.contains(&line) {
            inside.push(line);
        }
    }
    let inside = inside.join(", ");
    if gpus.is_empty() {
        return Finding {
            what: "kernels",
            state: State::Absent,
            found: format!("{inside}; no GPU to load them"),
            advice: None,
        };
    }
    match Gpu::new(0) {
        Ok(gpu) => Finding {
            what: "kernels",
            state: State::Ok,
            found: format!("{inside}; GPU 0 runs those for {}", gpu.arch()),
            advice: only_ptx.then(|| {
                "the driver compiles PTX at every start, which takes long: build where ptxas is found".to_owned()
            }),
        },
        Err(error) => Finding {
            what: "kernels",
            state: State::Problem,
            found: format!("{inside}; GPU 0 does not take them"),
            advice: Some(error.to_string()),
        },
    }
}

/// Libraries of NVIDIA's that programs beside this one need: nothing here does.
fn libraries(with_gpu: bool) -> Vec<Finding> {
    let finding = |what, use_of: &str, found: Option<String>| Finding {
        what,
        state: if found.is_some() {
            State::Ok
        } else {
            State::Absent
        },
        advice: (found.is_none() && with_gpu).then(|| {
            format!("{use_of}; put its directory into LD_LIBRARY_PATH if it is installed")
        }),
        found: found.unwrap_or_else(|| "not found".to_owned()),
    };
    vec![
        finding(
            "cuBLAS",
            "nothing of tandem needs it, linear layers of an engine may",
            library::cublas(),
        ),
        finding(
            "NCCL",
            "nothing of tandem needs it, several GPUs of an engine may",
            library::nccl(),
        ),
    ]
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
    for [what, place] in &report.runs {
        text += &format!("  {what:<28} {place}\n");
    }
    text + "\n+ there, - not there, ! in the way\n"
}

#[cfg(test)]
mod tests {
    use super::*;

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
}

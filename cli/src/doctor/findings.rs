//! The single checks.

use tandem_attn::exec::Cpu;

use super::{
    Finding, State,
    library::{self, Driver, GpuFacts},
};
#[cfg(feature = "cuda")]
use crate::failure::in_flags;
#[cfg(not(feature = "cuda"))]
use crate::failure::install_with;
use crate::{
    backend, memory,
    table::{counted, scaled},
};

pub(super) fn program() -> Finding {
    let features = [
        ("cuda", cfg!(feature = "cuda")),
        ("emulator", cfg!(feature = "emulator")),
        ("engine", cfg!(feature = "engine")),
    ];
    let features: Vec<_> = features
        .iter()
        .filter_map(|&(name, on)| on.then_some(name))
        .collect();
    let slow = cfg!(debug_assertions);
    Finding {
        what: "program",
        state: if slow { State::Problem } else { State::Ok },
        found: format!(
            "tandem {}, {}, {}, for {}-{}",
            env!("CARGO_PKG_VERSION"),
            match features[..] {
                [] => "without the features cuda, emulator and engine".to_owned(),
                [one] => format!("with the feature {one}"),
                _ => format!("with the features {}", features.join(", ")),
            },
            if slow { "not optimised" } else { "optimised" },
            std::env::consts::ARCH,
            std::env::consts::OS
        ),
        advice: slow.then(|| {
            "build with --release: what the CPU computes is many times slower without it".to_owned()
        }),
    }
}

pub(super) fn cpu() -> Finding {
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

/// CPU features that matter to attention.
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

pub(super) fn memory_of() -> Finding {
    let free = memory::available();
    Finding {
        what: "memory",
        state: State::Ok,
        found: format!("{} can be taken by this process", scaled(free as f64, "B")),
        advice: None,
    }
}

pub(super) fn driver_finding(driver: &Result<Driver, String>) -> Finding {
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

pub(super) fn gpu_finding(index: usize, gpu: &GpuFacts) -> Finding {
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

/// The kernels, and where plans run with them.
#[cfg(not(feature = "cuda"))]
pub(super) fn kernels(gpus: &[GpuFacts]) -> (Finding, &'static str) {
    let finding = Finding {
        what: "kernels",
        state: if gpus.is_empty() {
            State::Absent
        } else {
            State::Problem
        },
        found: "none in this program".to_owned(),
        advice: Some(format!(
            "to run on NVIDIA GPUs, install with {}",
            install_with("cuda")
        )),
    };
    (finding, "the CPU")
}

/// The kernels, and where plans run with them.
#[cfg(feature = "cuda")]
pub(super) fn kernels(gpus: &[GpuFacts]) -> (Finding, &'static str) {
    use tandem_attn::exec::gpu::{Gpu, MODULES};

    let mut inside: Vec<String> = Vec::new();
    for arch in MODULES.iter().map(|module| module.arch) {
        let of_arch = || MODULES.iter().filter(|module| module.arch == arch);
        let families: Vec<_> = of_arch().map(|module| module.family).collect();
        let machine_code = of_arch().all(|module| module.cubin.is_some());
        let form = if machine_code { "machine code" } else { "PTX" };
        let line = format!("{arch} ({form}: {})", families.join(", "));
        if !inside.contains(&line) {
            inside.push(line);
        }
    }
    let only_ptx = MODULES.iter().any(|module| module.cubin.is_none());
    let inside = inside.join(", ");
    if gpus.is_empty() {
        let finding = Finding {
            what: "kernels",
            state: State::Absent,
            found: format!("{inside}; no GPU to load them"),
            advice: None,
        };
        return (finding, "the CPU");
    }
    let gpu = match Gpu::new(0) {
        Ok(gpu) => gpu,
        Err(error) => return not_loaded(&inside, &error),
    };
    let finding = Finding {
        what: "kernels",
        state: State::Ok,
        found: format!("{inside}; GPU 0 runs those for {}", gpu.arch()),
        advice: only_ptx.then(|| {
            "the driver compiles PTX at the first start, which takes a minute or more: build where ptxas is found".to_owned()
        }),
    };
    (finding, "GPU 0, or the CPU with --backend cpu")
}

/// Kernels that GPU 0 does not take, and where plans run then.
#[cfg(feature = "cuda")]
pub(super) fn not_loaded(inside: &str, error: &tandem_attn::Error) -> (Finding, &'static str) {
    let finding = Finding {
        what: "kernels",
        state: State::Problem,
        found: format!("{inside}; GPU 0 does not take them"),
        advice: Some(in_flags(&error.to_string())),
    };
    let place = match error {
        tandem_attn::Error::NoMachineCode { .. } => {
            "GPU 0 with --compile-ptx, or the CPU with --backend cpu"
        }
        _ => "the CPU, with --backend cpu",
    };
    (finding, place)
}

/// NVIDIA's libraries: models need cuBLASLt on a GPU; other programs use the rest.
pub(super) fn libraries(with_gpu: bool) -> Vec<Finding> {
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
            match cfg!(feature = "engine") {
                true => {
                    "tandem generate, serve and bench --serve need it on a GPU: install the CUDA toolkit's package for \
                     it (libcublas-13-x or libcublas-12-x, in pip nvidia-cublas)"
                }
                false => "nothing of tandem needs it, linear layers of an engine may",
            },
            library::cublas(),
        ),
        finding(
            "NCCL",
            "tandem bench --gpus also measures its exchange if it is there, and Gpu::nccl_rank needs it",
            library::nccl(),
        ),
    ]
}

//! The emulator against the hardware: the same launches on both, and pieces of PTX that show each layout.
//!
//! The emulated side runs in processes of its own, or before: `TANDEM_FIDELITY_RECORD=DIRECTORY` writes what it
//! computes, on the emulator; `TANDEM_FIDELITY=DIRECTORY` compares with it, on a GPU. What differs there goes to the
//! folder `TANDEM_FIDELITY_SAVE`; `TANDEM_FIDELITY_FROM=NUMBER` leaves out the tasks before.

mod matrix;
mod record;
mod scalar;
mod tensor;
mod wgmma;

use crate::{common, launches};
use std::{
    collections::BTreeSet,
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicUsize, Ordering},
};

use kernels_gpu::registry::Op;
use launches::Output;
use record::{Record, Recorded};
use tandem_attn::exec::gpu::{Gpu, KernelId};

const TEST: &str = "fidelity::the_emulator_computes_what_the_gpu_does";

/// One thing that both do.
enum Task {
    Kernel(KernelId, u64),
    Scalar(usize),
    Matrix(u64),
    Tensor(u64),
    Wgmma(wgmma::Shape),
}

impl Task {
    fn all(seeds: u64) -> Vec<Self> {
        let mut tasks = Vec::new();
        for seed in 1..=seeds {
            // Kernels whose choice takes a problem that fills the machine.
            let is_large = |id: &KernelId| match id.info().op {
                Op::QkvStep { heads, .. } => heads > 1,
                Op::Merge(_) => !id.info().name.starts_with("merge_few"),
                Op::MeasureRead | Op::MeasureProducts => true,
                _ => false,
            };
            let kernels = KernelId::all().filter(|id| seed <= 2 || !is_large(id));
            tasks.extend(kernels.map(|id| Self::Kernel(id, seed)));
        }
        tasks.extend((0..scalar::OPERATIONS.len()).map(Self::Scalar));
        tasks.extend((0..8).map(Self::Matrix));
        tasks.extend((0..tensor::CASES).map(Self::Tensor));
        tasks.extend(wgmma::Shape::all().into_iter().map(Self::Wgmma));
        tasks
    }

    fn is_kernel(&self) -> bool {
        matches!(self, Self::Kernel(..))
    }

    fn name(&self) -> String {
        match self {
            Self::Kernel(id, seed) => format!("{id}, seed {seed}"),
            Self::Scalar(index) => scalar::OPERATIONS[*index].to_owned(),
            Self::Matrix(seed) => format!("fragments, seed {seed}"),
            Self::Tensor(case) => format!("tensor map, case {case}"),
            Self::Wgmma(shape) => shape.to_string(),
        }
    }

    fn run(&self, gpu: &Gpu) -> Result<Vec<Output>, String> {
        match self {
            Self::Kernel(id, seed) => launches::run(gpu, id.info(), *seed, false),
            Self::Scalar(index) => scalar::run(*index),
            Self::Matrix(seed) => matrix::run(*seed),
            Self::Tensor(case) => tensor::run(*case),
            Self::Wgmma(shape) => wgmma::run(shape),
        }
    }
}

/// Problems for each kernel; as many as make 2,000 launches.
const SEEDS: u64 = 11;

fn seeds() -> u64 {
    let seeds = std::env::var("TANDEM_FIDELITY_SEEDS").ok();
    seeds.map_or(SEEDS, |text| text.parse().expect("a number"))
}

/// The tasks of part `part` of `parts`, on the emulator, into a file.
fn record(gpu: &Gpu, directory: &Path) {
    let (part, parts) = part();
    let tasks = Task::all(seeds());
    let mut file = record::Writer::create(&record::file(directory, part)).expect("a file");
    for (index, task) in tasks.iter().enumerate() {
        if index % parts != part {
            continue;
        }
        let name = task.name();
        let outputs = task.run(gpu);
        let outputs = outputs.unwrap_or_else(|text| panic!("{name}: {text}"));
        let outputs = outputs.into_iter().map(Output::recorded).collect();
        file.put(&Record { name, outputs }).expect("written");
    }
    let launches = libcuda::symbol(c"ptx_driver_launches").expect("the emulator");
    // SAFETY: the type is that of the function in the emulator.
    let launches: extern "C" fn() -> u64 = unsafe { std::mem::transmute(launches) };
    file.finish(launches()).expect("written");
}

/// Which part of how many this process has.
fn part() -> (usize, usize) {
    let text = std::env::var("TANDEM_FIDELITY_PART").unwrap_or_else(|_| "0/1".into());
    let (part, parts) = text.split_once('/').expect("part/parts");
    let number = |text: &str| text.parse().expect("a number");
    (number(part), number(parts))
}

/// The emulator, where cargo puts it.
fn emulator() -> Option<PathBuf> {
    let named = std::env::var_os("TANDEM_EMULATOR").map(PathBuf::from);
    let program = std::env::current_exe().ok()?;
    let near = program.ancestors().skip(1).take(3);
    let near = near.map(|folder| folder.join("libptx_driver.so"));
    named.into_iter().chain(near).find(|place| place.is_file())
}

/// Has the emulator compute everything, in as many processes as there are cores.
fn emulate(gpu: &Gpu, emulator: &Path, directory: &Path) {
    let parts = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(16));
    let children: Vec<_> = (0..parts)
        .map(|part| {
            Command::new(std::env::current_exe().expect("this program"))
                .args(["--exact", TEST])
                .env("TANDEM_LIBCUDA", emulator)
                .env("TANDEM_REQUIRE_GPU", "1")
                .env("PTX_DRIVER", format!("sms={}", gpu.multiprocessors()))
                .env("TANDEM_FIDELITY_RECORD", directory)
                .env("TANDEM_FIDELITY_PART", format!("{part}/{parts}"))
                .spawn()
                .expect("a process")
        })
        .collect();
    for mut child in children {
        assert!(
            child.wait().expect("it ends").success(),
            "the emulator failed"
        );
    }
}

/// What a thread has compared.
#[derive(Default)]
struct Compared {
    kernels: BTreeSet<&'static str>,
    outputs: usize,
    bitwise: usize,
    differences: Vec<String>,
}

impl Compared {
    fn task(&mut self, task: &Task, gpu: &Gpu, recorded: &Recorded) {
        let name = task.name();
        let Some(emulated) = recorded.outputs.get(&name) else {
            return self
                .differences
                .push(format!("{name}: not computed by the emulator"));
        };
        if let Task::Kernel(id, _) = task {
            self.kernels.insert(id.info().name);
        }
        let got = match task.run(gpu) {
            Ok(got) if got.len() == emulated.len() => got,
            Ok(got) => {
                return self
                    .differences
                    .push(format!("{name}: {} outputs", got.len()));
            }
            Err(text) => return self.differences.push(format!("{name}: {text}")),
        };
        for (whole, emulated) in got.into_iter().zip(emulated) {
            let got = whole.clone().recorded();
            self.outputs += 1;
            self.bitwise += usize::from(got.bytes == emulated.bytes);
            let Err(text) = emulated.check(&got) else {
                continue;
            };
            self.differences.push(format!("{name}: {text}"));
            // For whoever looks for the reason.
            if let Some(directory) = std::env::var_os("TANDEM_FIDELITY_SAVE") {
                let file = format!("{name}, {}.bin", whole.name);
                let file = file.replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "_");
                std::fs::write(Path::new(&directory).join(file), &whole.bytes).expect("written");
            }
        }
    }
}

#[test]
fn the_emulator_computes_what_the_gpu_does() {
    let Some(gpu) = common::gpu(TEST) else { return };
    let skip = |why: &str| {
        let _ = writeln!(std::io::stderr(), "skipped: {TEST}: {why}");
    };
    let is_emulator = libcuda::symbol(c"ptx_driver_launches").is_some();
    if let Some(directory) = std::env::var_os("TANDEM_FIDELITY_RECORD") {
        assert!(is_emulator, "only what the emulator computes is recorded");
        return record(gpu, Path::new(&directory));
    }
    let given = std::env::var_os("TANDEM_FIDELITY").map(PathBuf::from);
    if is_emulator && given.is_none() {
        return skip("this is the emulator, and not the hardware");
    }
    if gpu.compute_capability() != (9, 0) {
        return skip("the launches are those of Hopper");
    }
    let temporary = std::env::temp_dir().join(format!("tandem-fidelity-{}", std::process::id()));
    let directory = match given {
        Some(directory) => directory,
        None => {
            let Some(emulator) = emulator() else {
                return skip(
                    "no libptx_driver.so near this program: cargo build -p tandem-ptx-driver",
                );
            };
            std::fs::create_dir_all(&temporary).expect("a folder");
            emulate(gpu, &emulator, &temporary);
            temporary.clone()
        }
    };
    let recorded = record::read_all(&directory).expect("what the emulator computed");
    let _ = std::fs::remove_dir_all(&temporary);
    let first = |name: &str| {
        std::env::var(name)
            .ok()
            .map(|text| text.parse().expect("a number"))
    };
    let from = first("TANDEM_FIDELITY_FROM").unwrap_or(0_usize);
    let tasks = Task::all(seeds());
    let kernels = tasks.iter().filter(|task| task.is_kernel()).count();
    let next = AtomicUsize::new(from);
    let threads = std::thread::available_parallelism().map_or(1, |cores| cores.get().min(16));
    let mut compared: Vec<Compared> = std::thread::scope(|scope| {
        let compare = || {
            gpu.make_current().expect("the primary context is there");
            let mut compared = Compared::default();
            let claim = || next.fetch_add(1, Ordering::Relaxed);
            let mut index = claim();
            while index < kernels {
                compared.task(&tasks[index], gpu, &recorded);
                index = claim();
            }
            compared
        };
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(compare)).collect();
        let workers = workers.into_iter();
        workers.map(|one| one.join().expect("it ends")).collect()
    });
    // One after the other: what is not right in one of these may take the context with it.
    let mut pieces = Compared::default();
    for (index, task) in tasks.iter().enumerate().skip(kernels.max(from)) {
        pieces.task(task, gpu, &recorded);
        if gpu
            .stream()
            .and_then(|stream| stream.synchronize())
            .is_err()
        {
            pieces.differences.push(format!(
                "the context is lost after task {index}, {}",
                task.name()
            ));
            break;
        }
    }
    compared.push(pieces);
    let sum = |of: fn(&Compared) -> usize| compared.iter().map(of).sum::<usize>();
    let kernels: BTreeSet<_> = compared.iter().flat_map(|one| &one.kernels).collect();
    println!(
        "fidelity: {} runs, {} launches of {} kernels and of pieces, {} outputs, {} the same to the bit, {} differences",
        tasks.len(),
        recorded.launches,
        kernels.len(),
        sum(|one| one.outputs),
        sum(|one| one.bitwise),
        sum(|one| one.differences.len()),
    );
    let differences: Vec<_> = compared.iter().flat_map(|one| &one.differences).collect();
    for difference in differences.iter().take(200) {
        println!("{difference}");
    }
    assert!(differences.is_empty());
}

//! Many cases, on several threads, until one fails.

use std::{
    fs,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    sync::{
        Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ptx_gpu::Settings;
use tandem_attn::exec::gpu::{Gpu, modules_of};

use crate::{
    Target,
    case::Case,
    cpu,
    draw::{Draw, Size},
    gpu,
    shrink::shrink,
    tally::{Failure, Tally},
};

/// Which cases.
pub struct Run {
    pub seeds: Range<u64>,
    pub time: Option<Duration>,
    pub threads: usize,
    pub tiny: bool,
    /// What is to be special about cases.
    pub with: Option<String>,
    /// The compute capability of an emulated GPU.
    pub compute: i32,
    /// Kernels in the place of those in the program.
    pub modules: Option<PathBuf>,
    /// Where those that fail are written.
    pub out: PathBuf,
}

/// A case that takes longer than this hangs.
const HANGS: Duration = Duration::from_secs(120);

/// Where cases run.
pub enum Place {
    Cpu,
    Gpu(Box<Gpu>),
    /// With its compute capability.
    Emulated(Box<Gpu>, i32),
}

/// Each case has an order of warps of its own.
fn settings(compute: i32, seed: u64) -> Settings {
    Settings {
        compute,
        ..Settings::in_order(seed, seed)
    }
}

impl Place {
    /// # Errors
    /// Where there is no such GPU.
    pub fn new(target: Target, modules: Option<&Path>, compute: i32) -> Result<Self, String> {
        let replaced = modules.map(modules_of).transpose();
        let replaced = replaced.map_err(|error| error.to_string())?;
        let load = || {
            let mut tell = |_| {};
            let builder = Gpu::builder().compile_ptx(&mut tell);
            let builder = match &replaced {
                Some(replaced) => builder.modules(&replaced.modules),
                None => builder,
            };
            let gpu = builder.build(0).map(Box::new);
            gpu.map_err(|error| error.to_string())
        };
        match target {
            Target::Cpu | Target::Plans | Target::Delays => Ok(Self::Cpu),
            Target::Gpu => Ok(Self::Gpu(load()?)),
            Target::Emulated => {
                let emulator = libcuda::stand_in("the emulator", ptx_gpu::symbol);
                emulator.map_err(|_| "another driver is in use")?;
                ptx_gpu::configure(settings(compute, 0));
                Ok(Self::Emulated(load()?, compute))
            }
        }
    }

    pub fn draw(&self, tiny: bool) -> Draw {
        Draw {
            gpu: !matches!(self, Self::Cpu),
            size: match tiny {
                true => Size::Tiny,
                false => Size::Usual,
            },
        }
    }

    /// Runs a case; a panic is a failure of it.
    pub fn case(&self, case: &Case) -> Result<Tally, Failure> {
        let run = || match self {
            Self::Cpu => cpu::run(case),
            Self::Gpu(gpu) => gpu::run(case, gpu),
            Self::Emulated(gpu, compute) => {
                ptx_gpu::configure(settings(*compute, case.seed));
                let done = gpu::run(case, gpu);
                if done.is_err() {
                    ptx_gpu::forget_failure();
                }
                done
            }
        };
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
            let text = panic.downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(Failure {
                step: None,
                what: format!("panicked: {}", text.unwrap_or("without a word")),
            })
        })
    }

    /// Whether a failure leaves the place as it was, so that smaller cases can be tried.
    fn survives(&self, failure: &Failure) -> bool {
        !matches!(self, Self::Gpu(_)) || !failure.what.contains("CUDA_ERROR")
    }
}

/// Runs the cases, and says what was called.
///
/// # Errors
/// The first case that fails: it was shrunk and written.
pub fn run(target: Target, run: &Run) -> Result<(), String> {
    let place = Place::new(target, run.modules.as_deref(), run.compute)?;
    let draw = place.draw(run.tiny);
    let hangs = match (&place, run.tiny) {
        (Place::Emulated(..), false) => 10 * HANGS,
        _ => HANGS,
    };
    let threads = match place {
        Place::Emulated(..) => 1,
        _ => run.threads.max(1),
    };
    let (next, left_out, stop, start) = (
        AtomicU64::new(run.seeds.start),
        AtomicU64::new(0),
        AtomicBool::new(false),
        Instant::now(),
    );
    let (all, failed) = (Mutex::new(Tally::default()), Mutex::new(None));
    // What each thread is at, for whoever watches.
    let busy: Vec<Mutex<Option<(u64, Instant)>>> = (0..threads).map(|_| Mutex::new(None)).collect();
    let at_work = AtomicU64::new(threads as u64);
    let work = |at: &Mutex<Option<(u64, Instant)>>| {
        while !stop.load(Ordering::Relaxed) && run.time.is_none_or(|time| start.elapsed() < time) {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= run.seeds.end {
                break;
            }
            *at.lock().expect("nobody panics") = Some((seed, Instant::now()));
            let case = draw.case(seed);
            if run.with.as_ref().is_some_and(|with| !case.has(with)) {
                left_out.fetch_add(1, Ordering::Relaxed);
                continue;
            }
            match place.case(&case) {
                Ok(tally) => all.lock().expect("nobody panics").add(tally),
                Err(failure) => {
                    stop.store(true, Ordering::Relaxed);
                    let first = &mut *failed.lock().expect("nobody panics");
                    first.get_or_insert((seed, failure));
                }
            }
        }
        *at.lock().expect("nobody panics") = None;
        at_work.fetch_sub(1, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        busy.iter().for_each(|at| {
            scope.spawn(|| work(at));
        });
        while at_work.load(Ordering::Relaxed) > 0 {
            std::thread::sleep(Duration::from_millis(20));
            for at in &busy {
                let at = *at.lock().expect("nobody panics");
                if let Some((seed, since)) = at
                    && since.elapsed() > hangs
                {
                    eprintln!("seed {seed} hangs: {:?}", draw.case(seed));
                    std::process::exit(3);
                }
            }
        }
    });
    let cases = next.into_inner().min(run.seeds.end) - run.seeds.start - left_out.into_inner();
    report(
        &all.into_inner().expect("nobody panics"),
        cases,
        start.elapsed(),
    );
    let Some((seed, failure)) = failed.into_inner().expect("nobody panics") else {
        return Ok(());
    };
    let mut case = draw.case(seed);
    let mut what = failure.to_string();
    if place.survives(&failure) {
        (case, what) = shrink(case, what, |smaller| {
            place.case(smaller).err().map(|failure| failure.to_string())
        });
    }
    let file = write(&run.out, &case)?;
    Err(format!(
        "seed {seed} fails: {failure}\nas {}: {what}\n`tandem-fuzz … --replay {}` runs it again",
        file.display(),
        file.display()
    ))
}

/// Runs the case of a file.
///
/// # Errors
/// What it does wrong, or why it cannot be read.
pub fn replay(target: Target, run: &Run, file: &Path) -> Result<(), String> {
    let text = fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let case: Case = serde_json::from_str(&text).map_err(|error| error.to_string())?;
    let start = Instant::now();
    let done = Place::new(target, run.modules.as_deref(), run.compute)?.case(&case);
    let tally = done.map_err(|failure| failure.to_string())?;
    report(&tally, 1, start.elapsed());
    Ok(())
}

fn write(folder: &Path, case: &Case) -> Result<PathBuf, String> {
    let file = folder.join(format!("fuzz-{}.json", case.seed));
    let text = serde_json::to_string_pretty(case).map_err(|error| error.to_string())?;
    fs::create_dir_all(folder).map_err(|error| error.to_string())?;
    fs::write(&file, text + "\n").map_err(|error| error.to_string())?;
    Ok(file)
}

fn report(tally: &Tally, cases: u64, time: Duration) {
    println!(
        "{cases} cases, {} calls in {:.1} s, {} of them wrong and refused, of {} classes",
        tally.calls,
        time.as_secs_f64(),
        tally.wrong.values().sum::<u64>(),
        tally.wrong.len()
    );
    for (class, count) in &tally.wrong {
        println!("  {count:8} {class}");
    }
    println!("results that were right, by what is special about them:");
    for (special, count) in &tally.right {
        println!("  {count:8} {special}");
    }
    println!(
        "{} right calls that were refused",
        tally.unsupported.values().sum::<u64>()
    );
    for (error, count) in &tally.unsupported {
        println!("  {count:8} {error}");
    }
}

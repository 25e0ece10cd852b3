//! The emulated GPU: memory, modules, streams, and failures.

use std::{
    collections::HashMap,
    ffi::CString,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    thread::{self, ThreadId},
    time::Instant,
};

use ptx_run::{Launch, Memory, Module, Timeline};

use crate::{settings::Settings, work::Work};

/// `CUresult`.
pub type Code = u32;
pub const SUCCESS: Code = 0;
pub const INVALID_VALUE: Code = 1;
pub const OUT_OF_MEMORY: Code = 2;
pub const INVALID_DEVICE: Code = 101;
pub const INVALID_CONTEXT: Code = 201;
pub const NO_BINARY: Code = 209;
pub const NO_PEER_ACCESS: Code = 217;
pub const INVALID_PTX: Code = 218;
pub const INVALID_HANDLE: Code = 400;
pub const NOT_FOUND: Code = 500;
pub const LAUNCH_FAILED: Code = 719;
pub const CAPTURING: Code = 900;
pub const UNJOINED: Code = 904;
pub const CAPTURED_EVENT: Code = 907;
pub const INVALID_CLUSTER_SIZE: Code = 912;

/// An entry of a module.
#[derive(Clone)]
pub struct Function {
    pub module: Arc<Module>,
    pub entry: String,
    pub static_shared: u32,
    /// Bytes of dynamic shared memory that launches may ask for.
    pub max_dynamic: u32,
    /// Whether clusters may have more than 8 blocks.
    pub large_clusters: bool,
    pub max_threads: u32,
    pub min_blocks: u32,
}

/// A stream that takes part in the capture of another one.
struct Joined {
    origin: usize,
    /// How much it has done in the capture, and how much of that another stream of the capture waits for.
    done: u64,
    awaited: u64,
}

/// Which threads must not make calls that could wait for the work of a capture, or would run at once instead of in the graph.
/// `CUstreamCaptureMode`.
#[derive(Clone, Copy)]
pub enum CaptureMode {
    Global,
    ThreadLocal(ThreadId),
    Relaxed,
}

impl CaptureMode {
    /// That of a capture by this thread.
    pub fn new(mode: u32) -> Option<Self> {
        match mode {
            0 => Some(Self::Global),
            1 => Some(Self::ThreadLocal(thread::current().id())),
            2 => Some(Self::Relaxed),
            _ => None,
        }
    }

    fn forbids_here(self) -> bool {
        match self {
            Self::Global => true,
            Self::ThreadLocal(id) => id == thread::current().id(),
            Self::Relaxed => false,
        }
    }
}

/// An event of a capture: the capture's stream, that on which it was recorded, and what that had done.
struct Recorded {
    origin: usize,
    stream: usize,
    done: u64,
}

/// What GPU a context was retained for. A program may change the settings and use several GPUs in turn.
#[derive(Clone, Copy, PartialEq)]
pub struct Architecture {
    pub compute: i32,
    pub multiprocessors: u32,
}

impl Architecture {
    /// Bytes of shared memory of a multiprocessor, and of a block at most: those of an A100, or of an H100.
    pub const fn shared_memory(self) -> (u32, u32) {
        match self.compute {
            80 => (167_936, 166_912),
            _ => (233_472, 232_448),
        }
    }
}

pub struct Gpu {
    pub settings: Settings,
    /// What each context was retained for.
    pub contexts: Vec<Architecture>,
    pub memory: Memory,
    pub modules: HashMap<usize, Arc<Module>>,
    pub functions: HashMap<usize, Function>,
    /// Captured work by stream.
    pub captures: HashMap<usize, Vec<Work>>,
    /// Their modes.
    pub modes: HashMap<usize, CaptureMode>,
    /// Streams that wait for an event of a capture.
    joined: HashMap<usize, Joined>,
    /// Events recorded in a capture.
    events: HashMap<usize, Recorded>,
    /// When an event was recorded outside of captures.
    pub times: HashMap<usize, Instant>,
    /// Graphs and their executables.
    pub graphs: HashMap<usize, Vec<Work>>,
    next_handle: usize,
    pub launches: u64,
    /// Timelines of traced launches.
    pub timelines: Vec<Timeline>,
    /// Whether a launch failed; no work is done after that.
    pub failed: bool,
    /// The report of the failure.
    pub failure: Option<CString>,
}

impl Gpu {
    fn new() -> Self {
        Self {
            settings: Settings::read(),
            contexts: Vec::new(),
            memory: Memory::new(),
            modules: HashMap::new(),
            functions: HashMap::new(),
            captures: HashMap::new(),
            modes: HashMap::new(),
            joined: HashMap::new(),
            events: HashMap::new(),
            times: HashMap::new(),
            graphs: HashMap::new(),
            next_handle: 0x1000,
            launches: 0,
            timelines: Vec::new(),
            failed: false,
            failure: None,
        }
    }

    pub fn handle(&mut self) -> usize {
        self.next_handle += 16;
        self.next_handle
    }

    /// Performs a piece of work, or adds it to the stream's capture.
    pub fn put(&mut self, stream: usize, work: Work) -> Code {
        let joined = self.joined.get_mut(&stream);
        let origin = joined.map_or(stream, |joined| {
            joined.done += 1;
            joined.origin
        });
        if let Some(captured) = self.captures.get_mut(&origin) {
            captured.push(work);
            return SUCCESS;
        }
        self.perform(&work)
    }

    /// Records an event on a stream. If the stream is being captured, the event belongs to the capture.
    pub fn record(&mut self, event: usize, stream: usize) {
        let joined = self.joined.get(&stream);
        let (origin, done) = joined.map_or((stream, 0), |joined| (joined.origin, joined.done));
        if self.captures.contains_key(&origin) {
            let recorded = Recorded {
                origin,
                stream,
                done,
            };
            self.events.insert(event, recorded);
            self.times.remove(&event);
        } else {
            self.events.remove(&event);
            self.times.insert(event, Instant::now());
        }
    }

    /// Whether the stream is in a capture, its own or one that it has joined.
    pub fn is_captured(&self, stream: usize) -> bool {
        self.captures.contains_key(&stream) || self.joined.contains_key(&stream)
    }

    /// Whether a capture forbids this thread to allocate and free memory, and to make calls that return when their work is done.
    pub fn forbids_unsafe_calls(&self) -> bool {
        self.modes.values().any(|mode| mode.forbids_here())
    }

    /// Whether the event was last recorded in a capture that goes on.
    pub fn belongs_to_capture(&self, event: usize) -> bool {
        self.events.contains_key(&event)
    }

    /// Makes a stream wait for an event. If the event belongs to a capture, the stream joins that capture.
    pub fn hold(&mut self, stream: usize, event: usize) {
        let Some(&Recorded {
            origin,
            stream: of,
            done,
        }) = self.events.get(&event)
        else {
            return;
        };
        if of == stream {
            return;
        }
        if let Some(awaited) = self.joined.get_mut(&of) {
            awaited.awaited = awaited.awaited.max(done);
        }
        if stream != origin {
            let joined = self.joined.entry(stream).or_insert(Joined {
                origin,
                done: 0,
                awaited: 0,
            });
            joined.done += 1;
        }
    }

    /// Ends the capture of a stream and of the streams that joined it. `Err` if there is none, or if one of these is not
    /// waited for at its end.
    pub fn end_capture(&mut self, stream: usize) -> Result<Vec<Work>, Code> {
        let mut of_it = self
            .joined
            .values()
            .filter(|joined| joined.origin == stream);
        let is_open = of_it.any(|joined| joined.awaited < joined.done);
        self.joined.retain(|_, joined| joined.origin != stream);
        self.events.retain(|_, event| event.origin != stream);
        self.modes.remove(&stream);
        let captured = self.captures.remove(&stream).ok_or(INVALID_VALUE)?;
        if is_open { Err(UNJOINED) } else { Ok(captured) }
    }

    pub fn perform(&mut self, work: &Work) -> Code {
        if self.failed {
            return LAUNCH_FAILED;
        }
        let result = match work {
            Work::Launch {
                function,
                launch,
                parameters,
            } => self.launch(function, launch, parameters),
            Work::Write { target, bytes } => self
                .memory
                .write(*target, bytes)
                .map_err(|fault| fault.to_string()),
            Work::Fetch {
                target,
                source,
                bytes,
            } => {
                // SAFETY: whoever asks for a copy promises that so many bytes are there until it is done, and whoever
                // launches a graph that they are there for each of its launches.
                let bytes = unsafe {
                    let source = std::ptr::with_exposed_provenance::<u8>(*source);
                    std::slice::from_raw_parts(source, *bytes)
                };
                let written = self.memory.write(*target, bytes);
                written.map_err(|fault| fault.to_string())
            }
            Work::Copy {
                target,
                source,
                bytes,
            } => {
                let copied = self.memory.copy(*target, *source, *bytes);
                copied.map_err(|fault| fault.to_string())
            }
        };
        let Err(text) = result else { return SUCCESS };
        eprintln!("{text}");
        if !matches!(work, Work::Launch { .. }) {
            return INVALID_VALUE;
        }
        self.failed = true;
        self.failure = CString::new(text).ok();
        LAUNCH_FAILED
    }

    fn launch(
        &mut self,
        function: &Function,
        launch: &Launch,
        parameters: &[u8],
    ) -> Result<(), String> {
        let schedule = (self.settings.schedule)(self.settings.seed.wrapping_add(self.launches));
        self.launches += 1;
        let start = Instant::now();
        let (module, entry, memory) = (&function.module, &function.entry, &mut self.memory);
        let result = match self.settings.trace {
            None => module.launch(entry, launch, parameters, memory, schedule),
            Some(block) => {
                let traced = module.trace(entry, launch, parameters, memory, block);
                traced.map(|(stats, timeline)| {
                    self.timelines.push(timeline);
                    stats
                })
            }
        };
        if self.settings.log {
            let seconds = start.elapsed().as_secs_f64();
            let Launch {
                grid,
                block,
                shared,
                overlaps,
                ..
            } = launch;
            let beside = if *overlaps {
                ", beside the one before"
            } else {
                ""
            };
            let shape = format!("{grid:?} × {block:?}, {shared} bytes shared{beside}");
            match &result {
                Ok(stats) => eprintln!(
                    "{}: {shape}: {} warp instructions, {} copies, {seconds:.3} s, {:.2} M/s",
                    function.entry,
                    stats.instructions,
                    stats.copies,
                    stats.instructions as f64 / seconds / 1e6
                ),
                Err(_) => eprintln!("{}: {shape}: failed after {seconds:.3} s", function.entry),
            }
        }
        result.map(|_| ()).map_err(|report| report.to_string())
    }
}

/// The only GPU.
pub fn gpu() -> MutexGuard<'static, Gpu> {
    static GPU: OnceLock<Mutex<Gpu>> = OnceLock::new();
    let gpu = GPU.get_or_init(|| Mutex::new(Gpu::new()));
    gpu.lock()
        .unwrap_or_else(std::sync::PoisonError::into_inner)
}

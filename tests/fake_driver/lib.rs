//! A library that replaces `libcuda.so.1` and fails on demand, compiled by `driver_errors` with
//! plain rustc. `FAKE_DRIVER` holds `name=value` pairs.
#![allow(non_snake_case)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

fn setting(name: &str, default: c_int) -> c_int {
    let settings = std::env::var("FAKE_DRIVER").unwrap_or_default();
    let value = settings
        .split_whitespace()
        .find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
    value.map_or(default, |value| value.parse().unwrap())
}

static LAUNCHES: AtomicI32 = AtomicI32::new(0);
static CURRENT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// A copy from the host is on its way.
static COPYING: AtomicI32 = AtomicI32::new(0);

/// What was seen, as `fake_seen` has it.
static SEEN: [AtomicI32; 7] = [const { AtomicI32::new(0) }; 7];

#[derive(Clone, Copy)]
enum Seen {
    /// Streams that were made to wait for an event.
    Waits,
    /// Copies from the host or to it on the default stream.
    DefaultCopies,
    /// Contexts that were waited for.
    ContextWaits,
    /// Whether pinned memory is copied from, for all that the host knows.
    Busy,
    /// Pinned memory that was freed meanwhile.
    FreedBusy,
    /// Whether the last launch may begin before the one in front of it ends.
    Overlaps,
    /// Whether a stream is in capture.
    Captures,
}

fn see(what: Seen) {
    SEEN[what as usize].fetch_add(1, Ordering::SeqCst);
}

fn set(what: Seen, value: bool) {
    SEEN[what as usize].store(value.into(), Ordering::SeqCst);
}

/// Not a driver function: a count or a state, by its number.
#[unsafe(no_mangle)]
pub extern "C" fn fake_seen(what: c_int) -> c_int {
    SEEN[what as usize].load(Ordering::SeqCst)
}

/// Modules have numbers from here on, and so do their functions.
const FIRST_MODULE: usize = 1000;
static MODULES: AtomicI32 = AtomicI32::new(FIRST_MODULE as i32);
static UNLOADED: Mutex<Vec<usize>> = Mutex::new(Vec::new());

/// `CUDA_ERROR_INVALID_HANDLE` for a function of a module that is gone.
fn known(function: *mut c_void) -> c_int {
    let gone = UNLOADED.lock().unwrap().contains(&function.addr());
    if gone { 400 } else { 0 }
}

/// Calls that may fail, since the last [`fake_fail`].
static CALLS: AtomicI32 = AtomicI32::new(0);
/// Which of them does, with what code, and whether all behind it do, too.
static FAILS: Mutex<(c_int, c_int, bool)> = Mutex::new((0, 0, false));
/// The first that did.
static FAILED: AtomicPtr<c_char> = AtomicPtr::new(std::ptr::null_mut());
/// What was made and not given back: contexts, modules, streams, events, device memory, pinned memory.
static ALIVE: [AtomicI32; 6] = [const { AtomicI32::new(0) }; 6];

#[derive(Clone, Copy)]
enum Kind {
    Context,
    Module,
    Stream,
    Event,
    Memory,
    Pinned,
}

/// A call that may fail.
fn step(name: &'static CStr) -> c_int {
    let call = CALLS.fetch_add(1, Ordering::SeqCst) + 1;
    let (at, code, for_good) = *FAILS.lock().unwrap();
    let fails = at > 0 && (call == at || for_good && call > at);
    if call == at {
        FAILED.store(name.as_ptr().cast_mut(), Ordering::SeqCst);
    }
    if fails { code } else { 0 }
}

/// A call that makes something.
fn made(kind: Kind, code: c_int) -> c_int {
    if code == 0 {
        ALIVE[kind as usize].fetch_add(1, Ordering::SeqCst);
    }
    code
}

/// One that gives it back. What is lost with the device counts as given back.
fn given_back(kind: Kind) -> c_int {
    ALIVE[kind as usize].fetch_sub(1, Ordering::SeqCst);
    0
}

/// Not a driver function: from now on the call of this number fails, and all behind it if `for_good` is not 0.
#[unsafe(no_mangle)]
pub extern "C" fn fake_fail(at: c_int, code: c_int, for_good: c_int) {
    *FAILS.lock().unwrap() = (at, code, for_good != 0);
    CALLS.store(0, Ordering::SeqCst);
    FAILED.store(std::ptr::null_mut(), Ordering::SeqCst);
}

/// Not a driver function: the call that failed first, null if none did.
#[unsafe(no_mangle)]
pub extern "C" fn fake_failed() -> *const c_char {
    FAILED.load(Ordering::SeqCst)
}

/// Not a driver function: how many of a kind were made and not given back.
#[unsafe(no_mangle)]
pub extern "C" fn fake_alive(kind: c_int) -> c_int {
    ALIVE[kind as usize].load(Ordering::SeqCst)
}

/// Not a driver function: whether bytes are on their way from the host that nobody waited for.
#[unsafe(no_mangle)]
pub extern "C" fn fake_copying() -> c_int {
    COPYING.load(Ordering::SeqCst)
}

/// Not a driver function: launches so far.
#[unsafe(no_mangle)]
pub extern "C" fn fake_launches() -> c_int {
    LAUNCHES.load(Ordering::SeqCst)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(_flags: c_uint) -> c_int {
    // Drivers that show no GPU answer `CUDA_ERROR_NO_DEVICE` here, not a count of 0.
    let none = if setting("devices", 1) == 0 { 100 } else { 0 };
    setting("init", none)
}

/// # Safety
/// As the driver's function, here and below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: c_int, text: *mut *const c_char) -> c_int {
    unsafe { *text = c"FAKE_ERROR".as_ptr() };
    // What a driver answers for codes it does not know.
    if code == 9999 { 1 } else { 0 }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(_code: c_int, text: *mut *const c_char) -> c_int {
    unsafe { *text = c"as it was told".as_ptr() };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    unsafe { *version = setting("version", 13000) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    unsafe { *count = setting("devices", 1) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(device: *mut c_int, ordinal: c_int) -> c_int {
    unsafe { *device = ordinal };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, _: c_int) -> c_int {
    let fake = c"Fake GPU".to_bytes_with_nul();
    assert!(length as usize >= fake.len());
    unsafe { std::ptr::copy_nonoverlapping(fake.as_ptr().cast(), name, fake.len()) };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_uint, _: c_int) -> c_int {
    let compute = setting("compute", 90);
    unsafe {
        *value = match which {
            16 => 132,
            75 => compute / 10,
            76 => compute % 10,
            81 => 233_472,
            97 => 232_448,
            _ => return 1,
        }
    };
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, _: c_int) -> c_int {
    unsafe { *context = std::ptr::without_provenance_mut(77) };
    made(Kind::Context, step(c"cuDevicePrimaryCtxRetain"))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(_device: c_int) -> c_int {
    given_back(Kind::Context)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> c_int {
    unsafe { *context = CURRENT.load(Ordering::SeqCst) };
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> c_int {
    CURRENT.store(context, Ordering::SeqCst);
    0
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleLoadDataEx(
    module: *mut *mut c_void,
    image: *const c_char,
    count: c_uint,
    keys: *const c_uint,
    values: *const *mut c_void,
) -> c_int {
    assert_eq!(CURRENT.load(Ordering::SeqCst) as usize, 77);
    let is_cubin = unsafe { std::slice::from_raw_parts(image.cast::<u8>(), 4) } == b"\x7fELF";
    let code = if is_cubin { setting("cubin", 0) } else { setting("ptx", 0) };
    unsafe {
        let number = MODULES.fetch_add(1, Ordering::SeqCst);
        *module = std::ptr::without_provenance_mut(number as usize);
        if !is_cubin {
            assert!(CStr::from_ptr(image).to_str().unwrap().contains(".version"));
        }
        let keys = std::slice::from_raw_parts(keys, count as usize);
        let values = std::slice::from_raw_parts(values, count as usize);
        let log = keys.iter().position(|&key| key == 5).expect("a log buffer");
        let size = keys.iter().position(|&key| key == 6).expect("its size");
        let said = c"line 7: no such instruction".to_bytes_with_nul();
        assert!(values[size] as usize >= said.len());
        std::ptr::copy_nonoverlapping(said.as_ptr(), values[log].cast(), said.len());
    }
    let failed = step(c"cuModuleLoadDataEx");
    made(Kind::Module, if code == 0 { failed } else { code })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: *mut c_void) -> c_int {
    UNLOADED.lock().unwrap().push(module.addr());
    given_back(Kind::Module)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuModuleGetFunction(
    function: *mut *mut c_void,
    module: *mut c_void,
    name: *const c_char,
) -> c_int {
    let lacking = setting("lacks_append", 0) == 1;
    if lacking && unsafe { CStr::from_ptr(name) }.to_bytes().starts_with(b"append") {
        return 500;
    }
    unsafe { *function = module };
    step(c"cuModuleGetFunction")
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuFuncGetAttribute(value: *mut c_int, which: c_uint, _: *mut c_void) -> c_int {
    unsafe { *value = if which == 0 { setting("threads", 256) } else { 0 } };
    step(c"cuFuncGetAttribute")
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: *mut c_int,
    _: *mut c_void,
    _: c_int,
    _: usize,
) -> c_int {
    unsafe { *blocks = 2 };
    step(c"cuOccupancyMaxActiveBlocksPerMultiprocessor")
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(_: *mut c_void, _: c_uint, _: c_int) -> c_int {
    step(c"cuFuncSetAttribute")
}

#[unsafe(no_mangle)]
pub extern "C" fn cuLaunchKernel(
    f: *mut c_void,
    gx: c_uint,
    _gy: c_uint,
    _gz: c_uint,
    bx: c_uint,
    _by: c_uint,
    _bz: c_uint,
    _shared: c_uint,
    _stream: *mut c_void,
    _parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    assert!(gx > 0 && bx > 0 && CURRENT.load(Ordering::SeqCst) as usize == 77);
    LAUNCHES.fetch_add(1, Ordering::SeqCst);
    set(Seen::Overlaps, false);
    if known(f) != 0 {
        return known(f);
    }
    #[cfg(young)]
    young::seen(_parameters);
    match step(c"cuLaunchKernel") {
        0 => setting("launch", 0),
        code => code,
    }
}

/// Returns when the bytes are on their way.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoD_v2(_to: u64, _from: *const c_void, _bytes: usize) -> c_int {
    COPYING.store(1, Ordering::SeqCst);
    see(Seen::DefaultCopies);
    step(c"cuMemcpyHtoD")
}

/// Copies are on the default stream.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> c_int {
    if stream.is_null() {
        COPYING.store(0, Ordering::SeqCst);
    }
    set(Seen::Busy, false);
    step(c"cuStreamSynchronize")
}

#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> c_int {
    see(Seen::ContextWaits);
    0
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(_: *mut c_void, _: *mut c_void, _: c_uint) -> c_int {
    see(Seen::Waits);
    step(c"cuStreamWaitEvent")
}

/// All events have passed.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(_: *mut c_void) -> c_int {
    set(Seen::Busy, false);
    step(c"cuEventQuery")
}

/// From pinned memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyHtoDAsync_v2(_: u64, _: *const c_void, _: usize, _: *mut c_void) -> c_int {
    let code = step(c"cuMemcpyHtoDAsync");
    if code == 0 {
        set(Seen::Busy, true);
    }
    code
}

#[unsafe(no_mangle)]
pub extern "C" fn cuMemFreeHost(_: *mut c_void) -> c_int {
    if fake_seen(Seen::Busy as c_int) != 0 {
        see(Seen::FreedBusy);
    }
    given_back(Kind::Pinned)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(_: *mut c_void, _: c_uint) -> c_int {
    set(Seen::Captures, true);
    step(c"cuStreamBeginCapture")
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(_: *mut c_void, graph: *mut *mut c_void) -> c_int {
    set(Seen::Captures, false);
    unsafe { *graph = std::ptr::without_provenance_mut(81) };
    step(c"cuStreamEndCapture")
}

/// Without these functions, the driver is too old to instantiate graphs.
#[cfg(graphs)]
mod graphs {
    use super::*;

    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
        executable: *mut *mut c_void,
        _graph: *mut c_void,
        _flags: u64,
    ) -> c_int {
        unsafe { *executable = std::ptr::without_provenance_mut(82) };
        step(c"cuGraphInstantiate")
    }

    /// Counts as one launch.
    #[unsafe(no_mangle)]
    pub extern "C" fn cuGraphLaunch(_executable: *mut c_void, _stream: *mut c_void) -> c_int {
        LAUNCHES.fetch_add(1, Ordering::SeqCst);
        step(c"cuGraphLaunch")
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuGraphExecDestroy(_executable: *mut c_void) -> c_int {
        0
    }
}

/// NCCL of a single rank.
mod nccl {
    use super::*;

    #[repr(C)]
    pub struct Id([u8; 128]);

    #[unsafe(no_mangle)]
    pub extern "C" fn ncclGetUniqueId(_: *mut Id) -> c_int {
        0
    }

    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ncclCommInitRankConfig(
        comm: *mut *mut c_void,
        _ranks: c_int,
        _id: Id,
        _rank: c_int,
        _config: *mut c_void,
    ) -> c_int {
        unsafe { *comm = std::ptr::without_provenance_mut(90) };
        0
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn ncclAllGather(
        _: *const c_void,
        _: *mut c_void,
        _: usize,
        _: c_int,
        _: *mut c_void,
        _: *mut c_void,
    ) -> c_int {
        0
    }

    #[unsafe(no_mangle)]
    pub unsafe extern "C" fn ncclCommGetAsyncError(_: *mut c_void, code: *mut c_int) -> c_int {
        unsafe { *code = 0 };
        0
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn ncclCommAbort(_: *mut c_void) -> c_int {
        0
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn ncclGetErrorString(_: c_int) -> *const c_char {
        c"as it was told".as_ptr()
    }
}

/// What is read is what was there before.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoH_v2(_: *mut c_void, _: u64, _: usize) -> c_int {
    see(Seen::DefaultCopies);
    step(c"cuMemcpyDtoH")
}

/// Calls with nothing to say but whether they failed.
macro_rules! steps {
    ($($symbol:ident = $name:literal ($($type:ty),*);)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $symbol($(_: $type),*) -> c_int {
            step($name)
        }
    )*};
}
steps! {
    cuGraphDestroy = c"cuGraphDestroy" (*mut c_void);
    cuStreamQuery = c"cuStreamQuery" (*mut c_void);
    cuMemcpyDtoHAsync_v2 = c"cuMemcpyDtoHAsync" (*mut c_void, u64, usize, *mut c_void);
    cuEventRecord = c"cuEventRecord" (*mut c_void, *mut c_void);
    cuMemsetD8_v2 = c"cuMemsetD8" (u64, u8, usize);
}

macro_rules! give_back {
    ($($symbol:ident($type:ty) = $kind:ident;)*) => {$(
        #[unsafe(no_mangle)]
        pub extern "C" fn $symbol(_: $type) -> c_int {
            given_back(Kind::$kind)
        }
    )*};
}
give_back! {
    cuStreamDestroy_v2(*mut c_void) = Stream;
    cuEventDestroy_v2(*mut c_void) = Event;
}

/// Null is nobody's.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemFree_v2(address: u64) -> c_int {
    if address == 0 { 0 } else { given_back(Kind::Memory) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(stream: *mut *mut c_void, _flags: c_uint) -> c_int {
    unsafe { *stream = std::ptr::without_provenance_mut(96) };
    made(Kind::Stream, step(c"cuStreamCreate"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(event: *mut *mut c_void, _flags: c_uint) -> c_int {
    unsafe { *event = std::ptr::without_provenance_mut(80) };
    made(Kind::Event, step(c"cuEventCreate"))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAlloc_v2(address: *mut u64, _bytes: usize) -> c_int {
    let code = match step(c"cuMemAlloc") {
        0 => setting("memory", 0),
        code => code,
    };
    if code == 0 {
        unsafe { *address = 1 << 40 };
    }
    made(Kind::Memory, code)
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    unsafe { (*free, *total) = (1000, 8000) };
    0
}

/// The bytes are never given back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostAlloc(address: *mut *mut c_void, bytes: usize, _: c_uint) -> c_int {
    let code = step(c"cuMemHostAlloc");
    if code == 0 {
        unsafe { *address = Vec::leak(vec![0_u64; bytes.div_ceil(8)]).as_mut_ptr().cast() };
    }
    made(Kind::Pinned, code)
}

/// What drivers from 12.0 on have: tensor maps, and launches with attributes. Maps hold the address and nothing else.
#[cfg(young)]
mod young {
    use super::*;

    static ENCODES: AtomicI32 = AtomicI32::new(0);
    static LAST: std::sync::Mutex<Vec<u64>> = std::sync::Mutex::new(Vec::new());

    /// Not a driver function: tensor maps that were made so far.
    #[unsafe(no_mangle)]
    pub extern "C" fn fake_encodes() -> c_int {
        ENCODES.load(Ordering::SeqCst)
    }

    /// Not a driver function: the first word of the parameters of a launch, counted from the last one backwards.
    #[unsafe(no_mangle)]
    pub extern "C" fn fake_first_word(back: usize) -> u64 {
        let last = LAST.lock().unwrap();
        last[last.len() - 1 - back]
    }

    pub fn seen(parameters: *mut *mut c_void) {
        let mut last = LAST.lock().unwrap();
        if last.len() >= 64 {
            last.clear();
        }
        last.push(unsafe { (*parameters).cast::<u64>().read() });
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuTensorMapEncodeTiled(
        map: *mut u64,
        _type: c_uint,
        _rank: c_uint,
        address: *mut c_void,
        _dims: *const u64,
        _strides: *const u64,
        _box_dims: *const c_uint,
        _element_strides: *const c_uint,
        _interleave: c_uint,
        _swizzle: c_uint,
        _l2: c_uint,
        _fill: c_uint,
    ) -> c_int {
        ENCODES.fetch_add(1, Ordering::SeqCst);
        unsafe { *map = address as u64 };
        step(c"cuTensorMapEncodeTiled")
    }

    #[unsafe(no_mangle)]
    pub extern "C" fn cuLaunchKernelEx(
        config: *const c_void,
        f: *mut c_void,
        parameters: *mut *mut c_void,
        _extra: *mut *mut c_void,
    ) -> c_int {
        LAUNCHES.fetch_add(1, Ordering::SeqCst);
        // The first attribute, if it is that of an overlap, comes first; each begins with its number.
        let first = unsafe { config.cast::<*const c_uint>().add(5).read().read() };
        set(Seen::Overlaps, first == 6);
        if known(f) != 0 {
            return known(f);
        }
        seen(parameters);
        step(c"cuLaunchKernelEx")
    }
}

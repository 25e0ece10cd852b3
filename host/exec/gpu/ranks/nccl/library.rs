//! The functions of NCCL that are called, found when the first group is made.

use std::{
    ffi::{CStr, OsString, c_char, c_int, c_void},
    ptr,
    sync::OnceLock,
};

use libcuda::Library;

use super::super::super::{DevicePtr, Stream};
use crate::shard::RankError;

pub(super) const SUCCESS: i32 = 0;
pub(super) const IN_PROGRESS: i32 = 7;

/// Names the one file to open instead of the usual one.
const OVERRIDE: &str = "TANDEM_LIBNCCL";

/// What ranks of one group share: one of them makes it and sends its bytes to the others.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NcclId(
    /// `ncclUniqueId`.
    pub [u8; 128],
);

impl NcclId {
    /// A new, unique id for a group.
    ///
    /// # Errors
    /// [`RankError::NoNccl`], [`RankError::Nccl`].
    pub fn new() -> Result<Self, crate::Error> {
        let nccl = open()?;
        let mut id = Self([0; 128]);
        // SAFETY: fills the bytes.
        match unsafe { (nccl.unique_id)(&mut id) } {
            SUCCESS => Ok(id),
            code => Err(nccl.error("ncclGetUniqueId", code).into()),
        }
    }
}

/// A communicator, or none.
#[repr(transparent)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Comm(*mut c_void);

impl Comm {
    pub(super) const NONE: Self = Self(ptr::null_mut());
}

/// `ncclConfig_t` of NCCL 2.18; newer ones take its size from it.
#[repr(C)]
struct Config {
    size: usize,
    magic: u32,
    version: u32,
    blocking: c_int,
    undefined: [c_int; 3],
    net_name: *const c_char,
    split_share: c_int,
}

type UniqueId = unsafe extern "C" fn(*mut NcclId) -> i32;
type Init = unsafe extern "C" fn(*mut Comm, c_int, NcclId, c_int, *mut Config) -> i32;
type AllGather =
    unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> i32;
type AsyncError = unsafe extern "C" fn(Comm, *mut i32) -> i32;
type Abort = unsafe extern "C" fn(Comm) -> i32;
type ErrorText = unsafe extern "C" fn(i32) -> *const c_char;
type Found = ptr::NonNull<c_void>;

/// The library.
pub(super) struct Nccl {
    unique_id: UniqueId,
    init: Init,
    all_gather: AllGather,
    async_error: AsyncError,
    abort: Abort,
    error_text: ErrorText,
}

/// Opened on the first call; the answer never changes afterwards.
pub(super) fn open() -> Result<&'static Nccl, RankError> {
    static NCCL: OnceLock<Result<Nccl, RankError>> = OnceLock::new();
    NCCL.get_or_init(|| {
        let file = std::env::var_os(OVERRIDE).unwrap_or_else(|| OsString::from("libnccl.so.2"));
        let missing = |reason: String| RankError::NoNccl {
            searched: file.to_string_lossy().into_owned(),
            reason,
        };
        // SAFETY: NCCL's initialisers are those of any program that links it.
        let library = unsafe { Library::open(&file) }.map_err(missing)?;
        let find = |name: &CStr| {
            let found = library.symbol(name);
            found
                .ok_or_else(|| missing(format!("it has no {name:?}: NCCL 2.18 or newer is wanted")))
        };
        // SAFETY: the functions of these names have these types, since NCCL 2.18.
        unsafe {
            Ok(Nccl {
                unique_id: std::mem::transmute::<Found, UniqueId>(find(c"ncclGetUniqueId")?),
                init: std::mem::transmute::<Found, Init>(find(c"ncclCommInitRankConfig")?),
                all_gather: std::mem::transmute::<Found, AllGather>(find(c"ncclAllGather")?),
                async_error: std::mem::transmute::<Found, AsyncError>(find(
                    c"ncclCommGetAsyncError",
                )?),
                abort: std::mem::transmute::<Found, Abort>(find(c"ncclCommAbort")?),
                error_text: std::mem::transmute::<Found, ErrorText>(find(c"ncclGetErrorString")?),
            })
        }
    })
    .as_ref()
    .map_err(Clone::clone)
}

impl Nccl {
    pub(super) fn error(&self, call: &'static str, code: i32) -> RankError {
        // SAFETY: a static text.
        let text = unsafe { CStr::from_ptr((self.error_text)(code)) };
        RankError::Nccl {
            call,
            code,
            text: text.to_string_lossy().into_owned(),
        }
    }

    /// # Safety
    /// As `ncclCommInitRankConfig`.
    pub(super) unsafe fn init(&self, comm: &mut Comm, ranks: u32, id: &NcclId, rank: u32) -> i32 {
        let mut config = Config {
            size: size_of::<Config>(),
            magic: 0xcafe_beef,
            version: 2_18_00,
            blocking: 0,
            undefined: [c_int::MIN; 3],
            net_name: ptr::null(),
            split_share: c_int::MIN,
        };
        // SAFETY: the caller's promise.
        unsafe { (self.init)(comm, ranks as c_int, *id, rank as c_int, &mut config) }
    }

    /// # Safety
    /// As `ncclAllGather`, of bytes.
    pub(super) unsafe fn all_gather(
        &self,
        from: DevicePtr,
        to: DevicePtr,
        bytes: usize,
        comm: Comm,
        stream: Stream,
    ) -> i32 {
        const UINT8: c_int = 1;
        let from = ptr::with_exposed_provenance(from as usize);
        let to = ptr::with_exposed_provenance_mut(to as usize);
        // SAFETY: the caller's promise.
        unsafe { (self.all_gather)(from, to, bytes, UINT8, comm, stream) }
    }

    /// # Safety
    /// As `ncclCommGetAsyncError`.
    pub(super) unsafe fn async_error(&self, comm: Comm) -> i32 {
        let mut found = SUCCESS;
        // SAFETY: the caller's promise.
        match unsafe { (self.async_error)(comm, &mut found) } {
            SUCCESS => found,
            code => code,
        }
    }

    /// # Safety
    /// As `ncclCommAbort`.
    pub(super) unsafe fn abort(&self, comm: Comm) {
        if !comm.0.is_null() {
            // SAFETY: the caller's promise.
            let _ = unsafe { (self.abort)(comm) };
        }
    }
}

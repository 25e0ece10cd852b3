//! The driver's functions.
//!
//! # Safety of all functions
//! As for the driver's functions of the same name: pointers refer to the memory that these read or write.

mod device;
mod errors;
mod launches;
mod memory;
mod modules;
mod streams;
mod tensor_maps;

use std::{
    ffi::{c_int, c_uint, c_void},
    ptr,
};

use crate::gpu::{Code, LAUNCH_FAILED, SUCCESS, gpu};

pub use self::{
    device::*, errors::*, launches::*, memory::*, modules::*, streams::*, tensor_maps::*,
};

fn handle(number: usize) -> *mut c_void {
    ptr::without_provenance_mut(number)
}

macro_rules! succeed {
    ($($name:ident($($type:ty),*);)*) => {$(
                pub extern "C" fn $name($(_: $type),*) -> Code {
            SUCCESS
        }
    )*};
}

succeed! {
    cuInit(c_uint);
    cuDevicePrimaryCtxRelease_v2(c_int);
    cuStreamDestroy_v2(*mut c_void);
}

/// After a failure, waiting functions return its code.
fn state() -> Code {
    if gpu().failed { LAUNCH_FAILED } else { SUCCESS }
}

/// Not a driver function: clears a failure, so that the next launch runs.
pub extern "C" fn ptx_driver_forget_failure() {
    gpu().failed = false;
}

/// Not a driver function: number of launches so far.
pub extern "C" fn ptx_driver_launches() -> u64 {
    gpu().launches
}

/// Not a driver function: traces this block of each later launch ([`Settings::trace`](crate::Settings::trace)); none if
/// it is negative.
pub extern "C" fn ptx_driver_trace(block: i32) {
    gpu().settings.trace = u32::try_from(block).ok();
}

/// Not a driver function: bytes that the traced block copied to shared memory since the last call. Stores by its
/// threads do not count.
pub extern "C" fn ptx_driver_loaded() -> u64 {
    let timelines = crate::take_timelines();
    let flights = timelines.iter().flat_map(|timeline| &timeline.flights);
    let loads = flights.filter(|flight| flight.what == ptx_run::Beside::Loads);
    loads.map(|flight| flight.amount).sum()
}

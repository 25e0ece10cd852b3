//! A substitute for the driver library: its functions return 0 if all arguments arrived, else 1. The test compiles it
//! with plain rustc and opens it as `libcuda.so.1`.
#![no_std]
#![crate_type = "cdylib"]

use core::ffi::c_void;

#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

/// Eleven arguments: more than fit in registers.
#[unsafe(no_mangle)]
#[allow(clippy::too_many_arguments)]
pub extern "C" fn cuLaunchKernel(
    f: usize,
    gx: u32,
    gy: u32,
    gz: u32,
    bx: u32,
    by: u32,
    bz: u32,
    shared: u32,
    stream: usize,
    params: *const c_void,
    extra: *const c_void,
) -> u32 {
    let arrived = f == 101
        && (gx, gy, gz) == (2, 3, 4)
        && (bx, by, bz) == (5, 6, 7)
        && shared == 8
        && stream == 109
        && params as usize == 110
        && extra as usize == 111;
    u32::from(!arrived)
}

/// A function with a float argument.
#[unsafe(no_mangle)]
pub extern "C" fn cuParamSetf(f: usize, offset: i32, value: f32) -> u32 {
    u32::from(!(f == 101 && offset == -7 && value == 0.625))
}


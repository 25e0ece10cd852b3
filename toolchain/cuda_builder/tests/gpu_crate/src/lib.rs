//! Kernels that test the builder.
#![no_std]
#![feature(abi_ptx, asm_experimental_arch, stdarch_nvptx)]

use core::{
    arch::{
        asm,
        nvptx::{_syncthreads, _thread_idx_x},
    },
    panic::PanicInfo,
};

#[panic_handler]
fn panic(_: &PanicInfo) -> ! {
    unsafe { asm!("trap;", options(noreturn)) }
}

/// Represents a struct that begins with a tensor map.
#[derive(Clone, Copy)]
#[repr(C, align(16))]
pub struct Params {
    map: [u64; 16],
    scale: f32,
}

#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn bounded(params: Params, out: *mut f32) {
    unsafe {
        asm!("// tandem.kernel bounded max_threads=256 min_blocks=2 tensor_maps=1");
        let factor = if cfg!(feature = "twice") { 2.0 } else { 1.0 };
        *out.add(_thread_idx_x() as usize) = params.scale * factor + params.map[0] as f32;
    }
}

#[cfg(target_feature = "sm_90a")]
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn clustered(out: *mut u32) {
    unsafe {
        asm!("// tandem.kernel clustered max_threads=64 cluster=2");
        *out = _thread_idx_x() as u32;
    }
}

/// The pattern of rust-lang/rust#137086: two branches on one condition with a barrier in between. Jump threading from
/// the first to the second would duplicate the barrier on each side, where the threads of a block would then wait
/// forever.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn barrier_between_branches(out: *mut u32, flag: u32) {
    unsafe {
        let first = _thread_idx_x() as u32 == flag;
        if first {
            *out = 1;
        }
        _syncthreads();
        if first {
            *out.add(1) = 2;
        } else {
            *out.add(2) = *out;
        }
    }
}

/// Panics on overflow if checks are enabled.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn sum(out: *mut u32, a: u32, b: u32) {
    unsafe { *out = a + b }
}

/// Arrays that must be in registers. If a loop is not unrolled, they go to the stack.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn register_arrays(input: *const f32, out: *mut f32) {
    const N: usize = 64;
    unsafe {
        let mut values = [0.0f32; N];
        let mut i = 0;
        while i < N {
            values[i] = *input.add(i * 32 + _thread_idx_x() as usize);
            i += 1;
        }
        let mut round = 0;
        while round < 4 {
            let mut i = 0;
            while i < N {
                values[i] = values[i] * values[(i + 7) % N] + 1.0;
                i += 1;
            }
            round += 1;
        }
        let mut i = 0;
        while i < N {
            *out.add(i * 32 + _thread_idx_x() as usize) = values[i];
            i += 1;
        }
    }
}

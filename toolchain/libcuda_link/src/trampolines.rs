//! One trampoline per driver function: it jumps through a slot, or binds the slot first.
//!
//! A trampoline does not know its function's signature, so it must leave all arguments in place. It uses only registers
//! that the calling conventions do not preserve between caller and callee (r11; x16 and x17); [`bind`] saves all
//! argument registers.

use std::arch::{global_asm, naked_asm};
use std::ffi::{CStr, c_char, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use crate::entry_points::with_entry_points;
use libcuda::driver;

/// `CUDA_ERROR_NO_DEVICE`: returned by every function if there is no driver.
const NO_DEVICE: u32 = 100;
/// `CUDA_ERROR_NOT_SUPPORTED`: the driver is too old to have the function.
const NOT_SUPPORTED: u32 = 801;

macro_rules! define {
    ($($name:ident)*) => {
        /// Index of each function's slot.
        #[allow(non_camel_case_types, clippy::upper_case_acronyms)]
        #[repr(usize)]
        enum Slot {
            $($name,)*
            Count,
        }

        const NAMES: [&CStr; Slot::Count as usize] = [
            $(match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => unreachable!(),
            },)*
        ];

        $(trampoline!($name);)*
    };
}

/// Hidden, so that only this program uses the symbol. If it were exported, libraries loaded later, such as the driver's
/// own helpers, would bind to it.
#[cfg(target_arch = "x86_64")]
macro_rules! trampoline {
    ($name:ident) => {
        global_asm!(
            concat!(".globl ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ",@function"),
            concat!(stringify!($name), ":"),
            "mov r11, qword ptr [rip + {slots} + {offset}]",
            "test r11, r11",
            "jz 2f",
            "jmp r11",
            "2:",
            "mov r11d, {index}",
            "jmp {bind}",
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            slots = sym SLOTS,
            offset = const Slot::$name as usize * size_of::<usize>(),
            index = const Slot::$name as usize,
            bind = sym bind,
        );
    };
}

#[cfg(target_arch = "aarch64")]
macro_rules! trampoline {
    ($name:ident) => {
        global_asm!(
            concat!(".globl ", stringify!($name)),
            concat!(".hidden ", stringify!($name)),
            concat!(".type ", stringify!($name), ",%function"),
            ".p2align 2",
            concat!(stringify!($name), ":"),
            "adrp x16, {slots} + {offset}",
            "ldr x16, [x16, :lo12:{slots} + {offset}]",
            "cbz x16, 2f",
            "br x16",
            "2:",
            "mov w17, #{index}",
            "b {bind}",
            concat!(".size ", stringify!($name), ", . - ", stringify!($name)),
            slots = sym SLOTS,
            offset = const Slot::$name as usize * size_of::<usize>(),
            index = const Slot::$name as usize,
            bind = sym bind,
        );
    };
}

with_entry_points!(define);

/// Address of each function; null before its first call.
static SLOTS: [AtomicPtr<c_void>; Slot::Count as usize] =
    [const { AtomicPtr::new(ptr::null_mut()) }; Slot::Count as usize];

/// Keeps the object with the trampolines in every program. A linker that has passed this crate's archive without
/// needing it does not return to it.
#[used]
static KEEP: unsafe extern "C" fn() = bind;

/// Finds the function whose slot index is in r11 and jumps to it with all arguments unchanged.
#[cfg(target_arch = "x86_64")]
#[unsafe(naked)]
unsafe extern "C" fn bind() {
    naked_asm!(
        "push rbp",
        "mov rbp, rsp",
        "push rdi",
        "push rsi",
        "push rdx",
        "push rcx",
        "push r8",
        "push r9",
        "sub rsp, 128",
        "movups [rsp], xmm0",
        "movups [rsp + 16], xmm1",
        "movups [rsp + 32], xmm2",
        "movups [rsp + 48], xmm3",
        "movups [rsp + 64], xmm4",
        "movups [rsp + 80], xmm5",
        "movups [rsp + 96], xmm6",
        "movups [rsp + 112], xmm7",
        "mov edi, r11d",
        "call {resolve}",
        "movups xmm0, [rsp]",
        "movups xmm1, [rsp + 16]",
        "movups xmm2, [rsp + 32]",
        "movups xmm3, [rsp + 48]",
        "movups xmm4, [rsp + 64]",
        "movups xmm5, [rsp + 80]",
        "movups xmm6, [rsp + 96]",
        "movups xmm7, [rsp + 112]",
        "add rsp, 128",
        "pop r9",
        "pop r8",
        "pop rcx",
        "pop rdx",
        "pop rsi",
        "pop rdi",
        "pop rbp",
        "jmp rax",
        resolve = sym resolve,
    )
}

/// Finds the function whose slot index is in w17 and jumps to it with all arguments unchanged.
#[cfg(target_arch = "aarch64")]
#[unsafe(naked)]
unsafe extern "C" fn bind() {
    naked_asm!(
        "stp x29, x30, [sp, #-208]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "stp x2, x3, [sp, #32]",
        "stp x4, x5, [sp, #48]",
        "stp x6, x7, [sp, #64]",
        "stp q0, q1, [sp, #80]",
        "stp q2, q3, [sp, #112]",
        "stp q4, q5, [sp, #144]",
        "stp q6, q7, [sp, #176]",
        "mov w0, w17",
        "bl {resolve}",
        "mov x16, x0",
        "ldp q6, q7, [sp, #176]",
        "ldp q4, q5, [sp, #144]",
        "ldp q2, q3, [sp, #112]",
        "ldp q0, q1, [sp, #80]",
        "ldp x6, x7, [sp, #64]",
        "ldp x4, x5, [sp, #48]",
        "ldp x2, x3, [sp, #32]",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #208",
        "br x16",
        resolve = sym resolve,
    )
}

/// Fills a slot. Two threads may do so concurrently, because both find the same address.
extern "C" fn resolve(index: u32) -> *mut c_void {
    let index = index as usize;
    let function = match driver() {
        Ok(driver) => match driver.symbol(NAMES[index]) {
            Some(address) => address.as_ptr(),
            None => answer_not_supported as *mut c_void,
        },
        Err(_) => without_driver(index),
    };
    SLOTS[index].store(function, Ordering::Release);
    function
}

/// The substitute for a function if there is no driver.
fn without_driver(index: usize) -> *mut c_void {
    // `cust` uses these two to print errors, and panics if they fail.
    if index == Slot::cuGetErrorName as usize {
        answer_error_name as *mut c_void
    } else if index == Slot::cuGetErrorString as usize {
        answer_error_string as *mut c_void
    } else {
        answer_no_device as *mut c_void
    }
}

// These two accept any arguments and access none of them. In both calling conventions, the caller owns the argument
// registers and the argument area of the stack.

extern "C" fn answer_no_device() -> u32 {
    NO_DEVICE
}

extern "C" fn answer_not_supported() -> u32 {
    NOT_SUPPORTED
}

unsafe extern "C" fn answer_error_name(_code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: called in place of `cuGetErrorName`, whose second argument points to a pointer.
    unsafe { *text = c"CUDA_ERROR_NO_DEVICE".as_ptr() };
    0
}

unsafe extern "C" fn answer_error_string(_code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: called in place of `cuGetErrorString`, whose second argument points to a pointer.
    unsafe { *text = c"no CUDA driver: libcuda.so.1 could not be opened".as_ptr() };
    0
}

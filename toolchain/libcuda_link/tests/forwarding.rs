//! Calls through the trampolines. Each runs in its own child process, because a process opens only one driver.
#![cfg(all(
    target_os = "linux",
    any(target_arch = "x86_64", target_arch = "aarch64")
))]

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::ptr;

use cust_raw::CUresult;
use libcuda_link as _;

/// Runs one test of this file in a child process that opens `driver` as the driver library.
fn in_child(test: &str, driver: &Path) {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env("TANDEM_LIBCUDA", driver)
        .env("TANDEM_TEST_CHILD", "1")
        .output()
        .unwrap();
    assert!(
        child.status.success(),
        "{}{}",
        String::from_utf8_lossy(&child.stdout),
        String::from_utf8_lossy(&child.stderr)
    );
}

fn is_child() -> bool {
    std::env::var_os("TANDEM_TEST_CHILD").is_some()
}

fn fake_driver() -> PathBuf {
    let out = Path::new(env!("CARGO_TARGET_TMPDIR")).join("libcuda.so.1");
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let compiled = Command::new(rustc)
        .args(["--edition", "2024", "-Cpanic=abort", "-Copt-level=1", "-o"])
        .arg(&out)
        .arg(concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fake_driver/lib.rs"
        ))
        .output()
        .expect("rustc runs");
    assert!(
        compiled.status.success(),
        "{}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    out
}

#[test]
fn arguments_arrive_and_absent_functions_say_so() {
    if !is_child() {
        return in_child(
            "arguments_arrive_and_absent_functions_say_so",
            &fake_driver(),
        );
    }
    // Twice: the first call binds the slot, the second uses it.
    for _ in 0..2 {
        // SAFETY: the fake driver compares the arguments and dereferences none of them.
        unsafe {
            let launched = cust_raw::cuLaunchKernel(
                ptr::without_provenance_mut(101),
                2,
                3,
                4,
                5,
                6,
                7,
                8,
                ptr::without_provenance_mut(109),
                ptr::without_provenance_mut(110),
                ptr::without_provenance_mut(111),
            );
            assert_eq!(launched, CUresult::CUDA_SUCCESS);
            let set = cust_raw::cuParamSetf(ptr::without_provenance_mut(101), -7, 0.625);
            assert_eq!(set, CUresult::CUDA_SUCCESS);
            assert_eq!(
                cust_raw::cuCtxSynchronize(),
                CUresult::CUDA_ERROR_NOT_SUPPORTED
            );
        }
    }
    let driver = libcuda::driver().unwrap();
    assert!(driver.name().ends_with("libcuda.so.1"));
    assert!(libcuda::symbol(c"cuParamSetf").is_some());
    assert!(libcuda::symbol(c"cuLaunchKernelEx").is_none());
}

#[test]
fn without_a_driver_every_call_answers_no_device() {
    if !is_child() {
        return in_child(
            "without_a_driver_every_call_answers_no_device",
            Path::new("/nowhere/libcuda.so.1"),
        );
    }
    // SAFETY: without a driver no argument is accessed, except the pointer to the text.
    unsafe {
        assert_eq!(cust_raw::cuInit(0), CUresult::CUDA_ERROR_NO_DEVICE);
        let mut count = 7;
        assert_eq!(
            cust_raw::cuDeviceGetCount(&mut count),
            CUresult::CUDA_ERROR_NO_DEVICE
        );
        assert_eq!(count, 7);
        let mut text = ptr::null();
        let answered = cust_raw::cuGetErrorString(CUresult::CUDA_ERROR_NO_DEVICE, &mut text);
        assert_eq!(answered, CUresult::CUDA_SUCCESS);
        assert!(
            CStr::from_ptr(text)
                .to_str()
                .unwrap()
                .contains("no CUDA driver")
        );
    }
    let missing = libcuda::driver().unwrap_err();
    assert_eq!(missing.searched, ["/nowhere/libcuda.so.1"]);
    assert!(libcuda::symbol(c"cuInit").is_none());
}

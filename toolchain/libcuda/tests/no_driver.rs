//! Without a driver, every function returns the error that there is no device.

use libcuda::{Code, Stream};

/// A process opens only one driver; this one is told to open a file that does not exist.
#[test]
fn every_function_answers_no_device_without_a_driver() {
    const CHILD: &str = "TANDEM_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .env("TANDEM_LIBCUDA", "/nowhere/libcuda.so.1")
            .env(CHILD, "1")
            .output()
            .unwrap();
        assert!(
            child.status.success(),
            "{}",
            String::from_utf8_lossy(&child.stdout)
        );
        return;
    }
    let missing = libcuda::driver().unwrap_err();
    assert_eq!(missing.searched, ["/nowhere/libcuda.so.1"]);
    // SAFETY: without a driver, no argument is accessed.
    unsafe {
        assert_eq!(libcuda::cuInit(0), Code::NO_DEVICE);
        let mut stream = Stream::NULL;
        assert_eq!(libcuda::cuStreamCreate(&mut stream, 0), Code::NO_DEVICE);
        assert!(stream.is_null());
    }
}

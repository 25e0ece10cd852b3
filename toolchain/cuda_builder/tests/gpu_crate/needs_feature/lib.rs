#![no_std]
#![feature(abi_ptx)]

#[cfg(feature = "needed")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo) -> ! {
    loop {}
}

#[unsafe(no_mangle)]
pub extern "ptx-kernel" fn nothing() {}

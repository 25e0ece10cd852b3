//! A step of attention in safetensors: `tandem attend` on the CPU.

#![no_main]

use std::{env, fs, process};

use clap::Parser;
use tandem_cli::attend;

#[derive(Parser)]
struct Call {
    #[command(flatten)]
    args: attend::Args,
}

libfuzzer_sys::fuzz_target!(init: tandem_libfuzzer::begin("tensors"), |bytes: &[u8]| {
    let folder = env::temp_dir();
    let [input, output] =
        ["in", "out"].map(|what| folder.join(format!("tandem-{what}-{}.st", process::id())));
    fs::write(&input, bytes).expect("a temporary file");
    let call = Call::parse_from([
        "attend".as_ref(),
        "--backend=cpu".as_ref(),
        "--force".as_ref(),
        "--input".as_ref(),
        input.as_os_str(),
        "--output".as_ref(),
        output.as_os_str(),
    ]);
    let _ = attend::run(&call.args);
});

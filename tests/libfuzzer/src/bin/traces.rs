//! Traces of requests: each of the formats that are read.

#![no_main]

use tandem_schedule::trace::Trace;

libfuzzer_sys::fuzz_target!(init: tandem_libfuzzer::begin("traces"), |bytes: &[u8]| {
    let text = String::from_utf8_lossy(bytes);
    for name in ["fuzzed.csv", "fuzzed.jsonl"] {
        if let Ok(trace) = Trace::parse(&text, name) {
            let _ = trace.mean_lengths();
        }
    }
});

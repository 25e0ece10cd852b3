//! Workloads in JSON, and the batches that they describe.

#![no_main]

use tandem_cli::workload::{Requests, parse};

libfuzzer_sys::fuzz_target!(init: tandem_libfuzzer::begin("workloads"), |bytes: &[u8]| {
    let Ok(cases) = parse("fuzzed.json", &String::from_utf8_lossy(bytes)) else {
        return;
    };
    for case in cases {
        // Large ones are refused or made, too, but take their time.
        let keys = |of: &Requests| u64::from(of.count) * u64::from(of.kv_len.max(of.q_len));
        if case.tree.is_none() && case.requests.iter().all(|of| keys(of) < 1 << 12) {
            let _ = case.batch();
        }
    }
});

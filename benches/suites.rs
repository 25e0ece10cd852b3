//! The suites of `tandem bench` as a benchmark, on the best backend that there is.
//!
//! `cargo bench --package tandem-cli --bench suites` runs the quick suite;
//! `… --bench suites -- decode pod` runs the suites named.

use std::time::Duration;

use clap::ValueEnum;
use tandem_cli::{
    Failure,
    backend::Place,
    bench::{self, Settings},
    output,
    workload::Suite,
};

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Without the flag this is `cargo test`, which only wants to know that it starts.
    if !arguments.iter().any(|argument| argument == "--bench") {
        return Ok(());
    }
    let named = arguments
        .iter()
        .filter(|argument| !argument.starts_with('-'));
    let mut suites = named
        .map(|name| Suite::from_str(name, true).map_err(Failure::Input))
        .collect::<Result<Vec<_>, _>>()?;
    if suites.is_empty() {
        suites.push(Suite::Quick);
    }
    let mut backend = Place::default().open()?;
    let settings = Settings {
        token_scales: false,
        energy: false,
        time: Duration::from_millis(500),
        check: 0,
        options: Default::default(),
        rules: Default::default(),
        memory_bytes: backend.memory_bytes(),
    };
    for suite in suites {
        let file = bench::measure(&mut *backend, &suite.cases(), &settings, |_| {})?;
        output::print(&bench::render(&file));
    }
    Ok(())
}

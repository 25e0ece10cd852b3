//! Kernels that wait a random time before each barrier, copy and claim give the bits of those that do not.
//!
//! ```sh
//! cargo xtask fuzz delays --seed 7 --out target/delayed
//! TANDEM_DELAYED=target/delayed TANDEM_CALLS=5000 cargo test --features cust --test gpu -- delays:: --nocapture
//! ```
//!
//! Each problem of a kernel is run once without delays and four times with them. `TANDEM_CALLS` is the number of runs
//! with delays that each family of kernels has at least. `TANDEM_ENTRIES` chooses kernels by a text in their names.
//! Without `TANDEM_DELAYED` there is nothing to compare with.

use std::{collections::BTreeMap, path::PathBuf, sync::Mutex};

use rayon::prelude::*;
use tandem_attn::{
    Hooks,
    exec::gpu::{Gpu, KernelInfo},
};

use crate::{
    common::{self, modules::AS_THEY_ARE},
    launches::{self, Output, attention},
};

const TEST: &str = "delays::waits_change_no_bit";

/// Runs of a problem with delays.
const REPEATS: u64 = 4;

/// A kernel, of a variant or not.
struct Entry {
    hooks: Option<&'static Hooks>,
    row: &'static KernelInfo,
}

impl Entry {
    fn name(&self) -> String {
        match self.hooks {
            Some(hooks) => hooks.entry(self.row),
            None => self.row.name.to_owned(),
        }
    }

    /// The module that it is in.
    fn family(&self) -> String {
        let family = self.row.family.name();
        self.hooks
            .map_or(family.into(), |_| format!("variants, {family}"))
    }

    fn run(&self, gpu: &Gpu, seed: u64) -> Result<Vec<Output>, String> {
        gpu.make_current().map_err(|error| error.to_string())?;
        match self.hooks {
            Some(hooks) => attention::run_hooked(gpu, hooks, self.row, seed, false),
            None => launches::run(gpu, self.row, seed, false),
        }
    }
}

#[test]
fn waits_change_no_bit() {
    let Some(folder) = std::env::var_os("TANDEM_DELAYED").map(PathBuf::from) else {
        return;
    };
    let Some(gpu) = common::gpu(TEST) else { return };
    let delayed = common::load_from(Some(&folder)).expect("kernels with delays");
    let only = std::env::var("TANDEM_ENTRIES").unwrap_or_default();
    let plain = launches::entries(gpu).map(|row| Entry { hooks: None, row });
    let hooked = launches::hooked(gpu).map(|(hooks, row)| Entry {
        hooks: Some(hooks),
        row,
    });
    let entries: Vec<Entry> = plain
        .chain(hooked)
        .filter(|entry| entry.name().contains(&only))
        .filter(|entry| !AS_THEY_ARE.contains(&entry.row.family.name()))
        .collect();
    let wanted = std::env::var("TANDEM_CALLS").map_or(1, |text| text.parse().expect("a number"));
    let calls = Mutex::new(BTreeMap::<String, u64>::new());
    for seed in 0.. {
        let done = calls.lock().expect("nobody panics").clone();
        let missing: Vec<&Entry> = entries
            .iter()
            .filter(|entry| {
                done.get(&entry.family())
                    .is_none_or(|&calls| calls < wanted)
            })
            .collect();
        if missing.is_empty() {
            println!("calls with delays: {done:?}");
            break;
        }
        missing.par_iter().for_each(|entry| {
            let run = |gpu: &Gpu| {
                entry
                    .run(gpu, seed)
                    .unwrap_or_else(|text| panic!("{}, seed {seed}: {text}", entry.name()))
            };
            let right = run(gpu);
            for _ in 0..REPEATS {
                assert!(
                    run(&delayed) == right,
                    "{}, seed {seed}: other bits",
                    entry.name()
                );
            }
            *calls
                .lock()
                .expect("nobody panics")
                .entry(entry.family())
                .or_default() += REPEATS;
        });
    }
}

//! Input from outside under libFuzzer: refused with a message, or read. `cargo xtask libfuzzer` builds and runs the
//! targets, each from its seeds.

use std::{env, fs, path::Path, process};

use tandem_attn::{
    plan::{DeviceDescription, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, PageTable, Spec},
};

#[path = "../../../cli/tests/hostile/descriptions.rs"]
#[allow(dead_code, reason = "traces alone are taken from it")]
mod descriptions;
#[path = "../../../cli/tests/hostile/tensors.rs"]
mod tensors;
#[path = "../../../cli/tests/hostile/workloads.rs"]
mod workloads;

/// A prompt of five tokens and two decodes behind a page that both read, in F32.
#[must_use]
pub fn problem() -> (Spec, Batch) {
    let mut table = PageTable::new(4, 6);
    table.push(&[0, 1], 5);
    table.push(&[2, 3, 4], 10);
    table.push(&[2, 3, 5], 11);
    let spec = Spec::new(2, 1, 16).with_dtype(Dtype::F32);
    (spec, Batch::new(vec![0, 5, 6, 7], table))
}

/// The plan of [`problem`].
#[must_use]
pub fn plan() -> Plan {
    let (spec, batch) = problem();
    let device = DeviceDescription::named("cpu").expect("it is built in");
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    plan.expect("it can be planned")
}

/// Before the first input: where `TANDEM_SEEDS` names a folder, the target's seeds are written there, and nothing else is done.
/// (A program without a target has no runtime of libFuzzer to link with.)
pub fn begin(target: &str) {
    if let Some(folder) = env::var_os("TANDEM_SEEDS") {
        fs::create_dir_all(&folder).expect("the folder can be made");
        seeds(target, Path::new(&folder));
        process::exit(0);
    }
}

/// Writes what a target begins with: files that are right, and some that are nearly.
fn seeds(target: &str, folder: &Path) {
    let put = |name: &str, content: &[u8]| {
        if content.len() < 4096 {
            fs::write(folder.join(name), content).expect("the folder can be written");
        }
    };
    match target {
        "workloads" => workloads::write(&put),
        "traces" => descriptions::traces(&put),
        "tensors" => tensors::write(&put),
        "plans" => {
            let json = serde_json::to_vec(&plan()).expect("plain data");
            fs::write(folder.join("plan.json"), json).expect("the folder can be written");
        }
        other => panic!("no target has the name {other}"),
    }
}

//! Workloads and steps with damage in their bytes: each is refused in words, or computed; nothing panics.

mod common;
#[path = "../../tests/common/damage.rs"]
mod damage;
#[path = "../../tests/common/numeric.rs"]
mod numeric;
#[path = "hostile/tensors.rs"]
mod tensors;
#[path = "hostile/workloads.rs"]
mod workloads;

use std::{cell::RefCell, collections::BTreeMap, fs};

use common::run;
use damage::{damaged, damaged_tensors};
use tandem_cli::workload::parse;

/// What is written, by name.
fn collected(write: impl Fn(&dyn Fn(&str, &[u8]))) -> BTreeMap<String, Vec<u8>> {
    let files = RefCell::new(BTreeMap::new());
    write(&|name, bytes| drop(files.borrow_mut().insert(name.to_owned(), bytes.to_vec())));
    files.into_inner()
}

#[test]
fn damaged_workloads_are_refused_or_read() {
    let files = collected(|put| workloads::write(&put));
    let (mut read, mut refused, mut made) = (0, 0, 0);
    for (name, whole) in files.iter().filter(|(_, whole)| whole.len() < 1000) {
        for seed in 0..300 {
            let text = String::from_utf8_lossy(&damaged(whole, seed)).into_owned();
            let Ok(cases) = parse(name, &text) else {
                refused += 1;
                continue;
            };
            read += 1;
            for case in cases {
                // Large ones are refused or made, too, but take their time.
                let keys = |of: &tandem_cli::workload::Requests| {
                    u64::from(of.count) * u64::from(of.kv_len.max(of.q_len))
                };
                let small =
                    case.tree.is_none() && case.requests.iter().all(|of| keys(of) < 1 << 12);
                made += u32::from(small && case.batch().is_ok());
            }
        }
    }
    assert!(
        read > 1000 && refused > 1000,
        "{read} read, {refused} refused"
    );
    assert!(made > 100, "{made} made");
}

#[test]
fn damaged_steps_are_refused_or_computed() {
    let files = collected(|put| tensors::write(&put));
    let directory = tempfile::tempdir().expect("a temporary directory");
    let (mut computed, mut refused) = (0, 0);
    for seed in 0..200 {
        let bytes = damaged_tensors(&files["ok.st"], seed);
        fs::write(directory.path().join("step.st"), bytes).expect("writable");
        let files = ["--input", "step.st", "--output", "out.st"];
        let call = [&["attend", "--backend", "cpu"][..], &files].concat();
        let said = run(directory.path(), &call);
        match said.code {
            0 => computed += 1,
            2 => {
                refused += 1;
                assert!(
                    said.stderr.starts_with("error: "),
                    "{seed}: {}",
                    said.stderr
                );
            }
            code => panic!("{seed}: {code}: {}", said.stderr),
        }
    }
    assert!(
        computed > 10 && refused > 50,
        "{computed} computed, {refused} refused"
    );
}

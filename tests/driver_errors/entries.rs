//! Errors and the trace name the entry that is launched, which for a variant is not the row of the registry that it replaces.

use tandem_attn::{
    Error,
    exec::gpu::{DeviceTensor, Gpu, KvPool, RunTensors, Stream},
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    variants::{ALIBI, Slopes},
};

use crate::driver::{Process, planned, said_by, with_library, workspace, young_driver};

const A: u64 = 1 << 30;

/// A run of the ALiBi variant with so many queries, and the entry that it launches.
fn run(gpu: &Gpu, queries: u32) -> (String, Result<(), Error>) {
    let spec = Spec::new(8, 2, 128).with_hooks(&ALIBI);
    let mut table = PageTable::new(16, 20);
    table.push(&(0..10).collect::<Vec<_>>(), 160);
    let plan = planned(gpu, &spec, &Batch::new(vec![0, queries], table));
    let entry = plan.kernel_name(&plan.groups[0]);
    let mut workspace = workspace(gpu, &plan);
    let q = DeviceTensor::new(A, Dtype::BF16, [queries as usize, 8, 128]);
    let pools = [KvPool::new(&spec, KvLayout::Nhd, 16, 20, A, A)];
    let slopes = Slopes { address: A };
    let given = RunTensors::new(&q, &pools, &q).with_own(&slopes);
    // SAFETY: the fake driver follows no address.
    let result = unsafe {
        workspace.upload(&plan, Stream::DEFAULT).unwrap();
        gpu.run_with(&mut workspace, &given, Stream::DEFAULT)
    };
    (entry, result)
}

#[test]
fn the_trace_names_the_entries_of_variants() {
    let traced = [("TANDEM_TRACE", "1")];
    let test = the_trace_names_the_entries_of_variants;
    let said = match said_by(test, "threads=1024", young_driver, &traced) {
        Process::Parent(said) => said,
        Process::Child => {
            let gpu = Gpu::new(0).unwrap();
            for queries in [160, 1] {
                let (entry, result) = run(&gpu, queries);
                assert_eq!(result, Ok(()));
                eprintln!("expected: {entry}");
            }
            return;
        }
        Process::Other => return,
    };
    let after = |start| {
        said.lines()
            .filter_map(move |line: &str| line.strip_prefix(start))
    };
    let launched: Vec<_> = after("tandem: ")
        .filter_map(|line| Some(line.split_once(" on stream ")?.0))
        .collect();
    let expected: Vec<_> = after("expected: ").collect();
    assert_eq!(expected.len(), 2, "{said}");
    for entry in expected {
        assert!(entry.ends_with("_alibi"), "{entry}");
        assert!(launched.contains(&entry), "{entry} is not in {launched:?}");
    }
}

#[test]
fn limits_of_launches_name_the_entries_of_variants() {
    let test = limits_of_launches_name_the_entries_of_variants;
    if !with_library(test, "threads=16", young_driver) {
        return;
    }
    let gpu = Gpu::new(0).unwrap();
    for queries in [160, 1] {
        let (entry, result) = run(&gpu, queries);
        let Err(Error::LaunchLimit { kernel, .. }) = result else {
            panic!("{result:?}")
        };
        assert_eq!(kernel, entry);
        assert!(entry.ends_with("_alibi"), "{entry}");
    }
}

//! What a plan says that a run launches is what a run launches.

use tandem_attn::{
    exec::gpu::{DeviceArray, DeviceTensor, Gpu, KvPool, RunTensors, Stream},
    plan::Plan,
    problem::{Batch, Compute, Dtype, KvLayout, PageTable, Spec},
    step::Rope,
    variants::{ALIBI, Slopes},
};

use crate::driver::{Process, planned, said_by, workspace, young_driver};

const A: u64 = 1 << 30;

/// Pages of a pool.
const PAGES: u32 = 1 << 18;

/// Requests with so many new tokens and keys.
fn batch(page_size: u32, requests: &[(u32, u32)]) -> Batch {
    let (mut table, mut next, mut indptr) = (PageTable::new(page_size, PAGES), 0, vec![0]);
    for &(queries, keys) in requests {
        let pages: Vec<_> = (next..next + keys.div_ceil(page_size)).collect();
        next += pages.len() as u32;
        table.push(&pages, keys);
        indptr.push(indptr[indptr.len() - 1] + queries);
    }
    Batch::new(indptr, table)
}

/// The cases of an architecture.
fn cases(compute: u32) -> Vec<(Spec, Batch)> {
    let decodes = [(1, 8000); 5];
    let many = [(1, 8000); 300];
    let prompt = [(700, 700), (300, 2000)];
    let hybrid = [&prompt[..], &decodes, &[(3, 100)]].concat();
    let mut cases = Vec::new();
    let mut add = |spec: Spec, requests: &[(u32, u32)]| cases.push((spec, batch(16, requests)));
    let plain = Spec::new(32, 8, 128);
    let of_8_bits = |dim| Spec::new(32, 8, dim).with_kv_dtype(Dtype::F8E4M3);
    let sinks = |count| {
        let mut spec = plain.with_sinks();
        spec.variant.sink_tokens = count;
        spec
    };
    for requests in [&decodes[..], &many, &prompt, &hybrid] {
        for dim in [48, 64, 80, 96, 112, 128, 192, 240, 256] {
            add(Spec::new(32, 8, dim), requests);
        }
        for spec in [sinks(1), sinks(2), of_8_bits(64), of_8_bits(128)] {
            add(spec, requests);
        }
        for dim in [80, 128] {
            let mut spec = Spec::new(32, 8, dim);
            (spec.q_dtype, spec.out_dtype) = (Dtype::F32, Dtype::F32);
            add(spec, requests);
        }
        add(plain.with_soft_cap(30.0), requests);
        add(plain.with_hooks(&ALIBI), requests);
        if compute == 90 {
            add(of_8_bits(128).with_compute(Compute::F8), requests);
            add(plain.with_rotary(Rope::new(128, 1e4)), requests);
            add(Spec::new(16, 2, 512), requests);
            add(Spec::new(128, 1, 192).with_head_dim_v(128), &prompt);
            add(Spec::latent(128, 512, 64), requests);
            add(Spec::latent(16, 512, 64), requests);
            add(of_8_bits(64), &[(200, 9000), (1, 50)]);
        }
    }
    add(Spec::new(32, 8, 80), &[(1, 3000); 64]);
    if compute == 90 {
        add(Spec::latent(64, 512, 64), &[(1, 8000); 64]);
    }
    // Pages that tensor maps do not take.
    for spec in [plain, Spec::new(32, 8, 96), of_8_bits(128)] {
        cases.push((spec, batch(5, &decodes)));
    }
    // Tiles of 64 rows do not read them row by row.
    cases.push((plain, batch(5, &[(7, 8000); 5])));
    // A tree of drafts behind a prompt, and one behind decodes.
    for queries in [40, 4] {
        let mut trees = batch(16, &[(queries, 500)]);
        trees.ancestors = vec![1; queries as usize];
        cases.push((plain, trees));
    }
    cases
}

/// Runs a plan on plain pools.
fn run(gpu: &Gpu, plan: &Plan, page_size: u32) {
    let (spec, tokens) = (plan.spec, plan.total_q as usize);
    let mut workspace = workspace(gpu, plan);
    let tensor = |dtype, dim: u32| {
        DeviceTensor::new(A, dtype, [tokens, spec.q_heads as usize, dim as usize])
    };
    let q = tensor(spec.q_dtype, spec.head_dim_qk);
    let mut out = tensor(spec.out_dtype, spec.head_dim_v);
    out.address += 1 << 28;
    let pool = match spec.latent {
        true => KvPool::latent(&spec, page_size, PAGES, A),
        false => KvPool::new(&spec, KvLayout::Nhd, page_size, PAGES, A, A),
    };
    let (pools, slopes) = ([pool], Slopes { address: A });
    let mut given = RunTensors::new(&q, &pools, &out);
    if spec.variant.hooks.is_some() {
        given = given.with_own(&slopes);
    }
    if spec.variant.sinks {
        let sinks = (spec.variant.sink_tokens * spec.q_heads) as usize;
        given = given.with_sinks(DeviceArray::new(A, sinks));
    }
    // SAFETY: the fake driver follows no address.
    unsafe {
        workspace.upload(plan, Stream::DEFAULT).unwrap();
        gpu.run_with(&mut workspace, &given, Stream::DEFAULT)
            .unwrap_or_else(|error| panic!("{spec:?}: {error}"));
    }
}

fn launch_all(compute: u32) {
    let gpu = Gpu::new(0).unwrap();
    let (mut planned_here, mut refused) = (0, 0);
    for (spec, batch) in cases(compute) {
        if gpu.supports(&spec).is_err() {
            refused += 1;
            continue;
        }
        let plan = planned(&gpu, &spec, &batch);
        planned_here += 1;
        eprintln!("case: {spec:?}\n{plan}");
        for entry in plan.launches() {
            eprintln!("expected: {entry}");
        }
        run(&gpu, &plan, plan.parts[0].page_size);
    }
    eprintln!("planned: {planned_here}, refused: {refused}");
    assert!(
        planned_here > 50 && refused < 12,
        "{planned_here} {refused}"
    );
}

fn compare(said: &str) {
    let mut wrong = Vec::new();
    for case in said.split("case: ").skip(1) {
        let after = |start| {
            let lines = case
                .lines()
                .filter_map(move |line| line.strip_prefix(start));
            let mut entries: Vec<&str> = lines
                .map(|line: &str| line.split(" on stream ").next().unwrap_or(line))
                .collect();
            entries.sort_unstable();
            entries
        };
        let (expected, launched) = (after("expected: "), after("tandem: "));
        if expected != launched {
            wrong.push(format!(
                "{case}\nplan:     {expected:?}\nlaunched: {launched:?}\n"
            ));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

#[test]
fn plans_name_what_is_launched() {
    for (settings, compute) in [
        ("threads=1024 compute=90", 90),
        ("threads=1024 compute=80", 80),
    ] {
        let traced = [("TANDEM_TRACE", "1")];
        match said_by(plans_name_what_is_launched, settings, young_driver, &traced) {
            Process::Child => return launch_all(compute),
            Process::Parent(said) => {
                compare(&said);
                // Among the cases are those in which a run launches what no group names.
                let rare: &[&str] = match compute {
                    90 => &[
                        "_pair",
                        "_extras",
                        "_alibi",
                        "turn_rows_",
                        "pieces",
                        "sm80_",
                    ],
                    _ => &["_general", "sm80_pod_"],
                };
                let always = ["widen_", "pad_heads", "narrow_rows_", "merge_few_"];
                for word in rare.iter().chain(&always) {
                    let mut expected = said.lines().filter(|line| line.starts_with("expected: "));
                    assert!(expected.any(|line| line.contains(word)), "{word}");
                }
            }
            Process::Other => (),
        }
    }
}

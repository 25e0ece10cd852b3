//! Decode on the GPU, as planned, against naive attention in f64.

use crate::common::{
    self, Memory, Stream, Tolerance, compare,
    problems::{Tensors, cases, kv_len, prefixed, variant},
};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    exec::gpu::{
        Arch, DecodeCall, DecodeTile, DeviceArray, Gpu, KernelId, KvPool, PartialStates,
        Stream as Handle,
    },
    plan::{DeviceDescription, Kernel, MergeMode, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, Spec},
    tensor::Element,
};

#[derive(Clone, Debug)]
struct Case {
    spec: Spec,
    batch: Batch,
    layout: KvLayout,
    options: PlanOptions,
    /// Row tiles that the planner chooses from.
    rows: Vec<u32>,
    run: u32,
    /// The kernels of Ampere, whatever the GPU.
    ampere: bool,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    let heads = (1..5_u32, 1..17_u32);
    let dim = prop_oneof![Just(64_u32), Just(128), Just(256)];
    let page = prop_oneof![
        4 => Just(16_u32),
        1 => Just(8),
        1 => Just(24),
        1 => Just(64),
        1 => Just(128),
        3 => 1..8_u32,
        1 => 9..128_u32,
    ];
    let layout = prop_oneof![Just(KvLayout::Nhd), Just(KvLayout::Hnd)];
    // A request: own keys, pages shared with the first one, queries.
    let request = (kv_len(), 0..12_usize, 1..9_u32);
    // Pages per cut, or the planner's choice.
    let split = prop_oneof![3 => Just(None), 2 => (1..20_u32).prop_map(Some)];
    let merge_mode = prop_oneof![Just(MergeMode::Fused), Just(MergeMode::Kernel)];
    let rows = prop_oneof![
        2 => Just(vec![8, 16]),
        3 => Just(vec![8, 16, 64, 128]),
        1 => Just(vec![64]),
        1 => Just(vec![128]),
    ];
    (
        (heads, dim, variant()),
        (
            page,
            prop::collection::vec(request, 1..14),
            prop::bool::weighted(0.5),
        ),
        (layout, split, merge_mode, rows, 1..5_u32, any::<bool>()),
        any::<u64>(),
    )
        .prop_map(
            |(((kv_heads, group), dim, variant), (page, requests, one_token), rest, seed)| {
                let (layout, split, merge_mode, rows, run, ampere) = rest;
                let mut spec = Spec::new(kv_heads * group, kv_heads, dim);
                spec.variant = variant;
                let mut options = PlanOptions::default();
                if let Some(pages) = split {
                    options.split = SplitMode::Fixed {
                        tokens: pages * page,
                    };
                }
                options.merge_mode = merge_mode;
                Case {
                    spec,
                    batch: prefixed(&requests, page, one_token, seed),
                    layout,
                    options,
                    rows,
                    run,
                    ampere,
                    seed,
                }
            },
        )
}

fn plan_of(case: &Case) -> Plan {
    let mut device = DeviceDescription::named("h200").expect("it is built in");
    device.decode.rows = case.rows.clone();
    // Heads of 256 have no tiles of 16 rows.
    if case.spec.head_dim_qk == 256 && case.rows.contains(&16) && !case.rows.contains(&64) {
        device.decode.rows.push(64);
    }
    if case.ampere {
        device.decode.joint = None;
    }
    if let Some(joint) = &mut device.decode.joint {
        // Seldom, where it pays, always.
        joint.cut_ns = [0.0, 5000.0, 1e9][(case.seed / 2 % 3) as usize];
        joint.apart_ns = joint.cut_ns;
    }
    let plan = Planner::new()
        .plan(&case.spec, &case.batch, &device, &case.options)
        .expect("the case can be planned");
    plan.verify(&case.batch)
        .expect("the plan computes the batch");
    plan
}

/// Runs a plan twice; the outputs and LSEs of both runs, as bytes.
fn run_twice<T: Element>(
    gpu: &Gpu,
    case: &Case,
    plan: &Plan,
    tensors: &Tensors<T, T>,
) -> Vec<(Vec<T>, Vec<f32>)> {
    let spec = &case.spec;
    let (heads, dim) = (spec.q_heads as usize, spec.head_dim_v as usize);
    let tokens = plan.total_q as usize;
    let slots = plan.slots as usize;
    let pool = &tensors.parts[0];
    let (k, v, q) = (
        Memory::new(&pool.k),
        Memory::new(&pool.v),
        Memory::new(&tensors.q),
    );
    // Arrays must not be empty to have an address.
    let padded = |values: &[u32]| [values, &[0; 4]].concat();
    let items = Memory::new(&plan.items);
    let rows = Memory::new(&padded(bytemuck::cast_slice(&plan.rows)));
    let page_ids = Memory::new(&padded(&plan.page_ids));
    let merges = Memory::new(&padded(bytemuck::cast_slice(&plan.merges)));
    let merge_slots = Memory::new(&padded(&plan.merge_slots));
    let partial_out = Memory::new(&vec![f32::NAN; (slots.max(1)) * heads * dim]);
    let partial_lse = Memory::new(&vec![f32::NAN; slots.max(1) * heads]);
    let arrivals = Memory::new(&vec![
        0_u32;
        (plan.merges.len() + 1) * spec.kv_heads as usize
    ]);
    let partials = PartialStates {
        out: partial_out.tensor(Dtype::F32, [slots.max(1), heads, dim]),
        lse: partial_lse.tensor(Dtype::F32, [slots.max(1), heads]),
    };
    let fused = plan.merge_mode == MergeMode::Fused;
    let pages = case.batch.parts[0].table.pool_pages;
    let page_size = pool.k_strides.page_size;
    let kv = KvPool::new(
        spec,
        KvLayout::Nhd,
        page_size,
        pages,
        k.address(),
        v.address(),
    )
    .with_strides(pool.k_strides, pool.v_strides);
    let stream = Stream::new();
    let merge_rows = DeviceArray::new(merges.address(), plan.merges.len());
    let results = (0..2)
        .map(|_| {
            let out = Memory::new(&vec![T::from_f32(f32::NAN); tokens * heads * dim]);
            let lse = Memory::new(&vec![f32::NAN; tokens * heads]);
            let q = q.tensor(T::DTYPE, [tokens, heads, dim]);
            let to = out.tensor(T::DTYPE, [tokens, heads, dim]);
            let lse_to = lse.tensor(Dtype::F32, [tokens, heads]);
            let tickets: Vec<Memory> = plan.groups.iter().map(|_| Memory::new(&[0_u32])).collect();
            for (group, ticket) in plan.groups.iter().zip(&tickets) {
                assert_eq!(group.kernel, Kernel::Decode);
                let first = items.address() + u64::from(group.items.start) * 40;
                let planned = group.id.expect("the plan is for a GPU");
                let ampere = planned.on(Arch::Sm80).filter(|_| case.ampere);
                let tile = DecodeTile {
                    kernel: ampere.unwrap_or(planned),
                    rows: group.tile.m,
                    run: case.run,
                    long: case.run > 1,
                };
                let call = DecodeCall {
                    spec,
                    tile,
                    items: DeviceArray::new(first, group.items.len()),
                    rows: rows.array(),
                    page_ids: page_ids.array(),
                    merges: merge_rows,
                    merge_slots: merge_slots.array(),
                    q: &q,
                    pool: &kv,
                    out: &to,
                    lse: Some(&lse_to),
                    partials: &partials,
                    arrivals: fused.then(|| arrivals.array()),
                    ticket: ticket.array(),
                    record: None,
                    extras: Default::default(),
                };
                // SAFETY: the arrays are the plan's, and live until the stream was waited for.
                unsafe { gpu.decode(&call, stream.0) }.expect("the launch is right");
            }
            if !fused || plan.merges.iter().any(|merge| merge.slots == 0) {
                // Without fused merges all of them; else those that no item arrives at.
                let left: Vec<_> = plan
                    .merges
                    .iter()
                    .copied()
                    .filter(|merge| !fused || merge.slots == 0)
                    .collect();
                let left = Memory::new(&padded(bytemuck::cast_slice(&left)));
                let count = if fused {
                    plan.merges.iter().filter(|merge| merge.slots == 0).count()
                } else {
                    plan.merges.len()
                };
                let left_rows = DeviceArray::new(left.address(), count);
                // SAFETY: as above.
                unsafe {
                    gpu.merge_states(
                        &partials,
                        left_rows,
                        merge_slots.array(),
                        &to,
                        Some(&lse_to),
                        stream.0,
                    )
                }
                .expect("the launch is right");
                stream.wait();
            }
            stream.wait();
            for ticket in &tickets {
                assert_eq!(ticket.read::<u32>(), [0], "a ticket was not wound back");
            }
            (out.read(), lse.read())
        })
        .collect();
    assert!(
        arrivals.read::<u32>().iter().all(|&count| count == 0),
        "a counter of arrivals was not wound back"
    );
    results
}

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let mut case = case.clone();
    (case.spec.q_dtype, case.spec.kv_dtype, case.spec.out_dtype) = (T::DTYPE, T::DTYPE, T::DTYPE);
    let plan = plan_of(&case);
    let tensors = Tensors::<T, T>::random(&case.spec, &case.batch, case.layout, case.seed);
    let right = tensors.reference(&case.spec, &case.batch);
    let runs = run_twice(gpu, &case, &plan, &tensors);
    let (heads, dim) = (case.spec.q_heads as usize, case.spec.head_dim_v as usize);
    let shape = [plan.total_q as usize, heads, dim];
    // Weights are rounded to 16 bits before they meet the values, whose sum may cancel.
    let of_weights = match T::DTYPE {
        Dtype::BF16 => 1.0 / 256.0,
        _ => 1.0 / 2048.0,
    };
    let mut tolerance = Tolerance::of(T::DTYPE);
    tolerance.absolute = of_weights;
    let got = common::to_f64(&runs[0].0);
    compare("out", &shape, &got, &right.out, tolerance).map_err(TestCaseError::fail)?;
    let lse = Tolerance {
        absolute: 2e-4,
        relative: 1e-5,
    };
    let got: Vec<f64> = runs[0].1.iter().map(|&x| x.into()).collect();
    compare("lse", &[shape[0], heads, 1], &got, &right.lse, lse).map_err(TestCaseError::fail)?;
    let bits = |run: &(Vec<T>, Vec<f32>)| {
        let out: Vec<u8> = bytemuck::cast_slice(&run.0).to_vec();
        (out, run.1.iter().map(|x| x.to_bits()).collect::<Vec<_>>())
    };
    prop_assert!(bits(&runs[0]) == bits(&runs[1]), "two runs differ");
    Ok(())
}

#[test]
fn decode_is_the_reference() {
    let Some(gpu) = common::gpu("decode_is_the_reference") else {
        return;
    };
    let mut runner = proptest::test_runner::TestRunner::new(cases(300));
    runner
        .run(&case(), |case| {
            if case.seed % 2 == 0 {
                check::<bf16>(gpu, &case)
            } else {
                check::<f16>(gpu, &case)
            }
        })
        .unwrap();
}

#[test]
fn decodes_of_head_dimensions_without_a_kernel_are_refused() {
    let Some(gpu) = common::gpu("decodes_of_head_dimensions_without_a_kernel_are_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 96);
    let memory = Memory::of_bytes(1 << 16);
    let partials = PartialStates {
        out: memory.tensor(Dtype::F32, [1, 8, 96]),
        lse: memory.tensor(Dtype::F32, [1, 8]),
    };
    let address = memory.address();
    let q = memory.tensor(Dtype::BF16, [1, 8, 96]);
    let call = DecodeCall {
        spec: &spec,
        tile: DecodeTile {
            kernel: KernelId::all().next().expect("there are some"),
            rows: 8,
            run: 1,
            long: false,
        },
        items: memory.array(),
        rows: memory.array(),
        page_ids: memory.array(),
        merges: memory.array(),
        merge_slots: memory.array(),
        q: &q,
        pool: &KvPool::new(&spec, KvLayout::Nhd, 16, 4, address, address),
        out: &q,
        lse: None,
        partials: &partials,
        arrivals: None,
        ticket: memory.array(),
        record: None,
        extras: Default::default(),
    };
    // SAFETY: refused before anything is launched.
    let error = unsafe { gpu.decode(&call, Handle::DEFAULT) };
    let error = error.expect_err("a head dimension of 96");
    assert!(matches!(error, Error::Extent { got: 96, .. }), "{error}");
}

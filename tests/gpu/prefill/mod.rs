//! Prefill on the GPU against the f64 reference, from plans of the planner.

mod case;

use crate::common;
use case::{Case, case};
use common::{
    Memory, Stream, Tolerance, compare, decode, gpu,
    problems::{Tensors, cases},
    straight,
};
use half::{bf16, f16};
use proptest::prelude::*;
use tandem_attn::{
    exec::gpu::{
        Arch, DeviceTensor, Gpu, KernelId, KvPool, PartialStates, PrefillCall, Stream as Handle,
    },
    plan::{Kernel, Plan, PlanOptions, Planner},
    problem::{Dtype, KvLayout, Spec},
    tensor::Element,
};

/// The kernel of 16 bits with blocks of so many keys: plans of prefills alone do not name those that run beside decodes.
fn with_keys(planned: KernelId, keys: u32) -> KernelId {
    let of = |id: KernelId| {
        let info = *id.info();
        let heads = (info.head_dim, info.value_dim, info.cap, info.element);
        (info.op, info.family, info.arch, info.rows, heads)
    };
    let mut all = KernelId::all();
    let found = all.find(|id| of(*id) == of(planned) && id.info().keys == keys);
    found.unwrap_or(planned)
}

/// A plan on the device, run through `prefill` and `merge_states`.
fn run(
    gpu: &Gpu,
    plan: &Plan,
    pools: (&Memory, &Memory),
    layout: KvLayout,
    pool_pages: u32,
    q: &Memory,
    (keys, ampere): (u32, bool),
) -> (Vec<u8>, Vec<f32>) {
    let spec = &plan.spec;
    let (tokens, heads, dim) = (
        plan.total_q as usize,
        spec.q_heads as usize,
        spec.head_dim_v as usize,
    );
    let at_least_one = |bytes: usize| Memory::new(&vec![0xFF_u8; bytes.max(16)]);
    let out = at_least_one(tokens * heads * dim * 2);
    let lse = at_least_one(tokens * heads * 4);
    let slots = plan.slots as usize;
    let (partial_out, partial_lse) = (
        at_least_one(slots * heads * dim * 4),
        at_least_one(slots * heads * 4),
    );
    let partials = PartialStates {
        out: partial_out.tensor(Dtype::F32, [slots, heads, dim]),
        lse: partial_lse.tensor(Dtype::F32, [slots, heads]),
    };
    let mut page_ids = plan.page_ids.clone();
    page_ids.push(0);
    let page_ids = Memory::new(&page_ids);
    let ticket = Memory::new(&[0_u32; 4]);
    let pool = KvPool::new(
        spec,
        layout,
        plan.parts[0].page_size,
        pool_pages,
        pools.0.address(),
        pools.1.address(),
    );
    let q = q.tensor(spec.q_dtype, [tokens, heads, spec.head_dim_qk as usize]);
    let out_tensor = out.tensor(spec.out_dtype, [tokens, heads, dim]);
    let lse_tensor = lse.tensor(Dtype::F32, [tokens, heads]);
    let stream = Stream::new();
    let mut kept = Vec::new();
    for group in &plan.groups {
        let items = Memory::new(plan.items_of(group));
        let planned = group.id.expect("the plan is for a GPU");
        let call = PrefillCall {
            spec,
            kernel: match ampere {
                true => planned.on(Arch::Sm80).expect("the heads are there"),
                false => with_keys(planned, keys),
            },
            rows: group.tile.m,
            pack: group.pack,
            items: items.array(),
            page_ids: page_ids.array(),
            q: &q,
            pool: &pool,
            out: &out_tensor,
            lse: Some(&lse_tensor),
            partials: Some(&partials),
            ticket: ticket.array(),
            record: None,
            extras: Default::default(),
        };
        // SAFETY: everything is as the plan says and outlives the wait below.
        let queued = unsafe { gpu.prefill(&call, stream.0) };
        queued.expect("the call is right");
        kept.push(items);
    }
    if !plan.merges.is_empty() {
        let rows = Memory::new(&plan.merges);
        let mut slots = plan.merge_slots.clone();
        slots.push(0);
        let merge_slots = Memory::new(&slots);
        // SAFETY: as above.
        unsafe {
            gpu.merge_states(
                &partials,
                rows.array(),
                merge_slots.array(),
                &out_tensor,
                Some(&lse_tensor),
                stream.0,
            )
        }
        .expect("the call is right");
        kept.extend([rows, merge_slots]);
        stream.wait();
    }
    stream.wait();
    assert_eq!(ticket.read::<u32>()[0], 0, "the ticket is reset");
    (out.read(), lse.read())
}

fn check<T: Element>(gpu: &Gpu, case: &Case) -> Result<(), TestCaseError> {
    let (spec, batch) = (case.spec(), case.batch());
    batch.check(&spec).expect("a right batch");
    let tensors = Tensors::<T, T>::random(&spec, &batch, case.layout, case.seed);
    let plan = Planner::new()
        .plan(&spec, &batch, &case.device(), &PlanOptions::default())
        .expect("a plan");
    let (k, v) = (
        Memory::new(&tensors.parts[0].k),
        Memory::new(&tensors.parts[0].v),
    );
    let mut queries = tensors.q.clone();
    queries.resize(queries.len().max(8), T::zeroed());
    let q = Memory::new(&queries);
    let pool_pages = batch.parts[0].table.pool_pages;
    let (out, lse) = run(
        gpu,
        &plan,
        (&k, &v),
        case.layout,
        pool_pages,
        &q,
        (case.keys, case.ampere),
    );
    let again = run(
        gpu,
        &plan,
        (&k, &v),
        case.layout,
        pool_pages,
        &q,
        (case.keys, case.ampere),
    );
    prop_assert!(
        out == again.0
            && lse
                .iter()
                .map(|x| x.to_bits())
                .eq(again.1.iter().map(|x| x.to_bits())),
        "not repeatable"
    );

    let right = tensors.reference(&spec, &batch);
    let (tokens, heads, dim) = (
        batch.total_q() as usize,
        spec.q_heads as usize,
        spec.head_dim_v as usize,
    );
    let got = decode(spec.out_dtype, &out[..tokens * heads * dim * 2]);
    // Weights are rounded to 16 bits before they meet the values, the output once more.
    let straight = straight::attention(&spec, &batch, &tensors);
    prop_assert_eq!(
        straight::excess(&got, &right.out, &straight, T::from_f32),
        None
    );
    let tolerance = match spec.out_dtype {
        Dtype::F16 => Tolerance {
            absolute: 2e-3,
            relative: 2e-3,
        },
        _ => Tolerance {
            absolute: 1.2e-2,
            relative: 8e-3,
        },
    };
    compare("out", &[tokens, heads, dim], &got, &right.out, tolerance)
        .map_err(TestCaseError::fail)?;
    let lse: Vec<f64> = lse[..tokens * heads].iter().map(|&x| x.into()).collect();
    compare(
        "lse",
        &[tokens, heads],
        &lse,
        &right.lse,
        Tolerance {
            absolute: 2e-3,
            relative: 1e-4,
        },
    )
    .map_err(TestCaseError::fail)
}

/// Without a GPU too: what the test below runs is what the kernel takes.
#[test]
fn plans_of_prefills_have_contiguous_items() {
    proptest!(cases(256), |(case in case())| {
        let (spec, batch) = (case.spec(), case.batch());
        prop_assert_eq!(batch.check(&spec), Ok(()));
        let plan = Planner::new()
            .plan(&spec, &batch, &case.device(), &PlanOptions::default())
            .map_err(|error| TestCaseError::fail(error.to_string()))?;
        for group in &plan.groups {
            prop_assert_ne!(group.kernel, Kernel::Decode);
            prop_assert_eq!(group.tile.m, case.rows);
            let most = case.rows / group.pack;
            for item in plan.items_of(group) {
                prop_assert!(!item.is_gathered() && item.rows <= most, "{:?}", item);
            }
        }
    });
}

/// Without a GPU: what the kernels' errors are measured by is attention.
#[test]
fn the_straightforward_formula_is_near_the_reference() {
    proptest!(cases(24), |(case in case())| {
        let (spec, batch) = (case.spec(), case.batch());
        let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, case.layout, case.seed);
        let right = tensors.reference(&spec, &batch).out;
        let straight = straight::attention(&spec, &batch, &tensors);
        let near = Tolerance { absolute: 0.03, relative: 0.02 };
        compare("out", &[right.len()], &straight, &right, near).map_err(TestCaseError::fail)?;
    });
}

#[test]
fn random_batches_match_the_reference() {
    let Some(gpu) = gpu("random_batches_match_the_reference") else {
        return;
    };
    proptest!(cases(256), |(case in case())| {
        if case.f16 {
            check::<f16>(gpu, &case)?;
        } else {
            check::<bf16>(gpu, &case)?;
        }
    });
}

/// Last tiles with rows of the first warpgroup alone, or of two of three, behind other tiles of the same CTA and before them.
#[test]
fn warpgroups_without_rows_let_tiles_pass() {
    let Some(gpu) = gpu("warpgroups_without_rows_let_tiles_pass") else {
        return;
    };
    let sms = gpu.device().sms;
    for (head_dim, rows, keys) in [
        (64, 128, 112),
        (64, 192, 112),
        (96, 128, 128),
        (96, 192, 96),
        (128, 128, 128),
        (128, 128, 80),
        (128, 128, 64),
        (128, 192, 80),
        (192, 128, 128),
        (256, 128, 80),
    ] {
        for causal in [true, false] {
            let heads = 6;
            // About three tiles for a CTA, of these lengths in turn.
            let lengths = [
                1,
                rows + 1,
                60,
                rows + 64,
                2 * rows + 5,
                rows + 65,
                rows,
                130,
            ];
            let queries = |request: u32| lengths[request as usize % lengths.len()];
            let requests = (0..3 * sms / heads).map(|r| (queries(r), r * 37 % 300));
            let case = Case {
                kv_heads: 2,
                group: heads / 2,
                head_dim,
                rows,
                keys,
                f16: false,
                cap: false,
                causal,
                window: None,
                layout: KvLayout::Nhd,
                page_size: Some(16),
                packed: causal,
                ampere: false,
                requests: requests.collect(),
                sms,
                seed: 7,
            };
            if let Err(error) = check::<bf16>(gpu, &case) {
                panic!("heads of {head_dim}, {rows} rows, {keys} keys: {error}");
            }
        }
    }
}

#[test]
fn prefills_of_head_dimensions_without_a_kernel_are_refused() {
    let Some(gpu) = gpu("prefills_of_head_dimensions_without_a_kernel_are_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 96);
    let memory = Memory::of_bytes(1 << 16);
    let q = memory.tensor(Dtype::BF16, [4, 8, 96]);
    let pool = KvPool::new(
        &spec,
        KvLayout::Nhd,
        16,
        4,
        memory.address(),
        memory.address(),
    );
    let call = any_call(&spec, &q, &pool, &memory);
    // SAFETY: nothing is launched.
    let error = unsafe { gpu.prefill(&call, Handle::DEFAULT) }.unwrap_err();
    assert!(error.to_string().contains("head dimension 96"), "{error}");
}

/// A call that is looked at and not made.
fn any_call<'a>(
    spec: &'a Spec,
    q: &'a DeviceTensor<3>,
    pool: &'a KvPool,
    memory: &Memory,
) -> PrefillCall<'a> {
    PrefillCall {
        spec,
        kernel: KernelId::all().next().expect("there are some"),
        rows: 128,
        pack: 1,
        items: memory.array(),
        page_ids: memory.array(),
        q,
        pool,
        out: q,
        lse: None,
        partials: None,
        ticket: memory.array(),
        record: None,
        extras: Default::default(),
    }
}

//! Latent attention: rows of two items are merged from registers by the unit that ends last.

use cust::sys;
use half::{bf16, f16};
use tandem_attn::{
    exec::gpu::{Gpu, Workspace, WorkspaceOptions},
    plan::{Bound, MergeMode, PackRule, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, KvLayout, Spec},
    tensor::Element,
};

use crate::{
    common::{self, Stream, problems::Tensors},
    problem::{OnDevice, Request, batch_of, check_results, uploaded},
};

/// How often a warp of the unit of the first keys wrote its share of the state for that of the other unit, how often that of the last
/// keys did, and how often both left theirs to a merging kernel.
#[derive(Debug, Default, PartialEq, Eq)]
struct Wrote {
    first: u32,
    second: u32,
    both: u32,
}

/// Words of a warp's share of a state, and how many of the first say nothing. It has half of the columns of 16 rows. In tiles of 16 rows
/// each of eight warps has 64 columns, and LSEs are where the other unit's share would begin.
fn share_of(plan: &Plan) -> (usize, usize) {
    let of_16_rows = plan.groups.iter().all(|group| group.tile.m == 16);
    if of_16_rows {
        (16 * 512 / 8, 16)
    } else {
        (16 * 512 / 2, 0)
    }
}

fn read<T: bytemuck::Pod>(workspace: &Workspace, place: &std::ops::Range<u64>) -> Vec<T> {
    let mut values = vec![T::zeroed(); (place.end - place.start) as usize / size_of::<T>()];
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    let from = workspace.memory().address + place.start;
    // SAFETY: the place is within the workspace, and nothing runs.
    let code = unsafe { sys::cuMemcpyDtoH_v2(bytes.as_mut_ptr().cast(), from, bytes.len()) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    values
}

/// Which states of rows with two were written since the workspace was made. Counters must be zero.
fn wrote(workspace: &Workspace, plan: &Plan) -> Wrote {
    let layout = workspace.layout();
    let arrivals: Vec<u32> = read(workspace, &layout.arrivals);
    assert!(arrivals.iter().all(|&count| count == 0), "counters stay");
    let states: Vec<u32> = read(workspace, &layout.partial_out);
    let of_slot = (plan.spec.q_heads * plan.spec.head_dim_v) as usize;
    let ((words, lses), mut wrote) = (share_of(plan), Wrote::default());
    for merge in plan.merges.iter().filter(|merge| merge.slots == 2) {
        let slots = &plan.merge_slots[merge.slots_begin as usize..][..2];
        // Warps do not wait for each other, so each has its own answer.
        for share in (0..of_slot).step_by(words) {
            let is_written = |slot: u32| {
                let share = &states[slot as usize * of_slot + share..][lses..words];
                share.iter().any(|&word| word != 0)
            };
            match [is_written(slots[0]), is_written(slots[1])] {
                [true, false] => wrote.first += 1,
                [false, true] => wrote.second += 1,
                [true, true] => wrote.both += 1,
                [false, false] => panic!("no state was written for the other unit"),
            }
        }
    }
    wrote
}

/// Requests of `queries` tokens whose keys are cut at multiples of 256: two pieces where the second is short, two where the first is
/// (in a window of 300 keys), two long ones, three, and one.
fn batch(queries: u32, page: u32) -> Batch {
    let requests = [326, 512, 700, 552, 100].map(|own| Request {
        parent: 0,
        shared: 0,
        own,
        queries,
    });
    batch_of(&requests, page, 5)
}

/// A plan as the planner makes it where it splits keys so without fixed splits.
fn plan_of(gpu: &Gpu, spec: &Spec, batch: &Batch) -> Plan {
    let options = PlanOptions::default()
        .with_packing(PackRule::Off)
        .with_split(SplitMode::Fixed { tokens: 256 });
    let plan = Planner::new().plan(spec, batch, &gpu.device(), &options);
    let mut plan = plan.expect("the case can be planned");
    plan.verify(batch).expect("the plan computes the batch");
    assert_eq!(plan.merge_mode, MergeMode::Kernel, "fixed splits");
    plan.merge_mode = MergeMode::Fused;
    plan
}

/// Runs a plan twice, checks the results, and says who wrote.
fn check<T: Element>(
    gpu: &Gpu,
    batch: &Batch,
    tensors: &Tensors<T, T>,
    plan: &Plan,
    captured: bool,
) -> ((Vec<u16>, Vec<u32>), Wrote) {
    let spec = plan.spec;
    let on_device = OnDevice::new(&spec, batch, tensors);
    let stream = Stream::new();
    let mut workspace = uploaded(gpu, &spec, &gpu.device(), plan, captured, &stream);
    let results = on_device.run(gpu, &mut workspace, &stream);
    let wrote = wrote(&workspace, plan);
    check_results(&spec, batch, tensors, &results).unwrap();
    let again = on_device.run(gpu, &mut workspace, &stream);
    assert!(results == again, "two runs differ");
    (results, wrote)
}

/// Whichever unit ends last merges, with the same bits. Units are claimed in the order of items: with that turned round, short pieces
/// begin before long ones.
#[test]
fn rows_of_two_pieces_are_merged_from_registers() {
    let Some(gpu) = common::gpu("rows_of_two_pieces_are_merged_from_registers") else {
        return;
    };
    let mut seen = Wrote::default();
    // Heads, new tokens, and whether their tiles are such that registers merge.
    let cases = [
        (64, 1, true),
        (128, 1, true),
        (16, 4, true),
        (96, 1, true),
        (60, 1, false),
        (16, 1, true),
        (16, 1, true),
        (8, 2, true),
        (16, 2, false),
        (12, 1, false),
    ];
    for (index, (heads, queries, merged)) in cases.into_iter().enumerate() {
        let (window, page) = (index % 2 == 0, if index % 3 == 2 { 1 } else { 64 });
        let mut spec = Spec::latent(heads, 512, 64).with_dtype(Dtype::BF16);
        spec = spec.with_kv_dtype(Dtype::BF16);
        spec.variant.sinks = index % 2 == 1;
        spec.variant.window_left = window.then_some(300);
        let batch = batch(queries, page);
        let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 3);
        let plan = plan_of(gpu, &spec, &batch);
        let (results, in_order) = check(gpu, &batch, &tensors, &plan, false);
        let mut turned = plan.clone();
        for group in &turned.groups {
            turned.items[group.items.start as usize..group.items.end as usize].reverse();
        }
        let (others, in_turn) = check(gpu, &batch, &tensors, &turned, false);
        assert!(results == others, "{heads} heads: bits depend on the order");
        for wrote in [in_order, in_turn] {
            assert_eq!(wrote.both == 0, merged, "{heads} heads: {wrote:?}");
            assert_eq!(wrote.first + wrote.second > 0, merged, "{heads} heads");
            (seen.first, seen.second) = (seen.first + wrote.first, seen.second + wrote.second);
        }
    }
    assert!(seen.first > 0 && seen.second > 0, "both orders: {seen:?}");
}

/// As many states as rows and pieces: the merging kernel has them.
#[test]
fn launch_sets_leave_pieces_to_the_merging_kernel() {
    let Some(gpu) = common::gpu("launch_sets_leave_pieces_to_the_merging_kernel") else {
        return;
    };
    let spec = Spec::latent(64, 512, 64).with_dtype(Dtype::F16);
    let spec = spec.with_kv_dtype(Dtype::F16);
    let batch = batch(1, 64);
    let tensors = Tensors::<f16, f16>::random(&spec, &batch, KvLayout::Nhd, 4);
    let mut plan = plan_of(gpu, &spec, &batch);
    let (in_set, wrote) = check(gpu, &batch, &tensors, &plan, true);
    assert_eq!((wrote.first, wrote.second), (0, 0));
    plan.merge_mode = MergeMode::Kernel;
    let (by_kernel, wrote) = check(gpu, &batch, &tensors, &plan, false);
    assert_eq!((wrote.first, wrote.second), (0, 0));
    assert!(in_set == by_kernel, "a launch set changes bits");
}

/// A graph of one plan has the kernels that merge, and its replays have the bits of runs. A plan without pieces has other launches.
#[test]
fn graphs_of_a_plan_merge_pieces() {
    let Some(gpu) = common::gpu("graphs_of_a_plan_merge_pieces") else {
        return;
    };
    let spec = Spec::latent(64, 512, 64).with_dtype(Dtype::BF16);
    let spec = spec.with_kv_dtype(Dtype::BF16);
    let batch = batch(1, 64);
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 6);
    let mut plan = plan_of(gpu, &spec, &batch);
    let (results, _) = check(gpu, &batch, &tensors, &plan, false);
    let on_device = OnDevice::new(&spec, &batch, &tensors);
    let (tokens, heads) = (plan.total_q as usize, spec.q_heads as usize);
    let out = on_device.out.tensor(Dtype::BF16, [tokens, heads, 512]);
    let lse = on_device.lse.tensor(Dtype::F32, [tokens, heads]);
    let stream = gpu.stream().expect("a stream");
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), WorkspaceOptions::default())
        .expect("there is memory");
    // SAFETY: the stream is ours; everything on the device lives until it was waited for.
    unsafe {
        workspace.upload(&plan, *stream).unwrap();
        let tensors = on_device.tensors(&out, &lse);
        let graph = stream
            .capture(|stream| gpu.run_with(&mut workspace, &tensors, stream))
            .unwrap();
        for _ in 0..2 {
            on_device
                .out
                .write_at(0, &vec![u16::MAX; tokens * heads * 512]);
            graph.launch(*stream).unwrap();
            stream.synchronize().unwrap();
            let bits: Vec<u16> = on_device.out.read_at(0, tokens * heads * 512);
            assert!(bits == results.0, "a replay differs");
        }
        plan.merge_mode = MergeMode::Kernel;
        workspace.upload(&plan, *stream).unwrap();
        graph
            .launch(*stream)
            .expect_err("the graph has no merging kernel for these");
    }
}

/// The debug mode reads what rows say of pieces.
#[test]
fn checks_know_rows_of_two_pieces() {
    let Some(gpu) = common::gpu("checks_know_rows_of_two_pieces") else {
        return;
    };
    let spec = Spec::latent(64, 512, 64).with_dtype(Dtype::BF16);
    let spec = spec.with_kv_dtype(Dtype::BF16);
    let batch = batch(1, 64);
    let tensors = Tensors::<bf16, bf16>::random(&spec, &batch, KvLayout::Nhd, 6);
    let plan = plan_of(gpu, &spec, &batch);
    let mut options = WorkspaceOptions::default();
    options.checks = true;
    let mut workspace = gpu
        .workspace(&spec, &Bound::of(&plan), options)
        .expect("there is memory");
    let stream = Stream::new();
    // SAFETY: the stream is ours.
    unsafe { workspace.upload(&plan, stream.0) }.expect("the plan fits");
    let results = OnDevice::new(&spec, &batch, &tensors).run(gpu, &mut workspace, &stream);
    check_results(&spec, &batch, &tensors, &results).unwrap();
}

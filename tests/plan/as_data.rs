//! Plans as data: they serialise, and print as a table.

use crate::damage::damaged;
use crate::problems::{Problem, Tensors, cases, problem, small_problem};
use proptest::prelude::*;
use tandem_attn::{
    Error,
    abi::WorkItem,
    exec::Cpu,
    plan::{
        BatchLimits, Bound, BrokenPlan, DeviceDescription, Plan, PlanOptions, Planner,
        WorkspaceLayout,
    },
    problem::{Batch, Dtype, KvLayout, PageTable, Spec},
    variants::ALIBI,
};

proptest! {
    #![proptest_config(cases(500))]

    /// What is read back is the plan to the last bit, and keeps what plans do: it runs and it grows.
    #[test]
    fn plans_survive_serialisation(problem in problem()) {
        let Problem { spec, batch, device, options, .. } = &problem;
        let plan = Planner::new().plan(spec, batch, device, options).expect("the problem can be planned");
        let json = serde_json::to_string(&plan).expect("plain data");
        let mut again: Plan = serde_json::from_str(&json).expect("what was written");
        prop_assert_eq!(&again, &plan);
        prop_assert_eq!(serde_json::to_string(&again).expect("plain data"), json);
        prop_assert_eq!(again.verify(batch), Ok(()));
        prop_assert_eq!(again.grow(batch).is_some(), plan.growable);
        prop_assert_eq!(again.to_string(), plan.to_string());
    }
}

/// A prompt of 300 tokens, and four decodes of which three share 40 pages.
fn batch() -> Batch {
    let mut table = PageTable::new(16, 500);
    table.push(&(400..419).collect::<Vec<_>>(), 300);
    for request in 0..3 {
        let pages: Vec<u32> = (0..40).chain([50 + request]).collect();
        table.push(&pages, 650);
    }
    table.push(&(100..300).collect::<Vec<_>>(), 3200);
    Batch::new(vec![0, 300, 301, 302, 303, 304], table)
}

#[test]
fn a_plan_prints_as_a_table() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    let plan = Planner::new()
        .plan(&spec, &batch(), &device, &PlanOptions::default())
        .unwrap();
    let table = plan.to_string();
    let mut lines = table.lines();
    assert_eq!(
        lines.next(),
        Some(
            "kernel                                    tile  heads    items    units     tokens         keys"
        )
    );
    // A line for each launch, which has the figures of its items, and one for the merges.
    for (line, group) in lines.by_ref().zip(&plan.groups) {
        let words: Vec<_> = line.split_whitespace().collect();
        let items = plan.items_of(group);
        let sum = |of: fn(&tandem_attn::abi::WorkItem) -> u32| {
            items.iter().map(of).sum::<u32>().to_string()
        };
        let figures = [
            plan.kernel_name(group),
            group.tile.to_string(),
            group.pack.to_string(),
            items.len().to_string(),
            plan.units_of(group).to_string(),
            sum(|item| item.rows),
            sum(|item| item.kv_len()),
        ];
        assert_eq!(words, figures);
    }
    let merges = format!(
        "304 query tokens, {} merges of {} partial states",
        plan.merges.len(),
        plan.slots
    );
    assert_eq!(table.lines().last(), Some(merges.as_str()));
}

/// Not the kernels with a soft cap in whose place they are, which no profile shows.
#[test]
fn kernels_of_a_variant_have_the_names_of_their_entries() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128).with_hooks(&ALIBI);
    let plan = Planner::new()
        .plan(&spec, &batch(), &device, &PlanOptions::default())
        .unwrap();
    let entries: Vec<_> = ALIBI.kernels().map(|id| ALIBI.entry(id.info())).collect();
    for group in &plan.groups {
        let name = plan.kernel_name(group);
        assert!(
            name.ends_with("_alibi") && entries.contains(&name),
            "{name}"
        );
        assert!(plan.to_string().contains(&name), "{plan}");
    }
}

#[test]
fn bounds_layouts_and_schedules_are_data_too() {
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    let options = PlanOptions::default();
    let bound = Bound::new(
        &spec,
        &device,
        &options,
        &BatchLimits::decodes(64, 8192, 16),
    )
    .unwrap();
    let layout = WorkspaceLayout::new(&spec, &bound);
    let options = options.with_bound(bound);
    let json = serde_json::to_string(&(options, &layout)).unwrap();
    assert_eq!(
        serde_json::from_str::<(PlanOptions, WorkspaceLayout)>(&json).unwrap(),
        (options, layout)
    );
}

/// How the CPU refuses a plan of one decode that was damaged; nothing is written.
fn refused(damage: impl FnOnce(&mut Plan)) -> BrokenPlan {
    let mut table = PageTable::new(16, 8);
    table.push(&[0, 1], 20);
    let batch = Batch::new(vec![0, 1], table);
    let spec = Spec::new(1, 1, 16).with_dtype(Dtype::F32);
    let device = DeviceDescription::named("cpu").unwrap();
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    let mut plan = plan.unwrap();
    damage(&mut plan);
    assert!(plan.verify(&batch).is_err());
    let tensors = Tensors::<f32, f32>::random(&spec, &batch, KvLayout::Nhd, 1);
    let mut out = vec![7.0_f32; 16];
    let ran = Cpu::new().run(&plan, &tensors.q, &tensors.views(), &mut out, None);
    assert_eq!(out, [7.0; 16]);
    match ran {
        Err(Error::BrokenPlan(broken)) => broken,
        _ => panic!("{ran:?}"),
    }
}

/// No memory is taken for slots that no merge takes.
#[test]
fn a_plan_of_too_many_slots_is_refused() {
    let broken = refused(|plan| plan.slots = u32::MAX);
    assert_eq!((broken.array, broken.got), ("merge_slots", u32::MAX));
}

/// Executors have no work without queries.
#[test]
fn an_item_without_rows_is_refused() {
    let broken = refused(|plan| {
        let mut empty = plan.items[0];
        empty.rows = 0;
        plan.items.push(empty);
        plan.groups[0].items.end += 1;
    });
    assert_eq!((broken.index, broken.field, broken.got), (1, "rows", 0));
}

/// Each run of a joint item becomes an item of its own, with its rows.
#[test]
fn a_run_that_does_not_name_rows_is_refused() {
    let mut table = PageTable::new(16, 400);
    for request in 0..2 {
        let pages: Vec<u32> = (0..128).chain([128 + request]).collect();
        table.push(&pages, 2060);
    }
    let batch = Batch::new(vec![0, 1, 2], table);
    let device = DeviceDescription::named("h200").unwrap();
    let spec = Spec::new(32, 8, 128);
    let options = PlanOptions::default();
    let plan = Planner::new().plan(&spec, &batch, &device, &options);
    let mut plan = plan.unwrap();
    let joint = plan.items.iter().position(WorkItem::is_joint);
    let joint = joint.expect("both share 2,048 keys");
    let run = joint + plan.items[joint].slot as usize;
    assert!(plan.without_joint_items().is_ok());
    (plan.items[run].flags, plan.items[run].rows_begin) = (0, 1 << 20);
    let broken = plan.without_joint_items().unwrap_err();
    assert_eq!((broken.index, broken.field, broken.got), (run, "flags", 0));
}

proptest! {
    #![proptest_config(cases(3000))]

    /// A plan whose text was damaged is refused when it is read, or when it is run; whatever it says, nothing panics.
    #[test]
    fn damaged_plans_are_refused_or_run(mut problem in small_problem(), seed in any::<u64>()) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        let Problem { spec, batch, device, options, layout, .. } = &problem;
        let plan = Planner::new().plan(spec, batch, device, options).expect("the problem can be planned");
        let json = serde_json::to_string(&plan).expect("plain data");
        for round in 0..8 {
            let Ok(mut read) = serde_json::from_slice::<Plan>(&damaged(json.as_bytes(), seed ^ round)) else {
                continue;
            };
            let verified = read.verify(batch);
            let tensors = Tensors::<f32, f32>::random(spec, batch, *layout, 1);
            let heads = (batch.total_q() * spec.q_heads) as usize;
            let mut out = vec![7.0_f32; heads * spec.head_dim_v as usize];
            let ran = Cpu::new().run(&read, &tensors.q, &tensors.views(), &mut out, None);
            if read == plan {
                prop_assert!(verified.is_ok() && ran.is_ok());
            }
            if ran.is_err() {
                prop_assert!(out.iter().all(|&x| x == 7.0), "refused, and outputs were written");
            }
            let _ = read.grow(batch);
        }
    }
}

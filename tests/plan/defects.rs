//! Broken plans: [`Plan::verify`] finds what is wrong, and what it lets pass computes the batch.

use std::collections::BTreeMap;

use crate::numeric::{Rng, Tolerance, compare, to_f64};
use crate::problems::{Problem, Tensors, cases, problem};
use proptest::{prelude::*, strategy::ValueTree, test_runner::TestRunner};
use tandem_attn::{
    abi::{DIRECT, MergeRow, NO_MERGE, WorkItem},
    exec::Cpu,
    plan::{DeviceDescription, Kernel, Plan, PlanOptions, Planner},
    problem::{Batch, Dtype, PageTable, Part, Spec},
};

fn plan_of(problem: &Problem) -> Plan {
    let Problem {
        spec,
        batch,
        device,
        options,
        ..
    } = problem;
    let plan = Planner::new().plan(spec, batch, device, options);
    plan.expect("the problem can be planned")
}

/// An index below `len`, if there is any.
fn pick(noise: &mut Rng, len: usize) -> Option<usize> {
    (len > 0).then(|| (noise.between(0.0, len as f32) as usize).min(len - 1))
}

/// Damages a plan; `None` where it has nothing of the kind.
type Damage = fn(&mut Plan, &mut Rng) -> Option<()>;

/// The last group gets the item too, or goes without it.
fn resize_last(plan: &mut Plan, by: i32) {
    let group = plan.groups.last_mut().expect("a group for the item");
    group.items.end = group.items.end.wrapping_add_signed(by);
}

/// An item whose every row needs its first and its last key.
fn needed(plan: &Plan, noise: &mut Rng) -> Option<usize> {
    let variant = plan.spec.variant;
    let at = pick(noise, plan.items.len())?;
    let whole = !variant.causal && variant.window_left.is_none();
    (whole && plan.items[at].kv_len() > 1).then_some(at)
}

fn joint(plan: &Plan, noise: &mut Rng) -> Option<usize> {
    let joint: Vec<usize> = (0..plan.launched())
        .filter(|&at| plan.items[at].is_joint())
        .collect();
    Some(joint[pick(noise, joint.len())?])
}

const DAMAGES: [(&str, Damage); 28] = [
    ("an item ends a key too early", |plan, noise| {
        let at = needed(plan, noise)?;
        plan.items[at].kv_end -= 1;
        Some(())
    }),
    ("an item begins a key too late", |plan, noise| {
        let at = needed(plan, noise)?;
        plan.items[at].kv_begin += 1;
        Some(())
    }),
    ("an item begins where another has read", |plan, noise| {
        let at = needed(plan, noise)?;
        plan.items[at].kv_begin = plan.items[at].kv_begin.checked_sub(1)?;
        Some(())
    }),
    ("an item reads past its table", |plan, noise| {
        let at = pick(noise, plan.items.len())?;
        plan.items[at].kv_end += 1 << 20;
        Some(())
    }),
    ("an item has no keys", |plan, noise| {
        let at = pick(noise, plan.items.len())?;
        plan.items[at].kv_end = plan.items[at].kv_begin;
        Some(())
    }),
    // The item behind it reads its keys: nothing else is wrong with the plan.
    (
        "an item has no keys and another reads them",
        |plan, noise| {
            let at = pick(noise, plan.launched())?;
            let tokens = |plan: &Plan, at: usize| -> Option<Vec<u32>> {
                let item = &plan.items[at];
                let rows = item.rows_begin..item.rows_begin + item.rows;
                let token = |row: u32| match item.is_gathered() {
                    true => plan.rows[row as usize].token,
                    false => row,
                };
                (!item.is_joint()).then(|| rows.map(token).collect())
            };
            let of_first = tokens(plan, at)?;
            let first = plan.items[at];
            let next = (0..plan.launched()).find(|&next| {
                let item = &plan.items[next];
                item.part == first.part
                    && item.kv_begin == first.kv_end
                    && tokens(plan, next).is_some_and(|tokens| tokens == of_first)
            })?;
            plan.items[at].kv_end = first.kv_begin;
            plan.items[next].kv_begin = first.kv_begin;
            Some(())
        },
    ),
    ("an item is missing", |plan, _| {
        plan.items.pop()?;
        resize_last(plan, -1);
        if plan.groups.last()?.items.is_empty() {
            plan.groups.pop();
        }
        Some(())
    }),
    ("an item comes twice", |plan, _| {
        plan.items.push(*plan.items.last()?);
        resize_last(plan, 1);
        Some(())
    }),
    ("an item is in no group", |plan, _| {
        plan.items.push(*plan.items.last()?);
        Some(())
    }),
    ("an item is one row short", |plan, noise| {
        let at = pick(noise, plan.items.len())?;
        plan.items[at].rows -= 1;
        Some(())
    }),
    ("an item reads another table", |plan, noise| {
        let at = pick(noise, plan.items.len())?;
        let before = plan.pages_of(&plan.items[at]).to_vec();
        plan.items[at].table += 1;
        let end = plan.items[at].table as usize + before.len();
        // Requests may have the same pages.
        let other = plan.page_ids.get(end - before.len()..end);
        (other != Some(&before[..])).then_some(())
    }),
    (
        "an item is of another kind than its group",
        |plan, noise| {
            let at = pick(noise, plan.items.len())?;
            plan.items[at].flags ^= WorkItem::GATHERED;
            Some(())
        },
    ),
    ("a group has another kernel", |plan, noise| {
        let at = pick(noise, plan.groups.len())?;
        let group = &mut plan.groups[at];
        group.kernel = match group.kernel {
            Kernel::Decode => Kernel::Prefill,
            _ => Kernel::Decode,
        };
        Some(())
    }),
    ("a tile does not hold its rows", |plan, noise| {
        let at = pick(noise, plan.groups.len())?;
        plan.groups[at].tile.m = 0;
        Some(())
    }),
    ("a tile packs heads that share no keys", |plan, noise| {
        let at = pick(noise, plan.groups.len())?;
        plan.groups[at].pack = plan.spec.group() + 1;
        Some(())
    }),
    ("a row stands elsewhere", |plan, noise| {
        let at = pick(noise, plan.rows.len())?;
        plan.rows[at].position += 1;
        Some(())
    }),
    ("a row is another token's", |plan, noise| {
        let at = pick(noise, plan.rows.len())?;
        plan.rows[at].token = (plan.rows[at].token + 1) % (plan.total_q + 1);
        Some(())
    }),
    ("two rows share a slot", |plan, noise| {
        let slots = |plan: &Plan| -> Vec<usize> {
            (0..plan.rows.len())
                .filter(|&at| plan.rows[at].slot != DIRECT)
                .collect()
        };
        let slots = slots(plan);
        let (a, b) = (
            slots[pick(noise, slots.len())?],
            slots[pick(noise, slots.len())?],
        );
        if a == b {
            return None;
        }
        plan.rows[a].slot = plan.rows[b].slot;
        Some(())
    }),
    ("a merge is missing", |plan, _| {
        plan.merges.pop()?;
        Some(())
    }),
    // The same merge again, behind all others: nothing else is wrong with the plan.
    ("a token is merged twice", |plan, _| {
        plan.merges.push(*plan.merges.last()?);
        Some(())
    }),
    // The first of the two is nobody's, and merges what another token left.
    (
        "a token is merged by a merge of another's states",
        |plan, _| {
            let [.., other, last] = plan.merges[..] else {
                return None;
            };
            let stray = MergeRow {
                token: last.token,
                ..other
            };
            plan.merges.insert(0, stray);
            let launched = plan.launched();
            let of_rows = plan.rows.iter_mut().map(|row| &mut row.merge);
            let of_items = plan.items[..launched]
                .iter_mut()
                .filter(|item| !item.is_joint())
                .map(|item| &mut item.merge);
            for merge in of_rows.chain(of_items).filter(|merge| **merge != NO_MERGE) {
                *merge += 1;
            }
            Some(())
        },
    ),
    ("a merge takes states in another order", |plan, noise| {
        let at = pick(noise, plan.merges.len())?;
        let merge = plan.merges[at];
        let slots = merge.slots_begin as usize..(merge.slots_begin + merge.slots) as usize;
        if slots.len() < 2 {
            return None;
        }
        plan.merge_slots[slots].reverse();
        Some(())
    }),
    ("a joint item leaves out a run", |plan, noise| {
        let at = joint(plan, noise)?;
        plan.items[at].merge -= 1;
        Some(())
    }),
    ("a joint item has the runs beside its own", |plan, noise| {
        let at = joint(plan, noise)?;
        plan.items[at].slot += 1;
        Some(())
    }),
    ("a slot is nobody's", |plan, _| {
        plan.slots += 1;
        Some(())
    }),
    ("a page is another", |plan, noise| {
        let at = pick(noise, plan.page_ids.len())?;
        plan.page_ids[at] ^= 1;
        Some(())
    }),
    (
        "KV heads that are together are no divisor of all",
        |plan, noise| {
            let at = pick(noise, plan.groups.len())?;
            plan.groups[at].kv_heads_together = plan.spec.kv_heads + 1;
            Some(())
        },
    ),
    ("a row block ends with another item", |plan, noise| {
        let at = pick(noise, plan.row_blocks.len())?;
        let tail = &mut plan.row_blocks[at].tail;
        if *tail == u32::MAX {
            return None;
        }
        *tail = plan.items.len() as u32;
        Some(())
    }),
];

#[test]
fn every_kind_of_damage_is_found() {
    let mut found = BTreeMap::new();
    let mut runner = TestRunner::deterministic();
    for _ in 0..12_000 {
        let problem = problem()
            .new_tree(&mut runner)
            .expect("a problem")
            .current();
        let plan = plan_of(&problem);
        assert_eq!(plan.verify(&problem.batch), Ok(()));
        let mut noise = Rng(problem.seed);
        for (name, damage) in DAMAGES {
            let mut broken = plan.clone();
            if damage(&mut broken, &mut noise).is_some() {
                let verdict = broken.verify(&problem.batch);
                assert!(
                    verdict.is_err(),
                    "{name}, and nothing is found in\n{broken:?}"
                );
                *found.entry(name).or_insert(0) += 1;
            }
        }
    }
    for (name, _) in DAMAGES {
        assert!(
            found.get(name).is_some_and(|times| *times >= 20),
            "{name}: {found:?}"
        );
    }
}

/// Changes one number somewhere.
fn change_a_number(
    plan: &mut Plan,
    array: u32,
    at: &prop::sample::Index,
    value: u32,
) -> Option<()> {
    let words: &mut [u32] = match array {
        0 => bytemuck::cast_slice_mut(&mut plan.items),
        1 => bytemuck::cast_slice_mut(&mut plan.rows),
        2 => bytemuck::cast_slice_mut(&mut plan.merges),
        3 => &mut plan.merge_slots,
        _ => &mut plan.page_ids,
    };
    let len = words.len();
    let word = words.get_mut(at.index(len.max(1)))?;
    // Mostly something near, which is harder to see.
    *word = if value < 1 << 30 {
        word.wrapping_add(value % 7).wrapping_sub(3)
    } else {
        value
    };
    Some(())
}

/// Executors refuse a table that begins before its part's, whatever it holds.
#[test]
fn a_table_of_another_part_with_the_same_pages_is_found() {
    let spec = Spec::new(4, 2, 64);
    let table = |keys| {
        let mut table = PageTable::new(16, 8);
        table.push(&[5, 6], keys);
        table
    };
    let mut prefix = Part::new(vec![0, 1], table(32));
    prefix.keys_after = vec![20];
    let own = Part::new(vec![0, 1], table(20));
    let batch = Batch::composed(vec![0, 1], vec![prefix, own]);
    let device = DeviceDescription::named("cpu").expect("described");
    let plan = Planner::new().plan(&spec, &batch, &device, &PlanOptions::default());
    let mut plan = plan.expect("a plan");
    assert_eq!(plan.verify(&batch), Ok(()));
    let second = plan.items.iter_mut().find(|item| item.part == 1);
    second.expect("it has keys").table -= 2;
    let found = plan.verify(&batch).expect_err("the first part's table");
    assert!(
        found.to_string().contains("outside of the pages"),
        "{found}"
    );
}

proptest! {
    #![proptest_config(cases(2000))]

    #[test]
    fn plans_that_pass_the_verifier_compute_the_batch(
        mut problem in problem(), array in 0u32..5, at in any::<prop::sample::Index>(), value in any::<u32>(),
    ) {
        problem.spec = problem.spec.with_dtype(Dtype::F32);
        let Problem { spec, batch, layout, seed, .. } = &problem;
        let mut plan = plan_of(&problem);
        if change_a_number(&mut plan, array, &at, value).is_none() || plan.verify(batch).is_err() {
            return Ok(());
        }
        let tensors: Tensors<f32, f32> = Tensors::random(spec, batch, *layout, *seed);
        let right = tensors.reference(spec, batch);
        let mut out = vec![0.0f32; right.out.len()];
        let cpu = Cpu::new();
        cpu.run(&plan, &tensors.q, &tensors.views(), &mut out, None).expect("the verifier let it pass");
        let shape = [plan.total_q as usize, spec.q_heads as usize, spec.head_dim_v as usize];
        compare("out", &shape, &to_f64(&out), &right.out, Tolerance::of(Dtype::F32)).map_err(TestCaseError::fail)?;
    }
}

//! Plans that grow with their batch, and those that must be made anew.

use tandem_attn::{
    plan::{
        Bound, DeviceDescription, PackRule, Plan, PlanError, PlanOptions, Planner, SplitMode,
        Update,
    },
    problem::{Batch, PageTable, Part, Spec},
};

/// A request with keys on ten pages, and more in a part behind it, whose queries see `after` keys behind the first part.
fn in_two_parts(keys: u32, after: u32, behind: u32) -> Batch {
    let mut first = Part::new(vec![0, 1], PageTable::new(16, 20));
    first.table.push(&(0..10).collect::<Vec<_>>(), keys);
    first.keys_after = vec![after];
    let mut second = Part::new(vec![0, 1], PageTable::new(16, 20));
    second.table.push(&[10], behind);
    Batch::composed(vec![0, 1], vec![first, second])
}

fn plan_on_h200(spec: &Spec, batch: &Batch, options: &PlanOptions) -> Plan {
    let device = DeviceDescription::named("h200").unwrap();
    let plan = Planner::new().plan(spec, batch, &device, options);
    plan.unwrap()
}

/// Four queries of which the first ends before the last piece begins. Once keys behind the part move it on, it reads that.
#[test]
fn a_plan_does_not_grow_into_keys_that_a_row_has_not_seen() {
    let batch = |behind: u32| {
        let mut first = Part::new(vec![0, 4], PageTable::new(16, 20));
        first.table.push(&(0..13).collect::<Vec<_>>(), 194);
        first.keys_after = vec![behind];
        let mut second = Part::new(vec![0, 3, 4], PageTable::new(16, 20));
        second.table.push(&[], 0);
        second.table.push(&[13], behind);
        Batch::composed(vec![0, 4], vec![first, second])
    };
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 192 });
    let plan = plan_on_h200(&Spec::new(8, 2, 128), &batch(1), &options);
    assert_eq!(plan.verify(&batch(1)), Ok(()));
    assert_eq!(plan.clone().grow(&batch(3)), None);
}

/// One piece would grow with a page of thousands of tokens, where a new plan has many.
#[test]
fn a_plan_grows_by_no_more_than_a_cut_inside_large_pages() {
    let batch = |page: u32, keys: u32| {
        let mut table = PageTable::new(page, 20);
        table.push(&(0..10).collect::<Vec<_>>(), keys);
        Batch::new(vec![0, 1], table)
    };
    let spec = Spec::new(32, 8, 128);
    for (page, split) in [
        (4096, SplitMode::Makespan),
        (784, SplitMode::Fixed { tokens: 1568 }),
    ] {
        let options = PlanOptions::default().with_split(split);
        let (first, grown) = (batch(page, page + 1), batch(page, page + 129));
        let mut plan = plan_on_h200(&spec, &first, &options);
        for keys in 2..=129 {
            let next = batch(page, page + keys);
            assert_eq!(plan.grow(&next), Some(Update::Patched), "{page} {keys}");
        }
        assert_eq!(plan.verify(&grown), Ok(()));
        assert_eq!(plan.clone().grow(&batch(page, page + 130)), None);
        let mut planner = Planner::new();
        let device = DeviceDescription::named("h200").unwrap();
        let again = planner.plan(&spec, &batch(page, page + 130), &device, &options);
        assert_eq!(again.unwrap().verify(&batch(page, page + 130)), Ok(()));
    }
    let uneven = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 128 });
    let device = DeviceDescription::named("h200").unwrap();
    let refused = Planner::new().plan(&spec, &batch(256, 300), &device, &uneven);
    assert!(
        matches!(refused, Err(PlanError::FixedSplit { .. })),
        "{refused:?}"
    );
}

/// Fewer keys behind those of a part: its queries stand further left, where a window shows what it had passed.
#[test]
fn a_plan_does_not_follow_queries_that_move_back() {
    let batch = |after| in_two_parts(160, after, 3);
    let mut spec = Spec::new(8, 2, 128);
    spec.variant.window_left = Some(100);
    let plan = plan_on_h200(&spec, &batch(3), &PlanOptions::default());
    assert_eq!(plan.clone().grow(&batch(3)), Some(Update::Kept));
    assert_eq!(plan.clone().grow(&batch(2)), None);
}

/// A page that the window has passed may be freed: a plan does not go on to read it.
#[test]
fn a_plan_does_not_grow_behind_a_page_that_its_window_passed() {
    let batch = |keys: u32| {
        let mut table = PageTable::new(16, 100);
        table.push(&(0..10).collect::<Vec<_>>(), keys);
        Batch::new(vec![0, 1], table)
    };
    let spec = Spec::new(8, 2, 128).with_window_left(20);
    for options in [
        PlanOptions::default(),
        PlanOptions::default().with_split(SplitMode::Fixed { tokens: 64 }),
    ] {
        // The query of 148 keys is at 147, and sees the keys from 127 on; that of 149 none of the page that ends at 128.
        let mut plan = plan_on_h200(&spec, &batch(146), &options);
        assert_eq!(plan.grow(&batch(147)), Some(Update::Patched));
        assert_eq!(plan.grow(&batch(148)), Some(Update::Patched));
        assert_eq!(plan.verify(&batch(148)), Ok(()));
        assert_eq!(plan.grow(&batch(149)), None);
    }
}

/// A key goes from the end of a part to one behind it: queries stand where they stood, and the part ends earlier.
#[test]
fn a_plan_does_not_follow_a_table_that_lost_keys() {
    let batch = |keys, behind| in_two_parts(keys, behind, behind);
    let plan = plan_on_h200(
        &Spec::new(8, 2, 128),
        &batch(158, 3),
        &PlanOptions::default(),
    );
    assert_eq!(plan.verify(&batch(158, 3)), Ok(()));
    let mut grown = plan.clone();
    assert_eq!(grown.grow(&batch(159, 3)), Some(Update::Patched));
    assert_eq!(grown.verify(&batch(159, 3)), Ok(()));
    assert_eq!(plan.clone().grow(&batch(157, 4)), None);
}

/// A plan grows only for the device and the options for which it was made, whoever made it.
#[test]
fn an_update_for_another_device_or_other_options_plans_anew() {
    let batch = |keys: u32| {
        let mut table = PageTable::new(16, 1000);
        table.push(&(0..1000).collect::<Vec<_>>(), keys);
        Batch::new(vec![0, 1], table)
    };
    let [h200, h100] = ["h200", "h100"].map(|name| DeviceDescription::named(name).unwrap());
    let fixed = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 512 });
    let (spec, auto) = (Spec::new(8, 2, 128), PlanOptions::default());
    let bound = Bound {
        slots: 1,
        ..Bound::of(&plan_on_h200(&spec, &batch(15_990), &fixed))
    };
    let plan = plan_on_h200(&spec, &batch(15_990), &auto);
    let updated = |device, options| {
        let mut plan = plan.clone();
        let done = Planner::new().update(&spec, &batch(15_991), device, options, &mut plan);
        (done, plan)
    };
    assert_eq!(updated(&h200, &auto).0, Ok(Update::Patched));
    for (device, options) in [(&h100, &auto), (&h200, &fixed)] {
        let new = Planner::new().plan(&spec, &batch(15_991), device, options);
        assert_eq!(
            updated(device, options),
            (Ok(Update::Planned), new.unwrap())
        );
    }
    let (done, within) = updated(&h200, &auto.with_bound(bound));
    assert_eq!(done, Ok(Update::Planned));
    assert!(within.slots <= 1 && plan.slots > 1);

    // What a file does not say is not taken for granted.
    let text = serde_json::to_string(&plan).unwrap();
    let mut read: Plan = serde_json::from_str(&text).unwrap();
    assert_eq!(read, plan);
    let done = Planner::new().update(&spec, &batch(15_991), &h200, &auto, &mut read);
    assert_eq!(done, Ok(Update::Planned));
}

/// A plan that was read from a file does not know the arrays of its batch, and looks at each row block. It sees the same changes.
#[test]
fn a_plan_read_from_a_file_grows_as_the_original() {
    let batch = || {
        let mut table = PageTable::new(16, 100);
        for request in 0..6 {
            let pages = [90, 91, 10 * request, 10 * request + 1];
            table.push(&pages, 50 + request % 3);
        }
        Batch::new((0..=6).collect(), table)
    };
    type Change = fn(&mut Batch);
    let changes: [(&str, Change); 10] = [
        ("nothing", |_| {}),
        ("a token for each", |batch| lengthen(batch, [1; 6])),
        ("tokens up to the last page's end", |batch| {
            lengthen(batch, [12; 6])
        }),
        ("tokens beyond it", |batch| lengthen(batch, [13; 6])),
        ("fewer tokens", |batch| lengthen(batch, [-1; 6])),
        ("a token for some", |batch| {
            lengthen(batch, [1, 1, 0, 1, 1, 1])
        }),
        ("another first page", |batch| {
            batch.parts[0].table.indices[8] = 99
        }),
        ("another last page", |batch| {
            batch.parts[0].table.indices[11] = 99
        }),
        ("other queries", |batch| {
            batch.parts[0].q_indptr[1] = 0;
            batch.qo_indptr[1] = 0;
        }),
        ("masks", |batch| batch.ancestors = vec![!0; 6]),
    ];
    let spec = Spec::new(8, 2, 128);
    for options in [
        PlanOptions::default(),
        PlanOptions::default().with_split(SplitMode::Fixed { tokens: 32 }),
        PlanOptions::default().with_packing(PackRule::Off),
    ] {
        let planned = plan_on_h200(&spec, &batch(), &options);
        for (name, change) in changes {
            let mut original = planned.clone();
            let json = serde_json::to_string(&original).unwrap();
            let mut read: Plan = serde_json::from_str(&json).unwrap();
            let mut grown = batch();
            // A second step, after which both know the arrays, and a third.
            for step in 0..3 {
                change(&mut grown);
                let update = original.grow(&grown);
                assert_eq!(update, read.grow(&grown), "{name}, step {step}");
                assert_eq!(original, read, "{name}, step {step}");
                if update.is_some() {
                    assert_eq!(original.verify(&grown), Ok(()), "{name}, step {step}");
                }
            }
        }
    }
}

/// Adds tokens to the last page of each request.
fn lengthen(batch: &mut Batch, by: [i32; 6]) {
    for (last, by) in batch.parts[0].table.last_page_len.iter_mut().zip(by) {
        *last = last.wrapping_add_signed(by);
    }
}

//! Every option of the planner changes the plan, or is refused.

use tandem_attn::{
    plan::{BatchLimits, DeviceDescription, PlanOptions, Planner},
    problem::{Batch, PageTable, Spec},
};

use crate::problems::PLAN_OPTIONS;

/// A chunk of a prompt, decodes behind a common prefix, and a long one of its own.
fn batch() -> Batch {
    let mut table = PageTable::new(16, 20_000);
    let mut ends = vec![0];
    let mut next = 256;
    let mut push = |queries: u32, shared: u32, own: u32| {
        let pages: Vec<u32> = (0..shared / 16)
            .chain(next..next + own.div_ceil(16))
            .collect();
        next += own.div_ceil(16);
        table.push(&pages, shared + own);
        ends.push(ends[ends.len() - 1] + queries);
    };
    push(1024, 0, 8192);
    for _ in 0..40 {
        push(1, 4096, 1000);
    }
    push(1, 0, 60_000);
    Batch::new(ends, table)
}

#[test]
fn each_option_counts_or_is_refused() {
    let (spec, batch) = (Spec::new(32, 8, 128), batch());
    let device = DeviceDescription::named("h200").unwrap();
    let plan = |options: &PlanOptions| {
        let plan = Planner::new().plan(&spec, &batch, &device, options).ok()?;
        plan.verify(&batch).unwrap();
        Some(serde_json::to_string(&plan).expect("a plan is data"))
    };
    let plain = plan(&PlanOptions::default()).expect("nothing is special");
    for (name, change) in PLAN_OPTIONS {
        let mut options = PlanOptions::default();
        change(&mut options);
        let changed = plan(&options);
        assert_ne!(changed.as_ref(), Some(&plain), "{name} changes nothing");
        let refused = ["bound", "decode_tile that"];
        let refused = refused.iter().any(|kind| name.starts_with(kind));
        assert_eq!(changed.is_none(), refused, "{name}");
    }
}

/// A token of the model is a token for each KV head, with words of its own.
#[test]
fn limits_by_kv_head_have_the_masks_of_all_heads() {
    let limits = BatchLimits::decodes(4, 1000, 16).with_mask_words(64);
    assert_eq!(limits.by_kv_head(8).mask_words, 8 * 64);
}

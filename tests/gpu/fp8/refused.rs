//! What is refused before anything is launched.

use super::*;

/// A workspace with room for fewer converted keys than a plan has prefills of.
#[test]
fn more_keys_of_prefills_than_the_bound_has_are_refused() {
    let Some(gpu) = gpu("more_keys_of_prefills_than_the_bound_has_are_refused") else {
        return;
    };
    let spec = Spec::new(8, 2, 128).with_kv_dtype(Dtype::F8E4M3);
    let mut table = PageTable::new(16, 40);
    table.push(&(0..40).collect::<Vec<_>>(), 640);
    let batch = Batch::new(vec![0, 100], table);
    let limits = BatchLimits::decodes(4, 640, 16).with_query_tokens(100);
    let options = PlanOptions::default();
    let plan = |prefill_keys| {
        let limits = limits.with_prefill_keys(prefill_keys);
        let bound = Bound::new(&spec, &gpu.device(), &options, &limits).expect("limits");
        let options = options.with_bound(bound);
        let bytes = WorkspaceLayout::new(&spec, &bound).bytes;
        let plan = Planner::new().plan(&spec, &batch, &gpu.device(), &options);
        (bytes, plan.map(drop))
    };
    let ((more, fits), (less, refused)) = (plan(640), plan(64));
    assert_eq!(fits, Ok(()));
    assert!(
        matches!(
            refused,
            Err(PlanError::Bound {
                needed: 10,
                bound: 5,
                ..
            })
        ),
        "{refused:?}"
    );
    // Keys and values of 2 heads of 128, 16 bits each.
    assert!(more - less >= (640 - 64) * 2 * 2 * 128 * 2);
}

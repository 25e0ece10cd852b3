//! Plans as launches: their order, and where rows are merged.

use kernels_gpu::abi::{MergeRow, PieceOf};

use super::*;
use crate::{
    plan::{DeviceDescription, PlanOptions, Planner, SplitMode},
    problem::{Batch, Dtype, PageTable, Spec},
};

pub(crate) fn plan_with(queries: &[u32], options: &PlanOptions) -> Plan {
    let requests: Vec<_> = queries.iter().map(|&queries| (queries, 8000)).collect();
    plan_of(&requests, options)
}

/// A plan of requests with so many new tokens and keys.
pub(crate) fn plan_of(requests: &[(u32, u32)], options: &PlanOptions) -> Plan {
    plan_for(&Spec::new(32, 8, 128), requests, options)
}

fn plan_for(spec: &Spec, requests: &[(u32, u32)], options: &PlanOptions) -> Plan {
    let mut table = PageTable::new(16, 500 * requests.len() as u32);
    let mut qo_indptr = vec![0];
    for (index, &(queries, keys)) in requests.iter().enumerate() {
        let first = 500 * index as u32;
        let pages = first..first + keys.div_ceil(16);
        table.push(&pages.collect::<Vec<_>>(), keys);
        qo_indptr.push(qo_indptr[index] + queries);
    }
    let device = DeviceDescription::named("h200").unwrap();
    let batch = Batch::new(qo_indptr, table);
    let plan = Planner::new().plan(spec, &batch, &device, options);
    plan.unwrap()
}

pub(crate) fn plan(queries: &[u32], merge_mode: MergeMode) -> Plan {
    let options = PlanOptions {
        merge_mode,
        pod: PodMode::Serial,
        ..PlanOptions::default()
    };
    plan_with(queries, &options)
}

pub(crate) fn launch_plan(plan: &Plan) -> LaunchPlan {
    let mut launch_plan = LaunchPlan::default();
    launch_plan.fill(plan, plan.merge_mode).unwrap();
    launch_plan
}

/// Tiles read a key once for each row: 250 tokens of 4 heads are 1,000 rows.
#[test]
fn few_rows_see_the_keys_of_short_chunks() {
    let spec = Spec::new(32, 8, 128);
    let of_8_bits = spec.with_kv_dtype(Dtype::F8E4M3);
    let few = |spec: &Spec, tokens| {
        let requests = [(tokens, 4000); 2];
        let plan = plan_for(spec, &requests, &PlanOptions::default());
        let launches = launch_plan(&plan).launches;
        assert_eq!(launches.len(), 1);
        launches[0].few_rows
    };
    assert!(few(&of_8_bits, 100) && few(&of_8_bits, 240));
    assert!(!few(&of_8_bits, 270) && !few(&of_8_bits, 2000));
    assert!(!few(&spec, 100), "16-bit keys are not converted");
}

/// Where a launch converts many keys, products hide less of it: 16 prompts of 1,024 tokens have 2,100 rows for a key of 4 heads.
#[test]
fn more_rows_are_few_where_keys_are_many() {
    let few = |requests: usize, tokens| {
        let spec = Spec::new(32, 8, 128).with_kv_dtype(Dtype::F8E4M3);
        let requests = vec![(tokens, tokens); requests];
        let plan = plan_for(&spec, &requests, &PlanOptions::default());
        let launches = launch_plan(&plan).launches;
        assert_eq!(launches.len(), 1);
        launches[0].few_rows
    };
    assert!(!few(8, 1024) && few(16, 1024) && few(64, 1024));
    assert!(!few(16, 2048), "4,100 rows");
}

#[test]
fn a_plan_of_one_part_runs_as_it_lies() {
    let plan = plan(&[1, 1, 100], MergeMode::Kernel);
    let launch_plan = launch_plan(&plan);
    assert_eq!(launch_plan.items, None);
    assert_eq!(launch_plan.launches.len(), plan.groups.len());
    for (launch, group) in launch_plan.launches.iter().zip(&plan.groups) {
        assert_eq!(launch.first, group.items.start);
        assert_eq!(launch.items, group.items.end - group.items.start);
        assert_eq!(launch.key.pack, group.pack);
    }
    assert_eq!(launch_plan.parts[0].pages, 1500);
    assert_eq!(launch_plan.merging.left, plan.merges.len() as u32);
    assert_eq!(launch_plan.merging.left_rows(&plan), plan.merges);
}

#[test]
fn decode_merges_its_own_states_and_leaves_those_of_prefill() {
    let plan = plan(&[1, 100], MergeMode::Fused);
    let launch_plan = launch_plan(&plan);
    assert!(launch_plan.merging.fused);
    let prefills: u32 = plan
        .items
        .iter()
        .filter(|item| !item.is_gathered() && item.merge != NO_MERGE)
        .map(|item| item.rows)
        .max()
        .unwrap_or(0);
    assert!(
        launch_plan.merging.left >= prefills
            && launch_plan.merging.left < plan.merges.len() as u32 + 1
    );
    assert!(
        launch_plan
            .merging
            .left_rows(&plan)
            .iter()
            .all(|merge| merge.token > 0)
    );
}

/// Kernels that share SMs leave merges, also in a graph whose decodes merge.
#[test]
fn decodes_that_share_sms_leave_their_merges() {
    let options = PlanOptions::default().with_split(SplitMode::Fixed { tokens: 1024 });
    let plan = plan_with(&[1, 8, 2], &options);
    let of_few_rows = |token: u32| token == 0 || token > 8;
    let mut launch_plan = LaunchPlan::default();
    launch_plan.fill(&plan, MergeMode::Fused).unwrap();
    assert!(launch_plan.merging.fused);
    let left = launch_plan
        .merging
        .left_rows(&plan)
        .iter()
        .map(|merge| merge.token);
    assert!(left.eq((0..11).filter(|&token| of_few_rows(token))));
    assert_eq!(launch_plan.merging.left, 3);
}

/// Kernels that share SMs count no arrivals. If others counted those at the same merges, the counters would not return to zero.
#[test]
fn arrivals_at_merges_are_counted_by_all_kernels_or_by_none() {
    // Two draft tokens each. The prefix has another kernel than the keys behind it.
    let (requests, shared, own) = (2, 128, 260);
    let mut table = PageTable::new(16, shared + requests * own);
    for request in 0..requests {
        let first = shared + request * own;
        let pages = (0..shared).chain(first..first + own);
        table.push(&pages.collect::<Vec<_>>(), (shared + own) * 16);
    }
    let batch = Batch::new((0..=requests).map(|request| 2 * request).collect(), table);
    let device = DeviceDescription::named("h200").unwrap();
    let (spec, options) = (Spec::new(32, 8, 128), PlanOptions::default());
    let plan = Planner::new().plan(&spec, &batch, &device, &options);
    let plan = plan.unwrap();
    let shares = |group: &&TileGroup| group.id.is_some_and(|id| id.info().co_resident);
    let (sharing, others): (Vec<_>, Vec<_>) = plan.groups.iter().partition(shares);
    assert!(!sharing.is_empty() && !others.is_empty(), "{plan}");

    let mut launch_plan = LaunchPlan::default();
    launch_plan.fill(&plan, MergeMode::Fused).unwrap();
    let mut rows = plan.rows.clone();
    for (index, row) in launch_plan.changed_rows(&plan) {
        rows[index] = row;
    }
    let mut arrivals = vec![0; plan.merges.len()];
    for item in others.iter().flat_map(|group| plan.items_of(group)) {
        let rows = &rows[item.rows_begin as usize..][..item.rows as usize];
        for row in rows.iter().filter(|row| row.merge != NO_MERGE) {
            arrivals[row.merge as usize] += 1;
        }
    }
    let left = launch_plan.merging.left_rows(&plan);
    for (merge, arrivals) in plan.merges.iter().zip(arrivals) {
        let expected = if left.contains(merge) { 0 } else { merge.slots };
        assert_eq!(arrivals, expected, "{merge:?}");
    }
    assert!(!left.is_empty());
}

/// Tokens without an item: only the merging kernel writes their zeros.
#[test]
fn tokens_without_keys_are_left_to_the_merging_kernel() {
    let mut table = PageTable::new(16, 4000);
    table.push(&(0..500).collect::<Vec<_>>(), 8000);
    table.push(&[], 0);
    let device = DeviceDescription::named("h200").unwrap();
    let options = PlanOptions {
        merge_mode: MergeMode::Fused,
        ..PlanOptions::default()
    };
    let mut spec = Spec::new(32, 8, 128);
    spec.variant.causal = false;
    let batch = Batch::new(vec![0, 1, 2], table);
    let plan = Planner::new().plan(&spec, &batch, &device, &options);
    let plan = plan.unwrap();
    let launch_plan = launch_plan(&plan);
    assert!(launch_plan.merging.fused);
    let left: Vec<_> = launch_plan.merging.left_rows(&plan).iter().collect();
    assert!(
        matches!(
            left[..],
            [MergeRow {
                token: 1,
                slots: 0,
                ..
            }]
        ),
        "{left:?}"
    );
    assert_eq!(launch_plan.merging.left, 1);
}

/// Rows of two items of tiles of 16 or 64 rows, in plans whose splits depend on the batch.
#[test]
fn pieces_of_the_same_rows_are_merged_by_their_kernel() {
    let requests = [(1, 8000); 64];
    let with =
        |heads, options: &PlanOptions| plan_for(&Spec::latent(heads, 512, 64), &requests, options);
    let auto = PlanOptions::default();
    for heads in [16, 64] {
        let plan = with(heads, &auto);
        assert!(plan.merges.iter().any(|merge| merge.slots == 2), "{plan}");
        assert_eq!(plan.merge_mode, MergeMode::Fused);
        let launches = launch_plan(&plan);
        assert!(launches.merging.fused && launches.launches.iter().any(|launch| launch.pieces));
        let left = launches.merging.left_rows(&plan);
        assert!(left.iter().all(|merge| merge.slots != 2), "{left:?}");

        // Each row says which of its two pieces it is of, by the same counters.
        let mut said = vec![Vec::new(); plan.merges.len()];
        for (index, row) in launches.changed_rows(&plan) {
            if row.merge != NO_MERGE {
                let of = PieceOf::of_word(row.merge);
                said[plan.rows[index].merge as usize].push((
                    of.piece,
                    of.merge,
                    plan.rows[index].slot,
                ));
            }
        }
        for (merge, (row, mut said)) in (0..).zip(plan.merges.iter().zip(said)) {
            said.sort_unstable();
            let slots = &plan.merge_slots[row.slots_begin as usize..][..row.slots as usize];
            let expected: Vec<_> = (0..)
                .zip(slots)
                .map(|(piece, slot)| (piece, merge, *slot))
                .collect();
            assert_eq!(said, if row.slots == 2 { expected } else { vec![] });
        }
    }

    // Where the merging kernel has all: what it was told is the plan's.
    let all_left = |plan: &Plan, launches: &LaunchPlan| {
        assert!(!launches.merging.fused && launches.launches.iter().all(|launch| !launch.pieces));
        assert_eq!(launches.merging.left_rows(plan), &plan.merges[..]);
    };
    let plan = with(64, &auto);
    let mut launches = launch_plan(&plan);
    launches.fill(&plan, MergeMode::Kernel).unwrap();
    all_left(&plan, &launches);
    let fixed = auto.with_split(SplitMode::Fixed { tokens: 4096 });
    let by_kernel = auto.with_merge_mode(MergeMode::Kernel);
    for (heads, options) in [(64, fixed), (64, by_kernel), (32, auto)] {
        let plan = with(heads, &options);
        assert!(
            plan.merges.iter().any(|merge| merge.slots == 2),
            "{heads} heads"
        );
        assert_eq!(plan.merge_mode, MergeMode::Kernel, "{heads} heads");
        all_left(&plan, &launch_plan(&plan));
    }
}

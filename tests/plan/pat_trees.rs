//! Bytes planned on the prefix trees of PAT's Figure 10.

use crate::trees::{HEADS, Tree, trees};
use tandem_attn::{
    plan::{DeviceDescription, PackRule, Plan, PlanOptions, Planner, SplitMode},
    problem::Spec,
};

const PAGE: u32 = 16;

fn plan(tree: &Tree, spec: &Spec, packing: PackRule, device: &DeviceDescription) -> Plan {
    let batch = tree.batch(PAGE);
    batch.check(spec).unwrap();
    let options = PlanOptions::default()
        .with_packing(packing)
        .with_split(SplitMode::Off);
    let plan = Planner::new().plan(spec, &batch, device, &options).unwrap();
    assert_eq!(plan.verify(&batch), Ok(()));
    plan
}

/// The device with these row tiles, whatever kernels there are.
fn with_rows(m: &[u32]) -> DeviceDescription {
    let mut device = DeviceDescription::named("h200").unwrap();
    device.decode.rows = m.to_vec();
    device.decode.keys = Some(64);
    device
}

#[test]
fn every_key_is_read_once_where_nodes_have_up_to_128_rows() {
    for packing in [PackRule::Fastest, PackRule::Exact] {
        every_key_is_read_once(packing);
    }
}

fn every_key_is_read_once(packing: PackRule) {
    let device = DeviceDescription::named("h200").unwrap();
    let (mut cases, mut worst) = (0, 0.0);
    for tree in trees() {
        for (q_heads, kv_heads) in HEADS {
            let spec = Spec::new(q_heads, kv_heads, 128);
            if tree.widest(&spec) <= 128 {
                let plan = plan(&tree, &spec, packing, &device);
                let most = tree.unique_keys() * spec.kv_bytes_per_token() * 105 / 100;
                let planned = plan.traffic().kv_bytes;
                assert!(
                    planned <= most,
                    "tree {} {q_heads}/{kv_heads} {packing:?}: {planned} of {most}",
                    tree.id
                );
                cases += 1;
                let unique = tree.unique_keys() * spec.kv_bytes_per_token();
                worst = f64::max(worst, planned as f64 / unique as f64);
            }
        }
    }
    println!("{packing:?}: {cases} cases, at most {worst:.4} of the unique bytes");
    assert_eq!(cases, 19);
}

#[test]
fn a_row_tile_with_little_to_do_joins_the_next_larger() {
    let device = with_rows(&[8, 16, 64, 128]);
    let launches_cost_nothing = DeviceDescription {
        launch_ns: 0.0,
        ..device.clone()
    };
    let trees = trees();
    let tree = trees.iter().find(|tree| tree.id == 9).unwrap();
    let spec = Spec::new(16, 8, 128);
    let rows = |device| {
        let plan = plan(tree, &spec, PackRule::Exact, device);
        let mut rows: Vec<u32> = plan.groups.iter().map(|group| group.tile.m).collect();
        rows.sort_unstable();
        rows
    };
    assert_eq!(rows(&launches_cost_nothing), [8, 64, 128]);
    assert_eq!(rows(&device), [8, 128]);
}

/// What shares a tile is read for all its rows: no state is left to merge, and there is one launch.
#[test]
fn joint_tiles_leave_nothing_to_merge() {
    let device = DeviceDescription::named("h200").unwrap();
    for tree in trees().iter().filter(|tree| (11..=18).contains(&tree.id)) {
        for (q_heads, kv_heads) in HEADS {
            let spec = Spec::new(q_heads, kv_heads, 128);
            let plan = plan(tree, &spec, PackRule::Fastest, &device);
            let name = format!("tree {} {q_heads}/{kv_heads}", tree.id);
            assert_eq!((plan.slots, plan.groups.len()), (0, 1), "{name}");
            let leaders = plan.items_of(&plan.groups[0]);
            assert!(leaders.iter().all(|item| item.is_joint()), "{name}");
            let most = |rows: u32| leaders.iter().all(|item| item.rows * spec.group() <= rows);
            assert!(most(plan.groups[0].tile.m), "{name}");
            // Taken apart, they are the same work in items of one table each.
            let apart = plan.without_joint_items().unwrap();
            assert_eq!(
                apart.items.len(),
                plan.items.len() - plan.launched(),
                "{name}"
            );
            assert_eq!(apart.traffic().kv_bytes, plan.traffic().kv_bytes, "{name}");
        }
    }
}

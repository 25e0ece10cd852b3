//! Compares PAT's packing rules with the planner's, by planned bytes on the prefix trees of PAT's Figure 10.

#[path = "../../tests/common/trees.rs"]
mod trees;

use tandem_attn::{
    plan::{DeviceDescription, PackRule, Plan, PlanOptions, Planner, Rules, SplitMode},
    problem::Spec,
};
use tandem_papers::{NONE, pat};
use trees::{HEADS, Tree, trees};

/// The planner's packing option and its rules.
type Way = (PackRule, Rules);

const PAPER: Way = (PackRule::Fastest, pat::PAPER);
const PUBLISHED: Way = (PackRule::Fastest, pat::PUBLISHED);
const OFF: Way = (PackRule::Off, NONE);

const PAGE: u32 = 16;

fn plan(tree: &Tree, spec: &Spec, (packing, rules): Way, device: &DeviceDescription) -> Plan {
    let batch = tree.batch(PAGE);
    batch.check(spec).unwrap();
    let options = PlanOptions::default()
        .with_packing(packing)
        .with_split(SplitMode::Off);
    let plan = Planner::with_rules(rules)
        .plan(spec, &batch, device, &options)
        .unwrap();
    assert_eq!(plan.verify(&batch), Ok(()));
    plan
}

fn keys_read(plan: &Plan) -> u64 {
    plan.items.iter().map(|item| u64::from(item.kv_len())).sum()
}

/// The device with these row tiles, whatever kernels it has.
fn with_rows(m: &[u32]) -> DeviceDescription {
    let mut device = DeviceDescription::named("h200").unwrap();
    device.decode.rows = m.to_vec();
    device.decode.keys = Some(64);
    device
}

#[test]
fn our_published_rule_is_the_published_rule() {
    let device = with_rows(&[16, 32, 64]);
    for tree in trees() {
        for ((q_heads, kv_heads), &published) in HEADS.into_iter().zip(&tree.published) {
            let plan = plan(
                &tree,
                &Spec::new(q_heads, kv_heads, 128),
                PUBLISHED,
                &device,
            );
            assert_eq!(
                keys_read(&plan),
                published,
                "tree {} with {q_heads}/{kv_heads} heads",
                tree.id
            );
        }
    }
}

/// The option for the fewest bytes moves no more than any rule, and neither does the default.
#[test]
fn no_rule_moves_fewer_bytes() {
    for rows in [
        &[8, 16, 64, 128][..],
        &[16, 32, 64],
        &[16, 32, 64, 128],
        &[16, 32, 64, 128, 256],
    ] {
        let device = with_rows(rows);
        for tree in trees() {
            for (q_heads, kv_heads) in HEADS {
                let spec = Spec::new(q_heads, kv_heads, 128);
                let bytes = |way| plan(&tree, &spec, way, &device).traffic().bytes();
                let exact = bytes((PackRule::Exact, NONE));
                let fastest = bytes((PackRule::Fastest, NONE));
                assert!(
                    fastest <= exact,
                    "tree {} {q_heads}/{kv_heads} {rows:?}: {fastest}, exact {exact}",
                    tree.id
                );
                for way in [PAPER, PUBLISHED, OFF] {
                    let other = bytes(way);
                    assert!(
                        exact <= other,
                        "tree {} {q_heads}/{kv_heads} {rows:?}: {exact}, {way:?} {other}",
                        tree.id
                    );
                }
            }
        }
    }
}

/// `cargo test -p tandem-papers --test pat_trees -- --nocapture the_table` prints the bytes that each rule moves.
#[test]
fn the_table() {
    let ours = DeviceDescription::named("h200").unwrap();
    let theirs = with_rows(&[16, 32, 64]);
    println!(
        "tree heads    unique MB   exact MB   paper MB   published MB (rows up to 64)   no packing MB"
    );
    let (mut exact_sum, mut published_sum) = (0.0, 0.0);
    for tree in trees() {
        for (q_heads, kv_heads) in HEADS {
            let spec = Spec::new(q_heads, kv_heads, 128);
            let megabytes =
                |way, device| plan(&tree, &spec, way, device).traffic().bytes() as f64 / 1e6;
            let unique = tree.unique_keys() as f64 * spec.kv_bytes_per_token() as f64 / 1e6;
            let exact = megabytes((PackRule::Exact, NONE), &ours);
            let published = megabytes(PUBLISHED, &theirs);
            println!(
                "{:>4} {q_heads:>2}/{kv_heads:<2} {unique:>12.1} {exact:>10.1} {:>10.1} {published:>14.1} {:>29.1}",
                tree.id,
                megabytes(PAPER, &ours),
                megabytes(OFF, &ours),
            );
            (exact_sum, published_sum) = (exact_sum + exact, published_sum + published);
        }
    }
    assert!(exact_sum < published_sum);
}

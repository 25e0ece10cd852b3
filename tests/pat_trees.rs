//! Bytes planned on the prefix trees of PAT's Figure 10.

use tandem_attn::{
    plan::{DeviceDescription, PackRule, Plan, PlanOptions, Planner, SplitMode},
    problem::{Batch, PageTable, Spec},
};

const HEADS: [(u32, u32); 4] = [(32, 32), (16, 8), (32, 8), (64, 8)];
const PAGE: u32 = 16;

struct Tree {
    id: u32,
    nodes: Vec<u32>,
    keys: Vec<u32>,
    /// Keys that the published packer reads, by heads.
    published: Vec<u64>,
}

fn trees() -> Vec<Tree> {
    fn numbers<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> Vec<T> {
        text.split(',')
            .map(|number| number.trim().parse().unwrap())
            .collect()
    }
    let lines = include_str!("data/pat_fig10.txt")
        .lines()
        .filter(|line| !line.starts_with('#'));
    let tree = |line: &str| {
        let [id, nodes, keys, published] = line.split(';').collect::<Vec<_>>().try_into().unwrap();
        Tree {
            id: numbers(id)[0],
            nodes: numbers(nodes),
            keys: numbers(keys),
            published: numbers(published),
        }
    };
    lines.map(tree).collect()
}

impl Tree {
    /// One query per leaf; node `j` of a level hangs on node `j · above / level` of the level above.
    fn batch(&self) -> Batch {
        let mut next_page = 0;
        let mut tables = vec![Vec::new()];
        for (&nodes, &keys) in self.nodes.iter().zip(&self.keys) {
            assert!(keys.is_multiple_of(PAGE), "tree {}: {keys} keys", self.id);
            let above = tables;
            let table = |node: u32| {
                let mut table: Vec<u32> =
                    above[node as usize * above.len() / nodes as usize].clone();
                table.extend(next_page..next_page + keys / PAGE);
                next_page += keys / PAGE;
                table
            };
            tables = (0..nodes).map(table).collect();
        }
        let mut table = PageTable::new(PAGE, next_page);
        for pages in &tables {
            table.push(pages, pages.len() as u32 * PAGE);
        }
        Batch::new((0..=tables.len() as u32).collect(), table)
    }

    fn unique_keys(&self) -> u64 {
        self.nodes
            .iter()
            .zip(&self.keys)
            .map(|(&nodes, &keys)| u64::from(nodes) * u64::from(keys))
            .sum()
    }

    /// Most query rows of a KV head below any node.
    fn widest(&self, spec: &Spec) -> u32 {
        let leaves = *self.nodes.last().unwrap();
        leaves.div_ceil(self.nodes[0]) * spec.group()
    }
}

fn plan(tree: &Tree, spec: &Spec, packing: PackRule, device: &DeviceDescription) -> Plan {
    let batch = tree.batch();
    batch.check(spec).unwrap();
    let options = PlanOptions {
        packing,
        split: SplitMode::Off,
        ..PlanOptions::default()
    };
    let plan = Planner::new().plan(spec, &batch, device, &options).unwrap();
    assert_eq!(plan.verify(&batch), Ok(()));
    plan
}

fn keys_read(plan: &Plan) -> u64 {
    plan.items.iter().map(|item| u64::from(item.kv_len())).sum()
}

/// The device with row tiles up to `m`.
fn with_rows(m: &[u32]) -> DeviceDescription {
    let mut device = DeviceDescription::named("h200").unwrap();
    device.decode.m = m.to_vec();
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
                PackRule::PatPublished,
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

#[test]
fn every_key_is_read_once_where_nodes_have_up_to_128_rows() {
    let device = with_rows(&[16, 32, 64, 128]);
    let mut cases = 0;
    for tree in trees() {
        for (q_heads, kv_heads) in HEADS {
            let spec = Spec::new(q_heads, kv_heads, 128);
            if tree.widest(&spec) <= 128 {
                let plan = plan(&tree, &spec, PackRule::Exact, &device);
                let most = tree.unique_keys() * spec.kv_bytes_per_token() * 105 / 100;
                let planned = plan.traffic().kv_bytes;
                assert!(
                    planned <= most,
                    "tree {} {q_heads}/{kv_heads}: {planned} of {most}",
                    tree.id
                );
                cases += 1;
            }
        }
    }
    assert_eq!(cases, 19);
}

#[test]
fn no_rule_moves_fewer_bytes() {
    for rows in [
        &[16, 32, 64][..],
        &[16, 32, 64, 128],
        &[16, 32, 64, 128, 256],
    ] {
        let device = with_rows(rows);
        for tree in trees() {
            for (q_heads, kv_heads) in HEADS {
                let spec = Spec::new(q_heads, kv_heads, 128);
                let bytes = |rule| plan(&tree, &spec, rule, &device).traffic().bytes();
                let exact = bytes(PackRule::Exact);
                for rule in [PackRule::PatPaper, PackRule::PatPublished, PackRule::Off] {
                    let other = bytes(rule);
                    assert!(
                        exact <= other,
                        "tree {} {q_heads}/{kv_heads} {rows:?}: {exact}, {rule:?} {other}",
                        tree.id
                    );
                }
            }
        }
    }
}

/// `cargo test --test pat_trees -- --nocapture the_table` prints what each rule moves.
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
                |rule, device| plan(&tree, &spec, rule, device).traffic().bytes() as f64 / 1e6;
            let unique = tree.unique_keys() as f64 * spec.kv_bytes_per_token() as f64 / 1e6;
            let exact = megabytes(PackRule::Exact, &ours);
            let published = megabytes(PackRule::PatPublished, &theirs);
            println!(
                "{:>4} {q_heads:>2}/{kv_heads:<2} {unique:>12.1} {exact:>10.1} {:>10.1} {published:>14.1} {:>29.1}",
                tree.id,
                megabytes(PackRule::PatPaper, &ours),
                megabytes(PackRule::Off, &ours),
            );
            (exact_sum, published_sum) = (exact_sum + exact, published_sum + published);
        }
    }
    assert!(exact_sum < published_sum);
}

use proptest::prelude::*;

use super::*;

/// A tree as nested nodes, flattened to preorder.
#[derive(Clone, Debug)]
struct Tree {
    keys: u32,
    /// Rows of a leaf.
    rows: u32,
    children: Vec<Tree>,
}

fn leaf(keys: u32, rows: u32) -> Tree {
    Tree {
        keys,
        rows,
        children: Vec::new(),
    }
}

fn node(keys: u32, children: Vec<Tree>) -> Tree {
    Tree {
        keys,
        rows: 0,
        children,
    }
}

fn flatten(tree: &Tree, parent: u32, begin: u32, nodes: &mut Vec<PackNode>) -> u32 {
    let index = nodes.len();
    let (end, is_leaf) = (begin + tree.keys, tree.children.is_empty());
    nodes.push(PackNode {
        parent,
        subtree_end: 0,
        begin,
        end,
        rows: tree.rows,
        is_leaf,
        joined: 0,
        start: 0,
    });
    let below: u32 = tree
        .children
        .iter()
        .map(|child| flatten(child, index as u32, end, nodes))
        .sum();
    nodes[index].rows += below;
    nodes[index].subtree_end = nodes.len() as u32;
    nodes[index].rows
}

fn packer(trees: &[Tree]) -> Packer {
    let mut packer = Packer::default();
    for tree in trees {
        flatten(tree, NO_NODE, 0, &mut packer.nodes);
    }
    packer
}

/// Rules that look at one edge at a time.
const RULES: [fn(&Join) -> bool; 3] = [
    Join::has_many_rows,
    Join::has_many_rows_or_no_more_tiles,
    |_| true,
];

fn exact(trees: &[Tree], costs: PackCosts) -> u64 {
    let mut packer = packer(trees);
    packer.pack(costs);
    packer.bytes()
}

fn by_rule(trees: &[Tree], rule: fn(&Join) -> bool, costs: PackCosts) -> u64 {
    let mut packer = packer(trees);
    packer.pack_by(rule, costs);
    packer.bytes()
}

/// The fewest bytes over all ways to cut and join.
fn fewest(trees: &[Tree], costs: PackCosts) -> u64 {
    let mut packer = packer(trees);
    packer.costs = costs;
    let edges: Vec<_> = (0..packer.nodes.len())
        .filter(|&at| packer.nodes[at].parent != NO_NODE)
        .collect();
    let ways = (0..1u32 << edges.len()).map(|way| {
        for at in 0..packer.nodes.len() {
            if packer.nodes[at].parent == NO_NODE {
                continue;
            }
            let edge = edges.iter().position(|&edge| edge == at).unwrap();
            let join = way >> edge & 1 == 1 && !packer.nodes[at].is_empty();
            packer.decide(at, join);
        }
        packer.bytes()
    });
    ways.min().unwrap()
}

const COSTS: PackCosts = PackCosts {
    kv_bytes: 4096,
    partial_bytes: 33024,
    tile_tokens: 32,
};

#[test]
fn a_long_prefix_is_cut_and_a_short_one_joined() {
    let tree = |prefix| node(prefix, vec![leaf(100, 1), leaf(100, 1)]);
    let starts = |prefix| {
        let mut packer = packer(&[tree(prefix)]);
        packer.pack(COSTS);
        packer
            .nodes
            .iter()
            .map(|node| node.start)
            .collect::<Vec<_>>()
    };
    // Cutting saves one read of the prefix and costs four partial states: 32 tokens' worth.
    assert_eq!(starts(33), [0, 33, 33]);
    assert_eq!(starts(32), [0, 0, 0]);
}

#[test]
fn rules_join_edge_by_edge() {
    let tree = node(64, vec![leaf(10, 15), leaf(10, 16)]);
    let starts = |rule: fn(&Join) -> bool| {
        let mut packer = packer(std::slice::from_ref(&tree));
        packer.pack_by(rule, COSTS);
        packer
            .nodes
            .iter()
            .map(|node| node.start)
            .collect::<Vec<_>>()
    };
    assert_eq!(starts(Join::has_many_rows), [0, 64, 0]);
    // 31 rows are one tile; without either child, one tile still remains.
    assert_eq!(starts(Join::has_many_rows_or_no_more_tiles), [0, 64, 0]);
    assert_eq!(starts(|_| true), [0, 0, 0]);
}

#[test]
fn deep_chains_stay_linear_and_no_worse_than_the_rules() {
    let deep = (0..200).fold(leaf(5, 1), |below, level| {
        node(20 + level % 3, vec![below, leaf(7, 1)])
    });
    let trees = [deep];
    let exact = exact(&trees, COSTS);
    for (at, rule) in RULES.into_iter().enumerate() {
        assert!(exact <= by_rule(&trees, rule, COSTS), "rule {at}");
    }
}

fn trees() -> impl Strategy<Value = Vec<Tree>> {
    let keys = prop_oneof![1u32..40, 1u32..400];
    let leaf = (
        prop_oneof![1 => Just(0u32), 6 => keys.clone()],
        prop_oneof![4 => Just(1u32), 1 => 1u32..9],
    )
        .prop_map(|(keys, rows)| leaf(keys, rows));
    let tree = leaf.prop_recursive(3, 12, 5, move |below| {
        (keys.clone(), prop::collection::vec(below, 2..5))
            .prop_map(|(keys, children)| node(keys, children))
    });
    prop::collection::vec(tree, 1..3)
}

fn costs() -> impl Strategy<Value = PackCosts> {
    (1u64..8, prop_oneof![Just(0u64), 1u64..60], 1u32..9).prop_map(
        |(kv_bytes, partial_bytes, tile_tokens)| PackCosts {
            kv_bytes,
            partial_bytes,
            tile_tokens,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 1 } else { 2_000 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn exact_is_the_fewest_bytes(trees in trees(), costs in costs()) {
        let mut packer = packer(&trees);
        let edges = packer.nodes.len() - trees.len();
        prop_assume!(edges <= 12);
        packer.pack(costs);
        let (exact, fewest) = (packer.bytes(), fewest(&trees, costs));
        let bound = if packer.approximate { fewest * 11 / 10 } else { fewest };
        prop_assert!(exact <= bound, "{} for {}", exact, fewest);
        for (at, rule) in RULES.into_iter().enumerate() {
            prop_assert!(exact <= by_rule(&trees, rule, costs), "rule {}", at);
        }
    }
}

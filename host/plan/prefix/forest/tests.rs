use super::*;

fn forest(tables: &[&[u32]]) -> Vec<Node> {
    let mut forest = Forest::default();
    let member = |index: u32| tables[index as usize];
    // Built twice, so that nothing of the first build may remain.
    forest.build(tables.len() as u32, member);
    forest.build(tables.len() as u32, member);
    forest.nodes
}

/// Each node as (pages, is it a leaf, entries of its subtree).
fn shape(tables: &[&[u32]]) -> Vec<(Vec<u32>, bool, u32)> {
    let nodes = forest(tables);
    let shape = nodes.iter().enumerate().map(|(entry, node)| {
        let pages = &tables[node.member as usize][node.begin as usize..node.end as usize];
        (
            pages.to_vec(),
            node.is_leaf,
            node.subtree_end - entry as u32,
        )
    });
    shape.collect()
}

#[test]
fn tables_without_common_pages_are_no_forest() {
    assert_eq!(shape(&[]), []);
    assert_eq!(shape(&[&[1, 2], &[], &[3]]), []);
}

#[test]
fn a_table_that_shares_nothing_is_a_root() {
    let expected = [
        (vec![], true, 1),
        (vec![1], false, 3),
        (vec![2], true, 1),
        (vec![], true, 1),
        (vec![3], true, 1),
    ];
    assert_eq!(shape(&[&[], &[1, 2], &[1], &[3]]), expected);
}

#[test]
fn neighbours_and_strangers_find_the_same_tree() {
    // 1 2 ─┬─ 3 ─┬─ 4
    //      │     └─ 5
    //      └─ 6
    let expected = [
        (vec![1, 2], false, 5),
        (vec![3], false, 3),
        (vec![4], true, 1),
        (vec![5], true, 1),
        (vec![6], true, 1),
    ];
    let (a, b, c): (&[u32], &[u32], &[u32]) = (&[1, 2, 3, 4], &[1, 2, 3, 5], &[1, 2, 6]);
    assert_eq!(shape(&[a, b, c]), expected);
    let apart = shape(&[a, &[9], c, &[8], b]);
    assert_eq!(apart.iter().filter(|node| !node.1).count(), 2);
    assert!(apart.contains(&(vec![1, 2], false, 5)) && apart.contains(&(vec![3], false, 3)));
}

#[test]
fn a_table_that_ends_inside_another_is_an_empty_leaf() {
    let expected = [
        (vec![1, 2], false, 3),
        (vec![3], true, 1),
        (vec![], true, 1),
    ];
    assert_eq!(shape(&[&[1, 2, 3], &[1, 2]]), expected);
    let twins = [(vec![1, 2], false, 3), (vec![], true, 1), (vec![], true, 1)];
    assert_eq!(shape(&[&[1, 2], &[1, 2]]), twins);
}

#[test]
fn the_common_prefix_of_long_slices() {
    let a: Vec<u32> = (0..100).collect();
    for at in [0, 1, 31, 32, 33, 64, 99] {
        let mut b = a.clone();
        b[at] = 1000;
        assert_eq!(common_prefix(&a, &b), at);
    }
    assert_eq!(common_prefix(&a, &a[..77]), 77);
}

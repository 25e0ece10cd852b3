//! The prefix trees of PAT's Figure 10.
// Each program uses its own part of this.
#![allow(dead_code)]

use tandem_attn::problem::{Batch, PageTable, Spec};

/// Query heads and KV heads.
pub const HEADS: [(u32, u32); 4] = [(32, 32), (16, 8), (32, 8), (64, 8)];

pub struct Tree {
    pub id: u32,
    pub nodes: Vec<u32>,
    pub keys: Vec<u32>,
    /// Keys that the published packer reads, by heads; of PAT's trees.
    pub published: Vec<u64>,
}

pub fn trees() -> Vec<Tree> {
    parse(include_str!("../data/pat_fig10.txt"))
}

/// Trees that a file describes, one in a line.
pub fn parse(text: &str) -> Vec<Tree> {
    fn numbers<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> Vec<T> {
        text.split(',')
            .map(|number| number.trim().parse().unwrap())
            .collect()
    }
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let tree = |line: &str| {
        let columns: Vec<_> = line.split(';').collect();
        Tree {
            id: numbers(columns[0])[0],
            nodes: numbers(columns[1]),
            keys: numbers(columns[2]),
            published: columns.get(3).map_or_else(Vec::new, |keys| numbers(keys)),
        }
    };
    lines.map(tree).collect()
}

impl Tree {
    /// One query per leaf; node `j` of a level hangs on node `j · above / level` of the level above.
    pub fn batch(&self, page: u32) -> Batch {
        let mut next_page = 0;
        let mut tables = vec![Vec::new()];
        for (&nodes, &keys) in self.nodes.iter().zip(&self.keys) {
            assert!(keys.is_multiple_of(page), "tree {}: {keys} keys", self.id);
            let above = tables;
            let table = |node: u32| {
                let mut table: Vec<u32> =
                    above[node as usize * above.len() / nodes as usize].clone();
                table.extend(next_page..next_page + keys / page);
                next_page += keys / page;
                table
            };
            tables = (0..nodes).map(table).collect();
        }
        let mut table = PageTable::new(page, next_page);
        for pages in &tables {
            table.push(pages, pages.len() as u32 * page);
        }
        Batch::new((0..=tables.len() as u32).collect(), table)
    }

    pub fn unique_keys(&self) -> u64 {
        self.nodes
            .iter()
            .zip(&self.keys)
            .map(|(&nodes, &keys)| u64::from(nodes) * u64::from(keys))
            .sum()
    }

    /// Most query rows of a KV head below any node.
    pub fn widest(&self, spec: &Spec) -> u32 {
        let leaves = *self.nodes.last().unwrap();
        leaves.div_ceil(self.nodes[0]) * spec.group()
    }
}

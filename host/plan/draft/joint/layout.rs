//! How the rows of a tree are spread over joint tiles.

use kernels_gpu::abi::WorkItem;

use crate::problem::PageTable;

/// The rows and keys of a leaf.
#[derive(Clone, Copy, Debug)]
pub struct Leaf {
    pub rows: u32,
    pub keys: u32,
}

/// An inner node with keys. Its rows are the first one and one past the last, among the rows of the tree.
#[derive(Clone, Copy, Debug)]
pub struct Inner {
    pub rows: (u32, u32),
    pub keys: u32,
}

/// The rows of a tree, and the keys of its leaves.
#[derive(Clone, Copy, Debug)]
pub struct TreeSize {
    pub rows: u32,
    pub leaf_keys: u64,
}

/// The rows of a tree in tiles.
#[derive(Debug, Default)]
pub struct TileLayout {
    /// What is laid out: the tree, the maximum number of query tokens per tile, and whether the layout is possible.
    pub of: Option<(u32, u32, bool)>,
    /// The tile of each row.
    pub tile_of: Vec<u32>,
    pub tiles: Vec<JointTile>,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct JointTile {
    /// One past its last row.
    pub rows_end: u32,
    pub keys: u32,
    pub runs: u32,
    /// Index of its next run, while the tree is drafted.
    pub next_run: u32,
}

impl TileLayout {
    /// Fills tiles with about equal numbers of rows and keys. Returns false if a leaf has more rows than a tile, or a
    /// tile has too many runs or keys.
    pub fn fill(&mut self, of: TreeSize, tokens: u32, leaves: &[Leaf], inner: &[Inner]) -> bool {
        let Self { tile_of, tiles, .. } = self;
        tile_of.clear();
        tiles.clear();
        let enough = of.leaf_keys.div_ceil(u64::from(of.rows.div_ceil(tokens)));
        let (mut tile, mut rows, mut keys) = (JointTile::default(), 0, 0);
        for leaf in leaves {
            if leaf.rows > tokens {
                return false;
            }
            let leaf_keys = u64::from(leaf.keys);
            if rows > 0 && (rows + leaf.rows > tokens || keys + leaf_keys / 2 > enough) {
                tile_of.resize(tile.rows_end as usize, tiles.len() as u32);
                tiles.push(tile);
                tile = JointTile {
                    rows_end: tile.rows_end,
                    ..JointTile::default()
                };
                (rows, keys) = (0, 0);
            }
            rows += leaf.rows;
            keys += leaf_keys;
            tile.rows_end += leaf.rows;
            tile.keys = tile.keys.saturating_add(leaf.keys);
            tile.runs += u32::from(leaf.keys > 0);
        }
        tile_of.resize(tile.rows_end as usize, tiles.len() as u32);
        tiles.push(tile);
        for node in inner {
            let first = tile_of[node.rows.0 as usize] as usize;
            let last = tile_of[node.rows.1 as usize - 1] as usize;
            for tile in &mut tiles[first..=last] {
                tile.keys = tile.keys.saturating_add(node.keys);
                tile.runs += 1;
            }
        }
        // Cuts fall between pages, so each run may be followed by numbers without keys.
        let keys = |tile: &JointTile| {
            u64::from(tile.keys) + u64::from(tile.runs) * u64::from(PageTable::MAX_PAGE_SIZE)
        };
        tiles.iter().all(|tile| {
            tile.runs <= WorkItem::MAX_RUNS && keys(tile) <= u64::from(PageTable::MAX_POSITION)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The keys of a tile are numbered through by 32 bits.
    #[test]
    fn tiles_with_more_keys_than_can_be_numbered_are_not_possible() {
        let fills = |keys: u32| {
            let leaves = [Leaf { rows: 1, keys }; 16];
            let inner = Inner {
                rows: (0, 16),
                keys: 1000,
            };
            let of = TreeSize {
                rows: 16,
                leaf_keys: 16 * u64::from(keys),
            };
            TileLayout::default().fill(of, 16, &leaves, &[inner])
        };
        assert!(fills(1 << 26));
        assert!(!fills(1 << 27) && !fills(1 << 28));
    }
}

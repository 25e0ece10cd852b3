//! The pages of keys that the prefills of a plan convert: from 8 bits to 16, or by applying the rotary embedding.

use std::ops::Range;

use kernels_gpu::abi::{ConvertedPage, WorkItem};

use super::data::Plan;

/// The converted pages that hold some keys.
pub(crate) const fn converted_pages(keys: &Range<u32>) -> Range<u32> {
    keys.start / ConvertedPage::KEYS..keys.end.div_ceil(ConvertedPage::KEYS)
}

/// Maximum number of converted pages of a plan. There are fewer if requests share prefixes. With a part of several heads, each page has
/// the room of so many.
pub(crate) fn most_pages(plan: &Plan) -> u32 {
    if !plan.spec.converts() || plan.groups.iter().any(|group| group.id.is_none()) {
        return 0;
    }
    let (mut of_blocks, mut prefixes) = (0, Prefixes::default());
    for item in plan.items.iter().filter(|item| !item.is_gathered()) {
        match keys_of_row_block(plan, item) {
            Some(keys) if is_first(plan, item) => of_blocks += converted_pages(&keys).len() as u32,
            Some(_) => {}
            None => {
                prefixes.add(item.table, item.kv_begin..item.kv_end);
            }
        }
    }
    (of_blocks + prefixes.pages()).saturating_mul(most_heads(plan))
}

/// The heads of the part that has the most.
pub(crate) fn most_heads(plan: &Plan) -> u32 {
    let heads = plan.parts.iter().map(|part| part.heads);
    heads.max().unwrap_or(1)
}

/// The keys of a prefill's table that its launch converts: those that any token of its row block sees. None for a prefill that
/// reads a prefix for several decodes: its launch converts what all prefills of this table read.
pub(crate) fn keys_of_row_block(plan: &Plan, item: &WorkItem) -> Option<Range<u32>> {
    let of_block = item.flags & WorkItem::SHARED_KEYS == 0;
    of_block.then(|| plan.keys_seen(plan.row_block_of(item)))
}

/// Whether a prefill is the first of its row block: of the first tile that sees any key, and with its first key. The last tokens
/// may see no key of a part.
fn is_first(plan: &Plan, item: &WorkItem) -> bool {
    let block = plan.row_block_of(item);
    let seen = |token: u32| {
        let position = block.position + (token - block.first_token) as i32;
        plan.spec.variant.visible(position, block.kv_len)
    };
    // Tokens before those of an item that sees keys see keys as well, unless all keys come after them.
    let first_tile = item.rows_begin == block.first_token || seen(item.rows_begin - 1).end == 0;
    first_tile && item.kv_begin == seen(item.rows_begin).start
}

/// The keys that prefills read for decodes, with their tables.
#[derive(Debug, Default)]
pub(crate) struct Prefixes(Vec<(u32, Range<u32>)>);

impl Prefixes {
    /// Adds the keys of a tile. Returns whether they are not those of the tile before.
    pub(crate) fn add(&mut self, table: u32, keys: Range<u32>) -> bool {
        let prefix = (table, keys);
        let is_new = self.0.last() != Some(&prefix);
        if is_new {
            self.0.push(prefix);
        }
        is_new
    }

    /// Number of pages that a launch converts.
    pub(crate) fn pages(mut self) -> u32 {
        self.0.sort_unstable_by_key(|(table, _)| *table);
        let tables = self.0.chunk_by(|a, b| a.0 == b.0);
        let of_table = tables.map(|of| {
            let keys = of.iter().map(|(_, keys)| keys.clone());
            converted_pages(&first_to_last(keys)).len() as u32
        });
        of_table.sum()
    }
}

/// The keys of a table that a launch converts, for prefixes: from the first key to the last. Decodes may read some in between.
pub(crate) fn first_to_last(keys: impl Iterator<Item = Range<u32>>) -> Range<u32> {
    keys.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end))
        .unwrap_or_default()
}

/// On an H200 a prefill converts an 8-bit key of 128 elements and its value in 0.94 ns beside its products, and a launch
/// before it in [`PREPARED_NS`]. The products of a key with a row of queries take 0.7 ps. So with fewer rows than these, the launch
/// before it saves time.
const FEW_ROWS: u64 = 1000;

/// Keys of a launch, counted once for each KV head, beyond which converting beside the products is not hidden behind them. The consumer
/// warps of an H200 convert 34,000 before their first product. Each SM has one warp for the others, which takes 9 µs for 64 keys or
/// their values; with fewer rows than [`FEW_ROWS_OF_MANY_KEYS`] the products take less time than that.
const MANY_KEYS: u64 = 80_000;
const FEW_ROWS_OF_MANY_KEYS: u64 = 3000;

/// Whether a launch before a prefill converts its keys, because few rows see each: `pairs` of a row and a key, each for one KV
/// head.
pub(crate) const fn few_rows_see_them(pairs: u64, keys: u64, kv_heads: u32) -> bool {
    let few = if keys * kv_heads as u64 > MANY_KEYS {
        FEW_ROWS_OF_MANY_KEYS
    } else {
        FEW_ROWS
    };
    pairs < few * keys
}

/// Time of that launch for a key of 128 elements of one head, with its value, at the speed of an H200's memory.
const PREPARED_NS: f64 = 0.18;
/// What a launch before a prefill takes in addition: a guess from launches of other kernels.
const PREPARED_LAUNCH_NS: f64 = 5e3;

/// Time of that launch in nanoseconds.
pub(crate) fn prepared_ns(keys: u64, kv_heads: u32, head_dim: u32) -> f64 {
    let elements = keys as f64 * f64::from(kv_heads) * f64::from(head_dim);
    PREPARED_LAUNCH_NS + elements / 128.0 * PREPARED_NS
}

/// What a prefill that converts takes longer on an H200 before its first product, when each of its consumer warps converts a piece, in
/// nanoseconds.
pub(crate) const FIRST_NS: f64 = 8e3;

/// The pieces of 64 keys or values of one head that a prefill converts, and the time in which an H200's warp converts one beside
/// products, in nanoseconds: fitted to random hybrid batches, most of which have heads of 64 and 256.
pub(crate) fn pieces_beside(keys: u64, kv_heads: u32, head_dim: u32) -> (f64, f64) {
    let pieces = 2.0 * keys as f64 * f64::from(kv_heads) / f64::from(ConvertedPage::KEYS);
    let piece_ns = match head_dim {
        0..=64 => 2e3,
        65..=128 => 4.5e3,
        _ => 7e3,
    };
    (pieces, piece_ns)
}

//! The pages of keys that the prefills of a plan convert: from 8 bits to 16, or by applying the rotary embedding.

use std::ops::Range;

use kernels_gpu::abi::ConvertedPage;

use super::data::Plan;

/// The converted pages that hold some keys.
pub(crate) const fn converted_pages(keys: &Range<u32>) -> Range<u32> {
    keys.start / ConvertedPage::KEYS..keys.end.div_ceil(ConvertedPage::KEYS)
}

/// Maximum number of converted pages of a plan. There are fewer if requests share prefixes.
pub(crate) fn most_pages(plan: &Plan) -> u32 {
    if !plan.spec.converts() || plan.groups.iter().any(|group| group.id.is_none()) {
        return 0;
    }
    let prefills = plan.items.iter().filter(|item| !item.is_gathered());
    // Counts each row block once: at the item with its last query token and its last key.
    let of_blocks = prefills.filter_map(|item| {
        let block = plan.row_block_of(item);
        let keys = plan.keys_seen(block);
        let last_token = item.rows_begin + item.rows == block.first_token + block.tokens;
        let of_block = || converted_pages(&keys).len() as u32;
        (last_token && item.kv_end == keys.end).then(of_block)
    });
    of_blocks.sum()
}

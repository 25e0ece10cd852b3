//! What a plan copies from a batch.

use super::{Plan, PlanError, PlannedPart, PlannedRowBlock, SplitMode};
use crate::problem::Batch;

/// A fixed split must fall between pages.
pub fn check_split(split: SplitMode, batch: &Batch) -> Result<(), PlanError> {
    if let SplitMode::Fixed { tokens } = split {
        for part in &batch.parts {
            let page_size = part.table.page_size;
            if tokens == 0 || !tokens.is_multiple_of(page_size) {
                return Err(PlanError::FixedSplit { tokens, page_size });
            }
        }
    }
    Ok(())
}

/// Copies the page ids and the row blocks of all parts, one part after the other.
pub fn collect_tables(batch: &Batch, plan: &mut Plan) -> Result<(), PlanError> {
    let Plan {
        parts,
        page_ids,
        row_blocks,
        ancestors,
        masks,
        ..
    } = plan;
    ancestors.clone_from(&batch.ancestors);
    masks.copy(&batch.masks);
    parts.clear();
    page_ids.clear();
    row_blocks.clear();
    let count = |what, length: usize| PlanError::narrow(what, length as u64);
    for part in &batch.parts {
        let page_size = part.table.page_size;
        let pages = count("page ids", page_ids.len())?;
        let first_block = count("row blocks", row_blocks.len())?;
        page_ids.extend_from_slice(&part.table.indices);
        let queries = part.q_indptr.iter().zip(&part.q_indptr[1..]);
        let ends = &part.table.indptr[1..];
        let tables = part.table.indptr.iter().zip(ends);
        let lens = tables.zip(&part.table.last_page_len);
        let blocks = queries.zip(lens).enumerate();
        row_blocks.extend(
            blocks.map(|(index, ((&first, &end), ((&begin, &next), &last)))| {
                let (tokens, capacity) = (end - first, (next - begin) * page_size);
                let kv_len = capacity.saturating_sub(page_size) + last;
                PlannedRowBlock {
                    first_token: first,
                    tokens,
                    position: (kv_len + part.after(index)) as i32 - tokens as i32,
                    kv_len,
                    capacity,
                    tail: u32::MAX,
                }
            }),
        );
        parts.push(PlannedPart {
            page_size,
            pages: pages..count("page ids", page_ids.len())?,
            row_blocks: first_block..count("row blocks", row_blocks.len())?,
            heads: part.heads,
        });
    }
    Ok(())
}

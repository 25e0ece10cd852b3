//! The input of drafting.

use std::{cell::LazyCell, ops::Range};

use super::DraftRow;
use crate::{
    plan::{
        data::{Kernel, Plan, PlannedPart, PlannedRowBlock},
        model::{Model, TileTable},
    },
    problem::{Batch, PageTable, Part},
};

/// A batch whose parts and row blocks are already in a plan.
#[derive(Clone, Copy)]
pub struct BatchInput<'a> {
    pub model: &'a Model,
    pub batch: &'a Batch,
    parts: &'a [PlannedPart],
    row_blocks: &'a [PlannedRowBlock],
    /// Row blocks of at most this many query tokens are decodes.
    most_decode_tokens: u32,
    /// Whether decodes of the fewest rows have few enough keys for a kernel that shares SMs.
    have_few_keys: bool,
    /// Whether decodes are few enough for smaller tiles.
    are_few: bool,
    /// Whether all decodes have enough rows for the larger tile.
    have_many_rows: bool,
    /// Whether a part has several heads: prefills, which run beside decodes of other parts.
    pub beside_heads: bool,
    /// Whether a query token may have keys in several parts.
    composed: bool,
}

impl<'a> BatchInput<'a> {
    pub fn new(model: &'a Model, batch: &'a Batch, plan: &'a Plan) -> Self {
        let (few, most) = (model.most_decode_tokens, model.most_tokens_of_decodes);
        // Prefill kernels run parts of several heads, whatever the number of tokens.
        let of_one_head = plan.parts.iter().filter(|part| part.heads == 1);
        let of_one_head = of_one_head.flat_map(|part| {
            &plan.row_blocks[part.row_blocks.start as usize..part.row_blocks.end as usize]
        });
        let beside_heads = plan.parts.iter().any(|part| part.heads > 1);
        let tokens = with_items(of_one_head).map(|block| block.tokens);
        let [shortest, longest] = tokens.fold([u32::MAX, 0], |[a, b], tokens| {
            [a.min(tokens), b.max(tokens)]
        });
        let may_be = !beside_heads && few < longest && longest <= most;
        let share_pages = LazyCell::new(|| most_share_pages(batch));
        // Beside shorter row blocks they are prefills: both kinds then run side by side. That is faster, unless prefills convert keys
        // of few rows that they do not share.
        let are_decodes = may_be
            && match model.spec.kv_dtype.bytes() {
                1 => {
                    let of_few_rows = model.device.decode_max_rows / model.spec.group();
                    (shortest > few || longest <= of_few_rows) && !*share_pages
                }
                _ => shortest > few,
            };
        let most_decode_tokens = if are_decodes { most } else { few };
        let have_few_keys = model.few_keys.as_ref().is_some_and(|(table, most)| {
            // Requests that wait have keys, but no queries.
            let keys = with_items(&plan.row_blocks).map(|block| block.kv_len);
            let keys = || keys.map(u64::from).sum::<u64>() * u64::from(model.spec.kv_heads);
            longest <= few && longest * table.decode_pack() <= table.narrowest() && keys() <= *most
        });
        // Narrower tiles take as long for rows that fit them, and prefixes may need the widest.
        let are_few = model.smaller.as_ref().is_some_and(|(smaller, most)| {
            let in_tile = smaller.decode_tokens();
            let tiles = u64::from(smaller.tiles_of_token() * model.spec.kv_heads);
            let (mut units, mut keys) = (0, 0);
            for block in with_items(&plan.row_blocks) {
                let of_block = u64::from(block.tokens.div_ceil(in_tile)) * tiles;
                units += of_block;
                keys += of_block * u64::from(block.kv_len);
            }
            let as_wide = smaller.widest() == model.tiles.widest();
            !beside_heads
                && longest <= most_decode_tokens
                && (as_wide || longest > in_tile)
                && units <= most[0]
                && keys <= most[1]
        });
        let have_many_rows = model.larger.is_some()
            && !beside_heads
            && longest <= most_decode_tokens
            && shortest != u32::MAX
            && shortest > model.tiles.decode_tokens()
            && !*share_pages;
        Self {
            model,
            batch,
            parts: &plan.parts,
            row_blocks: &plan.row_blocks,
            most_decode_tokens,
            have_few_keys,
            are_few,
            have_many_rows,
            beside_heads,
            composed: batch.parts.len() > 1 && !(beside_heads && have_own_tokens(batch)),
        }
    }

    /// The tiles of a batch in which nothing runs beside decodes.
    pub fn tiles(&self) -> &'a TileTable {
        let Model {
            few_keys,
            smaller,
            larger,
            tiles,
            ..
        } = self.model;
        match (few_keys, smaller, larger) {
            (Some((few_keys, _)), ..) if self.have_few_keys => few_keys,
            (_, Some((smaller, _)), _) if self.are_few => smaller,
            (.., Some(larger)) if self.have_many_rows => larger,
            _ => tiles,
        }
    }

    /// The parts of the batch. Their drafts choose from `tiles`.
    pub fn parts(self, tiles: &'a TileTable) -> impl Iterator<Item = PartInput<'a>> {
        let Self {
            model,
            batch,
            parts,
            row_blocks,
            most_decode_tokens,
            beside_heads,
            composed,
            ..
        } = self;
        let parts = batch.parts.iter().zip(parts).zip(0..);
        parts.map(move |((part, planned), index)| {
            let blocks = planned.row_blocks.start as usize..planned.row_blocks.end as usize;
            PartInput {
                model,
                tiles,
                part,
                index,
                first_page: planned.pages.start,
                row_blocks: &row_blocks[blocks],
                first_row_block: planned.row_blocks.start,
                most_decode_tokens,
                composed,
                beside_heads,
                masked: batch.has_masks(),
            }
        })
    }
}

/// The row blocks that have queries and keys. Others have no items.
fn with_items<'a>(
    blocks: impl IntoIterator<Item = &'a PlannedRowBlock>,
) -> impl Iterator<Item = &'a PlannedRowBlock> {
    let blocks = blocks.into_iter();
    blocks.filter(|block| block.tokens > 0 && block.kv_len > 0)
}

/// Whether most requests begin with the same page as another: then prefills convert these keys once for all.
fn most_share_pages<'a>(batch: &'a Batch) -> bool {
    let tables = batch.parts.iter().map(|part| &part.table);
    let first = |table: &'a PageTable| {
        let begins = table.indptr.windows(2).filter(|pair| pair[0] < pair[1]);
        begins.map(|pair| table.indices[pair[0] as usize])
    };
    let mut first: Vec<u32> = tables.flat_map(first).collect();
    let requests = first.len();
    first.sort_unstable();
    first.dedup();
    2 * first.len() <= requests
}

/// Whether no query token has keys in two parts.
fn have_own_tokens(batch: &Batch) -> bool {
    let mut taken = vec![false; batch.total_q() as usize];
    batch.parts.iter().all(|part| {
        let keyed = (0..part.row_blocks()).filter(|&row_block| part.kv_len(row_block) > 0);
        let mut tokens = keyed.flat_map(|row_block| {
            let tokens = part.q_range(row_block);
            tokens.start * part.heads..tokens.end * part.heads
        });
        tokens.all(|token| !std::mem::replace(&mut taken[token as usize], true))
    })
}

/// A part of a batch and what its drafts depend on.
pub struct PartInput<'a> {
    pub model: &'a Model,
    pub tiles: &'a TileTable,
    pub part: &'a Part,
    /// Index of the part.
    pub index: u32,
    /// Index of the part's first page id in the plan's page ids.
    pub first_page: u32,
    /// The part's row blocks, and the index of the first one among the plan's row blocks.
    pub row_blocks: &'a [PlannedRowBlock],
    pub first_row_block: u32,
    most_decode_tokens: u32,
    /// Whether query tokens may have keys in other parts, too.
    pub composed: bool,
    /// Whether a part of the batch has several heads: prefills, which run beside decodes of other parts.
    pub beside_heads: bool,
    /// Whether bits (`Batch::ancestors` or `Batch::masks`) hide keys from query tokens.
    pub masked: bool,
}

impl PartInput<'_> {
    /// Query tokens of the row blocks that have items.
    pub fn tokens(&self) -> impl Iterator<Item = u32> {
        with_items(self.row_blocks).map(|block| block.tokens)
    }

    /// The kernel that runs a row block of `q_len` query tokens.
    pub fn kernel(&self, q_len: u32) -> Kernel {
        if q_len <= self.most_decode_tokens && self.part.heads == 1 {
            Kernel::Decode
        } else {
            Kernel::Prefill
        }
    }

    /// The keys below `kv_len` from the first to the last that any of the rows sees.
    pub fn visible(&self, rows: &[DraftRow], kv_len: u32) -> Range<u32> {
        let positions = || rows.iter().map(|row| row.position);
        let (first, last) = (positions().min(), positions().max());
        let visible = |position: Option<i32>| {
            let position = position.unwrap_or(0);
            self.model.spec.variant.visible(position, kv_len)
        };
        visible(first).start..visible(last).end
    }
}

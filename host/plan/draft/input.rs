//! What drafts are made of.

use std::ops::Range;

use super::DraftRow;
use crate::{
    plan::{
        data::{Kernel, Plan, PlannedPart, PlannedRowBlock},
        model::{Model, TileTable},
    },
    problem::{Batch, Part},
};

/// A batch whose tables are in a plan.
#[derive(Clone, Copy)]
pub struct BatchInput<'a> {
    pub model: &'a Model,
    pub batch: &'a Batch,
    parts: &'a [PlannedPart],
    row_blocks: &'a [PlannedRowBlock],
}

impl<'a> BatchInput<'a> {
    pub fn new(model: &'a Model, batch: &'a Batch, plan: &'a Plan) -> Self {
        Self {
            model,
            batch,
            parts: &plan.parts,
            row_blocks: &plan.row_blocks,
        }
    }

    /// The parts, with tiles to choose from.
    pub fn parts(self, tiles: &'a TileTable) -> impl Iterator<Item = PartInput<'a>> {
        let Self {
            model,
            batch,
            parts,
            row_blocks,
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
                composed: batch.parts.len() > 1,
                masked: !batch.ancestors.is_empty(),
            }
        })
    }
}

/// A part of a batch and what its drafts depend on.
pub struct PartInput<'a> {
    pub model: &'a Model,
    pub tiles: &'a TileTable,
    pub part: &'a Part,
    /// The part's index.
    pub index: u32,
    /// Where the part's page ids begin in the plan's.
    pub first_page: u32,
    /// The part's row blocks, and where they begin in the plan's.
    pub row_blocks: &'a [PlannedRowBlock],
    pub first_row_block: u32,
    /// Whether the batch has other parts.
    pub composed: bool,
    /// Whether query tokens may not see some of their last keys.
    pub masked: bool,
}

impl PartInput<'_> {
    /// Which kernel runs a row block of so many query tokens.
    pub fn kernel(&self, q_len: u32) -> Kernel {
        // Decodes take 8-bit keys, and those that they turn, by whole groups of 8; what takes them one by one are prefills.
        let spec = &self.model.spec;
        let by_rows = (spec.kv_dtype.bytes() == 1 || spec.rotary.is_some())
            && !self.part.table.page_size.is_multiple_of(8)
            && self.model.tiles.has_prefills()
            && !self.model.device.is_cpu();
        if q_len <= self.model.most_decode_tokens && !by_rows {
            Kernel::Decode
        } else {
            Kernel::Prefill
        }
    }

    /// The keys below `kv_len` between the first and the last that any of the rows sees.
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

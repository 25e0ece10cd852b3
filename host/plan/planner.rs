//! The planner: from specification and batch to plan, reusing its buffers.

use serde::{Deserialize, Serialize};

use super::{
    DeviceDescription, MergeMode, PackRule, Plan, PlanError, PlannedPart, SplitMode, Tile,
    cost::CostModel,
    draft::{Draft, DraftRow, PartInput},
    emit::{Emitter, Pieces},
    gather::Gatherer,
    split::{SplitInput, Splitter},
    tiles::TileTable,
};
use crate::problem::{Batch, Spec};

/// Choices of a plan; the default is what serves best.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanOptions {
    /// How decodes that share prefixes are packed.
    pub packing: PackRule,
    /// How items are cut along their keys.
    pub split: SplitMode,
    /// One tile for all decodes instead of the selector's choice.
    pub decode_tile: Option<Tile>,
    /// Who merges partial states.
    pub merge_mode: MergeMode,
}

/// Makes plans. Keep it from step to step: its buffers are reused, so that planning allocates nothing in
/// the steady state.
#[derive(Debug, Default)]
pub struct Planner {
    /// What tiles and costs were derived from, and they.
    derived: Option<Derived>,
    gatherer: Gatherer,
    drafts: Vec<Draft>,
    draft_rows: Vec<DraftRow>,
    splitter: Splitter,
    emitter: Emitter,
}

#[derive(Debug)]
struct Derived {
    device: DeviceDescription,
    spec: Spec,
    decode_tile: Option<Tile>,
    tiles: TileTable,
    cost: CostModel,
}

impl Planner {
    /// A planner without memory of any batch.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Plans a batch.
    ///
    /// # Errors
    /// [`PlanError`]: a wrong specification or batch, or heads that no tile of the device fits.
    pub fn plan(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
    ) -> Result<Plan, PlanError> {
        let mut plan = Plan::empty(*spec);
        self.plan_into(spec, batch, device, options, &mut plan)?;
        Ok(plan)
    }

    /// Plans a batch into a plan whose memory is reused; after an error its content is unspecified.
    ///
    /// # Errors
    /// As [`plan`](Self::plan).
    pub fn plan_into(
        &mut self,
        spec: &Spec,
        batch: &Batch,
        device: &DeviceDescription,
        options: &PlanOptions,
        plan: &mut Plan,
    ) -> Result<(), PlanError> {
        batch.check(spec)?;
        self.derive(spec, device, options)?;
        check_split(options.split, batch)?;
        plan.spec = *spec;
        plan.total_q = batch.total_q();
        plan.merge_mode = options.merge_mode;
        collect_pages(batch, plan)?;

        self.drafts.clear();
        self.draft_rows.clear();
        for index in 0..batch.parts.len() {
            self.draft(options, batch, index, plan.parts[index].pages.start);
        }
        let Self {
            derived,
            drafts,
            draft_rows,
            splitter,
            emitter,
            ..
        } = self;
        let Derived { cost, tiles, .. } = derived.as_ref().expect("derived above");
        splitter.split(
            &SplitInput {
                mode: options.split,
                cost,
                tiles,
            },
            drafts,
        );
        let input = Pieces {
            variant: spec.variant,
            drafts,
            draft_rows,
            pieces: &splitter.pieces,
            launches: &splitter.launches,
            order: &splitter.order,
        };
        emitter.emit(&input, plan)
    }

    /// Derives tiles and costs, unless the last plan had the same heads on the same device.
    fn derive(
        &mut self,
        spec: &Spec,
        device: &DeviceDescription,
        options: &PlanOptions,
    ) -> Result<(), PlanError> {
        let same = self.derived.as_ref().is_some_and(|derived| {
            derived.spec == *spec
                && derived.decode_tile == options.decode_tile
                && derived.device == *device
        });
        if !same {
            spec.check()?;
            device.check()?;
            self.derived = Some(Derived {
                device: device.clone(),
                spec: *spec,
                decode_tile: options.decode_tile,
                tiles: TileTable::new(device, spec, options.decode_tile)?,
                cost: CostModel::new(device, spec),
            });
        }
        Ok(())
    }

    /// Drafts the items of a part: decodes packed by prefix, everything else in tiles of consecutive tokens.
    fn draft(&mut self, options: &PlanOptions, batch: &Batch, index: usize, first_page: u32) {
        let Self {
            derived,
            gatherer,
            drafts,
            draft_rows,
            ..
        } = self;
        let Derived {
            device,
            spec,
            tiles,
            ..
        } = derived.as_ref().expect("derived before drafting");
        let part = &batch.parts[index];
        let composed = batch.parts.len() > 1;
        let index = index as u32;
        let input = PartInput {
            device,
            spec,
            tiles,
            part,
            index,
            first_page,
            composed,
        };
        gatherer.gather(&input, options, drafts, draft_rows);
        for row_block in 0..part.row_blocks() {
            input.draft_contiguous(row_block, drafts);
        }
    }
}

/// A fixed split must fall between pages.
fn check_split(split: SplitMode, batch: &Batch) -> Result<(), PlanError> {
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

/// The page ids of all parts, one after the other.
fn collect_pages(batch: &Batch, plan: &mut Plan) -> Result<(), PlanError> {
    plan.parts.clear();
    plan.page_ids.clear();
    for part in &batch.parts {
        let start = plan.page_ids.len();
        plan.page_ids.extend_from_slice(&part.table.indices);
        let end = u32::try_from(plan.page_ids.len())
            .map_err(|_| PlanError::TooLarge { what: "page ids" })?;
        plan.parts.push(PlannedPart {
            page_size: part.table.page_size,
            pages: start as u32..end,
        });
    }
    Ok(())
}

//! All drafts of a batch.

use super::{BatchInput, DraftSink, Drafts, NO_ROW_BLOCK, decode::DecodeDrafter};
use crate::plan::{
    data::{PlanOptions, Rules},
    model::{PodConfig, TileTable},
};

/// Drafts batches. Buffers keep their memory from plan to plan.
#[derive(Debug, Default)]
pub struct Drafter {
    pub drafts: Drafts,
    /// Decodes in the tiles that they would have beside prefills.
    co_resident: Drafts,
    decodes: DecodeDrafter,
    has_prefills: bool,
    is_hybrid: bool,
}

impl Drafter {
    /// Drafts the decodes in the tiles for decodes alone. Returns whether the batch has both decodes and prefills.
    pub fn draft_decodes(
        &mut self,
        input: &BatchInput<'_>,
        options: &PlanOptions,
        rules: &Rules,
    ) -> bool {
        let Self {
            drafts,
            decodes,
            has_prefills,
            is_hybrid,
            ..
        } = self;
        drafts.clear();
        *has_prefills = false;
        for part in input.parts(input.tiles()) {
            *has_prefills |= decodes.draft(&part, options, rules, drafts);
        }
        *is_hybrid = *has_prefills && !drafts.items.is_empty();
        *is_hybrid
    }

    /// Whether the batch of the drafts has prefills.
    pub const fn has_prefills(&self) -> bool {
        self.has_prefills
    }

    /// Keys that decodes in other tiles read again, because these hold fewer query tokens, relative to all keys of the
    /// drafts: those of one row block, and those that several share.
    pub fn keys_again(
        &mut self,
        input: &BatchInput<'_>,
        tiles: &TileTable,
        options: &PlanOptions,
        rules: &Rules,
    ) -> [f64; 2] {
        let Self {
            drafts,
            co_resident,
            decodes,
            ..
        } = self;
        let most = tiles.decode_tokens();
        // Tiles of one row block with few query tokens are the same everywhere.
        let differs = most < input.tiles().decode_tokens()
            && (drafts.items.iter())
                .any(|draft| draft.rows > most || draft.tail_of == NO_ROW_BLOCK);
        if !differs {
            return [0.0; 2];
        }
        co_resident.clear();
        for part in input.parts(tiles) {
            decodes.draft(&part, options, rules, co_resident);
        }
        let (drafted, read) = (drafts.keys(), co_resident.keys());
        let all = drafted.iter().sum::<u64>().max(1);
        [0, 1].map(|kind| read[kind].saturating_sub(drafted[kind]) as f64 / all as f64)
    }

    /// Predicted time of decodes that share prefixes, in picoseconds, if nothing runs beside them. None if prefills
    /// cannot read their wide prefixes, or if the prefixes are too small for that to pay. `any` accepts prefixes of
    /// every size.
    pub fn shared_ps(&self, input: &BatchInput<'_>, any: bool) -> Option<u64> {
        let may = input.batch.parts.len() == 1 && !self.has_prefills;
        self.decodes.time_ps(input.model, any).filter(|_| may)
    }

    /// Drafts the decodes again into `drafts`, with prefills for the wide prefixes. Its own drafts stay as they are. Returns whether
    /// there are such prefixes.
    pub fn draft_wide(
        &mut self,
        input: &BatchInput<'_>,
        tiles: &TileTable,
        drafts: &mut impl DraftSink,
    ) -> bool {
        let rows = &mut self.drafts.rows;
        let own = rows.len();
        let mut any = false;
        for part in input.parts(tiles) {
            any |= self.decodes.draft_wide(&part, rows, drafts);
        }
        rows.truncate(own);
        any
    }

    /// Drafts the prefills. Drafts the decodes again if they take other tiles beside prefills.
    pub fn draft_all(
        &mut self,
        input: &BatchInput<'_>,
        tiles: &TileTable,
        config: Option<&PodConfig>,
        options: &PlanOptions,
        rules: &Rules,
    ) {
        let Self {
            drafts,
            decodes,
            has_prefills,
            is_hybrid,
            ..
        } = self;
        if !*has_prefills && config.is_some() {
            // `prefixes_beside` chose this for the wide prefixes.
            let Drafts { items, rows, runs } = drafts;
            items.clear();
            runs.clear();
            for part in input.parts(tiles) {
                decodes.draft_wide(&part, rows, items);
            }
            return;
        }
        // With several parts, decodes are drafted again: drafts are in the order of the parts, in which states are
        // merged.
        let other_tiles = config.is_some_and(|config| config.decode.is_some());
        let again = *is_hybrid && (input.batch.parts.len() > 1 || other_tiles);
        if again {
            drafts.clear();
        }
        for part in input.parts(tiles) {
            if again {
                decodes.draft(&part, options, rules, drafts);
            }
            if *has_prefills {
                part.draft_contiguous(&mut drafts.items);
            }
        }
    }
}

//! What an attempt to cut drafts reads.

use super::{
    classes::{DraftClasses, UnitCost},
    load::OpLoad,
};
use crate::plan::draft::Draft;

/// The drafts of one operation that are to be cut. An attempt takes this and the time by which all drafts must finish,
/// and fills a list of pieces.
#[derive(Clone, Copy)]
pub struct Problem<'a> {
    pub drafts: &'a [Draft],
    pub classes: &'a DraftClasses,
    /// A sort key and the draft: launch after launch, the longest first.
    pub order: &'a [(u64, u32)],
    pub load: &'a OpLoad,
}

impl<'a> Problem<'a> {
    /// Index, draft and cost: launch after launch, the longest first.
    pub fn drafts(&self) -> impl Iterator<Item = (u32, &'a Draft, UnitCost)> {
        let Self {
            drafts,
            classes,
            order,
            ..
        } = *self;
        order
            .iter()
            .map(move |&(_, index)| (index, &drafts[index as usize], classes.unit_cost(index)))
    }
}

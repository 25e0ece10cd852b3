//! Wider tiles for many decodes at once.

use crate::plan::{
    data::Kernel,
    draft::Draft,
    model::{CostModel, TileTable},
};

/// Moves all decodes to a wider tile if that is faster for so many units of their length. Kernels for few rows claim, list and
/// combine each unit with all of their warps; those for 64 rows have less to do between units, and two CTAs on an SM.
pub fn widen(cost: &CostModel, tiles: &TileTable, drafts: &mut [Draft]) {
    let is_decode = |draft: &Draft| draft.kernel == Kernel::Decode;
    let decodes = || drafts.iter().filter(|draft| is_decode(draft));
    let Some(rows) = decodes().next().map(|first| first.tile.m) else {
        return;
    };
    let Some(wider) = cost.wider(rows) else {
        return;
    };
    let moves = |draft: &Draft| draft.tile.m == rows && !draft.is_joint();
    if tiles.decode(wider.rows).is_none() || !decodes().all(moves) {
        return;
    }
    let (mut units, mut keys) = (0, 0);
    for draft in decodes() {
        let of_item = u64::from(draft.units(cost));
        units += of_item;
        keys += of_item * u64::from(draft.kv_len());
    }
    let ctas = f64::from(cost.resident_ctas(Kernel::Decode));
    let [least, most] = wider.keys.map(u64::from);
    if units as f64 >= wider.units * ctas && (least * units..=most * units).contains(&keys) {
        let moved = drafts.iter_mut().filter(|draft| is_decode(draft));
        moved.for_each(|draft| draft.tile.m = wider.rows);
    }
}

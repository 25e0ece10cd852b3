//! How PAT packs decodes that share prefixes.

use tandem_attn::plan::{Join, Rules};

/// The rule of the paper: join a child of `s` queries to a parent of `l` keys if `4·s ≥ l`.
pub const PAPER: Rules = Rules {
    join: Some(Join::has_many_rows),
    ..crate::NONE
};

/// The rule of the published code: `l` includes inherited keys, and a child is also joined if that needs no more query
/// tiles.
pub const PUBLISHED: Rules = Rules {
    join: Some(Join::has_many_rows_or_no_more_tiles),
    ..crate::NONE
};
